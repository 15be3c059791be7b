"""The head's measure of how far a policy has diverged from the policies that workers acted on."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..arrays import Frames, leaves, map_tree
from ..rollout import RolloutPart
from .base import Policy
from .sync import measured_states
from .tensors import eval_mode, to_tensors


class Sample(NamedTuple):
    """Some states that a worker acted on, and its policy's distribution parameters there.

    They are sequences of ``num_steps`` steps if the policy has a state. Otherwise each sequence has
    one step.
    """

    observations: Any  # (num_steps, batch, ...)
    params: Any  # (num_steps, batch, ...)
    starts: np.ndarray  # (num_steps, batch) bool, whether an episode begins there
    states: Any  # (batch, ...), the policy's states before the first step; None if it has none

    @classmethod
    def of(cls, part: RolloutPart, rows: range) -> "Sample":
        """Return the measured states of a worker's part.

        The arrays are copies, because the user gets the part and may write to it, and because a
        view would keep a whole message in memory.
        """
        number = len(leaves(part.params)[0]) // len(rows)
        in_sequence = part.states is not None
        places = measured_states(len(part.rewards), rows, number, in_sequence)
        places = places.reshape(number if in_sequence else 1, -1)
        # No starts at step 0: where an episode begins there, the part's states already are initial.
        starts = np.zeros(part.rewards.shape, bool)
        starts[1:] = (part.terminations | part.truncations)[:-1]

        def at_places(leaf: Any) -> Any:
            leaf = leaf.reshape(starts.size, *leaf.shape[2:])
            return leaf.only(places) if isinstance(leaf, Frames) else leaf[places]

        def in_order(leaf: np.ndarray) -> np.ndarray:
            return leaf.reshape(*places.shape, *leaf.shape[1:]).copy()

        observations = map_tree(at_places, part.observations)
        states = map_tree(np.copy, part.states) if in_sequence else None
        return cls(observations, map_tree(in_order, part.params), at_places(starts), states)


@torch.no_grad()
def divergence(policy: Policy, workers: Sequence[Sequence[Sample]]) -> np.ndarray:
    """Return each worker's KL(behavior || policy) in nats, the mean over the states of its samples.

    All sequences must have the same length. `Frames` are gathered only here, because images take
    megabytes.
    """
    observations, acted, starts, states = zip(*itertools.chain(*workers), strict=True)
    begins = np.concatenate(starts, 1)
    state = None if states[0] is None else _concatenate(states, 0)
    params = params_along(policy, _concatenate(observations, 1), begins, state)
    acted = _concatenate(acted, 1)
    behavior = map_tree(lambda leaf: torch.as_tensor(leaf, device=policy.device), acted)
    flat = [map_tree(lambda leaf: leaf.flatten(0, 1), tree) for tree in (behavior, params)]
    kl = policy.kl(*flat).view(begins.shape).mean(0)
    sizes = [sum(part.starts.shape[1] for part in parts) for parts in workers]
    firsts = np.cumsum([0, *sizes[:-1]])
    return np.add.reduceat(kl.cpu().numpy(), firsts) / sizes


@torch.no_grad()
def params_along(policy: Policy, observations: Any, starts: np.ndarray, state: Any) -> Any:
    """Return the parameters that `Policy.unroll` returns for arrays, in eval mode as on workers."""
    begins = torch.tensor(starts, device=policy.device)
    if state is not None:
        state = map_tree(lambda leaf: torch.tensor(leaf, device=policy.device), state)
    with eval_mode(policy):
        return policy.unroll(to_tensors(observations, policy, policy.device), begins, state)[0]


def _concatenate(trees: Sequence[Any], axis: int) -> Any:
    return map_tree(lambda *arrays: np.concatenate(arrays, axis), *trees)
