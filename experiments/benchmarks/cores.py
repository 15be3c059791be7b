"""The speed of training by the number of workers, on a machine of many cores.

    python -m experiments.benchmarks.cores

Runs PPO with the learner on the CPU in one thread and `--envs-per-worker` environments on each
worker. Then runs a loop in CleanRL's style in one process on the same machine, on AsyncVectorEnv
and on SyncVectorEnv, with as many environments as the largest number of workers has. Measures the
steady state, without start-up, the first iteration and the last. Prints environment steps per
second, the ratio to one worker, and for ClusterEnv the median seconds that an iteration spends
collecting and learning. In `experiments.benchmarks.cores:OneMillisecond-v0`, each step computes for
a millisecond.
"""

import os
import statistics
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import tyro

from . import work
from .scripts import ROOT, measure, train


class OneMillisecondEnv(gym.Env):
    """An environment whose steps keep a core busy for a millisecond. Episodes last 100 steps."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (8,)), gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(8, np.float32), {}

    def step(self, action):
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass
        self.steps += 1
        return np.zeros(8, np.float32), float(action == 0), self.steps == 100, False, {}


gym.register("OneMillisecond-v0", OneMillisecondEnv)


@dataclass
class Args:
    env_ids: tuple[str, ...] = (
        "experiments.benchmarks.cores:OneMillisecond-v0",
        "LunarLander-v3",
        "HalfCheetah-v5",
    )
    """the environments"""
    workers: tuple[int, ...] = (1, 2, 4, 8, 14)
    """numbers of workers"""
    envs_per_worker: int = 8
    """environments per worker"""
    iterations: int = 12
    """iterations per measurement; in each, a worker takes 128 steps in each environment"""
    loops: bool = True
    """also measure AsyncVectorEnv and SyncVectorEnv"""
    flags: tuple[str, ...] = ()
    """further flags of the script"""
    timeout: float = 300
    """seconds after which a measurement is given up"""


def clusterenv(args, env_id, num_workers):
    """Return steps per second in steady state, and the median seconds to collect and to learn."""
    script = "scripts/ppo_continuous_clusterenv.py" if "Cheetah" in env_id else "ppo_clusterenv.py"
    batch_size = num_workers * args.envs_per_worker * work.NUM_STEPS
    scalars, _ = train(
        ROOT / script, *work.FLAGS, "--env-id", env_id, "--num-workers", str(num_workers),
        "--envs-per-worker", str(args.envs_per_worker), "--total-timesteps",
        str(args.iterations * batch_size), "--no-overlap", *args.flags, timeout=args.timeout,
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    first, *_, last, _ = scalars("charts/SPS")
    parts = (
        statistics.median(s.value for s in scalars(f"time/{name}")[1:-1])
        for name in ("collect", "learn")
    )
    return (last.step - first.step) / (last.wall_time - first.wall_time), *parts


def report(env_id, name, sps, alone, details=""):
    print(
        f"{env_id}, {name}: {sps:,.0f} steps/s, {sps / alone:.2f} times one worker{details}",
        flush=True,
    )


if __name__ == "__main__":
    args = tyro.cli(Args)
    print(f"{os.cpu_count()} CPUs, {args.envs_per_worker} environments a worker", flush=True)
    for env_id in args.env_ids:
        alone = None
        for number in args.workers:
            sps, collect, learn = clusterenv(args, env_id, number)
            alone = alone or sps
            details = (
                f"; an iteration collects for {collect * 1000:.0f} ms and learns for "
                f"{learn * 1000:.0f} ms"
            )
            report(env_id, f"{number} workers", sps, alone, details)
        for vector in ("async", "sync") if args.loops else ():
            num_envs = args.envs_per_worker * max(args.workers)
            iterations = 2 if "OneMillisecond" in env_id and vector == "sync" else args.iterations
            steps, seconds = measure(
                "experiments.benchmarks.single",
                env_id,
                iterations,
                vector,
                num_envs,
                timeout=args.timeout,
            )
            report(env_id, f"loop on {num_envs} environments, {vector}", steps / seconds, alone)
