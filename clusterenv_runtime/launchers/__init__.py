"""Launchers start worker processes, say whether they live, and end them: here, or wherever you start them yourself."""

from .base import Exit, Launcher
from .external import ExternalLauncher
from .local import LocalLauncher
from .registry import launcher_names, make_launcher

__all__ = ["Exit", "ExternalLauncher", "Launcher", "LocalLauncher", "launcher_names", "make_launcher"]
