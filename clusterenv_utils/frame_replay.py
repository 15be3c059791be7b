"""The replay buffer of DQN on Atari, in place of CleanRL's `cleanrl_utils.buffers`."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch

from clusterenv_runtime.rollout import Rollout

from .replay import Replay


class ReplayBuffer(Replay):
    """The last `size` transitions, or slightly fewer. A stack is held as its frames' numbers.

    Each frame is stored once within a chunk and an episode. The frames of the stacks where these
    end are stored again.

    Args:
        size: the number of transitions.
        num_frames: the number of frames.
        observation_space: the space of stacks, ``(frame_stack, height, width)``.
        in_checkpoints: whether the buffer's state is its content; otherwise the state is empty.
        device: the device of the tensors.
    """

    def __init__(
        self,
        size: int,
        num_frames: int,
        observation_space: gym.Space,
        in_checkpoints: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(size, in_checkpoints, device)
        stack, *image = observation_space.shape
        self.frames = torch.zeros(num_frames, *image, dtype=torch.uint8, device=device)
        self.num_frames = 0  # added so far; frame number n is at n % len(frames)
        # The frame numbers of the stacks before and after each step.
        self.stacks = torch.zeros(size, 2, stack, dtype=torch.int64, device=device)
        self.actions = torch.zeros(size, 1, dtype=torch.int64, device=device)
        # Of each chunk whose frames are still held, the numbers of its first transition and frame.
        self.chunks: list[tuple[int, int]] = []

    @staticmethod
    def num_bytes(size: int, num_frames: int, observation_space: gym.Space) -> int:
        frame = int(np.prod(observation_space.shape[1:])) * observation_space.dtype.itemsize
        return num_frames * frame + size * (2 * observation_space.shape[0] * 8 + 8 + 4 + 4)

    def add(self, rollout: Rollout) -> None:
        stack = self.stacks.shape[-1]
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
        self._put(rollout, (self.stacks, self.num_frames + stacks))
        self.num_frames += len(frames)
        while self.chunks[0][1] < self.num_frames - len(self.frames):
            del self.chunks[0]

    def sample(self, batch_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return observations, actions, next observations, rewards and dones, `(batch_size, ...)`,
        on the learner's device.
        """
        num = min(self.inserted - self.chunks[0][0], self.size)
        drawn = torch.randint(num, (batch_size,), device=self._device)
        inds = (self.inserted - 1 - drawn) % self.size
        held = (self.stacks[inds] % len(self.frames)).flatten()
        frames = self.frames.index_select(0, held).to(device)
        obs, next_obs = frames.view(batch_size, 2, -1, *frames.shape[1:]).unbind(1)
        columns = self.actions, self.rewards, self.dones
        actions, rewards, dones = (column[inds].to(device) for column in columns)
        return obs, actions, next_obs, rewards, dones
