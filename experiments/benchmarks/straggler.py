"""The speed that is lost by waiting for slow workers and slow steps.

    python -m experiments.benchmarks.straggler          # `rollout`, and `send` and `recv`
    python -m experiments.benchmarks.straggler --ppo --delay 0.008 --seconds 15
    python -m experiments.benchmarks.straggler --sac --num-workers 10 --delay 0.04 --seconds 40

The environments sleep, so that few cores are enough. One of four workers is ten times slower than
the others. The first command prints the steps per second with and without the slow worker, by
`rollout`, in which all workers wait for the slowest, and by `send` and `recv`, in which none waits.
Streaming loses at least the slow worker's own share.

The second command measures the same with the whole PPO script, with `--no-overlap`, `--overlap` and
`--stream` in turn. It also runs eight workers on which the time of each step is drawn from a
lognormal distribution (sigma 1). Beside the measured speeds, it prints the speed that remains if
only waiting for the slowest worker costs time, from 20,000 drawn rollouts.

The third command runs `sac_clusterenv.py` with one gradient step for eight environment steps, so
that the workers set the pace.
"""

import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

from clusterenv_runtime import ClusterEnv, EpsilonGreedyPolicy

from .scripts import ROOT, steady

MODES = {f"`{flag}`": (flag,) for flag in ("--no-overlap", "--overlap", "--stream")}


@dataclass
class Args:
    num_workers: int = 4
    """workers, the last of which is slow"""
    delay: float = 0.002
    """seconds per step on the other workers"""
    seconds: float = 10
    """seconds per measurement"""
    ppo: bool = False
    """measure ppo_clusterenv.py"""
    sac: bool = False
    """measure sac_clusterenv.py"""
    rounds: int = 3
    """rounds of --ppo and --sac; each measures all settings in turn"""


class SleepingEnv(gym.Env):
    """An environment that sleeps in each step, ``slowdown`` times as long on ``slow_worker``."""

    observation_space = gym.spaces.Box(-1, 1, (4,))

    def __init__(self, delay, slow_worker=None, slowdown=1.0, sigma=0.0, continuous=False):
        self.action_space = gym.spaces.Box(-1, 1, (2,)) if continuous else gym.spaces.Discrete(2)
        is_slow = Path("/proc/self/comm").read_text() == f"worker {slow_worker}\n"
        self.delay, self.sigma = delay * (slowdown if is_slow else 1), sigma

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.delay * math.exp(self.sigma * self.np_random.normal()))
        return np.zeros(4, np.float32), 0.0, False, False, {}


gym.register("Sleeping-v0", SleepingEnv, max_episode_steps=100)


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


def train(args, script, num_workers, *flags, **env):
    """Return a script's steps per second."""
    kwargs = " ".join(f"{name}={value}" for name, value in {"delay": args.delay, **env}.items())
    steps, seconds = steady(
        ROOT / script, "--env-id", "experiments.benchmarks.straggler:Sleeping-v0",
        "--env-kwargs", kwargs, "--num-workers", str(num_workers), "--envs-per-worker", "1",
        "--eval-episodes", "0", "--max-seconds", str(args.seconds), *flags,
    )  # fmt: skip
    return steps / seconds


def measure_ppo(args):
    number, slow = args.num_workers, {"slow_worker": args.num_workers - 1, "slowdown": 10}
    settings = {"as fast": (number, 32, {}), "one ten times slower": (number, 32, slow)}
    settings |= {f"lognormal, {steps} steps": (8, steps, {"sigma": 1}) for steps in (16, 64)}
    found = {(setting, mode): [] for setting in settings for mode in MODES}
    for _ in range(args.rounds):
        for setting, mode in found:
            num_workers, num_steps, env = settings[setting]
            flags = "--num-steps", str(num_steps), "--num-minibatches", "4", *MODES[mode]
            rate = train(args, "ppo_clusterenv.py", num_workers, *flags, **env)
            found[setting, mode].append(rate)
    rows = {setting: [np.median(found[setting, mode]) for mode in MODES] for setting in settings}
    even, uneven = rows["as fast"], rows["one ten times slower"]
    print(
        f"| steps per second | {' | '.join(MODES)} | if only waiting costs |\n|---|---|---|---|---|"
    )
    for setting, rates in rows.items():
        num_workers, num_steps, env = settings[setting]
        rest = ""
        if env.get("sigma"):
            times = np.random.default_rng(1).lognormal(0, 1, (20_000, 8, num_steps)).sum(-1)
            rest = f"{times.mean() / times.max(1).mean():.2f} of streaming"
        elif env:
            rest = f"0.10, streaming {(number - 0.9) / number:.2f}"
        print(f"| {setting} | {' | '.join(f'{rate:.0f}' for rate in rates)} | {rest} |")
    ratios = np.divide(uneven, even)
    print("with the slow one, of the speed without:", ", ".join(f"{each:.2f}" for each in ratios))
    for setting in list(settings)[2:]:
        each = [np.divide(found[setting, mode], found[setting, "`--stream`"]) for mode in MODES]
        text = ", ".join(f"{np.median(ratio):.2f}" for ratio in each)
        print(f"{setting}, of the speed of streaming: {text}")


def measure_sac(args, best):
    script, flags = "scripts/sac_clusterenv.py", ["--utd", "0.125", "--learning-starts", "320"]
    flags += ["--total-timesteps", "32000"]  # sets the pace of a run's 200 reports
    ratios = []
    for _ in range(args.rounds):
        even, uneven = (
            train(args, script, args.num_workers, *flags, continuous=True, **slow)
            for slow in ({}, {"slow_worker": args.num_workers - 1, "slowdown": 10})
        )
        ratios.append(uneven / even)
        share = f"{ratios[-1]:.2f} times (best: {best:.2f})"
        print(f"{even:,.0f} steps/s, with the slow one {uneven:,.0f}: {share}", flush=True)
    print(f"median {np.median(ratios):.2f} times")


if __name__ == "__main__":
    args = tyro.cli(Args)
    best = (args.num_workers - 0.9) / args.num_workers
    if args.ppo:
        measure_ppo(args)
        sys.exit()
    if args.sac:
        measure_sac(args, best)
        sys.exit()
    for name, stream in (("rollout", False), ("send and recv", True)):
        even, uneven = steps_per_second(args, 1, stream), steps_per_second(args, 10, stream)
        share = f"{uneven / even:.2f} times (best: {best:.2f})"
        print(f"{name}: {even:,.0f} steps/s, with the slow one {uneven:,.0f}: {share}")
