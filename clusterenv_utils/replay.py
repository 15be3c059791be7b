"""The replay buffer of off-policy scripts, in place of CleanRL's `cleanrl_utils.buffers`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from clusterenv_runtime.rollout import Rollout

from .checks import check_memory
from .progress import say

SHARE_OF_GPU = 0.5  # the fraction of a GPU's free memory that a replay buffer may take


def replay_device(args: Any, num_bytes: int, device: torch.device) -> torch.device:
    """Return the device for a replay buffer of `num_bytes`, and print where the buffer is.

    It is the learner's `device` if that is a GPU with room for the buffer, and otherwise the CPU.
    If neither has room, exit with a one-line error.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    if num_bytes > SHARE_OF_GPU * free:
        check_memory(args, num_bytes)
        device = torch.device("cpu")
    place = "on the GPU" if device.type == "cuda" else "in memory"
    saved = "also in each checkpoint" if args.save_replay else "not in checkpoints"
    size = f"{args.buffer_size:,} transitions, {num_bytes / 2**20:,.1f} MiB"
    say(f"replay buffer: {size} {place}, {saved}")
    return device


class Replay:
    """The base of replay buffers, which hold the last `size` transitions.

    New transitions replace the oldest. The buffer's state loads on any device.
    """

    actions: torch.Tensor

    def __init__(self, size: int, in_checkpoints: bool, device: torch.device | str) -> None:
        self._in_checkpoints, self._device = in_checkpoints, torch.device(device)
        self.size, self.inserted = size, 0
        self.rewards = torch.zeros(size, device=device)
        self.dones = torch.zeros(size, device=device)

    def _put(self, rollout: Rollout, *columns: tuple[torch.Tensor, Any]) -> None:
        """Write a rollout's actions, rewards and dones, and further values into their `columns`."""
        num = rollout.rewards.size
        places = self._places(self.inserted, num, self.size)
        for column, values in (
            *columns,
            (self.actions, rollout.actions),
            (self.rewards, rollout.rewards),
            (self.dones, rollout.terminations),  # a truncation is not a done
        ):
            column[places] = torch.as_tensor(values).reshape(num, *column.shape[1:]).to(column)
        self.inserted += num

    def _places(self, first: int, num: int, size: int) -> torch.Tensor:
        """Return the places of `num` items from number `first` on; number n is at n % size."""
        return torch.arange(first, first + num, device=self._device) % size

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer's content, or an empty dict if checkpoints do not hold it."""
        return self._content() if self._in_checkpoints else {}

    def _content(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`.

        Raises:
            ValueError: it does not have the content of this buffer.
        """
        own, given = (
            {name: _form(name, value) for name, value in each.items()}
            for each in (self._content(), state)
        )
        if state and not (given == own and state["size"] == self.size):
            raise ValueError("the content of a replay buffer of another size or kind")
        for name, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            setattr(self, name, value.to(self._device) if is_tensor else value)


class ReplayBuffer(Replay):
    """The last `size` transitions, in preallocated tensors.

    Observations keep the dtype of their space.

    Args:
        size: the number of transitions.
        observation_space: the space of observations, which are vectors.
        action_space: the space of actions: numbers, `(1,)` each in a batch, or vectors.
        in_checkpoints: whether the buffer's state is its content; otherwise the state is empty.
        device: the device of the tensors.
    """

    def __init__(
        self,
        size: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        in_checkpoints: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(size, in_checkpoints, device)
        self.observations = _column(size, observation_space, device)
        self.next_observations = _column(size, observation_space, device)
        self.actions = _column(size, action_space, device)

    @staticmethod
    def num_bytes(
        size: int, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> int:
        spaces = observation_space, observation_space, action_space
        return size * (sum(_column(1, space, "cpu").nbytes for space in spaces) + 4 + 4)

    def add(self, rollout: Rollout) -> None:
        last = rollout.next_observations[None]
        next_observations = np.concatenate([rollout.observations[1:], last])
        # An episode's last step leads to its final observation, not to the one its environment was
        # reset to.
        next_observations[rollout.terminations | rollout.truncations] = rollout.final_observations
        # Nothing follows a termination, but NaN times 0 would be NaN.
        ends = next_observations[rollout.terminations]
        next_observations[rollout.terminations] = np.nan_to_num(ends, posinf=0, neginf=0)
        self._put(
            rollout,
            (self.observations, rollout.observations),
            (self.next_observations, next_observations),
        )

    def sample(
        self, num_batches: int, batch_size: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Return observations, actions, next observations, rewards and dones, `(num_batches,
        batch_size, ...)`, on the learner's device.
        """
        num = min(self.inserted, self.size)
        inds = torch.randint(num, (num_batches * batch_size,), device=self._device)
        columns = self.observations, self.actions, self.next_observations, self.rewards, self.dones
        shape = num_batches, batch_size
        drawn = (
            column.index_select(0, inds).view(*shape, *column.shape[1:]).to(device)
            for column in columns
        )
        obs, actions, next_obs, rewards, dones = drawn
        return obs.float(), actions, next_obs.float(), rewards, dones


def _form(name: str, value: Any) -> Any:
    """Return the form of a buffer's attribute. How many frames it has depends on the workers."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    return value.shape[name == "frames" :], value.dtype


def _column(size: int, space: gym.Space[Any], device: torch.device | str) -> torch.Tensor:
    """Return a tensor with room for `size` values of a space."""
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return torch.zeros(size, *(space.shape or (1,)), dtype=dtype, device=device)
