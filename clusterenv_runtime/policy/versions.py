"""The head's side of Adaptive Policy Synchronization: the published version, and how far each copy
has diverged.
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

logger = logging.getLogger(__name__)
HELD_BYTES = 2**30  # of all the different weights that workers hold
MANY_CHANGES = 10  # of the policy's structure


class Published(NamedTuple):
    """What is known of a published policy."""

    version: int = 0
    since: int = 1  # the first version of its structure
    example: dict[str, Any] = {}  # what it gives at one state, see `probe`


@dataclass(eq=False)
class PolicyCopy:
    """What the head knows of one worker's copy of the policy."""

    rows: range = range(1)  # the numbers of the worker's environments
    held: int = 0  # the version last sent; 0 for none of this structure
    behavior: int = 0  # the version it acted on when last heard of; 0 for unknown
    measured: int = 0  # the version whose divergence is known; 0 for none
    # In nats per action dimension, from the published version; inf until it has acted.
    divergence: float = math.inf
    pulls: int = 0  # so far
    recent: list[Sample] = field(default_factory=list)  # its last states under `behavior`, by part
    weights: torch.Tensor | None = None  # (weights,) float32; None if not known to the bit

    def forget(self) -> None:
        """Another process, or another structure, comes in its place."""
        self.held = 0
        self.behavior = 0
        self.measured = 0
        self.divergence = math.inf
        self.recent = []
        self.weights = None


