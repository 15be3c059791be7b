"""Signals that end a run in order: a scheduler's SIGTERM and SIGUSR1, SIGHUP, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..env import ClusterEnv
from ..errors import CheckpointError, EnvError, Interrupted, WorkerDiedError

TOLD = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
# Exit codes: EX_TEMPFAIL, for which schedulers may requeue, and the shell's 128 + SIGINT.
PREEMPTED = 75
CTRL_C = 130


class Signals:
    """The first signal ends the run. Later ones are ignored, but a second Ctrl-C is the usual one.

    Outside of `saving` there is nothing to save: the signal ends the process wherever it is.

    Args:
        speaks: whether it says so; of several learners that have the same signal, one does.

    Attributes:
        code: the exit code, once a signal has come.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.code: int | None = None
        self._speaks = speaks
        self._envs: ClusterEnv | None = None  # those of the training
        for number in (*TOLD, signal.SIGINT):
            is_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not is_nohup:
                signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        ignore_signals()
        self.code = CTRL_C if number == signal.SIGINT else PREEMPTED
        if self._envs is None:
            self.end()
        if self._envs.closed:
            raise Interrupted("interrupted")
        self._envs.interrupt()

    def raise_if_received(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.code is not None:
            raise Interrupted("interrupted")

    def end(self, why: Interrupted | None = None, then: str = "") -> None:
        """Say that the run was interrupted, or ``why`` if by no signal, and ``then`` how it goes
        on; exit.
        """
        if self.code is None:
            sys.exit(f"error: {why}{then}")
        if self._speaks:
            print(f"interrupted{then}", file=sys.stderr)
        sys.exit(self.code)

    @contextmanager
    def saving(self, envs: ClusterEnv, save: Callable[[], None], to_go_on: str) -> Iterator[None]:
        """Have a signal end this block where nothing is half done: save, say so, and exit.

        That is in a wait for workers, which the signal interrupts, and in `raise_if_received`. Once
        ``envs`` are closed, nothing is half done anywhere. A learner that is lost ends it likewise,
        and so do observations from which nobody can learn. An environment's error is raised in such
        a wait, too, and so is that of a worker which is not replaced: it is saved, and raised.
        """
        self._envs = envs
        try:
            yield
        except Interrupted as why:
            ignore_signals()
            try:
                save()
            except CheckpointError as error:
                sys.exit(not_saved(error, to_go_on))
            self.end(why, f"; to go on: {to_go_on}")
        except Exception as error:
            ignore_signals()  # torchrun, which ends all learners, would hide this error
            is_in_wait = isinstance(error, EnvError | WorkerDiedError)
            if (is_in_wait or isinstance(error.__cause__, EnvError)) and self._speaks:
                _save_after_error(save, to_go_on)
            raise
        finally:
            self._envs = None


def _save_after_error(save: Callable[[], None], to_go_on: str) -> None:
    """Save a run that an error ends in a wait, where nothing is half done."""
    try:
        save()
    except CheckpointError as error:
        print(f"not saved: {error}", file=sys.stderr)
    else:
        print(f"saved; to go on: {to_go_on}", file=sys.stderr)


def not_saved(error: CheckpointError, to_go_on: str) -> str:
    """Say that an interrupted run has no checkpoint of its end."""
    before = f"to go on from the checkpoint before, if there is one: {to_go_on}"
    return f"error: interrupted, and not saved: {error}; {before}"


def ignore_signals() -> None:
    """Ignore further signals: a scheduler may send two, and one while the run is saved."""
    for number in TOLD:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_terminal() -> None:
    """Send output nowhere if its terminal has hung up: writing to that is an error."""
    for output in (1, 2):
        try:
            os.write(output, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
