"""How soon the rows of a killed worker answer again, without and with a process that stands by (`--standby-workers 1`).

    python -m benchmarks.recovery

Kills one of two workers at random (`kill -9`) in the midst of rollouts, and takes the time until the rollout that
lacked its rows is whole. Prints the median and the longest, what of it had passed when another process had its place,
what the first rollout takes, and the memory of a process that stands by.
"""

import os
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import torch
import tyro

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, LocalLauncher


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """with vectors for observations and numbers for actions"""
    kills: int = 20
    """how many workers are killed, one after the other"""
    pause: float = 5
    """seconds after each, in which the next process can get ready"""


def memory(pid):
    """Return the resident and the proportional set size of a process, in MB; the latter divides what is shared."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = dict(line.split()[:2] for line in lines if line.startswith(("Rss:", "Pss:")))
    return [int(sizes[name]) / 1000 for name in ("Rss:", "Pss:")]


def recover(envs, policy):
    """Kill a worker; return the seconds until another process is in its place, and until its rows are there again."""
    before, pid, killed = len(envs.restarts), random.choice([worker.pid for worker in envs._pool.workers]), []

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


def measure(args, standby_workers):
    env_fns, launcher, median = [partial(gym.make, args.env_id)] * 8, LocalLauncher(), statistics.median
    start = time.perf_counter()
    with ClusterEnv(env_fns, 2, launcher=launcher, standby_workers=standby_workers) as envs:
        policy = CategoricalPolicy(torch.nn.Linear(envs.single_observation_space.shape[0], envs.single_action_space.n))
        envs.publish(policy)
        envs.reset(seed=1)
        envs.rollout(policy, 128)
        begun, times = time.perf_counter() - start, []
        for _ in range(args.kills):
            time.sleep(args.pause)
            times.append(recover(envs, policy))
        replaced, answered = zip(*times, strict=True)
        print(
            f"{standby_workers} standing by: answers after {median(answered):.2f} s, at most {max(answered):.2f}; "
            f"{median(replaced):.2f} s of it until replaced. The first rollout came after {begun:.2f} s"
        )
        time.sleep(args.pause)
        for process in launcher._standbys:
            print("its memory: {:.0f} MB, {:.0f} if what is shared is divided".format(*memory(process.pid)))


if __name__ == "__main__":
    args = tyro.cli(Args)
    for standby_workers in (0, 1):
        measure(args, standby_workers)
