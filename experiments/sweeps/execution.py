"""The execution of a sweep: several runs at once, until all have run or a signal arrives."""

import os
import signal
import sys
import time
from collections import deque

from .attempts import Attempt, checkpoints, directory_of, first_of, result_of
from .configurations import label
from .metrics import value_of

LOOK_S = 0.1  # seconds between two looks at the runs
STOP_S = 120  # seconds that a run has to save and end, once it was told to stop
TOLD = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
# The exit status of a run that has saved and stopped (EX_TEMPFAIL), and of one that stopped before
# it could save (the shell's 128 + SIGTERM).
SAVED, STOPPED = 75, 143


class Interrupted(Exception):
    """A signal has ended the sweep.

    Attributes:
        status: The exit status for this process.
    """

    def __init__(self, status):
        super().__init__("interrupted; finished runs are kept, start again to go on")
        self.status = status


class Signals:
    """The handler of the signals that end a sweep.

    While runs are under way, signals are only counted, so that the runs end cleanly. Otherwise a
    signal ends the sweep wherever it is.

    Attributes:
        are_counted: Whether runs are under way.
        number: The number of signals so far.
        presses: How many of the signals were a Ctrl-C.
    """

    def __init__(self):
        self.are_counted = False
        self.number = 0
        self.presses = 0
        for number in TOLD:
            is_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not is_nohup:
                signal.signal(number, self._take)

    def _take(self, number, _):
        if number == signal.SIGHUP:
            leave_terminal()
        self.number += 1
        self.presses += number == signal.SIGINT
        if not self.are_counted:
            raise Interrupted(STOPPED)


def leave_terminal():
    """Discard output whose terminal has hung up, because writing to that terminal is an error."""
    for output in (1, 2):
        try:
            os.write(output, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)


class Execution:
    """The runs of a sweep, both the waiting and the running ones.

    Args:
        plan: The configurations, a `Listed` or a `Search`.
        jobs: The number of runs at once.
    """

    def __init__(self, sweep, plan, output, jobs, progress, signals):
        self._sweep = sweep
        self._plan = plan
        self._output = output
        self._jobs = jobs
        self._progress = progress
        self._signals = signals
        self._waiting = deque()
        self._running = {}  # by the configuration's index
        self._failures = 0
        self._saved = None  # whether a stopped run has a checkpoint; None if none was stopped

    def run(self, indices):
        """Run the configurations of these indices. Return how many have failed.

        Raises:
            Interrupted: a signal has arrived. All runs have ended.
            SystemExit: the runs do not have the metric. All runs have ended.
        """
        self._waiting.extend(indices)
        self._signals.are_counted = True
        try:
            while (self._waiting or self._running) and not self._is_interrupted():
                while self._waiting and len(self._running) < self._jobs:
                    self._begin(self._waiting.popleft())
                self._progress.show(self._seconds(), len(self._waiting))
                time.sleep(LOOK_S if self._running else 0)
                self._conclude()
        finally:
            self._stop()
            self._signals.are_counted = False
        if self._is_interrupted():
            raise Interrupted(SAVED if self._saved else STOPPED)
        return self._failures

    def _is_interrupted(self):
        return self._signals.number > 0 or self._saved is not None

    def _seconds(self):
        return [attempt.seconds for attempt in self._running.values()]

    def _begin(self, index):
        flat = self._plan.take(index)
        directory = directory_of(self._sweep, flat, self._output)
        known = self._plan.known()
        first = first_of(self._sweep, known, self._output)
        self._progress.total = self._plan.number - len(known) + len(first)
        if first[directory] != index:
            text = f"is the same as {first[directory]}, which runs it"
            self._progress.tell(f"configuration {index} {text}: {label(self._sweep, flat)}")
        elif result_of(directory) is None:
            attempt = Attempt(self._sweep, flat, directory)
            self._running[index] = attempt
            self._progress.tell(f"{attempt.path}: {label(self._sweep, flat)}")

    def _conclude(self):
        """Write the results of the runs that have ended."""
        ended = [index for index, each in self._running.items() if each.status is not None]
        for index in ended:
            attempt = self._running.pop(index)
            if attempt.status == SAVED:  # a scheduler has also told the run to stop
                self._note_stopped([attempt])
                continue
            if failure := attempt.conclude():
                self._failures += 1
                self._progress.add_failure()
                self._progress.tell(f"error: configuration {index} {failure}", sys.stderr)
            else:
                result = result_of(attempt.directory)
                value = value_of(self._sweep, attempt.directory, result)
                self._progress.add(attempt.directory, attempt.flat, value, attempt.seconds)
            self._progress.tell_status(self._seconds(), len(self._waiting))

    def _stop(self):
        """Have all runs save and end. Kill those that are late, or all after a second Ctrl-C."""
        if not self._running:
            return
        for attempt in self._running.values():
            attempt.stop()
        number = len(self._running)
        plural = "s" * (number > 1)
        text = f"stopping {number} run{plural}, which may save; a second Ctrl-C ends them now"
        self._progress.tell(text, sys.stderr)
        deadline = time.monotonic() + STOP_S
        while any(each.status is None for each in self._running.values()):
            if self._signals.presses > 1 or time.monotonic() > deadline:
                break
            time.sleep(LOOK_S)
        for attempt in self._running.values():
            attempt.kill()
            if attempt.status == 0:
                attempt.conclude()
        self._note_stopped(self._running.values())
        self._running.clear()

    def _note_stopped(self, attempts):
        has_saved = any(checkpoints(attempt.directory) for attempt in attempts)
        self._saved = self._saved or has_saved
