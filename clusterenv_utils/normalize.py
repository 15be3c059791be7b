"""Gymnasium's NormalizeObservation and NormalizeReward, for a learner and its workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.wrappers.utils import RunningMeanStd

from clusterenv_runtime.rollout import Rollout


class Moments(RunningMeanStd):
    """The mean and variance, in float64, of all values passed to `update`."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__(epsilon=0, shape=shape)

    def update(self, x: np.ndarray) -> None:
        super().update(np.asarray(x, np.float64))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": torch.tensor(self.mean), "var": torch.tensor(self.var), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.var = state["mean"].numpy(), state["var"].numpy()
        self.count = state["count"]


class Normalize(torch.nn.Module):
    """The first layer of both networks, which normalizes observations.

    Its buffers travel with the weights, so a worker's buffers belong to the version that it holds.
    """

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_inputs))
        self.register_buffer("scale", torch.ones(num_inputs))

    def load(self, moments: Moments) -> None:
        self.mean.copy_(torch.from_numpy(moments.mean))
        self.scale.copy_(torch.from_numpy(1 / np.sqrt(moments.var + 1e-8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.mean) * self.scale).clamp(-10, 10)


class NormalizeReward:
    """Divides rewards by the standard deviation of discounted returns.

    Checkpoints hold the moments of the discounted returns. The discounted returns themselves begin
    again with each episode, and in a resumed run.
    """

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.moments = Moments()
        self.gamma = gamma
        self.discounted_return = np.zeros(num_envs)

    def __call__(self, rollout: Rollout) -> np.ndarray:
        """Return a rollout's scaled and clipped rewards, ``(num_steps, num_envs)`` in float32.

        If several chunks of one worker are side by side, each continues the one before it.
        """
        dones = rollout.terminations | rollout.truncations
        discounted_returns = np.empty_like(rollout.rewards)
        left = np.arange(len(rollout.rows))
        while len(left):
            rows, firsts = np.unique(rollout.rows[left], return_index=True)
            columns = left[firsts]
            discounted_returns[:, columns], self.discounted_return[rows] = discount(
                rollout.rewards[:, columns], rollout.starts[columns], dones[:, columns],
                self.gamma, self.discounted_return[rows],
            )  # fmt: skip
            left = np.delete(left, firsts)
        self.moments.update(discounted_returns.reshape(-1))
        return scale_rewards(rollout.rewards, self.moments.var).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return self.moments.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments.load_state_dict(state)


def discount(
    rewards: np.ndarray,
    starts: np.ndarray,
    dones: np.ndarray,
    gamma: float,
    discounted_return: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the discounted return of each episode up to each step, and the last ones.

    The first result is `(num_steps, num_envs)`, like `rewards` and `dones`. The second result,
    `(num_envs,)`, is the `discounted_return` of the next call. `starts`, `(num_envs,)`, says which
    environments begin with a new episode.
    """
    discounted_returns = np.zeros_like(rewards)
    discounted_return = np.where(starts, 0, discounted_return)
    for t in range(len(rewards)):
        discounted_returns[t] = gamma * discounted_return + rewards[t]
        discounted_return = discounted_returns[t] * (1 - dones[t])
    return discounted_returns, discounted_return


def scale_rewards(rewards: np.ndarray, return_var: np.ndarray) -> np.ndarray:
    """Return rewards divided by the standard deviation of discounted returns, and clipped.

    This is what CleanRL does with Gymnasium's wrappers.
    """
    return np.clip(rewards / np.sqrt(return_var + 1e-8), -10, 10)
