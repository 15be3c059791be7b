"""A user's program, which passes a strict type checker in ``make lint``."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from clusterenv_runtime import (
    CategoricalPolicy,
    ClusterEnv,
    EnvError,
    Evaluation,
    LocalLauncher,
    Policy,
    Rollout,
)


def make_env(env_id: str) -> gym.Env[Any, Any]:
    return gym.make(env_id)


class Quiet(CategoricalPolicy):
    """Acts on observations divided by two."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        logits = super().forward(observations / 2)
        return logits


def learn(policy: Policy, rollout: Rollout) -> float:
    returns: np.ndarray[Any, np.dtype[np.float64]] = rollout.episodic_returns
    return float(returns.mean()) if len(returns) else 0.0


def main() -> None:
    launcher = LocalLauncher(log_dir="logs")
    env_fns = [partial(make_env, "CartPole-v1") for _ in range(4)]
    with ClusterEnv(env_fns, num_workers=2, launcher=launcher, kl_threshold=0.05) as envs:
        policy = Quiet(nn.Linear(4, 2))
        observations, infos = envs.reset(seed=1)
        try:
            rollout = envs.rollout(policy, 16)
        except EnvError as error:
            raise SystemExit(str(error)) from None
        print(learn(policy, rollout), envs.divergence, envs.pulls, observations.shape, infos)
        evaluation: Evaluation = envs.evaluate(policy, 4, deterministic=True)
        envs.send(16)
        worker, chunk = envs.recv()
        envs.recv()
        envs.reset()
        actions = np.zeros(4, np.int64)
        _, rewards, terminations, truncations, _ = envs.step(actions)
        print(evaluation.returns, worker, chunk.rewards, rewards + terminations + truncations)


if __name__ == "__main__":
    main()
