"""The time until the rows of a killed worker are back in rollouts.

    python -m experiments.benchmarks.recovery

Kills one of two workers at random (`kill -9`) during rollouts, and measures the time until the
rollout that lacks its rows is complete. Prints the median and the longest time, the median time
until a replacement takes the worker's place, and the time of the first rollout.
"""

import os
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import torch
import tyro

from clusterenv_runtime import CategoricalPolicy, ClusterEnv


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """an environment with vectors as observations and discrete actions"""
    kills: int = 20
    """number of workers to kill, one after another"""
    pause: float = 5
    """seconds between a recovery and the next kill"""


def recover(envs, policy):
    """Kill a worker. Return the seconds until its replacement, and until its rows are back."""
    before, pid, killed = (
        len(envs.restarts),
        random.choice([worker.process.pid for worker in envs._pool.workers]),
        [],
    )

    def kill():
        time.sleep(random.uniform(0.2, 0.6))
        killed[:] = time.time(), time.perf_counter()
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    while len(envs.restarts) == before:
        envs.rollout(policy, 128)
    end = time.perf_counter()
    thread.join()
    return envs.restarts[-1]["time"] - killed[0], end - killed[1]


def measure(args):
    env_fns, median = [partial(gym.make, args.env_id)] * 8, statistics.median
    start = time.perf_counter()
    with ClusterEnv(env_fns, 2) as envs:
        policy = CategoricalPolicy(
            torch.nn.Linear(envs.single_observation_space.shape[0], envs.single_action_space.n)
        )
        envs.publish(policy)
        envs.reset(seed=1)
        envs.rollout(policy, 128)
        begun, times = time.perf_counter() - start, []
        for _ in range(args.kills):
            time.sleep(args.pause)
            times.append(recover(envs, policy))
        replaced, answered = zip(*times, strict=True)
        print(
            f"answers after {median(answered):.2f} s, at most {max(answered):.2f}; "
            f"{median(replaced):.2f} s of it until replaced. The first rollout came after "
            f"{begun:.2f} s"
        )


if __name__ == "__main__":
    measure(tyro.cli(Args))
