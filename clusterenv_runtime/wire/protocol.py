"""The wire: what head and workers say to each other.

A message is one msgpack header followed by raw buffers. The header is a pair: ``seq``, and one of
the structs below, validated when decoded. ``seq`` numbers a request, and comes back with its
answer: exactly one `Reply`, `Part` or `Error`, after two `Pull`s at most. What is neither has the
``seq`` None. Towards the worker, buffers may hold pickles, because a worker runs the head's code
anyway; towards the head, values are what `codec.pack` makes.
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

PROTOCOL_VERSION = 14
MAX_DROPPED = 100
MAX_REQUEST_FRAME = 2**31  # bytes, such as of weights; the head's own limit is `buffers.MAX_FRAME`
CURVE_BYTES = 33  # that CURVE adds to a frame
PULSE_S = 0.05  # how often a worker shows that it is there

Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]  # of an axis
NumberType = Annotated[str, msgspec.Meta(pattern=r"^[<>|][biuf]\d{1,2}$")]  # the dtype of numbers


class Message(msgspec.Struct, tag=True):
    """Base of what a header holds; the class name travels as the tag."""

    def __str__(self) -> str:
        return f"a {type(self).__name__}"


# Head to worker. Comments name the buffers that follow the header.
# cloudpickle of what `Blueprint.setup` describes; pickles of a `sync.SyncRule` and a `Likeness`;
# the large arrays of the first, or what `large.open_shared` takes
class Setup(Message):
    """Build the environments. From now on pull by this rule."""

    first_row: int
    seed: int = 0  # of the global generators, while environments are built
    shares_memory: bool = False  # whether the large arrays are in a file on this machine


class Reset(Message):  # pickle of (seeds, options, reset_mask or None)
    partial: bool = False  # whether there is a mask


class Step(Message):  # pickle of one action per environment
    pass


class CutOff(Message):  # pickle of (observations before, which rows are cut off)
    """Answer as to a `Step` that ends the episodes which an earlier process took along."""


class Call(Message):  # pickle of (args, kwargs)
    name: str


class SetAttr(Message):  # pickle of one value per environment
    name: str


class Collect(Message):
    """Act and step for ``num_steps``. A replacement is asked the same, and draws the same noise.

    ``divergence`` is mean KL(version ``behavior`` || ``version``), in nats per action dimension.
    """

    num_steps: int
    version: int
    # the version that the divergence is of, which the worker may hold no longer; 0 for none
    behavior: int
    divergence: float
    numbers: list[float]  # the policy's, see `Policy.numbers`
    states: int = 1  # of each row, whose distribution parameters are wanted
    seed: int = 0  # of the run's noise
    rollout: int = 0  # the number of this rollout since the seed was given, for `actor.noise_seed`


class Evaluate(Message):
    """Play episodes by a policy, in environments that are then reset before they act again.

    The buffers are a cloudpickle of the policy without its weights, and its weights, whole. The
    value of the reply is the returns, the lengths, and which episodes have ended, by environment,
    then time: float64, int64 and bool.
    """

    episodes: list[int]  # of each environment, how many count
    seed: int  # environment i is reset with this plus i; of the noise
    deterministic: bool
    max_steps: int  # of an episode
    numbers: list[float]  # the policy's, see `Policy.numbers`
    seeds: list[int]  # of the reset that follows


# cloudpickle of the policy without its weights, which the worker then pulls
class Structure(Message):
    pass


# all, flat; or what `differences.Difference.pack` makes, and what is never rounded
class Weights(Message):
    """Answers a `Pull`."""

    version: int
    levels: int  # of the difference, or `differences.WHOLE`
    checksum: int  # of what the worker then holds


class Ping(Message):  # nothing to do: it is for the head to see whether it can be sent
    """A worker's pulse sends one, too: `transport` knows it by its bytes."""


class Close(Message):
    pass


# Worker to head.
class Hello(Message):  # its text is printed, so it may move no cursor
    protocol: int
    index: int
    host: Annotated[str, msgspec.Meta(pattern=r"^[\w.:-]{0,255}\Z")]
    pid: int
    versions: dict[str, Annotated[str, msgspec.Meta(pattern=r"^[\w.!+-]{0,100}\Z")]]


