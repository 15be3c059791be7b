"""One worker, as the head knows it: all that is known of it, in one object."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..launchers import Exit
from ..policy.versions import PolicyCopy, Published
from ..wire.part import RolloutPart
from ..wire.protocol import Call, Collect, Error, Message, Pull, Reply, SetAttr
from .episodes import Episodes


class State(enum.Enum):
    """What a worker's process is doing. The order is that of its life, which begins anew with a
    replacement.
    """

    STARTING = "starting"  # it has not said hello
    BUILDING = "building"  # it has, and builds its environments
    READY = "ready"  # it answers requests
    LOST = (
        "lost"  # its process or its link is gone: the head reads its last words and finds out why
    )
    KILLED = "killed"  # it is being ended for good, so that another can take its place
    REFUSED = "refused"  # another could not be started in its place, and is tried again soon
    ENDED = "ended"  # there will be no other


CONNECTED = State.BUILDING, State.READY  # when messages can be sent to it


@dataclass
class PendingRequest:
    """A message to one worker that wants an answer."""

    seq: int
    worker: int
    message: Message
    buffers: tuple[Any, ...]
    published: Published  # when it was asked


class Served(NamedTuple):
    """An answer, and what it answers."""

    request: PendingRequest
    message: Reply | RolloutPart
    is_last: bool  # whether the process that answered has been replaced since


@dataclass
class WorkerHandle:
    """A worker: its current process, what it was told, and what outlives its processes."""

    index: int
    rows: slice  # its environments
    setup: bytes  # cloudpickle of what builds them
    episodes: Episodes  # in its environments, as the user knows them
    offset: int = 0  # of its head's environments among those of all learners

    # The current process. Times are those of the pool's clock, in seconds.
    state: State = State.STARTING
    process: int = 0  # how many have been before it
    identity: bytes | None = None  # of its connection; None until it has said hello
    host: str = ""
    pid: int = 0
    building: int | None = None  # the seq of the request that builds its environments
    built: int = 0  # environments of those, as far as it has said
    deadline: float = 0.0  # when the state must have changed
    heard: float = 0.0  # when its last message came, or else when it was started
    noticed: float = 0.0  # when the user was last told that it has not been started
    exit: Exit | None = None  # how it was lost, once that is known
    refusals: int = 0  # how often in a row it could not be started
    refusal: str = ""  # why, the last time
    ended_because: str = ""  # of a worker that has ended

    # What it was told, and what it has said.
    copy: PolicyCopy = field(default_factory=PolicyCopy)
    seeds: list[int | None] | None = None  # of its last reset; None before the first
    user_seeds: list[int | None] | None = None  # of the user's last reset of all environments
    asked_rollouts: int = 0  # since the noise was seeded
    rollouts: int = 0  # that have come of these
    asked: dict[int, Message] = field(
        default_factory=dict
    )  # what its process was sent and has not answered, by seq
    pulled: tuple[int, int] = (
        0,
        0,
    )  # the seq that its process has pulled for last, and what it said it held
    waited: float = 0.0  # seconds so far without a request to work on, or without weights
    has_been_ready: bool = False
    answers: int = 0  # of its process
    losses: int = 0  # of its processes, one after the other

    def __post_init__(self) -> None:
        self.num_envs = self.rows.stop - self.rows.start
        self.first_row = (
            self.offset + self.rows.start
        )  # the number of its first environment, for seeds and users
        self.numbers = self.copy.numbers = range(self.first_row, self.first_row + self.num_envs)

    def describe(self, log: str | None = None) -> str:
        """Return its name for the user, with where it runs and the path of its log."""
        where = f"{self.host}, pid {self.pid}" if self.host else "no hello yet"
        where += f", environments {self.first_row} to {self.first_row + self.num_envs - 1}"
        where += f", {self.ended_because}" if self.ended_because else ""
        return f"worker {self.index} ({where}{'' if log is None else f', log {log}'})"

    def fault_of(self, seq: int | None, message: Pull | Error, version: int) -> str:
        """Return why its process may not say this of a request, if it may not; ``version`` is the
        published one.

        For each request to act, in order, it may pull once, and again if what it held was of no use
        for the answer.
        """
        match message:
            case Pull(held):
                last, before = self.pulled
                pulls_again = seq == last and before > 0 == held
                may = isinstance(self.asked.get(seq), Collect) and (seq > last or pulls_again)
                return "" if may and 0 <= held < version else "it pulled for what it was not asked"
            case Error(env) if env is not None and env not in self.numbers:
                return f"it said that environment {env} raised, which is none of its own"
            case Error() if not (message.ends or isinstance(self.asked[seq], Call | SetAttr)):
                return "it said that an error of its environments ends nothing"
        return ""
