"""Conversion of exceptions to plain data, and back. The head calls no code of their classes."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any

import msgspec
import numpy as np

from ..errors import ClusterEnvError, ProtocolError, printable
from .buffers import MAX_FRAME, Arrays, to_buffers
from .codec import known_classes, pack, unpack

MAX_BYTES = 2**16  # of an exception's data, so that data and texts fit in a frame, `MAX_FRAME`
NOTHING = msgspec.Raw(b"\x80")  # an empty dict in msgpack
# Exceptions that are not raised again. The first two would end a loop or a generator of the user.
# The runtime's own exceptions are about the process that raises them.
NEVER = StopIteration, StopAsyncIteration, ClusterEnvError


class Content(msgspec.Struct):
    """The data of an exception, as it is sent."""

    arguments: tuple[Any, ...] | None = None
    attributes: dict[str, Any] = {}


def _own_of_python(kind: type) -> type:
    """Return the built-in class that this class extends, or is."""
    return next(base for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)


def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    """Return a class's slots by attribute name, without the slots of its built-in base class."""
    classes = kind.__mro__[: kind.__mro__.index(_own_of_python(kind))]
    members = [pair for each in reversed(classes) for pair in vars(each).items()]
    return {name: slot for name, slot in members if type(slot) is MemberDescriptorType}


def pack_exception(error: BaseException) -> tuple[msgspec.Raw, list[bytes], bool]:
    """Return an exception's data as `codec.pack` does, its buffers, and whether it is complete.

    The data holds the exception's arguments and attributes. Those that cannot be sent are left out.
    If the exception cannot be read, or the data is too long, the data is an empty dict.
    """
    arrays: list[np.ndarray] = []
    left_out: list[str] = []
    try:
        _, arguments, *more = _own_of_python(type(error)).__reduce__(error)
        attributes = dict(*more)
        for name, slot in _slots(type(error)).items():
            with suppress(AttributeError):  # the slot has no value
                attributes[name] = slot.__get__(error)
        content = {"arguments": arguments, "attributes": attributes}
        data = pack(content, arrays, left_out)
    except Exception:  # the exception's own code may raise anything
        return NOTHING, [], False
    buffers = [bytes(buffer) for buffer in to_buffers(arrays)]
    if len(data) + sum(map(len, buffers)) > MAX_BYTES:
        return NOTHING, [], False
    return data, buffers, not left_out


def remade(
    names: Sequence[str], text: str, data: msgspec.Raw, buffers: list[bytes], is_whole: bool
) -> Exception | None:
    """Return an exception of the first class in ``names`` that this process knows and can make.

    If there is no such class, or the data is malformed, return None.

    Args:
        names: the names of the exception's class and of its bases, see `codec.name_of`.
        text: the exception's text, which is its only argument if ``data`` holds no arguments.
        data: the exception's arguments and attributes, as `pack_exception` returns them.
        buffers: the buffers of ``data``.
        is_whole: whether ``data`` holds all arguments and attributes.
    """
    try:
        content = msgspec.convert(unpack(data, Arrays(buffers)), Content)
    except (ProtocolError, msgspec.ValidationError):
        return None
    arguments = [
        printable(each, MAX_FRAME, "\n\t") if isinstance(each, str) else each
        for each in ((text,) if content.arguments is None else content.arguments)
    ]
    known = known_classes(Exception)
    for name in names:
        kind = known.get(name)
        if kind is None or issubclass(kind, NEVER):
            continue
        own_of_python = _own_of_python(kind)
        if not is_whole and kind.__str__ is not own_of_python.__str__:
            kind = _saying(text, kind)
        try:
            exception = own_of_python.__new__(kind, *arguments)
            own_of_python.__init__(exception, *arguments)
        except (TypeError, ValueError):  # the built-in class takes other arguments
            continue
        slots = _slots(kind)
        for attribute, value in content.attributes.items():
            if attribute in slots:
                slots[attribute].__set__(exception, value)
            else:
                vars(exception)[attribute] = value
        return exception
    return None


def _saying(text: str, kind: type[Exception]) -> type[Exception]:
    """Return a subclass whose exceptions have this text.

    The class's own ``__str__`` might need data that has not arrived. If Python would call code of
    the class to make a subclass, return the class itself.
    """
    is_plain = all("__init_subclass__" not in vars(each) for each in kind.__mro__[:-1])
    if type(kind) is not type or not is_plain:  # making a subclass would call its code
        return kind
    content = {"__module__": kind.__module__, "__str__": lambda _: text}
    return type(kind.__qualname__, (kind,), content)
