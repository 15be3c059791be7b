"""Exceptions to plain data, and back, with none of their own code called at the head."""

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

MAX_BYTES = 2**16  # of an exception's data: texts and data fit in a frame, `buffers.MAX_FRAME`
NOTHING = msgspec.Raw(b"\x80")  # of an empty dict
# Raised again, the first two would end a loop or a generator of the user. The runtime's own
# exceptions are about the process that raises them.
NEVER = StopIteration, StopAsyncIteration, ClusterEnvError


class Content(msgspec.Struct):
    """What is sent of an exception."""

    arguments: tuple[Any, ...] | None = None
    attributes: dict[str, Any] = {}


def _own_of_python(kind: type) -> type:
    """Return the class of Python's own that this class extends, or is."""
    return next(base for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)


def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    """Return by name the attributes for which a class has slots, but not those of Python's own."""
    classes = kind.__mro__[: kind.__mro__.index(_own_of_python(kind))]
    members = [pair for each in reversed(classes) for pair in vars(each).items()]
    return {name: slot for name, slot in members if type(slot) is MemberDescriptorType}


def pack_exception(error: BaseException) -> tuple[msgspec.Raw, list[bytes], bool]:
    """Return the arguments and attributes of an exception, as `codec.pack` does, their arrays, and
    whether that is all.

    Attributes and arguments that cannot be sent are left out. The data of what is too long is that
    of an empty dict.
    """
    arrays: list[np.ndarray] = []
    left_out: list[str] = []
    try:
        _, arguments, *more = _own_of_python(type(error)).__reduce__(error)
        attributes = dict(*more)
        for name, slot in _slots(type(error)).items():
            with suppress(AttributeError):  # it has no value
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
    """Return an exception of the first of these classes that this process knows and can make.

    Args:
        names: of its class and of that class's bases, see `codec.name_of`.
        text: of the exception; its only argument, if its own are not in ``data``.
        data: its arguments and attributes, as `pack_exception` returns them.
        buffers: their arrays.
        is_whole: whether these are all that it has.
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
        except (TypeError, ValueError):  # Python's own wants others
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
    """Return a class like this one whose exceptions have this text: to write it, the class's own
    code might need what has not arrived.
    """
    is_plain = all("__init_subclass__" not in vars(each) for each in kind.__mro__[:-1])
    if type(kind) is not type or not is_plain:  # to extend it would call its code
        return kind
    content = {"__module__": kind.__module__, "__str__": lambda _: text}
    return type(kind.__qualname__, (kind,), content)
