"""The wire protocol: the messages between head and workers.

A message is one msgpack header, followed by raw buffers. The header is a pair: ``seq``, and one of
the structs below, which is validated when it is decoded. ``seq`` is the number of a request. The
worker answers a request with exactly one `Reply`, `Part` or `Error`, unless an earlier `Error`
ended it, see `Error.ends`. Before its response to a `Collect`, the worker may pull, at most twice.
The response, each `Pull` and its `Weights` carry the request's ``seq``. Messages that belong to no
request have the ``seq`` None. Buffers to a worker may hold pickles, because a worker runs the
head's code anyway. Buffers to the head hold the data of arrays, and no pickles.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
from typing import Annotated, Any

import msgspec
import zmq

from ..errors import printable
from .buffers import MAX_FRAME

PROTOCOL_VERSION = 15
MAX_DROPPED = 100
MAX_REQUEST_FRAME = 2**31  # bytes, for example of weights; frames to the head: `buffers.MAX_FRAME`
CURVE_BYTES = 33  # bytes that CURVE adds to a frame
PULSE_S = 0.05  # seconds, at most, between a worker's signs of life

Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]  # the length of an axis
NumberType = Annotated[str, msgspec.Meta(pattern=r"^[<>|][biuf]\d{1,2}$")]  # a dtype of numbers


class Message(msgspec.Struct, tag=True):
    """Base class of the messages. A header carries the class name as a tag."""

    def __str__(self) -> str:
        return f"a {type(self).__name__}"


# Messages from head to worker. The comments name the buffers that follow the header.


# the cloudpickle of `Blueprint.setup`; pickles of a `sync.SyncRule` and a `Likeness`; the large
# arrays of the cloudpickle, or the argument of `large.open_shared`
class Setup(Message):
    """Build the environments. From now on, pull by the `sync.SyncRule` in the buffers."""

    first_row: int
    seed: int = 0  # seeds the global generators while environments are built
    shares_memory: bool = False  # whether the large arrays are in a file on this machine


class Reset(Message):  # pickle of (seeds, options, reset_mask or None)
    partial: bool = False  # whether there is a reset mask


class Step(Message):  # pickle of one action per environment
    pass


class CutOff(Message):  # pickle of (last observations, mask of the rows to cut off)
    """Respond as to a `Step` that truncates the episodes that were lost with an earlier process."""


class Call(Message):  # pickle of (args, kwargs)
    name: str


class SetAttr(Message):  # pickle of one value per environment
    name: str


class Collect(Message):
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


class Evaluate(Message):
    """Play episodes with a policy. The next `Collect` then resets the environments first.

    The buffers are a cloudpickle of the policy without its weights, and its weights, unrounded. The
    reply's value is the episodes' returns (float64) and lengths (int64), and whether each episode
    ended (bool), in the order of the environments, then of time.
    """

    episodes: list[int]  # how many episodes count, for each environment
    seed: int  # the seed of the noise; environment i is reset with this plus i
    deterministic: bool
    max_steps: int  # the most steps of an episode
    numbers: list[float]  # the policy's numbers, see `Policy.numbers`
    seeds: list[int]  # one per environment, for the reset before training continues


# cloudpickle of the policy without its weights, which the worker pulls later
class Structure(Message):
    pass


# all weights, flat, or the buffers of `differences.Difference.pack`; then all that is never rounded
class Weights(Message):
    """The weights that answer a `Pull`."""

    version: int
    levels: int  # the difference's levels, or `differences.WHOLE`
    checksum: int  # of the weights that the worker holds afterward
    since: int  # the first version of the policy's structure
    numbers: list[float]  # the policy's numbers when this version was published


class Ping(Message):  # needs no action: it shows the head whether the worker can be reached
    """A worker's pulse also sends one, which `transport` recognizes by its bytes."""


class Close(Message):
    pass


# Messages from worker to head.
class Hello(Message):  # its texts are printed, so they must not move the cursor
    protocol: int
    index: int
    host: Annotated[str, msgspec.Meta(pattern=r"^[\w.:-]{0,255}\Z")]
    pid: int
    versions: dict[str, Annotated[str, msgspec.Meta(pattern=r"^[\w.!+-]{0,100}\Z")]]


