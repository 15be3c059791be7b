"""The time until workers act, and the memory that they take.

    python -m experiments.benchmarks.startup
    python -m tests.slurm.lab --cores 17 salloc -N1 -n17 \\
        python -m experiments.benchmarks.startup --workers 2 8 16 --ways fork slurm

Each row makes CartPole's environments, one for each worker: forked, started singly, with
Gymnasium's `AsyncVectorEnv`, with Stable-Baselines3's `SubprocVecEnv` if it is installed, or as
steps of a Slurm job. Prints the seconds from the construction to the end of the first rollout of 32
steps (the first 32 steps of workers that do not act), the proportional set size of all processes
but this one, and the seconds to close. Each row is its own program, so nothing is left from the row
before.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import torch
import tyro

from clusterenv_runtime import CategoricalPolicy, ClusterEnv

WAYS = "fork", "spawn", "AsyncVectorEnv", "SubprocVecEnv"
STEPS = 32


@dataclass
class Args:
    workers: tuple[int, ...] = (1, 8, 32, 128)
    """numbers of workers"""
    ways: tuple[str, ...] = WAYS
    """ways to start workers; in a Slurm job also `slurm`"""
    limit: float = 300
    """seconds after which a row is given up"""


def descendants(pid):
    """Return the ids of all descendants of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in children for each in (int(child), *descendants(child))]


def workers_of_slurm():
    """Yield the ids of the worker processes that Slurm has started on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        command = path.read_bytes()
        if b"clusterenv_runtime.worker\0" in command and b"srun" not in command.split(b"\0")[0]:
            yield int(path.parent.name)


def mebibytes(way):
    """Return the proportional set size of all processes that this one, or Slurm, has started."""
    kibibytes = 0
    for pid in workers_of_slurm() if way == "slurm" else descendants(os.getpid()):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kibibytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kibibytes / 1024


def cluster_env(env_fns, way):
    how = {"launcher": "slurm"} if way == "slurm" else {"worker_start": way}
    envs = ClusterEnv(env_fns, len(env_fns), startup_timeout=300, **how)
    envs.reset(seed=1)
    envs.rollout(CategoricalPolicy(torch.nn.Linear(4, 2)), STEPS)
    return envs


def vector_env(env_fns):
    envs = gym.vector.AsyncVectorEnv(env_fns)
    envs.reset(seed=1)
    for _ in range(STEPS):
        envs.step(envs.action_space.sample())
    return envs


def subproc_vec_env(env_fns):
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = SubprocVecEnv(env_fns)
    envs.reset()
    for _ in range(STEPS):
        envs.step([0] * len(env_fns))
    return envs


def measure(way, number):
    """Measure and print one row of the table."""
    env_fns = [partial(gym.make, "CartPole-v1")] * number
    start = time.perf_counter()
    if way == "AsyncVectorEnv":
        envs = vector_env(env_fns)
    elif way == "SubprocVecEnv":
        envs = subproc_vec_env(env_fns)
    else:
        envs = cluster_env(env_fns, way)
    seconds = time.perf_counter() - start
    memory = mebibytes(way)
    start = time.perf_counter()
    envs.close()
    closing = time.perf_counter() - start
    print(f"| {way} | {number} | {seconds:.1f} | {memory:,.0f} | {closing:.1f} |", flush=True)


def main(args):
    print("| workers | number | s to the first rollout | MiB | s to close |\n|---|---|---|---|---|")
    sys.stdout.flush()
    for number in args.workers:
        for way in args.ways:
            code = f"from experiments.benchmarks.startup import measure; measure({way!r}, {number})"
            try:
                subprocess.run([sys.executable, "-c", code], timeout=args.limit, check=True)
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                print(f"| {way} | {number} | {type(error).__name__} | | |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
