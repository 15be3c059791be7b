"""Launchers start worker processes, report whether they are alive, and end them.

A launcher of `extras` or of another package is imported only when it is made.
"""

import os
from importlib.metadata import EntryPoint, entry_points

from .base import Exit, ExternalLauncher, Launcher
from .local import LocalLauncher

__all__ = [
    "Exit",
    "ExternalLauncher",
    "Launcher",
    "LocalLauncher",
    "is_ours",
    "make_launcher",
    "names",
    "register",
]
GROUP = "clusterenv.launchers"  # the group of entry points
_registered: dict[str, EntryPoint] = {}


def register(name: str, value: str) -> None:
    """Add a launcher; ``value`` is its "module:class".

    A package can declare an entry point instead.
    """
    _registered[name] = EntryPoint(name, value, GROUP)


register("local", f"{__name__}.local:LocalLauncher")
register("external", f"{__name__}.base:ExternalLauncher")


def _launchers() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)} | _registered


def names() -> list[str]:
    """Return the names of all available launchers."""
    return sorted(_launchers())


def is_ours(name: str) -> bool:
    """Return whether the launcher of this name comes with this package."""
    point = _launchers().get(name)
    return point is not None and point.value.startswith("clusterenv_runtime.")


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
    launchers = _launchers()
    if name not in launchers:
        known = ", ".join(map(repr, names()))
        raise ValueError(f"launcher must be one of {known}, got {name!r}")
    return launchers[name].load()(log_dir, prefix, resources)  # type: ignore[no-any-return]
