"""The head's side of Adaptive Policy Synchronization: the published version, and how far each
worker's copy has diverged.

A version is a publication. Two workers that have pulled the same version may hold different
weights, because each moved toward it from the weights that it held: see `PolicyCopy.weights`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array

from ..arrays import leaves
from ..errors import one_line
from ..messages import Collect, Weights
from .sync import KL_STATES, states_of_each_row

if TYPE_CHECKING:
    import torch

    from ..rollout import Part
    from .base import Policy
    from .tensors import Sample

    # A message, and the weights that the worker then holds; None in their place if the head does
    # not keep these weights.
    Update = tuple[Weights, torch.Tensor | None]

logger = logging.getLogger(__name__)
HELD_BYTES = 2**30  # the most that the head keeps of the different weights that workers hold
MANY_CHANGES = 10  # the change of a policy's structure at which the head warns


@dataclass(eq=False)
class PolicyCopy:
    """What the head knows about one worker's copy of the policy."""

    rows: range = range(1)  # the numbers of the worker's environments
    held: int = 0  # the version last sent; 0 if none of this structure was sent
    behavior: int = 0  # the version that acted in the worker's last part; 0 if unknown
    measured: int = 0  # the version that `divergence` is of; 0 for none
    # From the published version, in nats per action dimension; inf until it is measured.
    divergence: float = math.inf
    pulls: int = 0  # the number of pulls so far
    recent: list[Sample] = field(default_factory=list)  # the last states under `behavior`, by part
    weights: torch.Tensor | None = None  # (weights,) float32; None if not known to the last bit

    def forget(self) -> None:
        """Forget all but ``pulls``, because another process or structure takes the copy's place."""
        vars(self).update(vars(PolicyCopy(self.rows, pulls=self.pulls)))