class Built(Message):
    """One more environment is built: the worker may be slow, but it is not stuck."""


class Reply(Message):  # the arrays of ``value``, then the arrays of ``infos``
    value: msgspec.Raw  # encoded by `codec.pack`
    infos: msgspec.Raw = msgspec.Raw(b"\xc0")  # None, in msgpack
    # the keys of infos, or of metadata, that could not be sent
    dropped: Annotated[list[str], msgspec.Meta(max_length=MAX_DROPPED)] = []


class Part(Message):  # the arrays of the part's fields in order, of its infos, and its frames
    """The response to a `Collect`: what the head cannot know in advance of a `part.RolloutPart`."""

    version: int
    layout: dict[str, str]  # by field, dtypes, and shapes without its axes, for the head to check
    ends: Size
    episodes: Size
    frames: list[Size]  # how many frames each stacked observation has
    # for each info: how many steps had it, and the dtype and shape of a value
    infos: dict[str, tuple[Size, NumberType, list[Size]]]
    # seconds spent waiting for a request or for weights since the previous part
    waited: Annotated[float, msgspec.Meta(ge=0, lt=2**53)]


class Pull(Message):
    """The request for weights before the response to a `Collect`, whose ``seq`` it carries."""

    # the version that the worker holds; 0 if it holds none, or other weights than the head sent
    version: int


class Error(Message):
    env: int | None
    kind: str  # the name of the exception's class
    message: str
    traceback: str
    fatal: bool  # whether the worker ends
    # whether the worker leaves all requests except `Call`, `SetAttr` and `Structure` unanswered
    # until it resets all environments
    ends_episodes: bool = False
    bases: list[str] = []  # the names of the class's bases
    content: msgspec.Raw = msgspec.Raw(b"\x80")  # from `pack_exception`, like the next two
    arrays: list[bytes] = []
    is_whole: bool = False

    @property
    def ends(self) -> bool:
        """Whether the worker's other outstanding requests get no response."""
        return self.fatal or self.ends_episodes

    def __str__(self) -> str:
        return printable(self.message)


FromHead = (
    Setup
    | Reset
    | Step
    | CutOff
    | Call
    | SetAttr
    | Structure
    | Collect
    | Evaluate
    | Weights
    | Ping
    | Close
)
FromWorker = Hello | Built | Reply | Part | Pull | Error
encode = msgspec.msgpack.Encoder().encode  # takes a pair (seq, message)
decode_from_head = msgspec.msgpack.Decoder(tuple[int | None, FromHead]).decode
decode_from_worker = msgspec.msgpack.Decoder(tuple[int | None, FromWorker]).decode


def frames(seq: int | None, message: Message, *buffers: Any) -> list[Any]:
    """Return the frames of one message, ready for ``send_multipart``.

    Raises:
        ValueError: the header is longer than ``MAX_FRAME``.
    """
    if len(header := encode((seq, message))) > MAX_FRAME:
        text = f"a message of {len(header)} bytes besides its arrays, {MAX_FRAME} at most"
        raise ValueError(f"{text}: put long values into arrays")
    return [header, *buffers]


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
        both = f"speaks protocol {hello.protocol}, the head {PROTOCOL_VERSION}"
        return f"{both}: install the same clusterenv_runtime on both"
    ours, theirs = shared_versions(), hello.versions
    if differing := [name for name in ours if theirs.get(name, ours[name]) != ours[name]]:
        names = ", ".join(f"{name} {theirs[name]} (head: {ours[name]})" for name in differing)
        return f"runs {names}: install the same versions on both"
    return None


def set_limits(socket: zmq.Socket[bytes], max_frame: int) -> None:
    """Cut off a peer that sends more than ``max_frame`` bytes in one frame.

    The limit also holds for a stranger's handshake.
    """
    socket.maxmsgsize = max_frame + CURVE_BYTES  # libzmq counts the bytes on the wire


def keep_alive(socket: zmq.Socket[bytes], silence: float) -> None:
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
    socket.heartbeat_ivl = max(min(milliseconds // 3, int(PULSE_S * 1000)), 1)


def pulse_of(identity: bytes) -> bytes:
    """Return the identity of a worker's second connection, its pulse, see `keep_alive`.

    ``identity`` is the identity of its first connection.
    """
    return b"p" + identity[1:]
