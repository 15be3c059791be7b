"""Ctrl-C in a program that has no handler of its own for it: it ends a wait for workers, but nothing halfway."""

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from types import CodeType, FrameType
from typing import TypeVar

Method = TypeVar("Method", bound=Callable)
_HOLDING = set[CodeType]()


def holds_ctrl_c(method: Method) -> Method:
    """Have Ctrl-C set ``self.interrupted`` while this method runs, for it to be raised after that.

    Python raises KeyboardInterrupt wherever it is. Here half of a message would be sent, or one that has come be lost,
    and the next wait might have no end.
    """
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
    pool = None if holding is None else holding.f_locals["self"]
    if pool is None or isinstance(pool.interrupted, KeyboardInterrupt):  # pressed once more: at once, then
        signal.default_int_handler(number, frame)
    pool.interrupted = KeyboardInterrupt()
