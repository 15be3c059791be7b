"""The replay buffer of off-policy scripts, in the place of CleanRL's `cleanrl_utils.buffers`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from ..rollout import Rollout


class ReplayBuffer:
    """The last `size` transitions, in preallocated tensors; observations keep the dtype of their
    space.

    Args:
        size: how many transitions it holds.
        observation_space: of vectors.
        action_space: of numbers, `(1,)` each in a batch, or of vectors.
        in_checkpoints: whether its state is what it holds; else that is empty.
    """

    def __init__(
        self,
        size: int,
        observation_space: gym.Space,
        action_space: gym.Space,
        in_checkpoints: bool = True,
    ) -> None:
        self.size, self.pos, self.inserted, self.in_checkpoints = size, 0, 0, in_checkpoints
        self.observations = _column(size, observation_space)
        self.next_observations = _column(size, observation_space)
        self.actions = _column(size, action_space)
        self.rewards, self.dones = torch.zeros(size), torch.zeros(size)

    @staticmethod
    def num_bytes(size: int, observation_space: gym.Space, action_space: gym.Space) -> int:
        spaces = observation_space, observation_space, action_space
        return size * (sum(_column(1, space).nbytes for space in spaces) + 4 + 4)

    def add(self, rollout: Rollout) -> None:
        last = rollout.next_observations[None]
        next_observations = np.concatenate([rollout.observations[1:], last])
        # An episode's last step leads to its final observation, not to the one its environment was
        # reset to.
        next_observations[rollout.terminations | rollout.truncations] = rollout.final_observations
        num = rollout.rewards.size
        fit = min(num, self.size - self.pos)  # the rest goes to the front, where the oldest are
        for column, values in (
            (self.observations, rollout.observations),
            (self.next_observations, next_observations),
            (self.actions, rollout.actions),
            (self.rewards, rollout.rewards),
            (self.dones, rollout.terminations),  # a truncation is not the end
        ):
            values = torch.from_numpy(values).reshape(num, *column.shape[1:])
            column[self.pos : self.pos + fit], column[: num - fit] = values[:fit], values[fit:]
        self.pos, self.inserted = (self.pos + num) % self.size, self.inserted + num

    def sample(
        self, num_batches: int, batch_size: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Return observations, actions, next observations, rewards and dones, `(num_batches,
        batch_size, ...)`.
        """
        inds = torch.randint(min(self.inserted, self.size), (num_batches * batch_size,))
        columns = self.observations, self.actions, self.next_observations, self.rewards, self.dones
        shape = num_batches, batch_size
        drawn = (
            column.index_select(0, inds).view(*shape, *column.shape[1:]).to(device)
            for column in columns
        )
        obs, actions, next_obs, rewards, dones = drawn
        return obs.float(), actions, next_obs.float(), rewards, dones

    def state_dict(self) -> dict[str, Any]:
        return vars(self) if self.in_checkpoints else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state, in_checkpoints=self.in_checkpoints)


def _column(size: int, space: gym.Space) -> torch.Tensor:
    """Return room for so many of a space."""
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return torch.zeros(size, *(space.shape or (1,)), dtype=dtype)
