"""The wire: what head and workers say to each other, and how values become frames.

A message is one msgpack header (a tagged struct, validated when decoded) followed by raw buffers. Every request has
a ``seq``; it gets exactly one `Reply` or `Error` with the same ``seq``. Towards the worker, buffers may hold pickles,
because a worker runs the head's code anyway; towards the head nothing is ever pickled: `pack` and `unpack` carry
arrays, numbers, strings, bytes, None and containers of these, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import re
from typing import Any

import msgspec
import numpy as np
import zmq
from gymnasium.spaces import GraphInstance

from .errors import ProtocolError

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 2**31  # a peer that sends more in one frame is cut off


class Message(msgspec.Struct, tag=True):
    """Base of every header; the class name travels as the tag."""


# Head to worker. Comments name the buffers that follow the header.
class Setup(Message):  # cloudpickle of EnvSlice's arguments
    seq: int
    sys_path: list[str]
    first_row: int


class Reset(Message):  # pickle of (seeds, options, reset_mask or None)
    seq: int
    partial: bool = False  # whether there is a mask


class Step(Message):  # pickle of one action per environment
    seq: int


class Lost(Message):
    """Answer a `Step` whose episodes an earlier process took along: they are cut off."""

    seq: int  # followed by a pickle of (observations before, which rows are cut off)


class Call(Message):  # pickle of (args, kwargs)
    seq: int
    name: str


class SetAttr(Message):  # pickle of one value per environment
    seq: int
    name: str


class Collect(Message):  # nothing, or the state of a torch.Generator to go on from
    """Act and step for ``num_steps``; ``divergence`` is mean KL(version ``behavior`` || ``version``), in nats."""

    seq: int
    num_steps: int
    version: int
    behavior: int  # the version that the divergence is of, which the worker may hold no longer; 0 for none
    divergence: float
    epsilon: float


class Structure(Message):  # cloudpickle of the policy without its weights, which the worker then pulls
    seq: int


class Weights(Message):  # the policy's parameters and buffers, flat
    version: int


class Ping(Message):  # no answer, and nothing to do: it is for the head to see whether it can be sent
    pass


class Close(Message):
    pass


# Worker to head.
class Hello(Message):
    protocol: int
    index: int
    host: str
    pid: int
    versions: dict[str, str]


class Reply(Message):  # the buffers of ``value`` and ``infos``
    seq: int
    value: Any
    infos: Any = None
    dropped: list[str] = []  # what of ``infos`` could not be sent
    generator: bytes = b""  # after a `Collect`: the state of the worker's random numbers


class Pull(Message):
    seq: int
    version: int  # the version the worker holds; 0 for none


class Error(Message):
    seq: int
    env: int | None
    kind: str
    message: str
    traceback: str
    fatal: bool


Requests = list[Any]  # of pairs: a message and its buffers
Request = Setup | Reset | Step | Lost | Call | SetAttr | Structure | Collect | Weights | Ping | Close
Answer = Hello | Reply | Pull | Error
_encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


@functools.cache
def shared_versions() -> dict[str, str]:
    """Versions that head and worker must share, because pickled code and tensors cross between them."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("gymnasium", "numpy", "cloudpickle", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name).split("+")[0]  # a CPU build matches a CUDA build
    return versions


def set_limits(socket: zmq.Socket[bytes], silence: float) -> None:
    """Cap what ``socket`` receives, and close a link that has been silent for so many seconds (ZMTP's PING)."""
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.heartbeat_ivl = max(int(silence * 250), 1)
    socket.heartbeat_timeout = max(int(silence * 750), 1)


_DTYPE = re.compile(r"[<>|][biufcSUmM]\d{1,9}(\[\w+\])?")  # plain data of a fixed size
_CONTAINERS = {"list": list, "tuple": tuple, "GraphInstance": lambda items: GraphInstance(*items)}


def frames(message: Message, *buffers: Any) -> list[Any]:
    """Return the frames of one message, ready for ``send_multipart``."""
    return [_encode(message), *buffers]


def pack(value: Any, buffers: list[Any], dropped: list[str] | None = None) -> Any:
    """Turn ``value`` into a tree msgpack can carry, appending the data of its arrays to ``buffers``.

    Types survive exactly (tuple or list, ``np.float32`` or ``float``), but for
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
            bits = getattr(np.random, state["bit_generator"])()
            bits.state = state
            return np.random.Generator(bits)
    except Exception as error:  # whatever a malformed tree makes NumPy raise
        raise ProtocolError(f"malformed value in a message: {error}") from None
    raise ProtocolError(f"unknown kind of value in a message: {kind!r}")
