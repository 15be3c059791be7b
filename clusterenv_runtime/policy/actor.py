"""A worker's policy at work. This module imports torch; a worker loads it when its first policy
comes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..arrays.trees import leaves, map_tree
from ..wire.protocol import Collect, Weights
from .base import Policy, to_tensor
from .differences import FROM_HELD, WHOLE, Difference, checksum
from .sync import measured_states, noise_seed


class Actor:
    """One forward per step, log-probabilities once per rollout. The policy acts in eval mode."""

    def __init__(self) -> None:
        self.version = 0  # of the policy held; 0 for none
        self.state: Any = (
            None  # of the policy, after its last step; None if it has none, or has not begun
        )
        self._held: torch.Tensor | None = None  # the float32 weights that differences are added to
        self._generator = torch.Generator()

    def load_structure(self, structure: Policy) -> None:
        """Become a policy of this structure, whose weights are yet to come."""
        self.policy, self.version = structure.with_empty_tensors("cpu").eval(), 0
        self._held = None

    def load_weights(self, message: Weights, buffers: list[Any]) -> None:
        """Become this version; or none, version 0, if what a difference was added to is not what
        the head believes.

        Raises:
            ValueError, zlib.error: the buffers are not weights of this policy, or not those that
            were sent.
        """
        if message.levels == WHOLE:
            self.policy.load_flat_weights(buffers[0])
            self._held = None
        else:
            sizes = self.policy.rounded_sizes
            difference = Difference.unpack(message.levels, *buffers[:2], sum(sizes))
            self._held = difference.added_to(self._held, sizes)
            self.policy.load_flat_weights(self._held.numpy().tobytes() + bytes(buffers[2]))
        weights, others = self.policy.split_weights(self.policy.flat_weights())
        is_right = checksum(weights, others.numpy()) == message.checksum
        if not is_right and message.levels != FROM_HELD:
            raise ValueError(
                "weights have another checksum than the head's: is a network or memory broken?"
            )
        self.version = message.version if is_right else 0

    def set_numbers(self, numbers: list[float]) -> None:
        """Take over the policy's numbers, as they are at the head."""
        for name, number in zip(self.policy.numbers, numbers, strict=True):
            setattr(self.policy, name, number)

    def prepare(self, request: Collect, rows: range) -> None:
        """Take over what is asked of the next rollout, in environments of these numbers."""
        self.set_numbers(request.numbers)
        self._rows, self._measured = rows, request.states
        self._seed, self._rollout = request.seed, request.rollout

    def start(self, num_steps: int, starts: np.ndarray) -> None:
        """Begin a rollout of environments of which those have begun an episode where ``starts`` is
        True.
        """
        self._num_steps = num_steps
        self._step_params: list[Any] = []
        self._actions: list[Any] = []
        self._given: list[Any] = []
        initial = self.policy.initial_state(len(starts))
        if _layout(initial) != _layout(self.state):  # there was none, or that of another policy
            self.state = initial
        self._begin(starts)
        self._states = self.state

    def _begin(self, starts: np.ndarray) -> None:
        if self.state is not None and starts.any():
            self.state = self.policy.started(self.state, torch.from_numpy(starts))

    @torch.inference_mode()
    def act(self, observations: Any, starts: np.ndarray) -> Any:
        """Return one action per environment, as the environments take them, for observations
        ``(num_envs, ...)``.

        ``starts`` ``(num_envs,)`` says which of these are the first of an episode.
        """
        tensors = to_tensor(observations, torch.device("cpu"), self.policy.float_observations)
        step = len(self._actions)
        if self.state is None:
            params = self.policy(tensors)
        else:
            self._begin(starts)
            # A copy: `forward` may write to it, and what it has returned may be among the
            # parameters, too.
            params, self.state = self.policy(tensors, map_tree(torch.clone, self.state))
        if step == 0:
            self._noise = self.draw(params)
        actions = self.policy.act(params, map_tree(lambda leaf: leaf[step], self._noise))
        self._step_params.append(params)
        self._actions.append(actions)
        # Copies: `to_env` and the environments may write to them.
        given = map_tree(
            lambda leaf: leaf.numpy(), self.policy.to_env(map_tree(torch.clone, actions))
        )
        if not self.policy.is_identity and any(leaf.dtype.kind in "iu" for leaf in leaves(given)):
            self._given.append(map_tree(np.copy, given))
        return given

    def draw(self, params: Any) -> Any:
        """Return the noise of a rollout, that of each row by its number; ``params`` are those of
        the first step.
        """
        noise = []
        for place, row in enumerate(self._rows):
            self._generator.manual_seed(noise_seed(self._seed, row, self._rollout))
            own = map_tree(lambda leaf: leaf[place : place + 1], params)  # noqa: B023
            noise.append(self.noise_of_row(own))
        return map_tree(lambda *each: torch.cat(each, 1), *noise)

    def noise_of_row(self, params: Any) -> Any:
        """Return the noise of the row whose parameters ``(1, ...)`` these are."""
        return self.policy.noise(self._num_steps, params, self._generator)

    @property
    def given(self) -> Any:
        """What the environments have got in this rollout, ``(num_steps, num_envs, ...)``.

        None if that is the actions, or holds no integers, of which alone some may be wrong.
        """
        return map_tree(lambda *each: np.stack(each), *self._given) if self._given else None

    @torch.inference_mode()
    def finish(self) -> dict[str, Any]:
        """Return what a `RolloutPart` holds of the policy: actions, their log-probs, extras, states
        and parameters.
        """
        params, actions = (
            map_tree(lambda *leaves: torch.stack(leaves), *each)
            for each in (self._step_params, self._actions)
        )
        if any(leaf.is_floating_point() and leaf.isnan().any() for leaf in leaves(params)):
            raise ValueError(
                "params hold NaN: has the policy diverged?"
            )  # before torch prints all of them
        places = measured_states(
            self._num_steps, self._rows, self._measured, self._states is not None
        )
        measured = torch.from_numpy(places)
        kept = {
            "actions": actions,
            "logprobs": self.policy.distribution(params).log_prob(actions),
            "extras": dict(self.policy.extras(params, actions)),
            "params": map_tree(lambda leaf: leaf.flatten(0, 1)[measured], params),
        }
        arrays = map_tree(lambda leaf: leaf.numpy(), kept)
        arrays["states"] = (
            None if self._states is None else map_tree(lambda leaf: leaf.numpy(), self._states)
        )
        return arrays


def _layout(state: Any) -> Any:
    """Return what two states have in common if one can take the place of the other."""
    return None if state is None else map_tree(lambda leaf: (leaf.shape, leaf.dtype), state)
