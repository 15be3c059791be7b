"""Ctrl-C in a program that leaves it to Python: it ends a call of a `ClusterEnv` where nothing is half done.

By itself KeyboardInterrupt is raised wherever Python is. Half of a message would be sent, or an answer lost, and the
next call might have no end. So a handler looks where the program is: amid a call it only has the pool interrupted,
whose waits raise it, or else the call's end. A second one is raised at once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from types import CodeType, FrameType
from typing import TypeVar

Method = TypeVar("Method", bound=Callable)
_HOLDING = set[CodeType]()


def holds_ctrl_c(method: Method) -> Method:
    """Let Ctrl-C amid this method of what has a ``_pool`` only interrupt that."""
    _HOLDING.add(method.__code__)
    return method


def hold_ctrl_c() -> None:
    """Set the handler, where Python's own is set; in other threads that is neither allowed nor needed."""
    _replace(signal.default_int_handler, _handle)


def let_go_of_ctrl_c() -> None:
    """Set Python's own again."""
    _replace(_handle, signal.default_int_handler)


def _replace(old: Callable, new: Callable) -> None:
    if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def _handle(number: int, frame: FrameType | None) -> None:
    holding = frame
    while holding is not None and holding.f_code not in _HOLDING:
        holding = holding.f_back
    if holding is None:
        signal.default_int_handler(number, frame)
    pool = holding.f_locals["self"]._pool
    before, pool.interrupted = pool.interrupted, None
    if isinstance(before, KeyboardInterrupt):
        signal.default_int_handler(number, frame)
    pool.interrupted = KeyboardInterrupt()
