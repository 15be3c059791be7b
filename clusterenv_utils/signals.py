"""Signals that end a run cleanly: a scheduler's SIGTERM and SIGUSR1, SIGHUP, and Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from clusterenv_runtime import ClusterEnv, ClusterEnvError, EnvError, Interrupted

from .errors import CheckpointError, ScriptError

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

    def end(self, then: str = "") -> NoReturn:
        """End the process, which a signal asks for. ``then`` says how to resume the run."""
        if self._speaks:
            print(f"interrupted{then}", file=sys.stderr)
        raise SystemExit(self.code)

    @contextmanager
    def saving(self, envs: ClusterEnv, save: Callable[[], None], to_go_on: str) -> Iterator[None]:
        """Have a signal end this block where nothing is half done: save, report it, and exit.

        Nothing is half done in a wait for workers, which the signal interrupts, and in
        `raise_if_received`. Once ``envs`` are closed, nothing is half done anywhere. A lost learner
        and observations that are not finite end the block in the same way. An environment's error,
        the death of a worker that is not replaced, and a full disk, on which the logs end, come
        where nothing is half done, too. Then the run is saved, and the error is raised again.
        """
        self._envs = envs
        try:
            yield
        except Interrupted as why:
            ignore_signals()
            try:
                save()
            except CheckpointError as error:
                before = f"to resume from the previous checkpoint, if there is one: {to_go_on}"
                raise ScriptError(f"interrupted, and not saved: {error}; {before}") from None
            if self.code is None:
                raise ScriptError(f"{why}; to resume: {to_go_on}") from None
            self.end(f"; to resume: {to_go_on}")
        except Exception as error:
            ignore_signals()  # torchrun, which then ends all learners, would hide this error
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            is_in_wait = isinstance(error, ClusterEnvError) or is_full
            if (is_in_wait or isinstance(error.__cause__, EnvError)) and self._speaks:
                _save_after_error(save, to_go_on)
            if is_full and isinstance(error, OSError):
                raise ScriptError(f"cannot write logs: {error.strerror}") from error
            raise
        finally:
            self._envs = None


def _save_after_error(save: Callable[[], None], to_go_on: str) -> None:
    try:
        save()
    except CheckpointError as error:
        print(f"not saved: {error}", file=sys.stderr)
    else:
        print(f"saved; to resume: {to_go_on}", file=sys.stderr)


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
