"""Extensions that the core never imports: launchers for schedulers, adapters, environments that
step together, and the ready-made policies.
"""

from ..launchers import register
from .backends import make_vec
from .together import Together

__all__ = ["Together", "make_vec"]

register("slurm", f"{__name__}.slurm:SlurmLauncher")
register("ray", f"{__name__}.ray:RayLauncher")
