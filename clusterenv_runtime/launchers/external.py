"""Workers that you start yourself, on any machine."""

from __future__ import annotations

import contextlib
import shlex

from ..errors import print_line
from .base import Launcher
from .processes import hash_seed


class ExternalLauncher(Launcher):
    """Prints the workers' commands. The head waits as long as you need to run them.

    The commands name the workers' key file, if there is one: a file below ``log_dir``, or your own
    copy of it if you made the keys.
    """

    name = "external"
    by_hand = True

    def command(self, index: int) -> list[str]:
        variables = ["OMP_NUM_THREADS=1", f"PYTHONHASHSEED={hash_seed()}"]
        return [*self.prefix, "env", *variables, "python", *self.arguments(index)]

    def start(self) -> None:
        print("run these, each once, wherever you like:")
        super().start()

    def start_worker(self, index: int) -> None:
        # A replacement has the same command, so nothing is lost if it cannot be printed again.
        with contextlib.suppress(OSError):
            print_line(shlex.join(self.command(index)))

    def pending(self, index: int) -> str | None:
        return "nobody has run its command yet"
