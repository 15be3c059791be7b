"""The replay buffer of DQN on Atari, and where a replay buffer fits."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from clusterenv_runtime import Rollout

from .errors import check
from .progress import say

SHARE_OF_GPU = 0.5  # the fraction of a GPU's free memory that a replay buffer may take


class FrameReplayBuffer:
    """The last `size` transitions, or slightly fewer. A stack is held as its frames' numbers.

    Each frame is stored once within a chunk and an episode. The frames of the stacks where these
    end are stored again. New transitions replace the oldest. The state loads on any device.

    Args:
        size: the number of transitions.
        num_frames: the number of frames.
        observation_space: the space of stacks, ``(frame_stack, height, width)``.
        device: the learner's, where the tensors are if it has room.
    """

    def __init__(
        self,
        size: int,
        num_frames: int,
        observation_space: gym.Space[Any],
        device: torch.device | str = "cpu",
    ) -> None:
        stack, *image = observation_space.shape
        frame = int(np.prod(image)) * observation_space.dtype.itemsize
        num_bytes = num_frames * frame + size * (2 * stack * 8 + 8 + 4 + 4)
        self._device = device = _device_for(num_bytes, torch.device(device))
        self.size, self.inserted = size, 0
        self.frames = torch.zeros(num_frames, *image, dtype=torch.uint8, device=device)
        self.num_frames = 0  # added so far; frame number n is at n % len(frames)
        # The frame numbers of the stacks before and after each step.
        self.stacks = torch.zeros(size, 2, stack, dtype=torch.int64, device=device)
        self.actions = torch.zeros(size, 1, dtype=torch.int64, device=device)
        self.rewards = torch.zeros(size, device=device)
        self.dones = torch.zeros(size, device=device)
        # Of each chunk whose frames are still held, the numbers of its first transition and frame.
        self.chunks: list[tuple[int, int]] = []

    def add(self, rollout: Rollout) -> None:
        stack, num = self.stacks.shape[-1], rollout.rewards.size
        self.chunks.append((self.inserted, self.num_frames))
        obs, dones = rollout.observations, rollout.terminations | rollout.truncations
        # An episode's last step leads to its final observation, not to the one its environment was
        # reset to.
        after = np.concatenate([rollout.final_observations, rollout.next_observations])
        after_index = len(obs.frames) + np.arange(after[:, :, 0, 0].size).reshape(-1, stack)
        next_index = np.concatenate([obs.index[1:], after_index[None, dones.sum() :]])
        next_index[dones] = after_index[: dones.sum()]
        frames = np.concatenate([obs.frames, after.reshape(-1, *obs.frames.shape[1:])])
        held = self._places(self.num_frames, len(frames), len(self.frames))
        self.frames[held] = torch.from_numpy(frames).to(self._device)
        stacks = torch.from_numpy(np.stack([obs.index, next_index], 2)).flatten(0, 1)
        places = self._places(self.inserted, num, self.size)
        for column, values in (
            (self.stacks, self.num_frames + stacks),
            (self.actions, rollout.actions),
            (self.rewards, rollout.rewards),
            (self.dones, rollout.terminations),  # a truncation is not a done
        ):
            column[places] = torch.as_tensor(values).reshape(num, *column.shape[1:]).to(column)
        self.inserted += num
        self.num_frames += len(frames)
        while self.chunks[0][1] < self.num_frames - len(self.frames):
            del self.chunks[0]

    def _places(self, first: int, num: int, size: int) -> torch.Tensor:
        """Return the places of `num` items from number `first` on; number n is at n % size."""
        return torch.arange(first, first + num, device=self._device) % size

    def sample(self, batch_size: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return a batch's tensors by name, `(batch_size, ...)`, on the learner's device."""
        num = min(self.inserted - self.chunks[0][0], self.size)
        drawn = torch.randint(num, (batch_size,), device=self._device)
        inds = (self.inserted - 1 - drawn) % self.size
        held = (self.stacks[inds] % len(self.frames)).flatten()
        frames = self.frames.index_select(0, held).to(device)
        obs, next_obs = frames.view(batch_size, 2, -1, *frames.shape[1:]).unbind(1)
        return {
            "obs": obs, "actions": self.actions[inds].to(device), "next_obs": next_obs,
            "rewards": self.rewards[inds].to(device), "dones": self.dones[inds].to(device),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if not name.startswith("_")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`. How many frames it has depends on the workers.

        Raises:
            ValueError: it is that of a buffer of another size.
        """
        for name, value in state.items():
            own = getattr(self, name)
            if isinstance(own, torch.Tensor):
                if own.shape[name == "frames" :] != value.shape[name == "frames" :]:
                    raise ValueError(f"{name} of another size")
                value = value.to(self._device)
            setattr(self, name, value)


def device_with_room(
    tensors: dict[str, torch.Tensor], size: int, device: torch.device
) -> torch.device:
    """Return the device for ``size`` rows like the first of each tensor: the learner's, if it has
    room, otherwise the CPU.
    """
    return _device_for(size * sum(each[0].nbytes for each in tensors.values()), device)


def _device_for(num_bytes: int, device: torch.device) -> torch.device:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    if num_bytes > SHARE_OF_GPU * free:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        takes = f"takes {num_bytes / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f}"
        check(num_bytes < memory, f"the replay buffer, --buffer-size, {takes}")
        device = torch.device("cpu")
    say(f"replay buffer: {num_bytes / 2**20:,.1f} MiB on the {device.type}")
    return device
