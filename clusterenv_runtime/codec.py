"""Values to frames and back: what may travel to the head, where nothing is ever unpickled.

`pack` and `Unpacker` carry arrays, numbers, strings, bytes, None and containers of these, and nothing else. Between
them a value is a tree of the structs below, which msgspec checks when it decodes a header. There is no map in it: with
keys that are made to collide, a map would keep busy whoever decodes it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Annotated, Any

import msgspec
import numpy as np
from gymnasium.spaces import GraphInstance

from .errors import ProtocolError

MAX_FRAME = 2**18  # bytes; what is larger travels in several frames. A stranger's handshake may be as long
SMALL = 2**16  # bytes; what is smaller shares a frame with others, as each frame costs several microseconds
MAX_KEYS = 1000  # of a dict that are not text. A sender can make them collide: then n take as long as n * n
MAX_COLLISIONS = 10 * MAX_KEYS**2  # in all of a message
MAX_DIMENSIONS = 64  # of an array, as NumPy has it
_DTYPE = r"[<>|][biufcSUmM]\d{1,9}(\[\w+\])?"  # plain data of a fixed size
_Index = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class _Node(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=lambda name: name.lower()):
    """Base of what a packed value is made of; on the wire a list that begins with the name."""


class Array(_Node):
    """Where the data of an array is, and what it means."""

    frame: _Index
    offset: _Index  # in bytes
    dtype: Annotated[str, msgspec.Meta(pattern=f"^{_DTYPE}$")]  # of an object, NumPy would take the data for pointers
    shape: Annotated[list[_Index], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class Scalar(Array):
    """A scalar of NumPy."""


class Bytes(Array):
    """Bytes, as an array of them."""


class List(_Node):
    """A list."""

    items: list[Packed]


class Tuple(List):
    """A tuple."""


class Graph(List):
    """A GraphInstance of Gymnasium."""


class Dict(_Node):
    """A dict, as pairs of key and value."""

    items: list[tuple[Packed, Packed]]


class Int(_Node):
    """An integer of more than 64 bits."""

    digits: Annotated[str, msgspec.Meta(pattern="^-?0x[0-9a-f]+$")]


class Generator(_Node):
    """A generator of NumPy."""

    state: Packed


Packed = None | bool | int | float | str | Array | Scalar | List | Tuple | Graph | Dict | Int | Bytes | Generator


def pack(value: Any, buffers: list[Any], dropped: list[str] | None = None) -> Packed:
    """Turn ``value`` into a tree msgpack can carry, appending the data of its arrays to ``buffers``.

    Types survive exactly (tuple or list, ``np.float32`` or ``float``), except for
    subclasses of containers, which arrive as their base. With ``dropped``, which is for infos, a dict entry that
    cannot be packed is left out and its key noted there, and what is as good as plain data arrives as that, see
    `_plain`; otherwise it raises TypeError.
    """
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeError("a text with lone surrogates cannot be sent to the head") from None
        return value
    if kind is bytes:
        data = np.frombuffer(value, np.uint8)
        return Bytes(*_append(data, buffers), "|u1", [len(value)])
    if kind is int:
        return value if -(2**63) <= value < 2**63 else Int(hex(value))
    if (
        isinstance(value, np.ndarray | np.generic)
        and re.fullmatch(_DTYPE, value.dtype.str)
        and (value.nbytes or not value.ndim or not value.size)
    ):
        place = _append(np.ascontiguousarray(value).reshape(-1), buffers)
        return (Scalar if isinstance(value, np.generic) else Array)(*place, value.dtype.str, list(value.shape))
    if isinstance(value, list | tuple):
        node = List if kind is list else Graph if kind is GraphInstance else Tuple
        return node([pack(item, buffers, dropped) for item in value])
    if isinstance(value, dict):
        items, others = [], 0
        for key, item in value.items():
            used = len(buffers)
            try:
                others += type(key) not in (str, bytes)
                _check_key(key, others)
                items.append((pack(key, buffers), pack(item, buffers, dropped)))
            except TypeError:
                if dropped is None:
                    raise
                del buffers[used:]
                dropped.append(f"{_name_of(key)} ({type(item).__name__})")
        return Dict(items)
    if dropped is not None and (plain := _plain(value)) is not None:
        return pack(plain, buffers, dropped)
    if kind is np.random.Generator:
        return Generator(pack(value.bit_generator.state, buffers))
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the head, only arrays, numbers, strings, bytes, "
        "None and containers of these (nothing is unpickled there)"
    )


def _plain(value: Any) -> Any:
    """Return the number, text, dict or array that a value stands for; None if it is none of these.

    That is of an `enum.IntEnum` and the like its number or text, of a dataclass a dict of its fields, and of what
    NumPy takes for an array, such as tensors of torch and JAX, an array, or a scalar if it has no dimensions.
    """
    for base, convert in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(value, base):
            return convert(value)
    try:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if hasattr(type(value), "__array__") and not isinstance(value, np.ndarray | np.generic):
            return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)[()]
    except Exception:  # whatever its own code raises: it stays where it is
        pass
    return None


def _append(array: np.ndarray, buffers: list[Any]) -> tuple[int, int]:
    """Append the data of a flat array, and return in which buffer they are, and from which byte on."""
    data = array.view(np.uint8).data if array.nbytes else b""
    if array.nbytes >= SMALL:
        buffers.extend(data[start : start + MAX_FRAME] for start in range(0, array.nbytes, MAX_FRAME))
        return len(buffers) - -(-array.nbytes // MAX_FRAME), 0
    if not buffers or not isinstance(buffers[-1], bytearray) or len(buffers[-1]) > MAX_FRAME - SMALL - 8:
        buffers.append(bytearray())
    shared = buffers[-1]
    shared += bytes(-len(shared) % 8)  # so that numbers lie where the processor wants them
    offset = len(shared)
    shared += data
    return len(buffers) - 1, offset


class Unpacker:
    """Undoes `pack` for the values of one message. Each byte of it belongs to one array: it unpacks to no more.

    Args:
        buffers: of that message.
        copy: whether arrays are fresh and writable, or read-only views of the buffers.
    """

    def __init__(self, buffers: list[Any], copy: bool = True) -> None:
        self._buffers, self._copy, self._bytes_left = buffers, copy, sum(map(len, buffers))
        self._collisions = 0  # that there may have been so far

    def __call__(self, tree: Packed) -> Any:
        """Return the value that was packed.

        Raises:
            ProtocolError: ``tree`` is not what `pack` makes, or does not fit the buffers.
        """
        try:
            return self._value_of(tree)
        except Exception as error:  # whatever a malformed tree makes NumPy raise
            raise ProtocolError(f"malformed value in a message: {error}") from None

    def _value_of(self, tree: Packed) -> Any:
        match tree:
            case Array():
                array = self._array_of(tree)
                if isinstance(tree, Scalar | Bytes):
                    return array[()] if isinstance(tree, Scalar) else array.tobytes()
                return array.copy() if self._copy else array
            case List():
                items = [self._value_of(item) for item in tree.items]
                return items if type(tree) is List else GraphInstance(*items) if type(tree) is Graph else tuple(items)
            case Dict():
                keys = [self._value_of(key) for key, _ in tree.items]
                others = 0
                for key in keys:
                    others += type(key) not in (str, bytes)
                    _check_key(key, others)
                self._collisions += others**2
                if self._collisions > MAX_COLLISIONS:
                    raise ValueError("too many keys that are not text")
                return {key: self._value_of(item) for key, (_, item) in zip(keys, tree.items, strict=True)}
            case Int():
                return int(tree.digits, 16)
            case Generator():
                return _generator(self._value_of(tree.state))
        return tree

    def _array_of(self, array: Array) -> np.ndarray:
        size = math.prod(array.shape) * np.dtype(array.dtype).itemsize
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise ValueError("its arrays are larger than the message")
        if not size and array.shape and math.prod(array.shape):  # it would be as long as the sender likes
            raise ValueError(f"dtype {array.dtype}, shape {array.shape}")
        data = self._buffers[array.frame]
        if size > MAX_FRAME and len(data) == MAX_FRAME:
            data = bytearray().join(self._buffers[array.frame : array.frame - (-size // MAX_FRAME)])
        if array.offset + size > len(data):  # NumPy's own check overflows
            raise ValueError("an array reaches beyond its frame")
        return np.ndarray(array.shape, array.dtype, data, array.offset)


def _check_key(key: Any, others: int) -> None:
    """Raise TypeError if this cannot be a dict's key; ``others`` are the keys so far that are not text."""
    if others > MAX_KEYS:
        raise TypeError(f"more than {MAX_KEYS} keys that are not text cannot be sent to the head")
    # To hash a container takes as long as it is, each time.
    if isinstance(key, tuple) and (len(key) > MAX_DIMENSIONS or any(isinstance(part, tuple) for part in key)):
        raise TypeError("a long or nested tuple cannot be sent to the head as a key")


def _name_of(key: Any) -> str:
    """Return a key's beginning as a text, whatever its own code does."""
    try:
        return str(key).encode(errors="backslashreplace").decode()[:200]
    except Exception:
        return f"a {type(key).__name__}"


def _generator(state: dict[str, Any]) -> np.random.Generator:
    if state["bit_generator"] not in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
        raise ValueError(f"bit generator {state['bit_generator']!r}")
    # NumPy reads memory at these places without a check.
    if not (0 <= state["state"].get("pos", 0) <= 624 and 0 <= state.get("buffer_pos", 0) <= 4):
        raise ValueError("the position of a bit generator")
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)
