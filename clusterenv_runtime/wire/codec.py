"""Values to frames and back: what may travel to the head, where nothing is ever unpickled.

`pack` and `Unpacker` carry arrays, numbers, strings, bytes, None and containers of these, and
nothing else. Between them a value is a tree of the structs in `packed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.spaces import GraphInstance

from ..arrays.trees import map_tree
from ..errors import ProtocolError
from .packed import DTYPE, Array, Bytes, Dict, Generator, Graph, Int, List, Packed, Scalar, Tuple

MAX_FRAME = (
    2**18
)  # bytes; what is larger travels in several frames. A stranger's handshake may be as long
SMALL = (
    2**16
)  # bytes; what is smaller shares a frame with others, as each frame costs several microseconds


def pack(value: Any, buffers: list[Any], dropped: list[str] | None = None) -> Packed:
    """Turn ``value`` into a tree msgpack can carry, appending the data of its arrays to
    ``buffers``.

    Types survive exactly (tuple or list, ``np.float32`` or ``float``), except for
    subclasses of containers, which arrive as their base. With ``dropped``, which is for infos, a
    dict entry that cannot be packed is left out and its key noted there, and what is as good as
    plain data arrives as that, see `_plain`; otherwise it raises TypeError.
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
        and re.fullmatch(DTYPE, value.dtype.str)
        and (value.nbytes or not value.ndim or not value.size)
    ):
        place = _append(np.ascontiguousarray(value).reshape(-1), buffers)
        return (Scalar if isinstance(value, np.generic) else Array)(
            *place, value.dtype.str, list(value.shape)
        )
    if isinstance(value, list | tuple):
        node = List if kind is list else Graph if kind is GraphInstance else Tuple
        return node([pack(item, buffers, dropped) for item in value])
    if isinstance(value, dict):
        items = []
        for key, item in value.items():
            used = len(buffers)
            try:
                items.append((pack(key, buffers), pack(item, buffers, dropped)))
            except TypeError:
                if dropped is None:
                    raise
                del buffers[used:]
                dropped.append(f"{_name_of(key)} ({type(item).__name__})")
        return Dict(items)
    if dropped is not None and (plain := _plain(value)) is not None:
        return pack(plain, buffers, dropped)
    if kind is np.random.Generator and type(value.bit_generator) is np.random.PCG64:
        return Generator(pack(value.bit_generator.state, buffers))
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the head, only arrays, numbers, strings, bytes, "
        "None and containers of these (nothing is unpickled there)"
    )