class PolicyStore:
    """The published version, and the measure of each `PolicyCopy` against it.

    Args:
        copies: all of them.
        rounds: whether workers pull rounded differences, see `differences`.
        needs_kl: whether they pull by divergence; else a policy may have none.
        learners: see `ClusterEnv`; None if there is one.
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
        self._num_rows = self._own_rows  # of all learners, once they have told each other
        self._spaces: tuple[Space, Space] | None = None
        self._elements = 1  # numbers in an observation
        self.version = 0  # +1 at each publish
        self.published = Published()
        self.structure = b""  # the pickled policy without its weights
        self.bytes_sent = 0  # cumulative weight bytes, all workers
        self.mismatches = 0  # how often a worker did not hold what it had been sent
        self._policy: Policy | None = None
        self._parts: dict[str, Any] = {}  # see `structure.parts_of`
        self._probed: Probed | None = None
        self._changes = 0  # of the structure, by parts of the policy that can be named
        self._has_warned = False  # that a divergence could not be measured
        self._weights: tuple[torch.Tensor, torch.Tensor] | None = None  # see `flat_weights`
        # What leads to the version from what a worker holds, a tensor by its identity: a message,
        # its buffers, and what the worker then holds, or None if the head does not keep that.
        self._updates: dict[
            torch.Tensor | None, tuple[Weights, list[Any], torch.Tensor | None]
        ] = {}

    def act_in(self, space: Space, action_space: Space) -> None:
        """Note the spaces of an observation and an action in which policies are to act."""
        self._spaces = space, action_space
        examples = leaves(create_empty_array(space, 1))
        self._elements = sum(getattr(leaf, "size", 1) for leaf in examples)

    def publish(self, policy: Policy, seen: Any = None) -> bool:
        """Make the current weights of ``policy`` the next version and measure every copy's
        divergence from them.

        Return whether ``structure`` has changed, so that the workers must be told. ``seen`` are
        some observations of environments, if there are any yet.

        Raises:
            TypeError: it is no `Policy`.
            ValueError: the policy cannot act in these environments. Nothing has changed then.
        """
        # These bring torch, as the policy has by now.
        from .structure import check_policy
        from .tensors import flat_weights

        is_new = policy is not self._policy or not self.structure
        if is_new:
            check_policy(policy)
            if self._rounds:
                _warn_of_frozen(policy)
        weights = flat_weights(policy)  # before anything changes: there may be no memory for it
        changed = self._update_structure(policy, is_new, seen)
        self.version += 1
        since = self.version if changed else self.published.since
        self.published = Published(self.version, since, self._probed.example)
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
        """Notice whether anything but weights and numbers has changed, and try the policy then.

        Return whether workers need another structure: for a new wrapper around the same module they
        need none.
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
            raise ValueError(f"{text}; define its kl, or do without by sync_mode 'always'")
        changed = structure != self.structure
        self._changes += bool(changed and self.structure and changes)
        if self._changes == MANY_CHANGES and changed:
            text = "the policy has become another %d times, by its %s, and workers got all weights"
            hint = "is that one of its numbers, or a buffer? See docs/policies.md"
            names = " and ".join(sorted(changes)[:3])
            logger.warning(f"{text}: {hint}", MANY_CHANGES, names)
        self._policy = policy
        self._parts = parts
        self._probed = probed
        self.structure = structure
        return changed

    def _measure(self, copies: list[PolicyCopy]) -> None:
        """Measure how far copies that have acted are from the policy. The divergence stays inf
        where that fails: parameters may be no distribution's, or the policy's own kl may fail.
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
            for copy in copies:  # also sequences of different lengths are measured one by one
                self._measure([copy])
            return
        for copy, of_copy in zip(copies, nats, strict=True):
            if np.isnan(of_copy):
                self._warn(copy, "it is NaN")
            else:
                copy.divergence = float(of_copy) / self._probed.dimensions

    def _warn(self, copy: PolicyCopy, why: str) -> None:
        """Say once that a divergence could not be measured."""
        if not self._has_warned:
            self._has_warned = True
            text = "worker %d's divergence could not be measured, so it pulls: %s"
            logger.warning(text, self._copies.index(copy), why)

    def acted(self, copy: PolicyCopy, part: RolloutPart) -> None:
        """Keep some states of a worker's part of a rollout, and its policy's distribution
        parameters there.
        """
        from .divergence import Sample

        if part.version < self.published.since:
            return  # another structure
        if part.version != copy.behavior or part.states is not None:
            copy.recent = []  # states of the same policy add up, except for sequences
        copy.recent.append(Sample.of(part, copy.rows))
        copy.behavior = part.version
        most = len(copy.rows) * states_of_each_row(KL_STATES, self._num_rows, self._elements)
        while sum(each.starts.size for each in copy.recent) > most and len(copy.recent) > 1:
            del copy.recent[0]

    def requests(self, copies: Sequence[PolicyCopy], num_steps: int) -> list[Collect]:
        """Return what asks each of these workers to act on the published version, or on its own.

        All are told the mean divergence of the environments of those that have acted, or inf if
        none has: so they pull together. With several learners that is of all environments of all,
        so each must call this as often.
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
        """Return the published version and its weights, for a worker that asks and says that it
        holds ``version``.
        """
        if version != copy.held and copy.weights is not None:
            self.mismatches += 1
            text = "worker %d does not hold the weights it was sent, and gets all"
            logger.warning(f"{text}; %d so far did not", self._copies.index(copy), self.mismatches)
            copy.weights = None
        if copy.weights not in self._updates:
            self._updates[copy.weights] = self._encode(copy)
        message, buffers, copy.weights = self._updates[copy.weights]
        copy.held = self.version
        copy.pulls += 1
        self.bytes_sent += sum(memoryview(buffer).nbytes for buffer in buffers)
        return message, buffers

    def _encode(self, copy: PolicyCopy) -> tuple[Weights, list[Any], torch.Tensor | None]:
        """Return what leads from the weights that a worker holds to the published version."""
        from .differences import WHOLE, Difference, checksum
        from .tensors import rounded_sizes

        weights, others = self._weights
        exact = others.cpu().numpy().data
        sizes = rounded_sizes(self._policy)
        held = None if copy.weights is None else copy.weights.to(weights.device)
        difference = Difference.between(held, weights, sizes) if self._rounds and sizes else None
        if difference is not None:
            packed = difference.pack()
            if sum(map(len, packed)) < weights.nbytes:
                after = difference.added_to(held, sizes)
                message = Weights(self.version, difference.levels, checksum(after, others))
                # Without room for them, the head sends all weights again the next time.
                of_others = {each.weights for each in self._copies if each is not copy} - {None}
                held_bytes = sum(each.nbytes for each in of_others) + after.nbytes
                return message, [*packed, exact], after if held_bytes <= HELD_BYTES else None
        message = Weights(self.version, WHOLE, checksum(weights, others))
        return message, [weights.cpu().numpy().data, exact], None

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy_version": self.version,
            "sync_bytes": self.bytes_sent,
            "workers": len(self._copies),
            "pulls": sum(copy.pulls for copy in self._copies),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this version, which no worker holds; the policy is that of the next
        `publish`.
        """
        self.version = state["policy_version"]
        self.bytes_sent = state["sync_bytes"]
        self.structure = b""
        # As many for each worker as before, in the mean.
        pulls = round(state["pulls"] * len(self._copies) / state["workers"])
        each, rest = divmod(pulls, len(self._copies))
        for index, copy in enumerate(self._copies):
            copy.forget()
            copy.pulls = each + (index < rest)


def _warn_of_frozen(policy: Policy) -> None:
    """Say that constants among the parameters are rounded like those that learn."""
    from .tensors import is_rounded

    named = policy.named_parameters()
    frozen = [name for name, each in named if is_rounded(each) and not each.requires_grad]
    if frozen:
        text = "workers get the frozen parameter%s %s rounded, like all: if that must be exact, %s"
        hint = "make it a buffer, or pull weights='float32'"
        logger.warning(text, "s" * (len(frozen) > 1), ", ".join(frozen[:3]), hint)
