"""Ctrl-C in a program that leaves it to Python: it ends a call of a `ClusterEnv` where nothing is
half done.

By itself KeyboardInterrupt is raised wherever Python is. Half of a message would be sent, or an
answer lost, and the next call might have no end. So while a call is under way, the handler only
interrupts that call's pool. A wait of the pool raises the KeyboardInterrupt, or else the end of the
call does. A second Ctrl-C is raised at once.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .pool import WorkerPool

Method = TypeVar("Method", bound=Callable)
_under_way: WorkerPool | None = (
    None  # the pool of the main thread's call, of one within another the inner one's
)


def ends_by_ctrl_c(method: Method) -> Method:
    """Have Ctrl-C end a call of this method, of an object with a ``_pool``, as described above."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _under_way
        before, pool = _under_way, self._pool
        if pool is before or current_thread() is not main_thread():
            return method(self, *args, **kwargs)
        _under_way = pool
        try:
            return method(self, *args, **kwargs)
        finally:
            _under_way, error = before, pool.interrupted
            # Nothing is called here: in a call, Python may handle another Ctrl-C.
            if error.__class__ is KeyboardInterrupt:
                pool.interrupted = None
                raise error

    return call


def hold_ctrl_c() -> None:
    """Set the handler, where Python's own is set; other threads may not, and need not."""
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
    before, _under_way.interrupted = _under_way.interrupted, None
    if isinstance(before, KeyboardInterrupt):
        signal.default_int_handler(number, frame)
    _under_way.interrupted = KeyboardInterrupt()
