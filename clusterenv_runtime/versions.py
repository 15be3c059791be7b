"""The head's side of Adaptive Policy Synchronization: the published version, and how far each copy has diverged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
from gymnasium import Space

from .protocol import Collect
from .spaces import flatten_steps, join, take
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
    # Observations, and distribution parameters there, of what it has seen lately under `behavior`, oldest first.
    recent: tuple[Any, np.ndarray] | None = None

    def forget(self) -> None:
        """Another process, or another structure, comes in its place."""
        self.held = self.behavior = self.measured = 0
        self.divergence, self.recent = math.inf, None


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
        divergence = policy.divergence(*zip(*(copy.recent for copy in known), strict=True)) if known else []
        for copy in self._copies:
            copy.measured, copy.divergence = copy.behavior, math.inf
        for copy, nats in zip(known, divergence, strict=True):
            copy.divergence = float(nats)
        return changed

    def acted(self, copy: PolicyCopy, part: RolloutPart) -> None:
        """Keep some of what a worker saw in its part of a rollout, and its policy's distribution parameters there."""
        if part.version < self._since:
            return  # another structure
        chosen = sampled_states(len(part.params), self._most)
        # Copies: the user may write to what these are views of.
        seen, params = flatten_steps(self._space, part.observations), part.params[chosen]
        seen = take(self._space, seen, sampled_states(part.rewards.size)[chosen])
        if part.version == copy.behavior:  # the same policy: more of the same
            last, before = slice(-self._most, None), copy.recent
            seen = take(self._space, join(self._space, (before[0], seen)), last)
            params = np.concatenate((before[1], params))[last]
        copy.behavior, copy.recent = part.version, (seen, params)

    def requests(self, copies: Sequence[PolicyCopy], num_steps: int) -> list[Collect]:
        """Return what asks each of these workers to act on the published version, or on its own.

        All are told the mean divergence of those that have acted, or inf if none has: so they pull together.
        """
        known = [copy.divergence for copy in copies if copy.measured]
        mean = float(np.mean(known)) if known else math.inf
        epsilon = float(getattr(self._policy, "epsilon", 0.0))  # the policy's current one, if any
        return [Collect(int(num_steps), self.version, copy.measured, mean, epsilon) for copy in copies]

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
            copy.pulls = pulls