class PolicyStore:
    """The published version, and the divergence of each `PolicyCopy` from it.

    Args:
        copies: the copies of all workers.
        rounds: whether workers pull rounded differences, see `differences`.
        learners: see `ClusterEnv`; None if there is one learner.
    """

    def __init__(self, copies: Sequence[PolicyCopy], rounds: bool, learners: Any = None) -> None:
        self._copies = copies
        self._rounds = rounds
        self.learners = learners
        self._own_rows = sum(len(copy.rows) for copy in copies)
        self._num_rows = self._own_rows  # all learners' rows, once the learners have shared them
        self._elements = 1  # numbers in an observation
        self._dimensions = 1  # of an action
        self.version = 0  # +1 at each publish
        self.since = 1  # the first version of the structure
        self.structure = b""  # see `tensors.pickled`
        self._brief: tuple[bytes, list[Any]] | None = None  # the structure, for comparison
        self.bytes_sent = 0  # the bytes of weights sent so far, to all workers
        self.mismatches = 0  # how often a worker did not hold the weights it was sent
        self._policy: Policy | None = None
        self._changes = 0  # changes of the same policy's structure
        self._has_warned = False  # whether it has warned that a divergence cannot be measured
        self.weights: tuple[torch.Tensor, torch.Tensor] | None = None  # see `flat_weights`
        self._numbers: list[float] = []  # the policy's numbers when it was published
        # The updates to the published version, by the weights that a worker holds (a tensor, by its
        # identity).
        self._updates: dict[torch.Tensor | None, Update] = {}

    def act_in(self, space: Space, action_space: Space) -> None:
        """Set the spaces of one observation and one action, in which policies will act."""
        self._elements, self._dimensions = (
            max(sum(getattr(leaf, "size", 1) for leaf in leaves(create_empty_array(each, 1))), 1)
            for each in (space, action_space)
        )

    def publish(self, policy: Policy) -> bool:
        """Publish the weights of ``policy`` as the next version. Measure every copy's divergence.

        Return whether ``structure`` has changed, so that the workers must get it.

        Raises:
            TypeError: ``policy`` is not a `Policy`.
            ValueError: the policy cannot travel. Nothing has changed then.
        """
        # This module imports torch, which the policy has imported already.
        from .tensors import check_policy, flat_weights, numbers_of, pickled

        is_known = policy is self._policy and self._brief is not None
        if not is_known:
            check_policy(policy)
        numbers = numbers_of(policy)
        brief = pickled(policy, code := []), code
        is_same = is_known and brief == self._brief
        structure = self.structure if is_same else pickled(policy)
        weights = flat_weights(policy)  # before anything changes, because memory may run out here
        changed = structure != self.structure
        if changed and is_known:
            self._changes += 1
            if self._changes == MANY_CHANGES:
                logger.warning(
                    "the policy's structure changed %d times, and workers got all weights each "
                    "time: should an attribute be one of its numbers, or a buffer? See "
                    "docs/policies.md",
                    MANY_CHANGES,
                )
        self.version += 1
        if changed:
            self.since = self.version
        self._policy, self._numbers = policy, numbers
        self.structure, self._brief = structure, brief
        self.weights = weights  # encoded only when the first worker pulls them
        self._updates = {}
        for copy in self._copies:
            if changed:
                copy.forget()
            copy.measured = copy.behavior
            copy.divergence = math.inf
        self._measure([copy for copy in self._copies if copy.behavior])
        return changed

    def _measure(self, copies: list[PolicyCopy]) -> None:
        """Measure how far copies that have acted have diverged from the policy.

        A divergence stays inf where measuring fails: parameters may not form a distribution, or the
        policy's own ``kl`` may fail.
        """
        from .tensors import divergence

        if not copies:
            return
        try:
            nats = divergence(self._policy, [copy.recent for copy in copies])
        except Exception as error:
            if len(copies) == 1:
                self._warn(copies[0], one_line(error))
                return
            for copy in copies:  # one by one, which also works for sequences of different lengths
                self._measure([copy])
            return
        for copy, of_copy in zip(copies, nats, strict=True):
            if not of_copy > -1e-3:  # NaN, or no divergence
                self._warn(copy, f"it is {of_copy}")
            else:
                copy.divergence = float(of_copy) / self._dimensions

    def _warn(self, copy: PolicyCopy, why: str) -> None:
        """Warn that a divergence could not be measured, the first time only."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "worker %d's divergence could not be measured, so it pulls: %s",
                self._copies.index(copy),
                why,
            )

    def acted(self, copy: PolicyCopy, part: Part) -> None:
        """Keep the measured states of a worker's part, with the distribution parameters there."""
        from .tensors import Sample

        if part.version < self.since:
            return  # the part is of another structure
        if part.version != copy.behavior or part.states is not None:
            copy.recent = []  # states of the same version accumulate, except for sequences
        copy.recent.append(Sample.of(part, copy.rows))
        copy.behavior = part.version
        most = len(copy.rows) * states_of_each_row(KL_STATES, self._num_rows, self._elements)
        while sum(each.starts.size for each in copy.recent) > most and len(copy.recent) > 1:
            del copy.recent[0]

    def requests(self, copies: Sequence[PolicyCopy], num_steps: int) -> list[Collect]:
        """Return the requests that ask these workers to act on the published version or their own.

        All requests carry the same number, so that the workers pull together: the mean divergence
        over the environments of the workers that have acted, or inf if none has. With several
        learners, the mean is over the environments of all learners, so each learner must call this
        method equally often.
        """
        from .tensors import numbers_of

        known = [copy for copy in copies if copy.measured]
        total = sum(copy.divergence * len(copy.rows) for copy in known)
        number = sum(len(copy.rows) for copy in known)
        if self.learners is not None:
            sums = self.learners.sum(np.array([total, number, self._own_rows], np.float64))
            total, number, self._num_rows = sums[0], sums[1], int(sums[2])
        mean = float(total / number) if number else math.inf
        numbers = numbers_of(self._policy)
        states = states_of_each_row(int(num_steps), self._num_rows, self._elements)
        return [
            Collect(int(num_steps), self.version, copy.measured, mean, numbers, states)
            for copy in copies
        ]

    def pull(self, copy: PolicyCopy, version: int) -> Weights:
        """Return the message that brings a worker to the published version.

        ``version`` is the version that the worker says it holds.
        """
        if version != copy.held and copy.weights is not None:
            self.mismatches += 1
            logger.warning(
                "worker %d does not hold the weights it was sent, and gets all weights "
                "(%d times so far)",
                self._copies.index(copy),
                self.mismatches,
            )
            copy.weights = None
        if copy.weights not in self._updates:
            self._updates[copy.weights] = self._encode(copy)
        message, copy.weights = self._updates[copy.weights]
        copy.held = self.version
        copy.pulls += 1
        self.bytes_sent += sum(memoryview(buffer).nbytes for buffer in message.buffers)
        return message

    def _encode(self, copy: PolicyCopy) -> Update:
        """Return the update from the weights that a worker holds, see `_updates`."""
        from .differences import WHOLE, Difference, checksum
        from .tensors import rounded_sizes

        weights, others = self.weights
        sizes = rounded_sizes(self._policy)
        held = None if copy.weights is None else copy.weights.to(weights.device)
        difference = Difference.between(held, weights, sizes) if self._rounds and sizes else None
        packed = [np.frombuffer(each, np.uint8) for each in difference.pack()] if difference else []
        levels, after, kept = WHOLE, weights, None
        if difference and sum(map(len, packed)) < weights.nbytes:
            levels, after = difference.levels, difference.added_to(held, sizes)
            # Without room for these weights, the head sends all weights at the next pull.
            of_others = {each.weights for each in self._copies if each is not copy} - {None}
            if sum(each.nbytes for each in of_others) + after.nbytes <= HELD_BYTES:
                kept = after
        buffers = [weights.cpu().numpy()] if levels == WHOLE else packed
        buffers.append(others.cpu().numpy())
        check = checksum(after, others)
        return Weights(self.version, levels, check, self.since, self._numbers, buffers), kept

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy_version": self.version,
            "sync_bytes": self.bytes_sent,
            "workers": len(self._copies),
            "pulls": sum(copy.pulls for copy in self._copies),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved version, which no worker holds.

        The policy comes with the next `publish`.
        """
        # The mean number of pulls per worker stays the same.
        pulls = round(state["pulls"] * len(self._copies) / state["workers"])
        self.version, self.bytes_sent = state["policy_version"], state["sync_bytes"]
        self.structure, self._brief = b"", None
        each, rest = divmod(pulls, len(self._copies))
        for index, copy in enumerate(self._copies):
            copy.forget()
            copy.pulls = each + (index < rest)
