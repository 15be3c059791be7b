"""Extensions that the core works without: launchers for schedulers, adapters, and the ready-made
policies, which the package's own name has for its users.
"""

from ..launchers import register

register("slurm", f"{__name__}.slurm:SlurmLauncher")
register("ray", f"{__name__}.ray:RayLauncher")