class Built(Message):
    """Another environment is built, and others are to come: slow is not stuck."""


class Reply(Message):  # the arrays of ``value``, then those of ``infos``
    value: msgspec.Raw  # as `codec.pack` makes it
    infos: msgspec.Raw = msgspec.Raw(b"\xc0")  # of None
    # the infos that could not be sent
    dropped: Annotated[list[str], msgspec.Meta(max_length=MAX_DROPPED)] = []


class Part(Message):  # the arrays of the part in the order of its fields, of its infos, its frames
    """Answers a `Collect` with a `part.RolloutPart`: what the head cannot know of it."""

    version: int
    layout: dict[str, str]  # of each field dtypes and shapes beside its axes, for the head to check
    ends: Size
    episodes: Size
    frames: list[Size]  # how many each stack of frames has
    # of each info how many steps had it, and the dtype and shape of a value
    infos: dict[str, tuple[Size, NumberType, list[Size]]]
    # seconds without a request to work on, or without weights, since the part before
    waited: Annotated[float, msgspec.Meta(ge=0, lt=2**53)]


class Pull(Message):
    """Asks for weights before a `Collect`, whose ``seq`` it has, is answered."""

    # the version the worker holds; 0 for none, or if its weights are not those that the head sent
    version: int


class Error(Message):
    env: int | None
    kind: str  # the name of the exception's class
    message: str
    traceback: str
    fatal: bool  # whether the worker ends
    # whether it leaves what it is asked unanswered, but for a `Call`, until it resets all
    ends_episodes: bool = False
    bases: list[str] = []  # the names of the class's bases
    content: msgspec.Raw = msgspec.Raw(b"\x80")  # what `pack_exception` returns
    arrays: list[bytes] = []
    is_whole: bool = False

    @property
    def ends(self) -> bool:
        """Whether there will be no answer to what else was asked."""
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
encode = msgspec.msgpack.Encoder().encode  # of (seq, message)
decode_from_head = msgspec.msgpack.Decoder(tuple[int | None, FromHead]).decode
decode_from_worker = msgspec.msgpack.Decoder(tuple[int | None, FromWorker]).decode


def frames(seq: int | None, message: Message, *buffers: Any) -> list[Any]:
    """Return the frames of one message, ready for ``send_multipart``.

    Raises:
        ValueError: all but its arrays is too long.
    """
    if len(header := encode((seq, message))) > MAX_FRAME:
        text = f"a message of {len(header)} bytes beside its arrays, {MAX_FRAME} at most"
        raise ValueError(f"{text}: put what is long into arrays")
    return [header, *buffers]


@functools.cache
def shared_versions() -> dict[str, str]:
    """Versions that head and worker must share, because pickled code and tensors cross between
    them.
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
    """Cut off a peer that sends more bytes than this in one frame. This holds for a stranger's
    handshake, too.
    """
    socket.maxmsgsize = max_frame + CURVE_BYTES  # libzmq counts what travels


def keep_alive(socket: zmq.Socket[bytes], silence: float) -> None:
    """Cut off a head that has been silent for so many seconds, and tell it to do so with this
    worker, by ZMTP's PING.

    What else is received puts off the end of a silence for ever, or hides a PONG behind it, so this
    is for a connection that carries nothing else. The head waits for 65 seconds at most: libzmq
    counts milliseconds in 16 bits there.
    """
    # eleven days at most: here it has 32 bits
    milliseconds = max(int(min(silence, 10**6) * 750), 1)
    socket.heartbeat_timeout = milliseconds
    socket.heartbeat_ttl = min(max(milliseconds, 100), 65_500)
    socket.heartbeat_ivl = max(min(milliseconds // 3, int(PULSE_S * 1000)), 1)


def pulse_of(identity: bytes) -> bytes:
    """Return the identity of a worker's second connection, see `keep_alive`, from that of its
    first.
    """
    return b"p" + identity[1:]
