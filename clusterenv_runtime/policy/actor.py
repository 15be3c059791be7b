"""A worker's policy at work. This module imports torch; a worker loads it when its first policy
comes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..arrays.trees import leaves, map_tree, not_finite
from ..errors import EnvRaised
from ..wire.protocol import Collect, Weights
from .base import Policy
from .differences import FROM_HELD, WHOLE, Difference, checksum
from .sync import measured_states
from .tensors import (
    empty_copy,
    flat_weights,
    load_weights,
    rounded_sizes,
    set_numbers,
    to_tensors,
)


def is_identity(policy: Policy) -> bool:
    """Return whether environments get the actions as they are, because `to_env` is the base's."""
    return getattr(policy.to_env, "__func__", None) is Policy.to_env


def layout_of_state(state: Any) -> Any:
    """Return what two states have in common if one can take the place of the other."""
    return None if state is None else map_tree(lambda leaf: (leaf.dtype, *leaf.shape), state)


class Actor:
    """One forward per step, log-probabilities once per rollout. The policy acts in eval mode.

    Args:
        takes_mode: whether it takes the mode of the distribution in place of actions that it draws.
    """

    def __init__(self, takes_mode: bool = False) -> None:
        self._takes_mode = takes_mode
        self.policy: Policy | None = None
        self.is_identity = True  # whether environments get the policy's actions as they are
        self.version = 0  # of the policy's weights; 0 for none
        self.state: Any = None  # after the policy's last step; None before it, or if it has none
        self._held: torch.Tensor | None = None  # the float32 weights that differences are added to
        self._generator = torch.Generator()
        self.before_step: Callable[[], None] = lambda: None  # is called before each step
        # Of the rollout:
        self._request: Collect | None = None
        self._rows = range(0)
        self._states: Any = None  # the state before the first step
        self._noise: Any = None
        self._params: list[Any] = []  # of each step
        self._actions: list[Any] = []
        self._given: list[Any] = []

    def load_structure(self, structure: Policy) -> None:
        """Become a policy of this structure, whose weights are yet to come."""
        self.policy = empty_copy(structure, "cpu").eval()
        self.is_identity = is_identity(structure)
        self.version = 0
        self._held = None

    def load(self, structure: Policy, weights: Sequence[Any]) -> None:
        """Become a policy of this structure with these weights, which `flat_weights` returns, as
        buffers.
        """
        self.load_structure(structure)
        load_weights(self.policy, *weights)

    def load_weights(self, message: Weights, buffers: list[Any]) -> None:
        """Become this version; or none, version 0, if the difference is from other weights than
        those that this worker holds.

        Raises:
            ValueError, RuntimeError, zlib.error: the buffers are not weights of this policy, or
            not those that were sent.
        """
        if message.levels == WHOLE:
            self._held = None
            load_weights(self.policy, *buffers)
        else:
            *packed, others = buffers
            sizes = rounded_sizes(self.policy)
            difference = Difference.unpack(message.levels, *packed, sum(sizes))
            self._held = difference.added_to(self._held, sizes)
            load_weights(self.policy, self._held.numpy(), others)
        is_right = checksum(*flat_weights(self.policy)) == message.checksum
        if not is_right and message.levels != FROM_HELD:
            text = "weights have another checksum than the head's"
            raise ValueError(f"{text}: is a network or memory broken?")
        self.version = message.version if is_right else 0

    def prepare(self, request: Collect, rows: range) -> None:
        """Take over the request for the next rollout, in environments of these rows."""
        set_numbers(self.policy, request.numbers)
        self._request = request
        self._rows = rows

    def start(self, starts: np.ndarray) -> None:
        """Begin a rollout. ``starts`` ``(num_envs,)`` says which environments begin an episode."""
        self._params = []
        self._actions = []
        self._given = []
        initial = self.policy.initial_state(len(starts))
        if layout_of_state(initial) != layout_of_state(self.state):
            self.state = initial  # there was none, or that of another policy
        self._begin_episodes(starts)
        self._states = self.state

    def _begin_episodes(self, starts: np.ndarray) -> None:
        if self.state is not None and starts.any():
            self.state = self.policy.started(self.state, torch.from_numpy(starts))

    @torch.inference_mode()
    def act(self, observations: Any, starts: np.ndarray) -> Any:
        """Return one action per environment, as the environments take them, for observations
        ``(num_envs, ...)``.

        ``starts`` ``(num_envs,)`` says which of these are the first of an episode.
        """
        self.before_step()
        tensors = to_tensors(observations, self.policy)
        if self.state is None:
            params = self.policy(tensors)
        else:
            self._begin_episodes(starts)
            # A copy: `forward` may write to it, and may return it among the parameters, too.
            params, self.state = self.policy(tensors, map_tree(torch.clone, self.state))
        actions = self._choose(params)
        self._params.append(params)
        self._actions.append(actions)
        # Copies: `to_env` and the environments may write to them.
        given = self.policy.to_env(map_tree(torch.clone, actions))
        given = map_tree(lambda leaf: leaf.numpy(), given)
        if not self.is_identity:
            self._given.append(map_tree(np.copy, given))
        return given

    def _choose(self, params: Any) -> Any:
        """Return the policy's actions in the next step."""
        if self._takes_mode:
            return self.policy.mode(params)
        step = len(self._actions)
        if step == 0:
            self._noise = self._draw(params)
        return self.policy.act(params, map_tree(lambda leaf: leaf[step], self._noise))

    def _draw(self, params: Any) -> Any:
        """Return the noise of a rollout, each row's by its number; ``params`` are those of the
        first step.
        """
        noise = []
        for place, row in enumerate(self._rows):
            seed = noise_seed(self._request.seed, row, self._request.rollout)
            self._generator.manual_seed(seed)
            own = map_tree(lambda leaf: leaf[place : place + 1], params)  # noqa: B023
            noise.append(self.policy.noise(self._request.num_steps, own, self._generator))
        return map_tree(lambda *each: torch.cat(each, 1), *noise)

    @property
    def given(self) -> Any:
        """The actions that the environments got in this rollout, ``(num_steps, num_envs, ...)``,
        where these are not the policy's.
        """
        return map_tree(lambda *each: np.stack(each), *self._given)

    @torch.inference_mode()
    def finish(self, observations: Any) -> dict[str, Any]:
        """Return the fields of a `RolloutPart` that come from the policy: actions, their log-probs,
        extras, states and parameters.

        ``observations`` ``(num_steps, num_envs, ...)`` are those it acted on.

        Raises:
            EnvRaised: it gave no distribution for an environment whose observations are not finite.
            ValueError: it gave NaN, or no distribution, for others.
        """
        params, actions = (
            map_tree(lambda *each: torch.stack(each), *trees)
            for trees in (self._params, self._actions)
        )
        try:
            logprobs = self._logprobs(params, actions)
        except ValueError:
            _blame_environment(map_tree(torch.Tensor.numpy, params), observations)
            raise
        in_sequence = self._states is not None
        num_steps, states = self._request.num_steps, self._request.states
        measured = torch.from_numpy(measured_states(num_steps, self._rows, states, in_sequence))
        kept = {
            "actions": actions,
            "logprobs": logprobs,
            "extras": dict(self.policy.extras(params, actions)),
            "params": map_tree(lambda leaf: leaf.flatten(0, 1)[measured], params),
        }
        if in_sequence:
            kept["states"] = self._states
        return {"states": None} | map_tree(lambda leaf: leaf.numpy(), kept)

    def _logprobs(self, params: Any, actions: Any) -> torch.Tensor:
        # torch would print all of the parameters.
        if any(leaf.is_floating_point() and leaf.isnan().any() for leaf in leaves(params)):
            raise ValueError("params hold NaN: has the policy diverged?")
        return self.policy.distribution(params).log_prob(actions)


def noise_seed(seed: int, row: int, rollout: int) -> int:
    """Return what seeds the noise of one row in one rollout; it follows from these numbers, and
    from nothing else.

    Of a seed, torch's generators use 32 bits.
    """
    numbers = struct.pack("<4Q", seed, row, rollout, 0)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=4).digest())


def _blame_environment(params: Any, observations: Any) -> None:
    """Raise an error about parameters as that of an environment, if what it gave may be why."""
    steps = not_finite(observations, 2)
    envs = not_finite(params, 2).any(0) & steps.any(0)
    if envs.any():
        env = int(envs.argmax())
        step = int(steps[:, env].argmax())
        text = f"its observation before step {step} of the rollout holds NaN or infinity"
        raise EnvRaised(env) from ValueError(f"{text}, and so does what the policy makes of it")
