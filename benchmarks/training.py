"""Training: ppo_clusterenv.py beside CleanRL's ppo.py, same environments, same settings, in turn.

    python -m benchmarks.training --cleanrl path/to/cleanrl/ppo.py

CleanRL is not part of this repository: clone https://github.com/vwxyzjn/cleanrl and name its file. Both scripts run
unmodified in this Python, CleanRL's both with torch's default threads and with one. Prints the training steps per
second that each logs, and the ratio to the faster of CleanRL's two; the median over the rounds.
"""

import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import tyro

from .scripts import ROOT, run


@dataclass
class Args:
    cleanrl: Path
    """path of CleanRL's ppo.py"""
    env_id: str = "LunarLander-v3"
    """the environment"""
    total_timesteps: int = 200_000
    """environment steps of each run"""
    rounds: int = 3
    """rounds, each of both scripts in turn"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    common = ["--env-id", args.env_id, "--total-timesteps", str(args.total_timesteps), "--num-steps", "128"]
    common += ["--num-minibatches", "4", "--update-epochs", "4"]
    ratios = []
    for _ in range(args.rounds):
        default, single = (
            run(args.cleanrl, *common, "--num-envs", "64", **variables)[0]
            for variables in ({}, {"OMP_NUM_THREADS": "1"})
        )
        clusterenv, _ = run(ROOT / "ppo_clusterenv.py", *common, "--num-workers", "2", "--envs-per-worker", "32")
        ratios.append(clusterenv / max(default, single))
        cleanrl = f"CleanRL {default:,.0f}, one thread {single:,.0f}"
        print(f"{cleanrl}; ClusterEnv {clusterenv:,.0f} steps/s: {ratios[-1]:.2f} times", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} ({args.env_id}, 64 environments, {os.cpu_count()} cores)")
