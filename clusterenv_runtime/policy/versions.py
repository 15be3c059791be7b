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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array

from ..arrays.trees import leaves
from ..errors import one_line
from ..wire.protocol import Collect, Weights
from .sync import KL_STATES, states_of_each_row

if TYPE_CHECKING:
    import torch

    from ..wire.part import RolloutPart
    from .base import Policy
    from .divergence import Sample
    from .probe import Probed

    # A message, its buffers, and the weights that the worker then holds; None in their place if the
    # head does not keep these weights.
    Update = tuple[Weights, list[Any], torch.Tensor | None]

logger = logging.getLogger(__name__)
HELD_BYTES = 2**30  # the most that the head keeps of the different weights that workers hold
MANY_CHANGES = 10  # the change of a policy's structure at which the head warns


class Published(NamedTuple):
    """What the head knows about the published policy."""

    version: int = 0
    since: int = 1  # the first version of this structure
    example: dict[str, Any] = {}  # the policy's output for one row, see `Probed.example`
    numbers: list[float] = []  # see `Policy.numbers`


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
        self.held = 0
        self.behavior = 0
        self.measured = 0
        self.divergence = math.inf
        self.recent = []
        self.weights = None


class PolicyStore:
    """The published version, and the divergence of each `PolicyCopy` from it.

    Args:
        copies: the copies of all workers.
        rounds: whether workers pull rounded differences, see `differences`.
        needs_kl: whether workers pull by divergence. If not, a policy needs no divergence.
        learners: see `ClusterEnv`; None if there is one learner.
    """

    def __init__(
        self,
        copies: Sequence[PolicyCopy],
        rounds: bool,
        needs_kl: bool = True,
        learners: Any = None,
    ) -> None:
        self._copies = copies
        self._rounds = rounds
        self._needs_kl = needs_kl
        self.learners = learners
        self._own_rows = sum(len(copy.rows) for copy in copies)
        self._num_rows = self._own_rows  # all learners' rows, once the learners have shared them
        self._spaces: tuple[Space, Space] | None = None
        self._elements = 1  # numbers in an observation
        self.version = 0  # +1 at each publish
        self.published = Published()
        self.structure = b""  # the pickled policy without its weights
        self.bytes_sent = 0  # the bytes of weights sent so far, to all workers
        self.mismatches = 0  # how often a worker did not hold the weights it was sent
        self._policy: Policy | None = None
        self._parts: dict[str, Any] = {}  # see `structure.parts_of`
        self._probed: Probed | None = None
        self._changes = 0  # changes of the structure whose changed parts can be named
        self._has_warned = False  # whether it has warned that a divergence cannot be measured
        self._weights: tuple[torch.Tensor, torch.Tensor] | None = None  # see `flat_weights`
        # The updates to the published version, by the weights that a worker holds (a tensor, by its
        # identity).
        self._updates: dict[torch.Tensor | None, Update] = {}

    def act_in(self, space: Space, action_space: Space) -> None:
        """Set the spaces of one observation and one action, in which policies will act."""
        self._spaces = space, action_space
        examples = leaves(create_empty_array(space, 1))
        self._elements = sum(getattr(leaf, "size", 1) for leaf in examples)

    def publish(self, policy: Policy, seen: Any = None) -> bool:
        """Publish the weights of ``policy`` as the next version. Measure every copy's divergence.

        Return whether ``structure`` has changed, so that the workers must get it. ``seen`` holds
        some observations from the environments, if there are any yet.

        Raises:
            TypeError: ``policy`` is not a `Policy`.
            ValueError: the policy cannot travel or act in these environments, or has no divergence
                although workers pull by it. Nothing has changed then.
        """
        # These modules import torch, which the policy has imported already.
        from .structure import check_policy
        from .tensors import flat_weights, numbers_of

        is_new = policy is not self._policy or not self.structure
        if is_new:
            check_policy(policy)
            if self._rounds:
                _warn_of_frozen(policy)
        numbers = numbers_of(policy)
        weights = flat_weights(policy)  # before anything changes, because memory may run out here
        changed = self._update_structure(policy, is_new, seen)
        self.version += 1
        since = self.version if changed else self.published.since
        self.published = Published(self.version, since, self._probed.example, numbers)
        self._weights = weights  # encoded only when the first worker pulls them
        self._updates = {}
        for copy in self._copies:
            if changed:
                copy.forget()
            copy.measured = copy.behavior
            copy.divergence = math.inf
        self._measure([copy for copy in self._copies if copy.behavior])
        return changed

    def _update_structure(self, policy: Policy, is_new: bool, seen: Any) -> bool:
        """Try the policy if anything except weights and numbers has changed.

        Return whether workers need another structure. For a new wrapper around the same module,
        they do not.
        """
        from .probe import probe
        from .structure import changed_parts, parts_of, pickled

        parts = parts_of(policy)
        changes = changed_parts(self._parts, parts)
        if self._probed is not None:
            changes -= self._probed.volatile
        if not is_new and not changes:
            return False
        structure = pickled(policy)
        probed = probe(policy, *self._spaces, seen)
        if self._needs_kl and probed.kl_fault is not None:
            text = f"the policy has no KL divergence: {probed.kl_fault}"
            raise ValueError(f"{text}; define its kl, or set sync_mode to 'always'")
        changed = structure != self.structure
        self._changes += bool(changed and self.structure and changes)
        if self._changes == MANY_CHANGES and changed:
            text = "the policy's structure changed %d times, by its %s, and workers got all weights"
            hint = "should that be one of its numbers, or a buffer? See docs/policies.md"
            names = " and ".join(sorted(changes)[:3])
            logger.warning(f"{text}: {hint}", MANY_CHANGES, names)
        self._policy = policy
        self._parts = parts
        self._probed = probed
        self.structure = structure
        return changed

    def _measure(self, copies: list[PolicyCopy]) -> None:
        """Measure how far copies that have acted have diverged from the policy.

        A divergence stays inf where measuring fails: parameters may not form a distribution, or the
        policy's own ``kl`` may fail.
        """
        from .divergence import divergence

        if not copies or self._probed.kl_fault is not None:
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
            if np.isnan(of_copy):
                self._warn(copy, "it is NaN")
            else:
                copy.divergence = float(of_copy) / self._probed.dimensions

    def _warn(self, copy: PolicyCopy, why: str) -> None:
        """Warn that a divergence could not be measured, the first time only."""
        if not self._has_warned:
            self._has_warned = True
            text = "worker %d's divergence could not be measured, so it pulls: %s"
            logger.warning(text, self._copies.index(copy), why)

    def acted(self, copy: PolicyCopy, part: RolloutPart) -> None:
        """Keep the measured states of a worker's part, with the distribution parameters there."""
        from .divergence import Sample

        if part.version < self.published.since:
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

    def pull(self, copy: PolicyCopy, version: int) -> tuple[Weights, list[Any]]:
        """Return the message and buffers that bring a worker to the published version.

        ``version`` is the version that the worker says it holds.
        """
        if version != copy.held and copy.weights is not None:
            self.mismatches += 1
            text = "worker %d does not hold the weights it was sent, and gets all weights"
            logger.warning(f"{text} (%d times so far)", self._copies.index(copy), self.mismatches)
            copy.weights = None
        if copy.weights not in self._updates:
            self._updates[copy.weights] = self._encode(copy)
        message, buffers, copy.weights = self._updates[copy.weights]
        copy.held = self.version
        copy.pulls += 1
        self.bytes_sent += sum(memoryview(buffer).nbytes for buffer in buffers)
        return message, buffers

    def _encode(self, copy: PolicyCopy) -> Update:
        """Return the update from the weights that a worker holds, see `_updates`."""
        from .differences import WHOLE, Difference, checksum
        from .tensors import rounded_sizes

        weights, others = self._weights
        _, since, _, numbers = self.published
        exact = others.cpu().numpy().data
        sizes = rounded_sizes(self._policy)
        held = None if copy.weights is None else copy.weights.to(weights.device)
        difference = Difference.between(held, weights, sizes) if self._rounds and sizes else None
        if difference is not None:
            packed = difference.pack()
            if sum(map(len, packed)) < weights.nbytes:
                after = difference.added_to(held, sizes)
                told = difference.levels, checksum(after, others), since, numbers
                message = Weights(self.version, *told)
                # Without room for these weights, the head sends all weights at the next pull.
                of_others = {each.weights for each in self._copies if each is not copy} - {None}
                held_bytes = sum(each.nbytes for each in of_others) + after.nbytes
                return message, [*packed, exact], after if held_bytes <= HELD_BYTES else None
        message = Weights(self.version, WHOLE, checksum(weights, others), since, numbers)
        return message, [weights.cpu().numpy().data, exact], None

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
        self.version = state["policy_version"]
        self.bytes_sent = state["sync_bytes"]
        self.structure = b""
        # The mean number of pulls per worker stays the same.
        pulls = round(state["pulls"] * len(self._copies) / state["workers"])
        each, rest = divmod(pulls, len(self._copies))
        for index, copy in enumerate(self._copies):
            copy.forget()
            copy.pulls = each + (index < rest)


def _warn_of_frozen(policy: Policy) -> None:
    """Warn that frozen parameters are rounded like those that learn."""
    from .tensors import is_rounded

    named = policy.named_parameters()
    frozen = [name for name, each in named if is_rounded(each) and not each.requires_grad]
    if frozen:
        text = "workers get the frozen parameter%s %s rounded, like all others: for exactness, %s"
        hint = "make it a buffer, or pull weights='float32'"
        logger.warning(text, "s" * (len(frozen) > 1), ", ".join(frozen[:3]), hint)
