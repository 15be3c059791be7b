"""How long until a task is solved: seconds to a mean return over the last 100 episodes, for several
seeds.

    python -m experiments.benchmarks.time_to_solve
    python -m experiments.benchmarks.time_to_solve --env-id LunarLander-v3 --flags="--gamma 0.99"

Trains with the environment's script, one seed after the other, to the end. Seconds count from the
start of the process, with its imports and the workers' start. Beside them stand the seconds of
training alone, and the environment steps.
"""

import math
import shlex
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tyro

from .scripts import ROOT, train

CARTPOLE = "--num-steps 64 --update-epochs 8 --learning-rate 1e-3 --total-timesteps 400000"
TASKS = {  # environment: (the return at which it counts as solved, script, flags)
    "LunarLander-v3": (200, "ppo_clusterenv.py", ""),
    "CartPole-v1": (475, "ppo_clusterenv.py", CARTPOLE),
    # CleanRL's report for ppo_continuous_action.py after a million steps, in v4.
    "HalfCheetah-v5": (1443, "scripts/ppo_continuous_clusterenv.py", ""),
}


@dataclass
class Args:
    env_id: tuple[Literal["LunarLander-v3", "CartPole-v1", "HalfCheetah-v5"], ...] = tuple(TASKS)
    """the environments"""
    flags: str = ""
    """further flags, in one string"""
    seeds: int = 5
    """seeds, from 1"""


def solve(env_id, seed, flags):
    """Return the seconds since the start of the process, those of training, and the steps; NaN if
    the task was not solved.
    """
    target, script, own = TASKS[env_id]
    start = time.time()
    scalars, _ = train(
        ROOT / script, "--env-id", env_id, "--seed", str(seed), "--eval-episodes", "1",
        *shlex.split(own), *shlex.split(flags),
    )  # fmt: skip
    for returned, sps in zip(scalars("charts/mean_return_100"), scalars("charts/SPS"), strict=True):
        if returned.value >= target:
            return returned.wall_time - start, returned.step / sps.value, returned.step
    return math.nan, math.nan, math.nan


if __name__ == "__main__":
    args = tyro.cli(Args)
    for env_id in args.env_id:
        found = []
        for seed in range(1, args.seeds + 1):
            found.append(solve(env_id, seed, args.flags))
            seconds, training, steps = found[-1]
            print(
                f"{env_id}, seed {seed}: {seconds:.1f} s, {training:.1f} of them training; "
                f"{steps:,.0f} steps",
                flush=True,
            )
        # An unsolved one counts as longer than any solved one.
        seconds, training, steps = np.median(np.nan_to_num(found, nan=math.inf), axis=0)
        target = TASKS[env_id][0]
        print(
            f"{env_id} to {target}: median {seconds:.1f} s, {training:.1f} of them training; "
            f"{steps:,.0f} steps"
        )
