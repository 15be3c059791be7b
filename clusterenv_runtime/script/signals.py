"""Signals that end a run in order: a scheduler's SIGTERM and SIGUSR1, a lost terminal's SIGHUP, and
Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..env import ClusterEnv
from ..errors import Interrupted, LearnerLostError, one_line
from .learners.learners import Learners

TOLD = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
PREEMPTED, CTRL_C = (
    75,
    130,
)  # exit codes: EX_TEMPFAIL, for which schedulers may requeue, and the shell's 128 + SIGINT


class Signals:
    """The first of these signals ends the run. Later ones are ignored, but a second Ctrl-C does
    what it does elsewhere.

    Outside of `saving` there is nothing to save, and the signal ends the process wherever it is.
    One of several ``learners`` also ends when another has, and says so, as torchrun then tells it
    to end.
    """

    def __init__(self, learners: Learners | None = None) -> None:
        self._learners = learners or Learners()
        self._code: int | None = None  # the exit code, once a signal has come
        self._envs: ClusterEnv | None = None  # what the training waits for
        for number in (*TOLD, signal.SIGINT):
            if (
                number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
            ):  # nohup has it ignored
                signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        _heed_no_more()
        self._code = CTRL_C if number == signal.SIGINT else PREEMPTED
        if self._envs is None:
            self._exit()
        if self._envs.closed:
            raise Interrupted("interrupted")
        self._envs.interrupt()

    def interrupt(self) -> None:
        """Do as if a scheduler had told this process to end; other threads may call it."""
        self._code = PREEMPTED if self._code is None else self._code
        if self._envs is not None:
            self._envs.interrupt()

    def _exit(self, then: str = "", why: Interrupted | None = None) -> None:
        is_told = self._code is not None or self._learners.world_size == 1
        culprit, code = self._learners.part(self._code or (PREEMPTED if is_told else 1))
        error = culprit or (None if is_told else why)
        if self._learners.speaks:
            print(f"error: {error}{then}" if error else f"interrupted{then}", file=sys.stderr)
        sys.exit(code)

    def raise_if_received(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self._code is not None:
            raise Interrupted("interrupted")

    @contextmanager
    def saving(self, envs: ClusterEnv, save: Callable[[], None], to_go_on: str) -> Iterator[None]:
        """Have a signal end this block where nothing is half done: call ``save``, say how to go on,
        and exit.

        That is in a wait for workers or for other learners, which it interrupts, and in
        `raise_if_received`. Once ``envs`` is closed nothing is ever half done. One of several
        learners that dies ends the others like a signal, but amid an update there is nothing to
        save.
        """
        self._envs = envs
        from_before = f"to go on from the checkpoint before, if there is one: {to_go_on}"
        try:
            yield
        except Interrupted as why:
            _heed_no_more()
            self._learners.begin_to_end()
            try:
                save()
            except OSError as error:
                self._learners.part(1)
                sys.exit(
                    f"error: interrupted, and not saved: {error.strerror or error}; {from_before}"
                )
            self._exit(
                f"; to go on: {to_go_on}" if self._learners.rank == 0 else f"; {from_before}", why
            )
        except LearnerLostError as error:  # amid an update
            _heed_no_more()
            self._learners.begin_to_end()
            culprit, _ = self._learners.part(1)
            sys.exit(f"error: {culprit or error}; {from_before}" if self._learners.speaks else 1)
        except BaseException as error:
            if (
                self._learners.world_size > 1
            ):  # torchrun, which has the others end, would end this one's last words
                _heed_no_more()
            self._learners.leave(f"has failed: {one_line(error)}")
            raise
        finally:
            self._envs = None


def _heed_no_more() -> None:
    """Ignore what comes now: a scheduler may tell this process twice, and amid its saving."""
    for number in TOLD:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_terminal() -> None:
    """Send what is printed nowhere, where it would go to a terminal that has hung up: writing to
    that is an error.
    """
    for output in (1, 2):
        try:
            os.write(output, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
