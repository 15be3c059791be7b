"""DQN: `dqn_clusterenv.py` compared with CleanRL's `dqn.py`.

    python -m experiments.benchmarks.dqn --cleanrl path/to/cleanrl/cleanrl/dqn.py \
        --cleanrl-python path/to/venv/bin/python

The scripts run in turn, each with one thread, with the same batches and as many gradient steps per
environment step. CleanRL is not part of this repository: clone https://github.com/vwxyzjn/cleanrl
and pass the path of its dqn.py. That script needs Gymnasium 0.29, and therefore its own Python,
with the packages of `peers/requirements-cleanrl.txt`. Prints the environment steps per second that
each script logs, their ratio, the share of the time that our learner is busy, and the cost of
`--deterministic`.
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
    """path of CleanRL's dqn.py"""
    cleanrl_python: Path
    """path of a Python that can run CleanRL's dqn.py"""
    env_id: str = "CartPole-v1"
    """the environment"""
    total_timesteps: int = 100_000
    """environment steps of each run"""
    rounds: int = 3
    """rounds; each runs all scripts in turn"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    common = ["--env-id", args.env_id, "--total-timesteps", str(args.total_timesteps)]
    ratios, costs, shares = [], [], []
    for _ in range(args.rounds):
        cleanrl, _ = run(args.cleanrl, *common, python=args.cleanrl_python, OMP_NUM_THREADS="1")
        ours, summary = run(ROOT / "dqn_clusterenv.py", *common, OMP_NUM_THREADS="1")
        deterministic, _ = run(
            ROOT / "dqn_clusterenv.py", *common, "--deterministic", OMP_NUM_THREADS="1"
        )
        ratios.append(ours / cleanrl)
        costs.append(deterministic / ours)
        shares.append(1 - summary["learner_waiting_seconds"] / summary["wall_seconds"])
        print(
            f"CleanRL {cleanrl:,.0f}  ClusterEnv {ours:,.0f} steps/s: {ratios[-1]:.2f} times; "
            f"learner busy "
            f"{shares[-1]:.0%}; --deterministic {deterministic:,.0f}: {costs[-1]:.2f} times",
            flush=True,
        )
    print(
        f"medians: {statistics.median(ratios):.2f} times CleanRL, learner busy "
        f"{statistics.median(shares):.0%}, "
        f"--deterministic {statistics.median(costs):.2f} times ({args.env_id}, {os.cpu_count()} "
        f"cores)"
    )
