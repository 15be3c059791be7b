"""Temporary: the old core under the names of the new one."""

from .launchers import Launcher  # noqa: F401
from . import launchers
from .launchers import ExternalLauncher, LocalLauncher, listening_address, make_launcher, worker_flags  # noqa: F401
from .slurm import SlurmLauncher

for cls, name, remote in (
    (LocalLauncher, "local", False),
    (ExternalLauncher, "external", True),
    (SlurmLauncher, "slurm", True),
):
    cls.name, cls.remote = name, remote
ExternalLauncher.address = lambda self, num_workers: None


def launcher_names():
    return list(launchers.LAUNCHERS)


def ClusterEnv(env_fns, *, log_dir=None, **options):  # noqa: N802
    from .env import ClusterEnv

    launcher = make_launcher(options.pop("launcher"), log_dir, options.pop("worker_prefix"))
    interface = options.pop("interface")
    options["bind_address"] = options["bind_address"] or interface
    return ClusterEnv(env_fns, launcher=launcher, **options)
