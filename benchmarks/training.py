"""Training: ppo_clusterenv.py beside CleanRL's ppo.py, same environments, same settings, in turn.

    python -m benchmarks.training --cleanrl path/to/cleanrl/ppo.py

CleanRL is not part of this repository: clone https://github.com/vwxyzjn/cleanrl and name its file. Both scripts run
unmodified in this Python, CleanRL's both with torch's default threads and with one. Prints the training steps per
second that each logs, and the ratio to the faster of CleanRL's two; the median over the rounds.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


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


def training_sps(script, *flags, **variables):
    """Run a script and return its last charts/SPS."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, **variables}
        command = [sys.executable, str(Path(script).resolve()), *flags]
        subprocess.run(command, cwd=directory, env=env, check=True, stdout=subprocess.DEVNULL)
        (run,) = Path(directory, "runs").iterdir()
        events = EventAccumulator(str(run))
        events.Reload()
        return events.Scalars("charts/SPS")[-1].value


if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parent.parent
    args = tyro.cli(Args)
    common = ["--env-id", args.env_id, "--total-timesteps", str(args.total_timesteps), "--num-steps", "128"]
    common += ["--num-minibatches", "4", "--update-epochs", "4"]
    ratios = []
    for _ in range(args.rounds):
        default, single = (
            training_sps(args.cleanrl, *common, "--num-envs", "64", **variables)
            for variables in ({}, {"OMP_NUM_THREADS": "1"})
        )
        clusterenv = training_sps(ROOT / "ppo_clusterenv.py", *common, "--num-workers", "2", "--envs-per-worker", "32")
        ratios.append(clusterenv / max(default, single))
        cleanrl = f"CleanRL {default:,.0f}, one thread {single:,.0f}"
        print(f"{cleanrl}; ClusterEnv {clusterenv:,.0f} steps/s: {ratios[-1]:.2f} times", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} ({args.env_id}, 64 environments, {os.cpu_count()} cores)")
