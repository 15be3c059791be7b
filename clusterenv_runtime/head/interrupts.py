"""Interrupts end a call of a `ClusterEnv` in one of its waits, where nothing is half done.

`ClusterEnv.interrupt` requests an interrupt. So does Ctrl-C, in a program that leaves Ctrl-C to
Python. By itself Python would raise KeyboardInterrupt wherever it is: half of a message might be
sent, or an answer lost, and the next call might not end. So while a call is under way, the handler
of Ctrl-C only requests an interrupt. The next wait raises it, or else the end of the call does.
A second Ctrl-C is raised at once.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable)


class Interrupt:
    """The error that the next wait is to raise. Signal handlers and threads may request one."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def request(self, error: BaseException) -> None:
        """Have the next wait raise ``error``, unless it has one to raise."""
        self.error = self.error or error

    def raise_requested(self) -> None:
        """Raise the error, if one was requested."""
        if (error := self.error) is not None:
            self.error = None
            raise error

    @property
    def is_ctrl_c(self) -> bool:
        return isinstance(self.error, KeyboardInterrupt)


_under_way: Interrupt | None = None  # of the main thread's call; of nested calls, the inner one's


def interruptible(method: Method) -> Method:
    """Let Ctrl-C end a call of this method, of an object with a ``_pool``, as described above."""
    is_step = method.__name__ in ("step", "step_wait")  # which may end episodes

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _under_way
        before = _under_way
        interrupt = self._pool.interrupt
        if interrupt is before or current_thread() is not main_thread():
            return method(self, *args, **kwargs)
        failures = self._pool.failures
        to_reset = {worker.index for worker in self._pool.workers} if is_step else set()
        _under_way = interrupt
        try:
            return method(self, *args, **kwargs)
        except KeyboardInterrupt:
            failures.to_reset |= to_reset
            raise
        finally:
            _under_way = before
            error = interrupt.error
            # No function is called here: in a call, Python may handle another Ctrl-C.
            if error.__class__ is KeyboardInterrupt:
                interrupt.error = None
                failures.to_reset |= to_reset
                raise error

    return call


def hold_ctrl_c() -> None:
    """Set the handler, where Python's own is set. Only the main thread may, and needs to."""
    _replace(signal.default_int_handler, _handle)


def let_go_of_ctrl_c() -> None:
    """Set Python's own handler again."""
    _replace(_handle, signal.default_int_handler)


def _replace(old: Callable, new: Callable) -> None:
    if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def _handle(number: int, frame: FrameType | None) -> None:
    if _under_way is None:
        signal.default_int_handler(number, frame)
    is_second = _under_way.is_ctrl_c
    _under_way.error = None
    if is_second:
        signal.default_int_handler(number, frame)
    _under_way.error = KeyboardInterrupt()
