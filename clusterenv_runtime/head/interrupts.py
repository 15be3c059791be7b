"""Interrupts, which end a call of a `ClusterEnv` in one of its waits, where nothing is half done.

`ClusterEnv.interrupt` requests an interrupt. So does Ctrl-C, in a program that leaves Ctrl-C to
Python. Python itself would raise KeyboardInterrupt at any point of the code: a message might be
half sent or a response lost, and the next call might never end. Therefore, while a call is under
way, the handler of Ctrl-C only requests an interrupt. The next wait raises it, or otherwise the end
of the call. A second Ctrl-C raises KeyboardInterrupt at once.
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
    """The error that the next wait will raise. Signal handlers and threads may request one."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def request(self, error: BaseException) -> None:
        """Have the next wait raise ``error``, unless another error was requested before."""
        self.error = self.error or error

    def raise_requested(self) -> None:
        """Raise the error, if one was requested."""
        if (error := self.error) is not None:
            self.error = None
            raise error

    @property
    def is_ctrl_c(self) -> bool:
        return isinstance(self.error, KeyboardInterrupt)


_under_way: Interrupt | None = None  # the one of the main thread's innermost call


def interruptible(method: Method) -> Method:
    """Let Ctrl-C end calls of a method as described above. Its object must have a ``_pool``."""
    is_step = method.__name__ in ("step", "step_wait")  # these may end episodes

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
            # No function is called here, because Python may handle another Ctrl-C during a call.
            if error.__class__ is KeyboardInterrupt:
                interrupt.error = None
                failures.to_reset |= to_reset
                raise error

    return call


def hold_ctrl_c() -> None:
    """Replace Python's own handler of Ctrl-C. Only the main thread can do this, or needs to."""
    _replace(signal.default_int_handler, _handle)


def let_go_of_ctrl_c() -> None:
    """Restore Python's own handler of Ctrl-C."""
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
