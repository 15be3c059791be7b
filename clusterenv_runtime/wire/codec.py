"""The encoding of values that travel to the head, which unpickles nothing.

A value is an array, a number, a string, bytes, None, a dtype, a PCG64 generator, a space, or a
container of such values. Arrays travel in the message's buffers, see `buffers`. The rest travels as
msgpack, with one extension for each type that msgpack lacks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from gymnasium import Space
from gymnasium.spaces import GraphInstance

from ..errors import ProtocolError
from .buffers import Arrays

# Only plain data of a fixed size: NumPy would take the data of an array of objects for pointers.
DTYPE = re.compile(r"[<>|][biufcSUmM][1-9]\d{0,8}(\[\w+\])?")
_encode = msgspec.msgpack.Encoder().encode


# The codes of msgpack's extensions. The data of each extension is msgpack, too: the items of a
# tuple, a frozenset or a GraphInstance of Gymnasium; the pairs of a dict; the hexadecimal text of
# an integer of more than 64 bits; the length of bytes; the dtype and shape of a NumPy array or
# scalar; the state of a generator; the text of a dtype; or, for a space of Gymnasium, the names of
# its class and of that class's bases, and its attributes.
TUPLE, GRAPH, DICT, INT, BYTES, ARRAY, SCALAR, GENERATOR, SET, DTYPE_OF, SPACE = range(11)


def pack(value: Any, arrays: list[np.ndarray], dropped: list[str] | None = None) -> msgspec.Raw:
    """Return ``value`` as msgpack, and append its arrays to ``arrays``.

    Types survive exactly (tuple or list, ``np.float32`` or ``float``), except that subclasses of
    containers arrive as their base class.

    Args:
        value: the value to send.
        arrays: the message's arrays, for `to_buffers`.
        dropped: for infos, a list. Entries of dicts that cannot be sent are left out, and their
            keys are appended to the list. Values that stand for plain data arrive as that data, see
            `_plain`.

    Raises:
        TypeError: a part of the value cannot be sent, and is not left out.
    """
    return msgspec.Raw(_encode(_node(value, arrays, dropped)))


def _node(value: Any, arrays: list[np.ndarray], dropped: list[str] | None) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if kind is bytes:
        arrays.append(np.frombuffer(value, np.uint8))
        return _extension(BYTES, len(value))
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeError("a text with lone surrogates cannot be sent to the head") from None
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else _extension(INT, hex(value))
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if DTYPE.fullmatch(array.dtype.str):
            arrays.append(array)
            code = SCALAR if isinstance(value, np.generic) else ARRAY
            return _extension(code, (array.dtype.str, array.shape))
    if isinstance(value, list | tuple):
        items = [_node(item, arrays, dropped) for item in value]
        if isinstance(value, list):
            return items
        return _extension(GRAPH if kind is GraphInstance else TUPLE, items)
    if isinstance(value, dict):
        return _extension(DICT, _pairs(value, arrays, dropped))
    if dropped is not None and (plain := _plain(value)) is not None:
        return _node(plain, arrays, dropped)
    if kind is np.random.Generator and type(value.bit_generator) is np.random.PCG64:
        return _extension(GENERATOR, _node(value.bit_generator.state, arrays, None))
    if kind is frozenset:
        return _extension(SET, [_node(item, arrays, dropped) for item in value])
    if isinstance(value, np.dtype):
        return _extension(DTYPE_OF, value.str)
    if isinstance(value, Space):
        # The generator is not sent, nor are attributes of a user's class that cannot be sent.
        attributes = {**vars(value), "_np_random": None}
        names = [name_of(base) for base in kind.__mro__]
        return _extension(SPACE, (names, _node(attributes, arrays, [])))
    raise TypeError(
        f"a {name_of(kind)} cannot be sent to the head, only arrays, numbers, strings, bytes, "
        "None, spaces and containers of these (nothing is unpickled there)"
    )


def name_of(kind: type) -> str:
    """Return the qualified name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def known_classes(base: type) -> dict[str, type]:
    """Return the subclasses of ``base`` in this process, by `name_of`.

    Of sibling classes with the same name, the class that was created first is returned.
    """
    known: dict[str, type] = {}
    for kind in _subclasses(base):
        known.setdefault(name_of(kind), kind)
    return known


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in type.__subclasses__(kind):
        yield subclass
        yield from _subclasses(subclass)


