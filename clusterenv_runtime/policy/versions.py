"""The head's side of Adaptive Policy Synchronization: the published version, and how far each copy
has diverged.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array

from ..arrays.frames import Frames
from ..arrays.trees import leaves, map_tree
from ..errors import one_line
from ..wire.protocol import Collect, Weights
from .probe import Probed, probe
from .sync import KL_STATES, measured_states, states_of_each_row

if TYPE_CHECKING:
    import torch

    from ..wire.part import RolloutPart
    from .base import Policy

logger = logging.getLogger(__name__)
HELD_BYTES = 2**30  # of all the different weights that workers hold
MANY_CHANGES = 10  # of the policy's structure, in a row


class Published(NamedTuple):
    """What is known of a published policy."""

    version: int = 0
    since: int = 1  # the first version of its structure
    example: dict[str, Any] = {}  # what it gives at one state, see `probe`
    is_identity: bool = True  # whether environments get the actions as they are drawn


@dataclass
class PolicyCopy:
    """What the head knows of one worker's copy of the policy."""

    numbers: range = range(1)  # of the worker's environments
    held: int = 0  # the version last sent; 0 for none of this structure
    behavior: int = 0  # the version it acted on when last heard of; 0 for unknown
    measured: int = 0  # the version whose divergence is known; 0 for none
    divergence: float = (
        math.inf
    )  # nats per action dimension, from the published version; inf until it has acted
    pulls: int = 0  # so far
    # What it has seen lately under `behavior`: how many states, and these as `Policy.divergence`
    # takes them, in parts, oldest first.
    recent: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    weights: HeldWeights | None = None  # that it holds; None if they are not known to the bit

    def forget(self) -> None:
        """Another process, or another structure, comes in its place."""
        self.held = self.behavior = self.measured = 0
        self.divergence, self.recent, self.weights = math.inf, [], None


class HeldWeights(NamedTuple):
    """Weights that some workers hold."""

    number: int  # by which they are told from others, from 1
    tensor: torch.Tensor  # ``(weights,)`` float32


class Update(NamedTuple):
    """What a worker that pulls is sent, and what it then holds."""

    message: Weights
    buffers: list[Any]
    weights: HeldWeights | None  # None if the head does not keep them


