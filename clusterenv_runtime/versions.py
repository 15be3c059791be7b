"""The head's side of Adaptive Policy Synchronization: the published version, and how far each copy has diverged."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np
from gymnasium import Space

from .answers import Published
from .protocol import Collect, Weights
from .spaces import flatten_steps, join, one_of, take
from .sync import KL_STATES, sampled_states

if TYPE_CHECKING:
    import torch

    from .policy import Policy
    from .rollout import RolloutPart

logger = logging.getLogger(__name__)
ALL_KL_STATES = 8192  # of all workers together, unless that leaves each with fewer than 16
HELD_BYTES = 2**30  # of all the different weights that workers hold


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
    # The weights it holds, ``(weights,)`` float32, one tensor for all that hold the same; None if not known to the bit.
    weights: torch.Tensor | None = None

    def forget(self) -> None:
        """Another process, or another structure, comes in its place."""
        self.held = self.behavior = self.measured = 0
        self.divergence, self.recent, self.weights = math.inf, None, None


class Answer(NamedTuple):
    """What a worker that pulls is sent, and what it then holds."""

    message: Weights
    buffers: list[Any]
    before: torch.Tensor | None  # what it held, kept so that no other has its id
    after: torch.Tensor | None  # None if the head does not keep it


class PolicyStore:
    """The published version, and the measure of each `PolicyCopy` against it.

    Args:
        copies: all of them.
        space: the single observation space.
        rounds: whether what workers pull is a rounded difference, see `differences`.
    """

    def __init__(self, copies: Sequence[PolicyCopy], space: Space, rounds: bool) -> None:
        self._copies, self._space, self._rounds = copies, space, rounds
        self._most = min(KL_STATES, max(ALL_KL_STATES // len(copies), 16))
        self.version, self.published = 0, Published()  # +1 at each publish, and what is known of it
        self.structure = b""  # cloudpickle of the policy without its weights
        self.bytes_sent = 0  # cumulative weight bytes, all workers
        self.mismatches = 0  # how often a worker did not hold what it had been sent
        self._policy: Policy | None = None
        self._layout: list[Any] = []  # of the policy, see `Policy.layout`

    def publish(self, policy: Policy) -> bool:
        """Make the current weights of ``policy`` the next version and measure every copy's divergence from them.

        Return whether ``structure`` has changed, so that the workers must be told. Whatever the policy raises for an
        observation is raised here.
        """
        flat, layout = policy.flat_weights(), policy.layout()
        structure, facts = self.structure, self.published[2:]
        if policy is not self._policy or layout != self._layout or not structure:
            structure = cloudpickle.dumps(policy.structure())
            params = policy.params_at(one_of(self._space))  # raises if it does not fit, before anything has changed
            actions = policy.action_at(params).numpy()
            kinds = "iu" if actions.dtype.kind in "iu" else actions.dtype.kind
            facts = tuple(params.shape[1:]), actions.shape[1:], kinds
        changed = structure != self.structure  # a new wrapper around the same module is not a new structure
        self._policy, self._layout, self.structure = policy, layout, structure
        self.version += 1
        self.published = Published(self.version, self.version if changed else self.published.since, *facts)
        if changed:
            for copy in self._copies:
                copy.forget()
        # A copy on the learner's device; it becomes bytes only when the first worker pulls this version.
        self._flat, self._answers = flat, dict[int, Answer]()
        known = [copy for copy in self._copies if copy.behavior]
        for copy in self._copies:
            copy.measured, copy.divergence = copy.behavior, math.inf
        self._measure(known)
        return changed

    def _measure(self, copies: list[PolicyCopy]) -> None:
        """Measure how far copies that have acted are from the policy; where that is no number, it stays inf."""
        if not copies:
            return
        try:
            divergence = self._policy.divergence(*zip(*(copy.recent for copy in copies), strict=True))
        except (ValueError, IndexError):  # their parameters are no distribution's, or their states no policy's
            for copy in copies if len(copies) > 1 else []:
                self._measure([copy])
        else:
            for copy, nats in zip(copies, divergence, strict=True):
                copy.divergence = float(nats)

    def acted(self, copy: PolicyCopy, part: RolloutPart) -> None:
        """Keep some of what a worker saw in its part of a rollout, and its policy's distribution parameters there."""
        if part.version < self.published.since:
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

    def pull(self, copy: PolicyCopy, version: int) -> tuple[Weights, list[Any]]:
        """Return the published version and its weights, for a worker that asks and says that it holds ``version``."""
        if version != copy.held and copy.weights is not None:
            self.mismatches += 1
            logger.warning("a worker does not hold the weights it was sent (%d. time): it gets all", self.mismatches)
            copy.weights = None
        if (answer := self._answers.get(id(copy.weights))) is None:
            answer = self._encode(copy)
        copy.pulls += 1
        copy.held, copy.weights = self.version, answer.after
        self.bytes_sent += sum(memoryview(buffer).nbytes for buffer in answer.buffers)
        return answer.message, answer.buffers

    def _has_room_for(self, weights: torch.Tensor, copy: PolicyCopy) -> bool:
        """Say whether this copy's next weights may be kept; else its next pull is of all weights again."""
        others = (other.weights for other in self._copies if other is not copy and other.weights is not None)
        different = {id(other): other.nbytes for other in others}
        return sum(different.values()) + weights.nbytes <= HELD_BYTES

    def _encode(self, copy: PolicyCopy) -> Answer:
        """Make what takes a worker from what it holds to the published version: once for all that hold the same."""
        from .differences import WHOLE, Difference, checksum  # brings torch, as the policy has by now

        sizes = self._policy.rounded_sizes
        weights, others = self._policy.split_weights(self._flat)
        held = None if copy.weights is None else copy.weights.to(weights.device)
        others = others.cpu().numpy().data
        difference = Difference.between(held, weights, sizes) if self._rounds and sizes else None
        packed = [] if difference is None else [*difference.pack(), others]
        if packed and sum(map(len, packed)) < len(self._flat):
            after = difference.added_to(held, sizes)
            message = Weights(self.version, difference.levels, checksum(after, others))
            kept = after if self._has_room_for(after, copy) else None
            answer = Answer(message, packed, copy.weights, kept)
        else:
            message = Weights(self.version, WHOLE, checksum(weights, others))
            answer = Answer(message, [self._flat.cpu().numpy().data], copy.weights, None)
        self._answers[id(copy.weights)] = answer
        return answer

    def state_dict(self) -> dict[str, Any]:
        pulls = [copy.pulls for copy in self._copies]
        return {"policy_version": self.version, "pulls": pulls, "sync_bytes": self.bytes_sent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this version, which no worker holds; the policy is that of the next `publish`."""
        self.version, self.bytes_sent = state["policy_version"], state["sync_bytes"]
        self.structure = b""
        for copy, pulls in zip(self._copies, state["pulls"], strict=True):
            copy.forget()
            copy.pulls = pulls
