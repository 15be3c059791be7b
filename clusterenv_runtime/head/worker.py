"""One worker as the head knows it: its present process, and what outlives its processes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space

from ..arrays.trees import merge_rows
from ..envs.large import LargeArray
from ..launchers import Exit
from ..policy.versions import PolicyCopy
from ..wire.protocol import Collect, CutOff, Message, Step


class State(enum.Enum):
    """The states of a process, in the order of its life."""

    STARTING = "starting"  # it has not said hello
    BUILDING = "building"  # it has said hello, and builds its environments
    READY = "ready"  # it answers requests
    # Its process or its link is gone. The head reads its last messages and finds out the reason.
    LOST = "lost"
    KILLED = "killed"  # it is being killed, so that another can take its place
    REFUSED = "refused"  # the system refused to start it, and the head will try again
    ENDED = "ended"  # no other process will take its place


ALIVE = State.STARTING, State.BUILDING, State.READY
CONNECTED = State.BUILDING, State.READY  # messages can be sent to it


class Process:
    """One life of a worker. Each start makes a new one, so nothing of an earlier life remains.

    Times are of the head's clock, in seconds.
    """

    def __init__(self, now: float = 0.0, startup_timeout: float = 0.0) -> None:
        self.state = State.STARTING
        self.deadline = now + startup_timeout  # when the state must have changed
        self.heard = now  # when its last message came, or else when it was started
        self.noticed = now  # when the user was last told that it has yet to be started
        self.refusals = 0  # how often the system refused to start it
        self.refusal = ""  # the system's last reason

        self.identity: bytes | None = None  # of its connection; None before its hello
        self.host = ""
        self.pid = 0
        self.building: int | None = None  # the seq of the request to build its environments

        self.asked: dict[int, Message] = {}  # by seq: requests sent to it that it has not answered
        self.pulled = 0, 0  # the seq of its last pull, and the version it said it held

        self.is_refused = False  # it broke the protocol, and nothing more of it counts
        self.exit: Exit | None = None  # how it was lost, once that is known
        self.ended_because = ""  # the reason, if no other process will take its place

    def is_heard(self, identity: bytes) -> bool:
        """Say whether a message of this connection counts: another's is of an earlier process."""
        return identity == self.identity and self.state != State.ENDED and not self.is_refused

    def may_pull(self, seq: int | None, held: int, published: int) -> bool:
        """Say whether it may pull before it answers ``seq``, if it holds version ``held``.

        It may pull once for each request to act, in order. It may pull again if the weights that it
        held were of no use.
        """
        last, before = self.pulled
        pulls_again = seq == last and before > 0 == held
        may = isinstance(self.asked.get(seq), Collect) and (seq > last or pulls_again)
        return may and 0 <= held < published


@dataclass
class Episodes:
    """A worker's episodes as the user has seen them, and the end of those that a process took along
    when it died. Masks are ``(num_envs,)`` bool.
    """

    seen: Any  # the user's last observations; None before the first reset
    ended: np.ndarray  # environments whose end the user has seen, but not what follows
    # Environments whose episode is lost, which the user does not know; None if there are none.
    cut: np.ndarray | None = None

    @classmethod
    def begun(cls, seen: Any, num_envs: int) -> Episodes:
        """Return episodes none of which has ended."""
        return cls(seen, np.zeros(num_envs, bool))

    def reset(self) -> None:
        """Note that the user resets all environments."""
        self.ended = np.zeros_like(self.ended)
        self.cut = None

    def lost(self) -> None:
        """Note that the worker's process has died with its episodes."""
        if self.seen is not None:
            self.cut = ~self.ended

    def step(self, actions: Any) -> tuple[Message, bytes]:
        """Return the request to step the environments, or to say that their episodes are lost."""
        if self.cut is not None:
            # Also episodes that a reset by a mask has begun since: their steps would be lost.
            return CutOff(), cloudpickle.dumps((self.seen, ~self.ended))
        return Step(), cloudpickle.dumps(actions)

    def saw_reset(self, space: Space, observations: Any, mask: np.ndarray) -> Any:
        """Note a reset of the environments of ``mask``; return the user's observations after it."""
        self.ended = self.ended & ~mask
        if self.cut is not None:
            self.cut = self.cut & ~mask
            # Other lost episodes go on for the user until the next step ends them.
            observations = merge_rows(space, ~self.cut, observations, self.seen)
            self.cut = self.cut if self.cut.any() else None
        self.seen = observations
        return observations


@dataclass
class Worker:
    """A worker: what outlives its processes, and the present one."""

    index: int
    rows: slice  # its environments
    setup: bytes  # cloudpickle of what builds them
    arrays: list[LargeArray]  # of that
    offset: int = 0  # of its head's environments among those of all learners

    process: Process = field(default_factory=Process)
    copy: PolicyCopy = field(default_factory=PolicyCopy)
    seeds: list[int | None] | None = None  # of its last reset; None before the first
    asked_rollouts: int = 0  # rollouts asked for since the noise was seeded
    rollouts: int = 0  # how many of them have come
    steps: int = 0  # environment steps of rollouts that have come
    # The seq of an evaluation after which its environments wait for a reset; 0 for none.
    evaluated: int = 0
    waited: float = 0.0  # seconds so far without a request to work on, or without weights
    has_been_ready: bool = False
    losses: int = 0  # processes lost in a row

    def __post_init__(self) -> None:
        # Its environments' numbers, for seeds and for the user.
        self.numbers = range(self.offset + self.rows.start, self.offset + self.rows.stop)
        self.num_envs = len(self.numbers)
        self.copy.rows = self.numbers
        self.episodes = Episodes.begun(None, self.num_envs)  # as far as the user knows them

    def describe(self, log: str | None = None) -> str:
        """Return its name for the user, with where it runs and the path of its log."""
        process = self.process
        parts = [
            f"{process.host}, pid {process.pid}" if process.host else "no hello yet",
            f"environments {self.numbers[0]} to {self.numbers[-1]}",
            process.ended_because,
            "" if log is None else f"log {log}",
        ]
        return f"worker {self.index} ({', '.join(filter(None, parts))})"
