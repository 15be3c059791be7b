"""The head's side of Adaptive Policy Synchronization: the published version, and how far each copy has diverged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
from gymnasium import Space

from .protocol import Collect
from .spaces import map_space
from .sync import KL_STATES, sampled_states

if TYPE_CHECKING:
    from .policy import Policy
    from .rollout import RolloutPart

ALL_KL_STATES = 8192  # of all workers together, unless that leaves each with fewer than 16


@dataclass
class PolicyCopy:
    """What the head knows of one worker's copy of the policy."""

    held: int = 0  # the version last sent; 0 for none of this structure
    behavior: int = 0  # the version it acted on when last heard of; 0 for unknown
    measured: int = 0  # the version whose divergence is known; 0 for none
    divergence: float = math.inf  # nats, from the published version; inf until the worker has acted
    pulls: int = 0  # so far
    # (observations, distribution parameters) of what it has seen lately under `behavior`, oldest first
    recent: list[tuple[Any, np.ndarray]] = field(default_factory=list)

    def forget(self) -> None:
        """Another process, or another structure, comes in its place."""
        self.held = self.behavior = self.measured = 0
        self.divergence = math.inf


class PolicyStore:
    """The published version, and the measure of each `PolicyCopy` against it."""

    def __init__(self, copies: Sequence[PolicyCopy], space: Space) -> None:
        self._copies, self._space = copies, space
        self._most = min(KL_STATES, max(ALL_KL_STATES // len(copies), 16))
        self.version = 0  # +1 at each publish
        self.structure, self._since = b"", 0  # cloudpickle of the policy without its weights, its first version
        self.bytes_sent = 0  # cumulative weight bytes, all workers
        self._policy: Policy | None = None

    def publish(self, policy: Policy) -> bool:
        """Make the current weights of ``policy`` the next version and measure every copy's divergence from them.

        Return whether ``structure`` has changed, so that the workers must be told.
        """
        self.version += 1
        old = self.structure
        if policy is not self._policy:
            self._policy, self.structure = policy, cloudpickle.dumps(policy.structure())
        changed = self.structure != old  # a new wrapper around the same module is not a new structure
        if changed:
            self._since = self.version
            for copy in self._copies:
                copy.forget()
        # A copy on the learner's device; it becomes bytes only when the first worker pulls this version.
        self._flat, self._bytes = policy.flat_weights(), None
        known = [copy for copy in self._copies if copy.behavior]
        recent = zip(*(self._join(copy.recent) for copy in known), strict=True)
        divergence = policy.divergence(*recent) if known else []
        for copy in self._copies:
            copy.measured, copy.divergence = copy.behavior, math.inf
        for copy, nats in zip(known, divergence, strict=True):
            copy.divergence = float(nats)
        return changed

    def _join(self, recent: list[tuple[Any, np.ndarray]]) -> tuple[Any, np.ndarray]:
        def join(*leaves: np.ndarray) -> np.ndarray:
            return np.concatenate(leaves)[-self._most :]

        seen, params = zip(*recent, strict=True)
        return map_space(join, self._space, *seen), join(*params)

    def acted(self, copy: PolicyCopy, part: RolloutPart) -> None:
        """Keep some of what a worker saw in its part of a rollout, and its policy's distribution parameters there."""
        if part.version < self._since:
            return  # another structure
        chosen = sampled_states(len(part.params), self._most)
        states = sampled_states(part.rewards.size)[chosen]

        def choose(leaf: np.ndarray) -> np.ndarray:
            return leaf.reshape(-1, *leaf.shape[2:])[states]  # a copy: the user may write to what this is a view of

        if part.version != copy.behavior:  # else the same policy: more of the same
            copy.recent.clear()
        copy.recent.append((map_space(choose, self._space, part.observations), part.params[chosen]))
        while sum(len(params) for _, params in copy.recent[1:]) >= self._most:
            del copy.recent[0]
        copy.behavior = part.version

    @property
    def epsilon(self) -> float:
        """The policy's, where it has one, now."""
        return float(getattr(self._policy, "epsilon", 0.0))

    def mean_divergence(self, copies: Iterable[PolicyCopy]) -> float:
        """Return the mean divergence, in nats, of those that have acted; inf if none has."""
        known = [copy.divergence for copy in copies if copy.measured]
        return float(np.mean(known)) if known else math.inf

    def request(self, copy: PolicyCopy, num_steps: int, divergence: float) -> Collect:
        """Return what asks a worker to act on the published version, or on its own."""
        return Collect(int(num_steps), self.version, copy.measured, divergence, self.epsilon)

    def pull(self, copy: PolicyCopy) -> tuple[int, memoryview]:
        """Return the published version and its weights, for a worker that has asked for them."""
        if self._bytes is None:
            self._bytes = self._flat.cpu().numpy().data
        copy.pulls += 1
        copy.held = self.version
        self.bytes_sent += self._bytes.nbytes
        return self.version, self._bytes

    def state_dict(self) -> dict[str, Any]:
        pulls = [copy.pulls for copy in self._copies]
        return {"policy_version": self.version, "pulls": pulls, "sync_bytes": self.bytes_sent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this version, which no worker holds; the policy is that of the next `publish`."""
        self.version, self.bytes_sent = state["policy_version"], state["sync_bytes"]
        self._policy, self.structure = None, b""
        for copy, pulls in zip(self._copies, state["pulls"], strict=True):
            copy.forget()
            copy.recent.clear()
            copy.pulls = pulls
