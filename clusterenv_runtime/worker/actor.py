"""A worker's policy at work. This module imports torch; a worker loads it when its first policy comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..differences import FROM_HELD, WHOLE, Difference, checksum
from ..policy import Policy, to_tensor
from ..protocol import Weights


class Actor:
    """One forward per step, log-probabilities once per rollout. The policy acts in eval mode."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # workers share their machine with other workers
        self.version = 0  # of the policy held; 0 for none
        self._held: torch.Tensor | None = None  # the float32 weights that differences are added to
        self._generator = torch.Generator()

    def load_structure(self, structure: Policy) -> None:
        """Become a policy of this structure, whose weights are yet to come."""
        self.policy, self.version = structure.with_empty_tensors("cpu").eval(), 0
        self._held = None

    def load_weights(self, message: Weights, buffers: list[Any]) -> None:
        """Become this version; or none, version 0, if what a difference was added to is not what the head believes.

        Raises:
            ValueError, zlib.error: the buffers are not weights of this policy, or not those that were sent.
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
            raise ValueError("weights have another checksum than the head's: is a network or memory broken?")
        self.version = message.version if is_right else 0

    def set_epsilon(self, epsilon: float) -> None:
        """Explore as the head says, if the policy explores so."""
        if hasattr(self.policy, "epsilon"):
            self.policy.epsilon = epsilon

    def seed(self, seed: list[int] | None) -> None:
        """Draw the noise anew, from these numbers, or with None at random."""
        self._generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))

    @property
    def generator_state(self) -> bytes:
        """The state of the noise, a `torch.Generator`'s."""
        return self._generator.get_state().numpy().tobytes()

    def load_generator_state(self, state: Any) -> None:
        """Go on from that state, in any readable buffer."""
        self._generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))

    def start(self, num_steps: int, num_envs: int) -> None:
        """Begin a rollout."""
        self._num_steps, self._num_envs = num_steps, num_envs
        self._step_params: list[torch.Tensor] = []
        self._actions: list[torch.Tensor] = []

    @torch.inference_mode()
    def act(self, observations: Any) -> np.ndarray:
        """Return one action per environment for observations ``(num_envs, ...)``."""
        params = self.policy(to_tensor(observations, torch.device("cpu")))
        step = len(self._actions) % self._num_steps
        if step == 0:
            self._noise = self.policy.noise(self._num_steps, self._num_envs, params.shape[-1], self._generator)
        actions = self.policy.act(params, self._noise[step])
        self._step_params.append(params)
        self._actions.append(actions)
        return self.policy.to_env(actions).numpy().copy()  # the environments may write to it

    @torch.inference_mode()
    def finish(self, states: np.ndarray, steps: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return actions, log-probs ``(num_steps, num_envs, ...)``, and the parameters at ``states`` (flat indices).

        ``steps`` ``(num_steps, num_envs)``: which step each is of, if there were more than num_steps.
        """
        params, actions = torch.stack(self._step_params), torch.stack(self._actions)
        if steps is not None:
            which = torch.from_numpy(steps), torch.arange(self._num_envs)
            params, actions = params[which], actions[which]
        logprobs = self.policy.distribution(params).log_prob(actions)
        return actions.numpy(), logprobs.numpy(), params.flatten(0, 1)[torch.from_numpy(states)].numpy()
