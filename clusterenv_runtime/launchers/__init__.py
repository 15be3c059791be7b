"""Launchers start worker processes, say whether they live, and end them: here, or wherever you start them yourself."""

import os
from importlib.metadata import EntryPoint, entry_points

from .base import Exit, Launcher
from .external import ExternalLauncher
from .local import LocalLauncher
from .ray import RayLauncher
from .slurm import SlurmLauncher

__all__ = ["Exit", "ExternalLauncher", "Launcher", "LocalLauncher", "RayLauncher", "launcher_names", "make_launcher"]
OWN = {launcher.name: launcher for launcher in (LocalLauncher, SlurmLauncher, RayLauncher, ExternalLauncher)}


def _added() -> dict[str, EntryPoint]:
    """Return those that other packages add, which are not imported until one is made."""
    return {point.name: point for point in entry_points(group="clusterenv.launchers") if point.name not in OWN}


def launcher_names() -> list[str]:
    """Return the names that `make_launcher` knows."""
    return [*OWN, *_added()]


def make_launcher(name: str, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> Launcher:
    """Return the launcher of this name.

    Raises:
        KeyError: there is none of this name.
        StartupError: it cannot start workers here; the text says what to do.
    """
    launcher = OWN[name] if name in OWN else _added()[name].load()
    return launcher(log_dir, prefix)
