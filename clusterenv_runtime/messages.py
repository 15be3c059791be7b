"""The wire protocol: the messages between head and workers, and their sockets' options.

A message travels as a pair of ``seq``, the number of a request, and the message. The worker answers
a request with exactly one `Reply`, `Part` or `Error`, unless an earlier `Error` ended it, see
`Error.ends`. Before its response to a `Collect`, the worker may pull, at most twice. The response,
each `Pull` and its `Weights` carry the request's ``seq``. Messages that belong to no request have
the ``seq`` None. A worker unpickles what the head sends, because it runs the head's code anyway.
The head reads what workers send by `pickling.reader`. `Hello` comes before the head knows the
process, so it is JSON, and nothing is unpickled for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import zmq

from .arrays import Frames
from .errors import ProtocolError, one_line
from .pickling import MAX_FRAME, from_frames, reader, to_frames, writer
from .rollout import Part

if TYPE_CHECKING:
    from .policy.sync import SyncRule
    from .setup import Process

PROTOCOL_VERSION = 16
MAX_HELLO = 2**16  # bytes
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:!+-]{0,255}\Z")]
CURVE_BYTES = 33  # bytes that CURVE adds to a frame
PULSE_S = 0.05  # seconds, at most, between signs of life of one of few workers


# Messages from head to worker.
@dataclass
class Setup:
    """Build the environments. From now on, pull by this rule."""

    first_row: int
    seed: int  # of the global generators while environments are built
    rule: SyncRule
    process: Process  # what the worker's process takes over
    environments: bytes  # for `setup.loads`, with the next field
    arrays: Any


@dataclass
class Reset:
    """Reset all environments, or those in the mask."""

    seeds: list[int | None]
    options: bytes  # a cloudpickle
    mask: np.ndarray | None = None


@dataclass
class Step:
    actions: Any  # of the worker's rows


@dataclass
class CutOff:
    """Continue for a process that has died with its episodes, as the user has seen them.

    It comes after the `Reset` of this process. The next `Step` truncates the episode, or, if the
    user has seen its end, shows that reset.
    """

    seen: Any  # the observations that the user saw last
    ended: np.ndarray  # (num_envs,) bool, whether the user has seen the episode's end


@dataclass
class Call:
    name: str
    arguments: bytes  # a cloudpickle of args and kwargs


@dataclass
class SetAttr:
    name: str
    values: bytes  # a cloudpickle of one value for each environment


@dataclass
class Collect:
    """Act and step for ``num_steps`` steps.

    A replacement gets the same request, and draws the same noise. ``divergence`` is the mean
    KL(the worker's policy || ``version``) of all workers that are asked together, in nats per
    action dimension, so that these workers pull together.
    """

    num_steps: int
    version: int
    # the version that ``divergence`` is for, which the worker may no longer hold; 0 for none
    behavior: int
    divergence: float
    numbers: list[float]  # the policy's numbers, see `Policy.numbers`
    states: int = 1  # how many states of each row the head wants distribution parameters for
    seed: int = 0  # the seed of the run's noise
    rollout: int = 0  # the rollout's number since the noise was seeded, for `actor.noise_seed`


@dataclass
class Evaluate:
    """Play episodes with this policy, then reset the environments.

    The reply's value is the episodes' returns (float64) and lengths (int64), and whether each
    episode ended (bool), in the order of the environments, then of time.
    """

    structure: bytes  # see `tensors.pickled`
    weights: Sequence[Any]  # see `tensors.flat_weights`
    numbers: list[float]  # the policy's numbers, see `Policy.numbers`
    deterministic: bool
    episodes: list[int]  # how many episodes count, for each environment
    seed: int  # the seed of the noise; environment i is reset with this plus i
    max_steps: int  # after about so many steps an episode counts as it is
    seeds: list[int]  # one per environment, for that reset


@dataclass
class Structure:
    """Take on a policy whose weights the worker pulls later."""

    pickled: bytes


@dataclass
class Weights:
    """The weights that answer a `Pull`."""

    version: int
    levels: int  # the difference's levels, or `differences.WHOLE`
    checksum: int  # of the weights that the worker holds afterward
    since: int  # the first version of the policy's structure
    numbers: list[float]  # the policy's numbers when this version was published
    # all weights, or the buffers of `Difference.pack`; then all that is never rounded
    buffers: list[Any]


@dataclass
class Ping:
    """Shows the head whether the worker can be reached. A worker's pulse sends one, too."""


@dataclass
class Close:
    pass


# Messages from worker to head.
@dataclass
class Hello:
    """The first message of a process. Its texts are printed, so they cannot move the cursor."""

    protocol: int
    index: int
    host: Name
    pid: int
    versions: dict[Name, Name]


@dataclass
class Built:
    """One more environment is built: the worker may be slow, but it is not stuck."""


@dataclass
class Reply:
    value: Any
    dropped: list[str] = field(default_factory=list)  # infos that cannot be sent


@dataclass
class Pull:
    """The request for weights before the response to a `Collect`, whose ``seq`` it carries."""

    version: int  # that the worker holds; 0 if it holds none, or other weights than the head sent


@dataclass
class Error:
    env: int | None
    kind: str  # the name of the exception's class
    text: str
    traceback: str
    fatal: bool  # whether the worker ends
    # whether the worker leaves all requests except `Call`, `SetAttr` and `Structure` unanswered
    # until it resets all environments
    ends_episodes: bool = False
    exception: bytes | None = None  # see `pickling.pack_exception`

    @property
    def ends(self) -> bool:
        """Whether the worker's other outstanding requests get no response."""
        return self.fatal or self.ends_episodes


Message = Any  # one of the classes above
FROM_WORKER = {kind.__name__: kind for kind in (Built, Reply, Part, Pull, Error)}
PING = to_frames((None, Ping()))


def hello_frames(hello: Hello) -> list[bytes]:
    return [msgspec.json.encode(hello)]


def read_hello(frames: Sequence[Any]) -> Hello:
    """Return the `Hello` of a process that the head does not know yet.

    Raises:
        ProtocolError: the frames are no hello.
    """
    try:
        if len(frames) != 1 or len(frames[0]) > MAX_HELLO:
            raise ValueError("it is too long")
        return msgspec.json.decode(frames[0], type=Hello)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no hello: {error}") from None


def worker_frames(seq: int | None, message: Message, allowed: tuple[type, ...]) -> list[Any]:
    """Return the frames of a worker's message.

    Raises:
        TypeError: the message holds something that the head does not read, see `pickling`.
    """
    return to_frames((seq, type(message).__name__, vars(message)), writer((Frames, *allowed)))


def read_worker(frames: list[Any], allowed: tuple[type, ...]) -> tuple[int | None, Message]:
    """Return ``seq`` and the message of a worker.

    Raises:
        ProtocolError: the frames are no message of a worker.
    """
    content = from_frames(frames, reader((Frames, *allowed)))
    try:
        seq, kind, fields = msgspec.convert(content, tuple[int | None, str, Any])
        return seq, msgspec.convert(fields, FROM_WORKER[kind])
    except Exception as error:  # a worker may send anything
        raise ProtocolError(f"malformed message: {one_line(error)}") from None


@functools.cache
def shared_versions() -> dict[str, str]:
    """Return the versions that head and worker must share.

    The versions must match because pickled code and tensors pass between head and worker.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("gymnasium", "numpy", "cloudpickle", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            # a CPU build matches a CUDA build
            versions[name] = importlib.metadata.version(name).split("+")[0]
    return versions


def mismatch(hello: Hello) -> str | None:
    """Return why the sender of ``hello`` cannot be a worker of this head, or None if it can."""
    if hello.protocol != PROTOCOL_VERSION:
        return (
            f"speaks protocol {hello.protocol}, the head {PROTOCOL_VERSION}: install the same "
            "clusterenv_runtime on both"
        )
    ours, theirs = shared_versions(), hello.versions
    if differing := [name for name in ours if theirs.get(name, ours[name]) != ours[name]]:
        names = ", ".join(f"{name} {theirs[name]} (head: {ours[name]})" for name in differing)
        return f"runs {names}: install the same versions on both"
    return None


def set_limit(socket: zmq.Socket[bytes]) -> None:
    """Cut off a peer that sends more than ``MAX_FRAME`` bytes in one frame, even a stranger."""
    socket.maxmsgsize = MAX_FRAME + CURVE_BYTES  # libzmq counts the bytes on the wire


def keep_alive(socket: zmq.Socket[bytes], silence: float, pulse: float = PULSE_S) -> None:
    """Cut off a head that is silent for ``silence`` seconds, and have the head do the same.

    ZMTP's PING tells the head how long to wait. Other messages on the connection would put off the
    deadline forever, or hide a PONG behind them, so use this only for a connection that carries
    nothing else. The head waits for at most 65 seconds, because libzmq counts the milliseconds in
    16 bits there.
    """
    # at most eleven days, because libzmq counts milliseconds in 32 bits here
    milliseconds = max(int(min(silence, 10**6) * 750), 1)
    socket.heartbeat_timeout = milliseconds
    socket.heartbeat_ttl = min(max(milliseconds, 100), 65_500)
    socket.heartbeat_ivl = max(min(milliseconds // 3, int(pulse * 1000)), 1)


def pulse_of(identity: bytes) -> bytes:
    """Return the identity of a worker's second connection, its pulse, see `keep_alive`.

    ``identity`` is the identity of its first connection.
    """
    return b"p" + identity[1:]
