"""One slow worker among others: the loss from waiting for it, in rollouts and in streaming.

    python -m experiments.benchmarks.straggler

The environments sleep, on `--num-workers` workers of which the last is slowed ten times. Prints the
steps per second with and without the slow one, by `rollout` (all wait for the slowest) and by
`send` and `recv` (none waits). Streaming can lose no less than the slow worker's own share.
"""

import time
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import torch
import tyro

from clusterenv_runtime import ClusterEnv, EpsilonGreedyPolicy


@dataclass
class Args:
    num_workers: int = 4
    """workers, the last of which is slow"""
    delay: float = 0.002
    """seconds a step takes on the others"""
    seconds: float = 10
    """of each measurement"""


class SleepingEnv(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)

    def __init__(self, delay):
        self.delay = delay

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.delay)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def steps_per_second(args, slowdown, stream):
    delays = [args.delay] * (args.num_workers - 1) + [args.delay * slowdown]
    policy, steps = EpsilonGreedyPolicy(torch.nn.Linear(4, 2)), 0
    with ClusterEnv([partial(SleepingEnv, delay) for delay in delays], args.num_workers) as envs:
        envs.publish(policy)
        envs.reset(seed=1)
        envs.rollout(policy, 8)
        if stream:
            for _ in range(2):
                envs.send(8)
        start = time.perf_counter()
        while time.perf_counter() - start < args.seconds:
            if stream:
                worker, chunk = envs.recv()
                envs.send(8, worker)
            else:
                chunk = envs.rollout(policy, 8)
            steps += chunk.rewards.size
        return steps / (time.perf_counter() - start)


if __name__ == "__main__":
    args = tyro.cli(Args)
    best = (args.num_workers - 0.9) / args.num_workers
    for name, stream in (("rollout", False), ("send and recv", True)):
        even, uneven = steps_per_second(args, 1, stream), steps_per_second(args, 10, stream)
        share = f"{uneven / even:.2f} times (best: {best:.2f})"
        print(f"{name}: {even:,.0f} steps/s, with the slow one {uneven:,.0f}: {share}")
