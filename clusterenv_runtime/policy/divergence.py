"""How far a policy is from what workers acted on, as the head measures it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..arrays.frames import Frames
from ..arrays.trees import leaves, map_tree
from ..wire.part import RolloutPart
from .base import Policy
from .sync import measured_states
from .tensors import to_tensors

PASS_ELEMENTS = 2**20  # numbers in the observations of one forward pass, which bounds its memory


class Seen(NamedTuple):
    """Some states of a worker, and its policy's distribution parameters there.

    They are sequences of ``num_steps`` if the policy has a state, and else of one step each.
    """

    observations: Any  # (num_steps, batch, ...)
    params: Any  # (num_steps, batch, ...)
    starts: np.ndarray  # (num_steps, batch) bool, whether an episode begins there
    states: Any  # (batch, ...) of the policy before the first step, None if it has none

    @classmethod
    def of(cls, part: RolloutPart, rows: range) -> Seen:
        """Return the measured states of a worker's part.

        They are copies: the user, who gets the rest, may write to it, and a view would keep all of
        a message.
        """
        number = len(leaves(part.params)[0]) // len(rows)
        in_sequence = part.states is not None
        places = measured_states(len(part.rewards), rows, number, in_sequence)
        places = places.reshape(number if in_sequence else 1, -1)
        starts = np.zeros(part.rewards.shape, bool)  # a part's states are those before its start
        starts[1:] = (part.terminations | part.truncations)[:-1]

        def at_places(leaf: Any) -> Any:
            leaf = leaf.reshape(starts.size, *leaf.shape[2:])
            return leaf.only(places) if isinstance(leaf, Frames) else leaf[places]

        def in_order(leaf: np.ndarray) -> np.ndarray:
            return leaf.reshape(*places.shape, *leaf.shape[1:]).copy()

        observations = map_tree(at_places, part.observations)
        states = map_tree(np.copy, part.states) if in_sequence else None
        return cls(observations, map_tree(in_order, part.params), at_places(starts), states)

    @classmethod
    def join(cls, parts: Sequence[Seen]) -> Seen:
        """Return states of several workers or parts, whose sequences must be equally long, as one.

        Only now are `Frames` gathered, because images are megabytes.
        """
        observations, params, starts, states = zip(*parts, strict=True)
        return cls(
            _concatenate(observations, 1),
            _concatenate(params, 1),
            np.concatenate(starts, 1),
            None if states[0] is None else _concatenate(states, 0),
        )

    def last(self, most: int) -> Seen:
        """Return at most so many of these states, the last ones, of a policy without a state."""
        observations, params = map_tree(lambda leaf: leaf[:, -most:], self[:2])
        return Seen(observations, params, self.starts[:, -most:], None)


@torch.no_grad()
def divergence(policy: Policy, workers: Sequence[Seen]) -> np.ndarray:
    """Return KL(behavior || policy) in nats for each of several workers, a mean over its states."""
    seen = Seen.join(workers)
    behavior = map_tree(lambda leaf: torch.as_tensor(leaf, device=policy.device), seen.params)
    params = params_along(policy, seen.observations, seen.starts, seen.states)
    flat = [map_tree(lambda leaf: leaf.flatten(0, 1), tree) for tree in (behavior, params)]
    kl = policy.kl(*flat).view(seen.starts.shape).mean(0)
    sizes = [each.starts.shape[1] for each in workers]
    firsts = np.cumsum([0, *sizes[:-1]])
    return np.add.reduceat(kl.cpu().numpy(), firsts) / sizes


@torch.no_grad()
def params_along(policy: Policy, observations: Any, starts: np.ndarray, state: Any) -> Any:
    """Return the parameters that `Policy.unroll` gives of arrays, in eval mode, as on the workers.

    It takes as many rows at a time as fit in memory.
    """
    elements_of_row = sum(leaf[0, 0].size for leaf in leaves(observations))
    most = max(PASS_ELEMENTS // max(elements_of_row, 1), 1)

    def params_of(rows: slice) -> Any:
        some = map_tree(lambda leaf: leaf[:, rows], observations)
        begins = torch.tensor(starts[:, rows], device=policy.device)
        before = None
        if state is not None:
            before = map_tree(lambda leaf: torch.tensor(leaf[rows], device=policy.device), state)
        return policy.unroll(to_tensors(some, policy, policy.device), begins, before)[0]

    with _evaluating(policy):
        firsts = range(0, starts.shape[1], most)
        passes = [params_of(slice(first, first + most)) for first in firsts]
    return map_tree(lambda *each: torch.cat(each, 1), *passes)


@contextlib.contextmanager
def _evaluating(policy: Policy) -> Iterator[None]:
    """Have a policy in eval mode for a while."""
    training = [module for module in policy.modules() if module.training]
    policy.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _concatenate(trees: Sequence[Any], axis: int) -> Any:
    return map_tree(lambda *arrays: np.concatenate(arrays, axis), *trees)
