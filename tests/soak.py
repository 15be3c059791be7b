"""Run many workers for a long time, with rollouts, chunks and pulls, and check that neither memory
nor descriptors grow.

    python -m tests.soak --minutes 30 --workers 16

This prints its progress. At the end, it prints the slopes (Theil-Sen) of each process's resident
memory in each of the last three quarters of the time. It fails if a process has gained descriptors,
or more than 2 MiB per hour in each of the three quarters.
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.stats import theilslopes

from clusterenv_runtime import CategoricalPolicy, ClusterEnv

from .conftest import worker_commands
from .envs import CountingEnv
from .nets import change, linear


def resident_mib(pid):
    return (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    )


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def soak(seconds, num_workers, say=print, samples=500):
    """Run the workers. Return each sample's elapsed seconds, and each process's MiB and number of
    descriptors, the head's first, as an array ``(samples, 1 + num_workers, 2)``.
    """
    torch.set_num_threads(1)
    env_fns = [partial(CountingEnv, length=50)] * (2 * num_workers)
    # Allocated and written to before the start, so that the measurement itself does not grow.
    times, sizes = np.full(samples, -1.0), np.full((samples, 1 + num_workers, 2), -1.0)
    start, steps = time.monotonic(), 0
    with ClusterEnv(env_fns, num_workers, kl_threshold=0.0, bind_address="127.0.0.1") as envs:
        policy = CategoricalPolicy(linear(1, 2))
        envs.reset(seed=1)
        pids = [os.getpid(), *worker_commands()]
        for number in range(samples):
            while (elapsed := time.monotonic() - start) < (number + 1) * seconds / samples:
                for _ in range(5):
                    steps += envs.rollout(policy, 16).rewards.size
                    change(policy, 0.01)
                for _ in range(2):
                    envs.send(16)
                for _ in range(2 * num_workers):
                    steps += envs.recv()[1].rewards.size
                for _ in range(5):
                    steps += len(envs.step([0] * envs.num_envs)[1])
                envs.reset(seed=1)
            times[number], sizes[number] = (
                elapsed,
                [(resident_mib(pid), descriptors(pid)) for pid in pids],
            )
            if number % max(samples // 30, 1) == 0:
                head, workers = sizes[number, 0], sizes[number, 1:].max(0)
                say(
                    f"{elapsed:5.0f} s, {steps:,} steps, {envs.pulls.sum():,} pulls: head "
                    f"{head[0]:.1f} MiB, "
                    f"{head[1]:.0f} descriptors; workers at most {workers[0]:.1f} MiB, "
                    f"{workers[1]:.0f} descriptors"
                )
        assert not envs.restarts
    return times, sizes


def growth(times, sizes):
    """Yield each process's name, its slopes in MiB per hour in the last three quarters, and its
    gained descriptors.
    """
    quarters = np.array_split(np.arange(len(times)), 4)[1:]
    for number in range(sizes.shape[1]):
        slopes = [
            theilslopes(sizes[part, number, 0], times[part] / 3600).slope for part in quarters
        ]
        gained = int(sizes[-1, number, 1] - sizes[quarters[0][0], number, 1])
        yield "head" if number == 0 else f"worker {number - 1}", slopes, gained


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=16)
    args = parser.parse_args()
    bad = False
    for name, slopes, gained in growth(
        *soak(args.minutes * 60, args.workers, partial(print, flush=True))
    ):
        # A leak grows all the time, while malloc's arenas grow only now and then.
        leak = bool(min(slopes) > 2 or gained > 0)
        bad = bad or leak
        trend = ", ".join(f"{slope:+.2f}" for slope in slopes)
        print(
            f"{name}: {trend} MiB an hour in the last three quarters, {gained:+d} "
            f"descriptors{' LEAK' * leak}"
        )
    sys.exit(bad)


if __name__ == "__main__":
    main()
