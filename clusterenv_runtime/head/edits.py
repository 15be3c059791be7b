"""Which code has been edited since the `ClusterEnv` was made: replacements act by that."""

from __future__ import annotations

import os
import sys

SHOWN = 3  # files that a warning names


class Edits:
    """Notes when the files of all modules were written that are imported here, besides the script.

    The script itself travels as it was.
    """

    def __init__(self) -> None:
        modules = [module for name, module in sys.modules.items() if name != "__main__"]
        files = {getattr(module, "__file__", None) for module in modules} - {None}
        self._written = {file: _written(file) for file in files}

    def describe(self) -> str:
        """Return a text that names the files written since; "" if there are none."""
        times = self._written.items()
        edited = sorted(file for file, written in times if _written(file) != written)
        if not edited:
            return ""
        names = ", ".join(edited[:SHOWN])
        more = f" and {len(edited) - SHOWN} more" if len(edited) > SHOWN else ""
        return f"; it runs code that was changed since the others started: {names}{more}"


def _written(file: str) -> int | None:
    """Return when a file was written, in nanoseconds; None if it is not there."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None
