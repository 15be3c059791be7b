"""A worker as the head sees it: its current process, and the state that outlives its processes."""

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
from ..policy.versions import PolicyCopy, Published
from ..wire.protocol import Collect, CutOff, Message, Step


class State(enum.Enum):
    """The states of a process: STARTING, BUILDING and READY follow one another.

    A process that is lost is LOST, then KILLED. NOT_STARTED is a replacement that the system has
    failed to start. ENDED is final.
    """

    STARTING = "starting"  # it has not said hello yet
    BUILDING = "building"  # it has said hello, and builds its environments
    READY = "ready"  # it answers requests
    # The process or its link is gone. The head reads the last messages and finds out the reason.
    LOST = "lost"
    KILLED = "killed"  # it is being killed, so that a replacement can take its place
    NOT_STARTED = "not started"  # the system could not start it, and the head will try again
    ENDED = "ended"  # no replacement will take its place


ALIVE = State.STARTING, State.BUILDING, State.READY
CONNECTED = State.BUILDING, State.READY  # messages can be sent to it


class Process:
    """One process of a worker. Each start makes a new object, so no earlier state remains.

    Times are in seconds of the head's clock.
    """

    def __init__(self, now: float = 0.0, startup_timeout: float = 0.0) -> None:
        self.state = State.STARTING
        self.deadline = now + startup_timeout  # the time by which the state must have changed
        self.heard = now  # when its last message came; at first, when it was started
        self.noticed = now  # when the user was last told that it has not been started yet
        self.failed_starts = 0  # how often the system could not start it
        self.start_error = ""  # the system's last reason

        self.identity: bytes | None = None  # the connection's ZeroMQ identity; None before `Hello`
        self.host = ""
        self.pid = 0
        self.building: int | None = None  # the seq of the request to build its environments

        self.asked: dict[int, Message] = {}  # requests sent to it and not answered yet, by seq
        self.pulled = 0, 0  # the seq of its last pull, and the version that it claimed to hold
        self.policy: Published | None = None  # the policy whose weights it was last sent

        self.is_refused = False  # it broke the protocol, so its messages no longer count
        self.exit: Exit | None = None  # how it was lost; None until the head knows
        self.ended_because = ""  # why no replacement will take its place; empty if one may

    def is_heard(self, identity: bytes) -> bool:
        """Return whether a connection's messages count. Others belong to earlier processes."""
        return identity == self.identity and self.state != State.ENDED and not self.is_refused

    def may_pull(self, seq: int | None, held: int, published: int) -> bool:
        """Return whether the process may pull for request ``seq`` while it holds version ``held``.

        It may pull once for each request to act, in order. It may pull a second time if the weights
        that it held turned out to be unusable.
        """
        last, before = self.pulled
        pulls_again = seq == last and before > 0 == held
        may = isinstance(self.asked.get(seq), Collect) and (seq > last or pulls_again)
        return may and 0 <= held < published


@dataclass
class Episodes:
    """A worker's episodes as the user has seen them, and which of them a dead process took along.

    Masks are ``(num_envs,)`` bool.
    """

    seen: Any  # the last observations that the user saw; None before the first reset
    ended: np.ndarray  # whether the user has seen an episode's end, but not the reset after it
    # Environments whose episode is lost, but goes on for the user; None if there are none.
    cut: np.ndarray | None = None

    @classmethod
    def begun(cls, seen: Any, num_envs: int) -> Episodes:
        """Return episodes of which none has ended."""
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
        """Return the request to step the environments, or to report that episodes are lost."""
        if self.cut is not None:
            # Also cut off episodes that a masked reset has begun since: their steps would be lost.
            return CutOff(), cloudpickle.dumps((self.seen, ~self.ended))
        return Step(), cloudpickle.dumps(actions)

    def saw_reset(self, space: Space, observations: Any, mask: np.ndarray) -> Any:
        """Note a reset of the environments in ``mask``. Return the observations for the user."""
        self.ended = self.ended & ~mask
        if self.cut is not None:
            self.cut = self.cut & ~mask
            # For the user, other lost episodes go on until the next step ends them.
            observations = merge_rows(space, ~self.cut, observations, self.seen)
            self.cut = self.cut if self.cut.any() else None
        self.seen = observations
        return observations


@dataclass
class Worker:
    """A worker: its current process, and the state that outlives its processes."""

    index: int
    rows: slice  # the environments' rows
    setup: bytes  # the cloudpickle that builds the environments
    arrays: list[LargeArray]  # the large arrays of `setup`
    offset: int = 0  # the head's first environment among those of all learners

    process: Process = field(default_factory=Process)
    copy: PolicyCopy = field(default_factory=PolicyCopy)
    seeds: list[int | None] | None = None  # the last reset's seeds; None before the first
    asked_rollouts: int = 0  # rollouts requested since the noise was seeded
    rollouts: int = 0  # how many of these rollouts have come
    steps: int = 0  # environment steps in all rollouts that have come
    # The seq of the evaluation after which the environments need a reset; 0 if they need none.
    evaluated: int = 0
    waited: float = 0.0  # seconds so far spent waiting for a request or for weights
    has_been_ready: bool = False
    losses: int = 0  # processes lost in a row, without a step in between

    def __post_init__(self) -> None:
        # The environments' numbers, for seeds and for the user.
        self.numbers = range(self.offset + self.rows.start, self.offset + self.rows.stop)
        self.num_envs = len(self.numbers)
        self.copy.rows = self.numbers
        self.episodes = Episodes.begun(None, self.num_envs)  # as the user has seen them

    def describe(self, log: str | None = None) -> str:
        """Return the worker's name for the user, with its host, environments and log's path."""
        process = self.process
        parts = [
            f"{process.host}, pid {process.pid}" if process.host else "no hello yet",
            f"environments {self.numbers[0]} to {self.numbers[-1]}",
            process.ended_because,
            "" if log is None else f"log {log}",
        ]
        return f"worker {self.index} ({', '.join(filter(None, parts))})"