def _extension(code: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encode(content))


def _pairs(value: dict[Any, Any], arrays: list[np.ndarray], dropped: list[str] | None) -> list[Any]:
    pairs = []
    for key, item in value.items():
        number = len(arrays)
        try:
            pairs.append((_node(key, arrays, None), _node(item, arrays, dropped)))
        except TypeError:
            if dropped is None:
                raise
            del arrays[number:]
            dropped.append(f"{_name_of(key)} ({type(item).__name__})")
    return pairs


def _plain(value: Any) -> Any:
    """Return the number, text, dict or array that a value stands for; None if it stands for none.

    A member of an `enum.IntEnum`, or an instance of another subclass of int, float or str, stands
    for its number or text. A dataclass instance stands for a dict of its fields. An object that
    NumPy can convert to an array, for example a tensor of torch or JAX, stands for this array, or
    for a scalar if it has no dimensions.
    """
    for base, convert in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(value, base):
            return convert(value)
    try:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if hasattr(type(value), "__array__") and not isinstance(value, np.ndarray | np.generic):
            return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)[()]
    except Exception:  # the value's own code may raise anything; the value is then left out
        pass
    return None


def _name_of(key: Any) -> str:
    """Return the beginning of a key's text, even if the key's own code raises."""
    try:
        return str(key).encode(errors="backslashreplace").decode()[:200]
    except Exception:
        return f"a {type(key).__name__}"


def unpack(data: msgspec.Raw, arrays: Arrays) -> Any:
    """Return the value that `pack` encoded as ``data``. Its arrays are copies.

    Raises:
        ProtocolError: ``data`` does not come from `pack`, or does not match ``arrays``.
    """

    def take(dtype: str, shape: list[int]) -> np.ndarray:
        if DTYPE.fullmatch(dtype) is None or min(shape, default=0) < 0:
            raise ValueError(f"an array of dtype {dtype}, shape {shape}")
        return arrays.take("an array", np.dtype(dtype), tuple(shape))

    makers: dict[int, Callable[[Any], Any]] = {
        TUPLE: tuple,
        GRAPH: lambda items: GraphInstance(*items),
        DICT: dict,
        INT: lambda text: int(text, 16),
        BYTES: lambda size: take("|u1", [size]).tobytes(),
        ARRAY: lambda form: take(*form).copy(),
        SCALAR: lambda form: take(*form)[()],
        GENERATOR: _generator,
        SET: frozenset,
        DTYPE_OF: np.dtype,
        SPACE: lambda content: _space(*content),
    }
    decoder = msgspec.msgpack.Decoder(ext_hook=lambda code, data: makers[code](decode(data)))
    decode = decoder.decode
    try:
        return decode(data)
    except ProtocolError:
        raise
    except Exception as error:  # from Python, NumPy or msgspec: a worker may send anything
        raise ProtocolError(f"malformed value in a message: {error}") from None


def _generator(state: dict[str, Any]) -> np.random.Generator:
    bits = np.random.PCG64()  # the kind that Gymnasium's generators have
    bits.state = state  # NumPy refuses the state of another kind of bit generator
    return np.random.Generator(bits)


def _space(names: list[str], attributes: dict[str, Any]) -> Space:
    """Return a space of the first class in ``names`` that this process knows."""
    known = known_classes(Space)
    kind = next(known[name] for name in names if name in known)
    space = object.__new__(kind)  # calls none of the class's own code
    vars(space).update(attributes)
    return space
