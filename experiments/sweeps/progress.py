"""The progress of a sweep: a changing line on a terminal, and elsewhere a line after each run."""

import statistics

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .configurations import label
from .metrics import best_of


def duration(seconds):
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class Progress:
    """A counter of a sweep's runs, which shows the progress.

    Attributes:
        total: The number of different configurations.
    """

    def __init__(self, sweep, total, jobs):
        self.total = total
        self._sweep = sweep
        self._jobs = jobs
        self._values = {}  # by directory: (configuration, metric or None)
        self._failed = 0
        self._seconds = []  # seconds of each run that has finished in this process
        self._shown = ""
        console = Console()
        changes = console.is_terminal and not console.is_dumb_terminal
        self._live = None
        if changes:
            self._live = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_):
        if self._live:
            self._live.stop()

    def add(self, directory, flat, value, seconds=None):
        """Count a run that has finished, in this process or before."""
        self._values[directory] = flat, value
        if seconds is not None:
            self._seconds.append(seconds)

    def add_failure(self):
        self._failed += 1

    def status(self, running, waiting, is_live=False):
        """Return the progress of the sweep as text.

        Args:
            running: The seconds that each current run has taken so far.
            waiting: The number of runs that have not started.
            is_live: Whether the text is for the changing line.
        """
        texts = [f"{len(self._values)} of {self.total} done"]
        if self._failed:
            texts.append(f"{self._failed} failed")
        if is_live and running:
            texts.append(f"{len(running)} running, the first for {duration(max(running))}")
        parts = [", ".join(texts)]
        measured = [(flat, value) for flat, value in self._values.values() if value is not None]
        if self._seconds and (running or waiting):
            parts.append(f"about {duration(self._left(running, waiting))} left")
        if measured:
            flat, best = best_of(self._sweep, measured)
            metric = self._sweep["metric"]["name"]
            parts.append(f"best {metric} {best:.4g}: {label(self._sweep, flat)}")
        return "; ".join(parts)

    def _left(self, running, waiting):
        mean = statistics.fmean(self._seconds)
        rests = [max(mean - seconds, 0) for seconds in running]
        return max((sum(rests) + waiting * mean) / self._jobs, *rests, 0)

    def tell(self, text, file=None):
        """Print a line above the changing one."""
        if self._live:
            self._live.stop()
        print(text, file=file, flush=True)
        if self._live:
            self._live.start()
            self._shown = ""

    def tell_status(self, running, waiting):
        """Print the progress, unless the changing line shows it."""
        if not self._live:
            self.tell(self.status(running, waiting))

    def show(self, running, waiting):
        """Update the changing line."""
        if self._live:
            line = self.status(running, waiting, is_live=True)
            if line != self._shown:
                self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            self._shown = line