def _plain(value: Any) -> Any:
    """Return the number, text, dict or array that a value stands for; None if it is none of these.

    That is of an `enum.IntEnum` and the like its number or text, of a dataclass a dict of its
    fields, and of what NumPy takes for an array, such as tensors of torch and JAX, an array, or a
    scalar if it has no dimensions.
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
        buffers.extend(
            data[start : start + MAX_FRAME] for start in range(0, array.nbytes, MAX_FRAME)
        )
        return len(buffers) - -(-array.nbytes // MAX_FRAME), 0
    if (
        not buffers
        or not isinstance(buffers[-1], bytearray)
        or len(buffers[-1]) > MAX_FRAME - SMALL - 8
    ):
        buffers.append(bytearray())
    shared = buffers[-1]
    shared += bytes(-len(shared) % 8)  # so that numbers lie where the processor wants them
    offset = len(shared)
    shared += data
    return len(buffers) - 1, offset


class Unpacker:
    """Undoes `pack` for the values of one message. Each byte of it belongs to one array: it unpacks
    to no more.

    Args:
        buffers: of that message.
        copy: whether arrays are fresh and writable, or read-only views of the buffers.
    """

    def __init__(self, buffers: list[Any], copy: bool = True) -> None:
        self._buffers, self._copy, self._bytes_left = buffers, copy, sum(map(len, buffers))

    def __call__(self, tree: Packed) -> Any:
        """Return the value that was packed.

        Raises:
            ProtocolError: ``tree`` is not what `pack` makes, or does not fit the buffers.
        """
        with _refusing():
            return self._value_of(tree)

    def _value_of(self, tree: Packed) -> Any:
        match tree:
            case Array():
                array = self._array_of(tree)
                if isinstance(tree, Scalar | Bytes):
                    return array[()] if isinstance(tree, Scalar) else array.tobytes()
                return array.copy() if self._copy else array
            case List():
                items = [self._value_of(item) for item in tree.items]
                return (
                    items
                    if type(tree) is List
                    else GraphInstance(*items)
                    if type(tree) is Graph
                    else tuple(items)
                )
            case Dict():
                return {self._value_of(key): self._value_of(item) for key, item in tree.items}
            case Int():
                return int(tree.digits, 16)
            case Generator():
                return _generator(self._value_of(tree.state))
        return tree

    def tree_of(self, tree: Packed) -> Any:
        """Return the dicts and tuples that were packed, with all else in them as it is packed; see
        `__call__`.
        """
        if type(tree) is Dict:
            with _refusing():
                return {self._value_of(key): self.tree_of(item) for key, item in tree.items}
        return tuple(map(self.tree_of, tree.items)) if type(tree) is Tuple else tree

    def arrays(self, forms: dict[str, tuple[Packed, Any, tuple[int, ...]]]) -> dict[str, Any]:
        """Return trees of arrays by name, as views. Each is packed, and must be like an example.

        That is a tree of arrays, or of None, in whose order the keys come. Instead of its arrays'
        first axis there are these leading ones.

        Raises:
            ProtocolError: one is of another structure, shape or dtype.
        """
        return {name: self._tree_like(name, *form) for name, form in forms.items()}

    def _tree_like(self, name: str, packed: Packed, example: Any, leading: tuple[int, ...]) -> Any:
        if isinstance(example, np.ndarray):  # as most are
            return self._array_like(name, packed, example, leading)
        try:
            return map_tree(
                lambda one, leaf: self._array_like(name, leaf, one, leading),
                example,
                self.tree_of(packed),
            )
        except ValueError:
            raise ProtocolError(f"{name} are not of the policy's structure") from None

    def _array_like(
        self, name: str, packed: Packed, example: np.ndarray | None, leading: tuple[int, ...]
    ) -> np.ndarray | None:
        if example is None and packed is None:
            return None
        if example is None:
            raise ProtocolError(f"{name} are of a policy that has none")
        if type(packed) is not Array:
            raise ProtocolError(f"{name} must be an array, got a {type(packed).__name__}")
        shape, dtype = [*leading, *example.shape[1:]], example.dtype
        if packed.shape != shape or packed.dtype != dtype.str:
            expected, found = f"{dtype.str} {tuple(shape)}", f"{packed.dtype} {tuple(packed.shape)}"
            raise ProtocolError(f"{name} must be {expected}, got {found}")
        return self._view(packed, dtype, shape)

    def _view(self, array: Array, dtype: np.dtype, shape: list[int]) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise ProtocolError(
                "malformed value in a message: its arrays are larger than the message"
            )
        data = self._buffers[array.frame] if array.frame < len(self._buffers) else b""
        if size > MAX_FRAME and len(data) == MAX_FRAME:
            data = bytearray().join(self._buffers[array.frame : array.frame - (-size // MAX_FRAME)])
        if array.offset + size > len(data):  # NumPy's own check overflows
            raise ProtocolError("malformed value in a message: an array reaches beyond its frame")
        return np.ndarray(shape, dtype, data, array.offset)

    def _array_of(self, array: Array) -> np.ndarray:
        dtype = np.dtype(array.dtype)
        if (
            not dtype.itemsize and array.shape and math.prod(array.shape)
        ):  # it would be as long as the sender likes
            raise ValueError(f"dtype {array.dtype}, shape {array.shape}")
        return self._view(array, dtype, array.shape)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise ProtocolError for whatever a malformed tree makes Python or NumPy raise."""
    try:
        yield
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"malformed value in a message: {error}") from None


def _name_of(key: Any) -> str:
    """Return a key's beginning as a text, whatever its own code does."""
    try:
        return str(key).encode(errors="backslashreplace").decode()[:200]
    except Exception:
        return f"a {type(key).__name__}"


def _generator(state: dict[str, Any]) -> np.random.Generator:
    """Return the generator of NumPy whose bit generator, a PCG64 as Gymnasium's are, has this
    state.
    """
    bits = np.random.PCG64()
    bits.state = state  # which refuses that of another
    return np.random.Generator(bits)