class PolicyStore:
    """The published version, and the measure of each `PolicyCopy` against it.

    Args:
        copies: all of them.
        space: the single observation space.
        action_space: the single action space.
        rounds: whether what workers pull is a rounded difference, see `differences`.
        needs_kl: whether they pull by divergence; else a policy may have none.
        sum_over_learners: see `ClusterEnv`; None if there is one.
    """

    def __init__(
        self,
        copies: Sequence[PolicyCopy],
        space: Space,
        action_space: Space,
        rounds: bool,
        needs_kl: bool = True,
        sum_over_learners: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self._copies, self._space, self._action_space = copies, space, action_space
        self._rounds, self._needs_kl, self._sum_over_learners = rounds, needs_kl, sum_over_learners
        self.is_of_several_learners = sum_over_learners is not None
        # Of all learners, once they have told each other.
        self._num_rows = self._own_rows = sum(len(copy.numbers) for copy in copies)
        self._elements = sum(
            getattr(leaf, "size", 1) for leaf in leaves(create_empty_array(space, 1))
        )
        self.version, self.published = 0, Published()  # +1 at each publish, and what is known of it
        self.structure = b""  # cloudpickle of the policy without its weights
        self.bytes_sent = 0  # cumulative weight bytes, all workers
        self.mismatches = 0  # how often a worker did not hold what it had been sent
        self._policy: Policy | None = None
        self._layout: dict[str, Any] = {}  # of the policy, see `structure.layout_of`
        self._probed: Probed | None = None  # what is known of it
        self._has_warned, self._changes = False, 0  # in a row, of the structure
        self._flat: torch.Tensor | None = (
            None  # all weights of the version, on the learner's device
        )
        self._updates: dict[
            int, Update
        ] = {}  # to the version, by the number of the weights held, or 0
        self._numbers = itertools.count(1)  # of `HeldWeights`

    def publish(self, policy: Policy, seen: Any = None) -> bool:
        """Make the current weights of ``policy`` the next version and measure every copy's
        divergence from them.

        Return whether ``structure`` has changed, so that the workers must be told. ``seen`` are
        some observations of environments, if there are any yet.

        Raises:
            TypeError: it is no `Policy`.
            ValueError: the policy cannot act in these environments. Nothing has changed then.
        """
        if policy is None or policy is not self._policy:
            _check_policy(policy)
        from .structure import layout_of, pickled  # torch, as the policy has by now

        layout, structure, probed = layout_of(policy), self.structure, self._probed
        if policy is not self._policy or not structure or self._differences(layout):
            structure = pickled(policy)
            probed = probe(policy, self._space, self._action_space, seen)
            if probed.kl_fault is not None and self._needs_kl:
                text = f"the policy has no KL divergence: {probed.kl_fault}"
                raise ValueError(f"{text}; define its kl, or do without by sync_mode 'always'")
        flat = policy.flat_weights()
        changed = (
            structure != self.structure
        )  # a new wrapper around the same module is not a new structure
        if changed and self.structure:
            self._warn_of_changes(layout)
        else:
            self._changes = 0
        self._policy, self._layout, self.structure, self._probed = policy, layout, structure, probed
        self.version += 1
        since = self.version if changed else self.published.since
        self.published = Published(self.version, since, probed.example, policy.is_identity)
        if changed:
            for copy in self._copies:
                copy.forget()
        self._flat = flat  # a copy; it becomes bytes only when the first worker pulls this version
        self._updates = {}
        known = [copy for copy in self._copies if copy.behavior]
        for copy in self._copies:
            copy.measured, copy.divergence = copy.behavior, math.inf
        self._measure(known)
        return changed

    def _differences(self, layout: dict[str, Any]) -> list[str]:
        """Return in what a layout is another structure's, besides what changes whenever the policy
        acts.
        """
        keys = (layout.keys() | self._layout.keys()) - self._probed.volatile
        return [key for key in keys if layout.get(key) != self._layout.get(key)]

    def _warn_of_changes(self, layout: dict[str, Any]) -> None:
        self._changes += 1
        if self._changes == MANY_CHANGES and (names := self._differences(layout)):
            text = "the policy is another with each version, by its %s, so workers get all weights: is that one of its"
            logger.warning(
                f"{text} numbers, or a buffer? See docs/policies.md",
                " and ".join(sorted(names)[:3]),
            )

    def _measure(self, copies: list[PolicyCopy]) -> None:
        """Measure how far copies that have acted are from the policy; where that is no number, it
        stays inf.
        """
        if not copies or self._probed.kl_fault is not None:
            return
        try:
            divergence = self._policy.divergence(*zip(*map(self._joined, copies), strict=True))
        except (
            Exception
        ) as error:  # their parameters may be no distribution's, or its own kl may fail
            for copy in copies if len(copies) > 1 else []:
                self._measure([copy])
            if len(copies) == 1 and not self._has_warned:
                self._has_warned = True
                text = "worker %d's divergence could not be measured, so it pulls: %s"
                logger.warning(text, self._number(copies[0]), one_line(error))
        else:
            for copy, nats in zip(copies, divergence, strict=True):
                copy.divergence = float(nats) / self._probed.dimensions

    def _number(self, copy: PolicyCopy) -> int:
        """Return whose copy this is."""
        return next(number for number, each in enumerate(self._copies) if each is copy)

    def acted(self, copy: PolicyCopy, part: RolloutPart) -> None:
        """Keep some of what a worker saw in its part of a rollout, and its policy's distribution
        parameters there.
        """
        if part.version < self.published.since:
            return  # another structure
        # No views of what the user gets, who may write to it, nor of a message: of `Frames`, that
        # is a copy.
        number = len(leaves(part.params)[0]) // len(copy.numbers)
        recent = [
            self._sampled(copy, part, number)
            if part.states is None
            else self._in_sequence(part, number)
        ]
        if (
            part.version == copy.behavior and part.states is None
        ):  # the same policy: more of the same
            recent = [*copy.recent, *recent]
            while sum(number for number, _ in recent[1:]) >= self._most(copy):
                del recent[0]
        copy.behavior, copy.recent = part.version, recent

    def _most(self, copy: PolicyCopy) -> int:
        """Return how many states of a worker, from several parts, its divergence is measured on."""
        return len(copy.numbers) * states_of_each_row(KL_STATES, self._num_rows, self._elements)

    def _joined(self, copy: PolicyCopy) -> tuple[Any, ...]:
        if len(copy.recent) > 1:  # joined only now, as of images each part is megabytes
            numbers, parts = zip(*copy.recent, strict=True)
            most = self._most(copy)
            joined = map_tree(lambda *each: np.concatenate(each)[-most:], *parts)
            copy.recent = [(min(sum(numbers), most), joined)]
        return map_tree(np.asarray, copy.recent[0][1])

    def _sampled(
        self, copy: PolicyCopy, part: RolloutPart, number: int
    ) -> tuple[int, tuple[Any, Any]]:
        size, num_steps = part.rewards.size, len(part.rewards)
        sent = measured_states(num_steps, copy.numbers, number, in_sequence=False)

        def kept(leaf: Any) -> Any:
            leaf = leaf.reshape(size, *leaf.shape[2:])
            return leaf.only(sent) if isinstance(leaf, Frames) else leaf[sent]

        return len(sent), (map_tree(kept, part.observations), map_tree(np.copy, part.params))

    def _in_sequence(
        self, part: RolloutPart, number: int
    ) -> tuple[int, tuple[Any, Any, np.ndarray, Any]]:
        starts = np.zeros(
            (number, part.rewards.shape[1]), bool
        )  # its state is that before the first step
        starts[1:] = (part.terminations | part.truncations)[: number - 1]
        seen = map_tree(lambda leaf: np.array(leaf[:number]), part.observations)
        return starts.size, (
            seen,
            map_tree(np.copy, part.params),
            starts,
            map_tree(np.copy, part.states),
        )

    def requests(self, copies: Sequence[PolicyCopy], num_steps: int) -> list[Collect]:
        """Return what asks each of these workers to act on the published version, or on its own.

        All are told the mean divergence of the environments of those that have acted, or inf if
        none has: so they pull together. With several learners that is of all environments of all,
        so each must call this as often.
        """
        known = [copy for copy in copies if copy.measured]
        total = sum(copy.divergence * len(copy.numbers) for copy in known)
        number = sum(len(copy.numbers) for copy in known)
        if self._sum_over_learners is not None:
            sums = self._sum_over_learners(np.array([total, number, self._own_rows], np.float64))
            total, number, self._num_rows = sums[0], sums[1], int(sums[2])
        mean = float(total / number) if number else math.inf
        numbers = self._policy.numbers_now()
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
            text = (
                "worker %d does not hold the weights it was sent, and gets all; %d so far did not"
            )
            logger.warning(text, self._number(copy), self.mismatches)
            copy.weights = None
        number = 0 if copy.weights is None else copy.weights.number
        if number not in self._updates:
            self._updates[number] = self._encode(copy)
        update = self._updates[number]
        copy.pulls += 1
        copy.held, copy.weights = self.version, update.weights
        self.bytes_sent += sum(memoryview(buffer).nbytes for buffer in update.buffers)
        return update.message, update.buffers

    def _has_room_for(self, weights: torch.Tensor, copy: PolicyCopy) -> bool:
        """Say whether this copy's next weights may be kept; else its next pull is of all weights
        again.
        """
        others = [
            other.weights
            for other in self._copies
            if other is not copy and other.weights is not None
        ]
        different = {other.number: other.tensor.nbytes for other in others}
        return sum(different.values()) + weights.nbytes <= HELD_BYTES

    def _encode(self, copy: PolicyCopy) -> Update:
        """Make what takes a worker from the weights it holds to the published version."""
        from .differences import (
            WHOLE,
            Difference,
            checksum,
        )  # brings torch, as the policy has by now

        sizes = self._policy.rounded_sizes
        weights, others = self._policy.split_weights(self._flat)
        held = None if copy.weights is None else copy.weights.tensor.to(weights.device)
        others = others.cpu().numpy().data
        difference = Difference.between(held, weights, sizes) if self._rounds and sizes else None
        packed = [] if difference is None else [*difference.pack(), others]
        if packed and sum(map(len, packed)) < len(self._flat):
            after = difference.added_to(held, sizes)
            message = Weights(self.version, difference.levels, checksum(after, others))
            is_kept = self._has_room_for(after, copy)
            return Update(
                message, packed, HeldWeights(next(self._numbers), after) if is_kept else None
            )
        message = Weights(self.version, WHOLE, checksum(weights, others))
        return Update(message, [self._flat.cpu().numpy().data], None)

    def state_dict(self) -> dict[str, Any]:
        pulls = sum(copy.pulls for copy in self._copies)
        return {
            "policy_version": self.version, "sync_bytes": self.bytes_sent,
            "workers": len(self._copies), "pulls": pulls,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this version, which no worker holds; the policy is that of the next `publish`."""
        self.version, self.bytes_sent = state["policy_version"], state["sync_bytes"]
        self.structure = b""
        # As many for each worker as before, in the mean.
        pulls = round(state["pulls"] * len(self._copies) / state["workers"])
        each, rest = divmod(pulls, len(self._copies))
        for index, copy in enumerate(self._copies):
            copy.forget()
            copy.pulls = each + (index < rest)


def _check_policy(policy: Any) -> None:
    from .base import Policy  # brings torch, as every policy does

    if not isinstance(policy, Policy):
        found = policy.__name__ if isinstance(policy, type) else type(policy).__name__
        raise TypeError(
            f"a Policy is wanted, such as CategoricalPolicy(actor), got {found}; see docs/policies.md"
        )
    policy.check()
