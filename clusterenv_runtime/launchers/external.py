"""Workers that you start, wherever you like."""

from __future__ import annotations

import contextlib
import shlex

from ..errors import print_line
from .base import Launcher


class ExternalLauncher(Launcher):
    """Prints the workers' commands and lets the head wait for as long as you need to run them.

    The commands name the file of the keys, if there are any: one below ``log_dir``, or of keys that
    you have made, the workers' one, wherever you have taken that.
    """

    name, by_hand = "external", True

    def command(self, index: int) -> list[str]:
        return [*self.prefix, "env", "OMP_NUM_THREADS=1", "python", *self.arguments(index)]

    def start(self) -> None:
        print("run these, each once, wherever you like:")
        super().start()

    def start_worker(self, index: int) -> None:
        with contextlib.suppress(
            OSError
        ):  # nobody reads it any more; the command is the one that was printed first
            print_line(shlex.join(self.command(index)))

    def pending(self, index: int) -> str | None:
        return "nobody has run its command yet"
