"""How similar rollouts of the same seed, rows and policy are with different numbers of workers.

    python -m experiments.benchmarks.rows

Noise, and the states by which workers decide to pull, follow from the seed, the row and the number
of the rollout. The batches differ, so only the rounding of matrix products can differ. Trains a
policy by its gradient, with rollouts from each number of workers in turn. Prints how many rollouts
have other actions than with one worker, and the number of the first such rollout. After it, the
runs diverge.
"""

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn

from clusterenv_runtime import CategoricalPolicy, ClusterEnv


@dataclass
class Args:
    env_ids: tuple[str, ...] = ("CartPole-v1", "LunarLander-v3")
    """the environments"""
    workers: tuple[int, ...] = (2, 4, 8)
    """numbers of workers to compare with one worker"""
    num_envs: int = 64
    """environments in all"""
    num_steps: int = 64
    """steps per rollout"""
    rollouts: int = 50
    """rollouts, each followed by an update"""
    seeds: int = 3
    """number of seeds, from 1"""


def collect(args, env_id, num_workers, seed):
    """Yield the actions of each rollout of a policy that learns."""
    torch.manual_seed(seed)
    env = gym.make(env_id)
    actor = nn.Sequential(
        nn.Linear(env.observation_space.shape[0], 64), nn.Tanh(), nn.Linear(64, env.action_space.n)
    )
    policy, optimizer = CategoricalPolicy(actor), torch.optim.Adam(actor.parameters(), 1e-3)
    with ClusterEnv([lambda: gym.make(env_id)] * args.num_envs, num_workers) as envs:
        envs.reset(seed=seed)
        for _ in range(args.rollouts):
            rollout = envs.rollout(policy, args.num_steps)
            yield rollout.actions
            actions, rewards = (
                torch.as_tensor(rollout.actions),
                torch.as_tensor(rollout.rewards).float(),
            )
            logprobs = policy.distribution(policy(torch.as_tensor(rollout.observations))).log_prob(
                actions
            )
            optimizer.zero_grad()
            (-(logprobs * rewards).mean()).backward()
            optimizer.step()


def main():
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    for env_id in args.env_ids:
        for seed in range(1, args.seeds + 1):
            of_one = list(collect(args, env_id, 1, seed))
            for number in args.workers:
                pairs = zip(of_one, collect(args, env_id, number, seed), strict=True)
                same = [bool(np.array_equal(*pair)) for pair in pairs]
                first = f", the first at rollout {same.index(False) + 1}" if False in same else ""
                text = f"{same.count(False)} of {len(same)} rollouts have other actions{first}"
                print(f"{env_id}, seed {seed}, {number} workers: {text}", flush=True)


if __name__ == "__main__":
    main()
