"""Workers that you start, wherever you like."""

from __future__ import annotations

import contextlib
import shlex

from ..errors import print_line
from .base import Launcher
from .processes import hash_seed


class ExternalLauncher(Launcher):
    """Prints the workers' commands. The head waits for as long as you need to run them.

    The commands name the file of the workers' keys, if there is one: a file below ``log_dir``, or
    your own copy of the keys that you have made.
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
        # A replacement's command is the first one's, so it matters little if nobody reads it.
        with contextlib.suppress(OSError):
            print_line(shlex.join(self.command(index)))

    def pending(self, index: int) -> str | None:
        return "nobody has run its command yet"
