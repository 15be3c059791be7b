"""The cost of encryption: rollouts over tcp with CURVE, compared with a socket file.

    python -m experiments.benchmarks.security

The environments cost nothing, so only the transport counts. Observations are vectors like
LunarLander's, and Atari's stacked images (84 x 84 x 4 bytes a step, 28 kB). Both take turns,
`--rounds` times. Prints the medians of environment steps per second, and their ratios to those of
the socket file.
"""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import tyro

from clusterenv_runtime import CategoricalPolicy, ClusterEnv

from .idle import Corner, IdleEnv
from .scale import TRANSPORTS


@dataclass
class Args:
    rounds: int = 5
    """rounds; each measures both in turn"""
    seconds: float = 3
    """seconds per measurement"""
    num_workers: int = 2
    """worker processes, with 8 environments each"""


def steps_per_second(args, env_fn, options):
    policy = CategoricalPolicy(Corner())
    with ClusterEnv([env_fn] * (8 * args.num_workers), args.num_workers, **options) as envs:
        envs.reset(seed=1)
        envs.rollout(policy, 128)  # warm
        steps, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < args.seconds:
            steps += envs.rollout(policy, 128).rewards.size
        return steps / seconds


def main():
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    for name, space in {
        "vectors (8,) float32": ((8,), np.float32),
        "images (84, 84, 4) uint8": ((84, 84, 4), np.uint8),
    }.items():
        measured = {transport: [] for transport in TRANSPORTS}
        for _ in range(args.rounds):
            for transport, options in TRANSPORTS.items():
                speed = steps_per_second(args, partial(IdleEnv, *space), options)
                measured[transport].append(speed)
        plain = np.median(measured["ipc"])
        for transport, speeds in measured.items():
            print(
                f"{name}, {transport}: {np.median(speeds):,.0f} steps/s ({min(speeds):,.0f} to "
                f"{max(speeds):,.0f}), {np.median(speeds) / plain:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
