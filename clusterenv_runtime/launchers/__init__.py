"""Launchers start worker processes, report whether they are alive, and end them.

A launcher of `extras` or of another package is imported only when it is made.
"""

import os
from importlib.metadata import entry_points

from .base import Exit, ExternalLauncher, Launcher
from .local import LocalLauncher

__all__ = ["Exit", "ExternalLauncher", "Launcher", "LocalLauncher", "make_launcher", "names"]
GROUP = "clusterenv.launchers"  # the group of entry points
BUILT_IN = {each.name: each for each in (LocalLauncher, ExternalLauncher)}


def names() -> list[str]:
    """Return the names of all available launchers."""
    return sorted([*BUILT_IN, *entry_points(group=GROUP).names])


def make_launcher(
    name: str,
    log_dir: str | os.PathLike[str] | None = None,
    prefix: str = "",
    resources: str = "",
) -> Launcher:
    """Return the launcher of this name.

    Raises:
        ValueError: no launcher has this name, or it does not accept the prefix or the resources.
        StartupError: the launcher cannot start workers here; the error message says what to do.
    """
    if name not in names():
        known = ", ".join(map(repr, names()))
        raise ValueError(f"launcher must be one of {known}, got {name!r}")
    kind = BUILT_IN.get(name) or entry_points(group=GROUP)[name].load()
    return kind(log_dir, prefix, resources)  # type: ignore[no-any-return]
