"""Exceptions to plain data, and back, with none of their own code called at the head."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ..errors import ClusterEnvError, ProtocolError, printable
from .buffers import MAX_FRAME, Arrays, to_buffers
from .codec import pack, unpack

MAX_BYTES = 2**16  # of an exception's data: texts and data fit in a frame, `buffers.MAX_FRAME`
NOTHING = msgspec.Raw(b"\xc0")  # of None
# Raised again, the first two would end a loop or a generator of the user. The runtime's own
# exceptions are about the process that raises them.
NEVER = StopIteration, StopAsyncIteration, ClusterEnvError


def name_of(kind: type) -> str:
    """Return the name of a class, with that of its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _own_of_python(kind: type) -> type:
    """Return the class of Python's own that this class extends, or is."""
    return next(base for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)


def pack_exception(error: BaseException) -> tuple[msgspec.Raw, list[bytes]]:
    """Return the arguments and attributes of an exception, as `codec.pack` does, and their arrays.

    Attributes that cannot be sent are left out. The data of arguments that cannot be sent, and of
    what is too long, is that of None.
    """
    arrays: list[np.ndarray] = []
    try:
        _, arguments, *attributes = _own_of_python(type(error)).__reduce__(error)
        data = pack((arguments, *(attributes or [{}])), arrays, dropped=[])
    except Exception:  # the exception's own code may raise anything
        return NOTHING, []
    buffers = [bytes(buffer) for buffer in to_buffers(arrays)]
    is_short = len(data) + sum(map(len, buffers)) <= MAX_BYTES
    return (data, buffers) if is_short else (NOTHING, [])


def remade(
    names: Sequence[str], text: str, data: msgspec.Raw, buffers: list[bytes]
) -> Exception | None:
    """Return an exception of the first of these classes that this process knows and can make.

    Args:
        names: of its class and of that class's bases, see `name_of`.
        text: its only argument, if ``data`` is that of None.
        data: its arguments and attributes, as `pack_exception` returns them.
        buffers: their arrays.
    """
    try:
        content = unpack(data, Arrays(buffers)) or ((text,), {})
        arguments, attributes = msgspec.convert(content, tuple[tuple[Any, ...], dict[str, Any]])
    except (ProtocolError, msgspec.ValidationError):
        return None
    arguments = [
        printable(each, MAX_FRAME, "\n\t") if isinstance(each, str) else each for each in arguments
    ]
    known = {name_of(kind): kind for kind in _subclasses(Exception)}
    for name in names:
        kind = known.get(name)
        if kind is None or issubclass(kind, NEVER):
            continue
        own_of_python = _own_of_python(kind)
        try:
            exception = own_of_python.__new__(kind, *arguments)
            own_of_python.__init__(exception, *arguments)
        except (TypeError, ValueError):  # Python's own wants others
            continue
        vars(exception).update(attributes)
        return exception
    return None


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in type.__subclasses__(kind):
        yield subclass
        yield from _subclasses(subclass)
