"""Signals that end a run cleanly: a scheduler's SIGTERM and SIGUSR1, SIGHUP, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clusterenv_runtime.env import ClusterEnv
from clusterenv_runtime.errors import CheckpointError, EnvError, Interrupted, WorkerDiedError

TOLD = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
# Exit codes: EX_TEMPFAIL, on which schedulers may requeue, and the shell's 128 + SIGINT.
PREEMPTED = 75
CTRL_C = 130


class Signals:
    """The signal handler of a run, which the first signal ends.

    Later signals are ignored, except for a second Ctrl-C, which raises KeyboardInterrupt as usual.
    Outside `saving` there is nothing to save, so the signal ends the process wherever it is.

    Args:
        speaks: whether to print that the run was interrupted. Of several learners that get the same
            signal, one does.

    Attributes:
        code: the exit code, None until a signal has come.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.code: int | None = None
        self._speaks = speaks
        self._envs: ClusterEnv | None = None  # the training environments, in `saving`
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
        """Print that the run was interrupted, or ``why`` if no signal came, and ``then``; exit.

        ``then`` says how to resume the run.
        """
        if self.code is None:
            sys.exit(f"error: {why}{then}")
        if self._speaks:
            print(f"interrupted{then}", file=sys.stderr)
        sys.exit(self.code)

    @contextmanager
    def saving(self, envs: ClusterEnv, save: Callable[[], None], to_go_on: str) -> Iterator[None]:
        """Have a signal end this block where nothing is half done: save, report it, and exit.

        Nothing is half done in a wait for workers, which the signal interrupts, and in
        `raise_if_received`. Once ``envs`` are closed, nothing is half done anywhere. A lost learner
        and observations that are not finite end the block in the same way. An environment's error,
        or the death of a worker that is not replaced, is raised in such a wait, too. Then the run
        is saved, and the error is raised again.
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
            self.end(why, f"; to resume: {to_go_on}")
        except Exception as error:
            ignore_signals()  # torchrun, which then ends all learners, would hide this error
            is_in_wait = isinstance(error, EnvError | WorkerDiedError)
            if (is_in_wait or isinstance(error.__cause__, EnvError)) and self._speaks:
                _save_after_error(save, to_go_on)
            raise
        finally:
            self._envs = None


def _save_after_error(save: Callable[[], None], to_go_on: str) -> None:
    """Save a run after an error in a wait for workers, where nothing is half done."""
    try:
        save()
    except CheckpointError as error:
        print(f"not saved: {error}", file=sys.stderr)
    else:
        print(f"saved; to resume: {to_go_on}", file=sys.stderr)


def not_saved(error: CheckpointError, to_go_on: str) -> str:
    """Return the message that an interrupted run could not be saved."""
    before = f"to resume from the previous checkpoint, if there is one: {to_go_on}"
    return f"error: interrupted, and not saved: {error}; {before}"


def ignore_signals() -> None:
    """Ignore further signals except for Ctrl-C, which raises KeyboardInterrupt.

    A scheduler may send two signals, the second one while the run is being saved.
    """
    for number in TOLD:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_terminal() -> None:
    """Discard output whose terminal has hung up, because writing to it is an error."""
    for output in (1, 2):
        try:
            os.write(output, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
