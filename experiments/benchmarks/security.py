"""The costs of CURVE and heartbeats: rollouts over ipc, plain tcp and encrypted tcp.

    python -m experiments.benchmarks.security

The environments cost nothing, so only the transport counts. Observations are vectors like
LunarLander's, and Atari's stacked images (84 x 84 x 4 bytes a step, 28 kB). All variants take
turns, `--rounds` times. Prints the medians of environment steps per second, and their ratios to
plain tcp without heartbeats.
"""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import tyro

from clusterenv_runtime import CategoricalPolicy, ClusterEnv

from .idle import Corner, IdleEnv

TCP = {"bind_address": "127.0.0.1"}
VARIANTS = {
    "tcp, no heartbeats": {
        **TCP,
        "security": "none",
        "allow_insecure": True,
        "worker_timeout": 1e5,
    },
    "tcp, heartbeats": {
        **TCP,
        "security": "none",
        "allow_insecure": True,
        "worker_timeout": 1.0,
    },  # five heartbeats a second
    "tcp, CURVE, heartbeats": {**TCP, "worker_timeout": 1.0},
    "ipc, heartbeats": {"worker_timeout": 1.0},
}


@dataclass
class Args:
    rounds: int = 5
    """rounds; each measures all variants in turn"""
    seconds: float = 3
    """seconds per measurement"""
    num_workers: int = 2
    """worker processes, with 8 environments each"""


def steps_per_second(args, env_fn, variant):
    policy = CategoricalPolicy(Corner())
    with ClusterEnv([env_fn] * (8 * args.num_workers), args.num_workers, **variant) as envs:
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
        measured = {variant: [] for variant in VARIANTS}
        for _ in range(args.rounds):
            for variant, arguments in VARIANTS.items():
                measured[variant].append(
                    steps_per_second(args, partial(IdleEnv, *space), arguments)
                )
        plain = np.median(measured["tcp, no heartbeats"])
        for variant, speeds in measured.items():
            print(
                f"{name}, {variant}: {np.median(speeds):,.0f} steps/s ({min(speeds):,.0f} to "
                f"{max(speeds):,.0f}), "
                f"{np.median(speeds) / plain:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
