"""Extensions that the core works without: launchers for schedulers, adapters, environments that
step together, and the ready-made policies, which the package's own name has for its users.
"""

from ..launchers import register
from .backends import make_vec
from .together import Together

__all__ = ["Together", "make_vec"]

register("slurm", f"{__name__}.slurm:SlurmLauncher")
register("ray", f"{__name__}.ray:RayLauncher")
