"""Launchers start worker processes, say whether they live, and end them: here, or wherever you
start them yourself.
"""

import os
from importlib.metadata import EntryPoint, entry_points

from .base import Exit, Launcher
from .external import ExternalLauncher
from .local import LocalLauncher

__all__ = [
    "Exit",
    "ExternalLauncher",
    "Launcher",
    "LocalLauncher",
    "is_ours",
    "launcher_names",
    "make_launcher",
    "register",
]
OWN = {launcher.name: launcher for launcher in (LocalLauncher, ExternalLauncher)}
OURS = f"{__package__.partition('.')[0]}."  # what the modules of this package begin with
GROUP = "clusterenv.launchers"  # of entry points
_registered: dict[str, EntryPoint] = {}


def register(name: str, value: str) -> None:
    """Add a launcher, ``value`` being its "module:class", where no installed package names it as an
    entry point.
    """
    _registered[name] = EntryPoint(name, value, GROUP)


def _added() -> dict[str, EntryPoint]:
    """Return those that extras and other packages add, which are not imported until one is made."""
    installed = {point.name: point for point in entry_points(group=GROUP) if point.name not in OWN}
    return {**installed, **_registered}


def is_ours(name: str) -> bool:
    """Say whether the launcher of this name comes with this package."""
    added = _added()
    return name in OWN or (name in added and added[name].value.startswith(OURS))


def launcher_names() -> list[str]:
    """Return the names that `make_launcher` knows."""
    return [*OWN, *sorted(_added())]


def make_launcher(
    name: str, log_dir: str | os.PathLike[str] | None = None, prefix: str = ""
) -> Launcher:
    """Return the launcher of this name.

    Raises:
        KeyError: there is none of this name.
        StartupError: it cannot start workers here; the text says what to do.
    """
    launcher = OWN[name] if name in OWN else _added()[name].load()
    return launcher(log_dir, prefix)
