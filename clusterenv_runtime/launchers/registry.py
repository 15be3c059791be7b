"""Which launchers there are: the runtime's own, and those that other packages add as entry points."""

from __future__ import annotations

import importlib.metadata
import os

from .base import Launcher

GROUP = "clusterenv.launchers"
# As entry points are written, so that naming one imports no other.
OWN = {
    "local": "clusterenv_runtime.launchers.local:LocalLauncher",
    "slurm": "clusterenv_runtime.launchers.slurm:SlurmLauncher",
    "external": "clusterenv_runtime.launchers.external:ExternalLauncher",
}


def _launchers() -> dict[str, importlib.metadata.EntryPoint]:
    added = importlib.metadata.entry_points(group=GROUP)
    own = [importlib.metadata.EntryPoint(name, path, GROUP) for name, path in OWN.items()]
    return {point.name: point for point in (*own, *(point for point in added if point.name not in OWN))}


def launcher_names() -> list[str]:
    """Return the names that `make_launcher` knows."""
    return list(_launchers())


def make_launcher(name: str, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> Launcher:
    """Return the launcher of this name.

    Raises:
        KeyError: there is none of this name.
        StartupError: it cannot start workers here; the text says what to do.
    """
    return _launchers()[name].load()(log_dir, prefix)
