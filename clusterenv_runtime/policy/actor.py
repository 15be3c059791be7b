"""The actor: a worker's copy of the policy, and how it acts in a rollout.

This module imports torch. A worker imports it when its first policy arrives.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..arrays import leaves, map_tree
from ..messages import Collect, Weights
from .base import Policy
from .differences import FROM_HELD, WHOLE, Difference, checksum
from .sync import measured_states
from .tensors import flat_weights, load_weights, rounded_sizes, set_numbers, to_tensors


def layout_of_state(state: Any) -> Any:
    """Return a state's dtypes and shapes, which are equal if one state can replace another."""
    return None if state is None else map_tree(lambda leaf: (leaf.dtype, *leaf.shape), state)


class Actor:
    """A policy in eval mode: one forward pass per step, log-probabilities once per rollout.

    Args:
        before_step: called before each step.
        takes_mode: whether actions are the mode of the distribution instead of drawn from it.
    """

    def __init__(
        self, before_step: Callable[[], None] = lambda: None, takes_mode: bool = False
    ) -> None:
        self._takes_mode = takes_mode
        self.policy: Policy | None = None
        self.version = 0  # the version of the policy's weights; 0 if it has none
        self.state: Any = None  # the policy's state after its last step; None if there is none
        self._since = 0  # the first version of this structure
        self._numbers: list[float] = []  # the numbers of this version when it was published
        self._held: torch.Tensor | None = None  # the float32 weights that differences are added to
        self._generator = torch.Generator()
        self._before_step = before_step
        # The current rollout:
        self._request: Collect | None = None
        self._rows = range(0)
        self._states: Any = None  # the policy's state before the first step
        self._noise: Any = None
        self._params: list[Any] = []  # the distribution parameters of each step
        self._actions: list[Any] = []

    def load_structure(self, structure: Policy) -> None:
        """Take on a policy of this structure, whose weights arrive later."""
        self.policy = structure.eval()
        self.version = 0
        self._held = None

    def load(self, structure: Policy, weights: Sequence[Any]) -> None:
        """Take on a policy of this structure, with weights from the buffers of `flat_weights`."""
        self.load_structure(structure)
        load_weights(self.policy, *weights)

    def load_weights(self, message: Weights) -> None:
        """Load the version that a pull returned.

        The version becomes 0 instead if the message is a difference from other weights than those
        that this worker holds.

        Raises:
            ValueError, RuntimeError, zlib.error: the buffers are not weights of this policy, or are
            not the weights that the head sent.
        """
        if message.levels == WHOLE:
            self._held = None
            load_weights(self.policy, *message.buffers)
        else:
            *packed, others = message.buffers
            sizes = rounded_sizes(self.policy)
            difference = Difference.unpack(message.levels, *packed, sum(sizes))
            self._held = difference.added_to(self._held, sizes)
            load_weights(self.policy, self._held.numpy(), others)
        is_right = checksum(*flat_weights(self.policy)) == message.checksum
        if not is_right and message.levels != FROM_HELD:
            raise ValueError(
                "the checksum of the weights differs from the head's: is the network or memory "
                "faulty?"
            )
        self.version = message.version if is_right else 0
        self._since, self._numbers = message.since, message.numbers

    def start(self, request: Collect, rows: range, starts: np.ndarray) -> None:
        """Begin a rollout of the environments with these numbers.

        ``starts`` ``(num_envs,)`` says which of them begin an episode.
        """
        # A request that is older than this structure has numbers of another policy.
        is_older = request.version < self._since
        set_numbers(self.policy, self._numbers if is_older else request.numbers)
        self._request, self._rows = request, rows
        self._params = []
        self._actions = []
        initial = self.policy.initial_state(len(starts))
        if layout_of_state(initial) != layout_of_state(self.state):
            self.state = initial  # there was no state, or it was another policy's
        self._begin_episodes(starts)
        self._states = self.state

    def _begin_episodes(self, starts: np.ndarray) -> None:
        if self.state is not None and starts.any():
            self.state = self.policy.started(self.state, torch.from_numpy(starts))

    @torch.inference_mode()
    def act(self, observations: Any, starts: np.ndarray) -> Any:
        """Return the environments' actions, one per row of the observations ``(num_envs, ...)``.

        ``starts`` ``(num_envs,)`` says which observations are the first of an episode.
        """
        self._before_step()
        tensors = to_tensors(observations, self.policy)
        if self.state is None:
            params = self.policy(tensors)
        else:
            self._begin_episodes(starts)
            # A copy, because `forward` may write to the state or return it among the parameters.
            params, self.state = self.policy(tensors, map_tree(torch.clone, self.state))
        if (step := len(self._actions)) == 0:
            self._check_forward(params)
        if self._takes_mode:
            actions = self.policy.mode(params)
        else:
            if step == 0:
                self._noise = self._draw(params)
            actions = self.policy.act(params, map_tree(lambda leaf: leaf[step], self._noise))
        # Copies, because `to_env` and the environments may write to actions.
        given = self.policy.to_env(map_tree(torch.clone, actions))
        if step == 0:
            _check("act", actions, len(starts))
            _check("to_env", given, len(starts))
        self._params.append(params)
        self._actions.append(actions)
        return map_tree(torch.Tensor.numpy, given)

    def _check_forward(self, params: Any) -> None:
        returned = params if self._states is None else (params, self.state)
        _check("forward", returned, len(self._rows))
        before, after = layout_of_state(self._states), layout_of_state(self.state)
        if before != after:  # so the next rollout would begin without the policy's memory
            raise ValueError(
                f"the policy's forward returns a state {after}, but its initial_state is {before}"
            )

    def _draw(self, params: Any) -> Any:
        """Return the noise of a rollout, which each row draws with a seed of its own.

        ``params`` are the distribution parameters of the first step.
        """
        noise = []
        for place, row in enumerate(self._rows):
            seed = noise_seed(self._request.seed, row, self._request.rollout)
            self._generator.manual_seed(seed)
            own = map_tree(lambda leaf: leaf[place : place + 1], params)  # noqa: B023
            noise.append(self.policy.noise(self._request.num_steps, own, self._generator))
            _check("noise", noise[-1], self._request.num_steps, 1)
        return map_tree(lambda *each: torch.cat(each, 1), *noise)

    @torch.inference_mode()
    def finish(self) -> dict[str, Any]:
        """Return the fields of a `Part` that come from the policy.

        These are actions, log-probabilities, extras, states and distribution parameters.
        """
        params, actions = (
            map_tree(lambda *each: torch.stack(each), *trees)
            for trees in (self._params, self._actions)
        )
        logprobs = self.policy.distribution(params).log_prob(actions)
        shape = self._request.num_steps, len(self._rows)
        if logprobs.shape != shape:
            raise ValueError(
                f"the policy's log_prob gives {tuple(logprobs.shape)} for {shape} actions, not one "
                "number for each: sum over the last dimensions"
            )
        for leaf in leaves(params):  # a greedy policy takes NaN for the best
            if leaf.is_floating_point():
                is_nan = leaf.isnan().view(*shape, -1).any(-1)
                logprobs = logprobs.masked_fill(is_nan, math.nan)
        extras = dict(self.policy.extras(params, actions))
        _check("extras", extras, *logprobs.shape)
        in_sequence = self._states is not None
        num_steps, states = self._request.num_steps, self._request.states
        measured = torch.from_numpy(measured_states(num_steps, self._rows, states, in_sequence))
        kept = {
            "actions": actions,
            "logprobs": logprobs,
            "extras": extras,
            "params": map_tree(lambda leaf: leaf.flatten(0, 1)[measured], params),
        }
        if in_sequence:
            kept["states"] = self._states
        return {"states": None} | map_tree(lambda leaf: leaf.numpy(), kept)


def _check(name: str, tree: Any, *shape: int) -> None:
    """Raise ValueError unless a policy's method gave tensors whose shapes begin with ``shape``."""
    for leaf in leaves(tree):
        found = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        if found[: len(shape)] != shape:
            raise ValueError(
                f"the policy's {name} must give tensors ({', '.join(map(str, shape))}, ...), "
                f"got {found}"
            )


def noise_seed(seed: int, row: int, rollout: int) -> int:
    """Return the seed of one row's noise in one rollout, which depends on these numbers alone.

    The seed has 32 bits, because torch's generators use no more.
    """
    numbers = struct.pack("<4Q", seed, row, rollout, 0)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=4).digest())
