"""Values to frames and back: what may travel to the head, where nothing is ever unpickled.

`pack` and `unpack` carry arrays, numbers, strings, bytes, None and containers of these, and nothing else.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from gymnasium.spaces import GraphInstance

from .errors import ProtocolError

_DTYPE = re.compile(r"[<>|][biufcSUmM]\d{1,9}(\[\w+\])?")  # plain data of a fixed size
_CONTAINERS = {"list": list, "tuple": tuple, "GraphInstance": lambda items: GraphInstance(*items)}


def pack(value: Any, buffers: list[Any], dropped: list[str] | None = None) -> Any:
    """Turn ``value`` into a tree msgpack can carry, appending the data of its arrays to ``buffers``.

    Types survive exactly (tuple or list, ``np.float32`` or ``float``), except for
    subclasses of containers, which arrive as their base. With ``dropped`` a dict entry that cannot be
    packed is left out and its key noted there; otherwise it raises TypeError.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else ["int", hex(value)]
    if (
        isinstance(value, np.ndarray | np.generic)
        and _DTYPE.fullmatch(value.dtype.str)
        and (value.nbytes or not value.ndim or not value.size)
    ):
        array = np.ascontiguousarray(value).reshape(-1)
        buffers.append(array.view(np.uint8).data if array.nbytes else b"")
        name = "scalar" if isinstance(value, np.generic) else "array"
        return [name, len(buffers) - 1, value.dtype.str, list(value.shape)]
    if isinstance(value, list | tuple):
        name = kind.__name__ if kind in (list, GraphInstance) else "tuple"
        return [name, [pack(item, buffers, dropped) for item in value]]
    if isinstance(value, dict):
        items = []
        for key, item in value.items():
            used = len(buffers)
            try:
                items.append([pack(key, buffers), pack(item, buffers, dropped)])
            except TypeError:
                if dropped is None:
                    raise
                del buffers[used:]
                dropped.append(f"{key} ({type(item).__name__})")
        return ["dict", items]
    if kind is np.random.Generator:
        return ["Generator", pack(value.bit_generator.state, buffers)]
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the head, only arrays, numbers, strings, bytes, "
        "None and containers of these (nothing is unpickled there)"
    )


def unpack(tree: Any, buffers: list[Any], copy: bool = True) -> Any:
    """Undo `pack`. Arrays are fresh and writable, or with ``copy=False`` read-only views of ``buffers``.

    Raises:
        ProtocolError: ``tree`` is not what `pack` makes, or does not fit ``buffers``.
    """
    if not isinstance(tree, list):
        return tree
    try:
        kind, data = tree[0], tree[1]
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]([unpack(item, buffers, copy) for item in data])
        if kind == "dict":
            return {unpack(key, buffers, copy): unpack(item, buffers, copy) for key, item in data}
        if kind == "int":
            return int(data, 16)
        if kind in ("array", "scalar"):
            if not _DTYPE.fullmatch(tree[2]) or any(type(length) is not int or length < 0 for length in tree[3]):
                raise ValueError(f"dtype {tree[2]}, shape {tree[3]}")
            dtype = np.dtype(tree[2])
            # np.str_("") has no bytes; an array of such would be as long as the sender likes
            flat = np.frombuffer(buffers[data], dtype) if dtype.itemsize or tree[3] else np.zeros((), dtype)
            array = flat.reshape(tree[3])
            return array[()] if kind == "scalar" else array.copy() if copy else array
        if kind == "Generator":
            state = unpack(data, buffers)
            if state["bit_generator"] not in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
                raise ValueError(f"bit generator {state['bit_generator']!r}")
            # NumPy reads memory at these places without a check.
            if not (0 <= state["state"].get("pos", 0) <= 624 and 0 <= state.get("buffer_pos", 0) <= 4):
                raise ValueError("the position of a bit generator")
            bits = getattr(np.random, state["bit_generator"])()
            bits.state = state
            return np.random.Generator(bits)
    except Exception as error:  # whatever a malformed tree makes NumPy raise
        raise ProtocolError(f"malformed value in a message: {error}") from None
    raise ProtocolError(f"unknown kind of value in a message: {kind!r}")
