"""Training: our PPO scripts compared with CleanRL's, on the same environments in turn.

    python -m experiments.benchmarks.training --cleanrl path/to/cleanrl/ppo.py
    python -m experiments.benchmarks.training --cleanrl path/to/cleanrl/ppo_continuous_action.py \
        --total-timesteps 1000000
    python -m experiments.benchmarks.training --cleanrl path/to/cleanrl/ppo_atari.py \
        --total-timesteps 20480 --flags="--compile"

CleanRL is not part of this repository: clone https://github.com/vwxyzjn/cleanrl and pass the path
of a script. All scripts run in this Python, CleanRL's both with torch's default threads and with
one. `ppo.py` has the same batches as our script: environments, steps, epochs and minibatches. Each
has its own learning rate, discounts, reward scale and clipping of values, and only ours overlaps.
For `ppo_continuous_action.py`, both scripts have their own defaults, with batches of 2048 steps.
`ppo_atari.py` and `ppo_atari_envpool.py` have the same settings as our script. Prints the training
steps per second that each script logs, the ratio to the faster of CleanRL's two runs, and the mean
return of the last 100 episodes. Each round has its own seed.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from .scripts import ROOT, run

PPO = ["--num-steps", "128", "--num-minibatches", "4", "--update-epochs", "4"]
SCRIPTS = {  # CleanRL's script: (our script, environment, CleanRL's flags, our flags)
    "ppo.py": (
        "ppo_clusterenv.py", "LunarLander-v3",
        [*PPO, "--num-envs", "64"], [*PPO, "--num-workers", "2", "--envs-per-worker", "32"],
    ),
    "ppo_continuous_action.py": ("scripts/ppo_continuous_clusterenv.py", "HalfCheetah-v5", [], []),
    "ppo_atari.py": ("scripts/ppo_atari_clusterenv.py", "BreakoutNoFrameskip-v4", [], []),
    "ppo_atari_envpool.py": ("scripts/ppo_atari_clusterenv.py", "Breakout-v5", [], ["--envpool=1"]),
}  # fmt: skip


@dataclass
class Args:
    cleanrl: Path
    """path of CleanRL's ppo.py, ppo_continuous_action.py, ppo_atari.py or ppo_atari_envpool.py"""
    env_id: str | None = None
    """the environment; by default LunarLander-v3, HalfCheetah-v5 or Breakout, by script"""
    flags: str = ""
    """further flags of our script, in one string"""
    total_timesteps: int = 200_000
    """environment steps of each run"""
    rounds: int = 3
    """rounds; each runs both scripts in turn"""
    one_thread: bool = False
    """run CleanRL's script with one thread only, if that is known to be faster"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.cleanrl.name not in SCRIPTS:
        raise SystemExit(f"--cleanrl must name {' or '.join(SCRIPTS)}, got {args.cleanrl}")
    script, env_id, theirs, ours = SCRIPTS[args.cleanrl.name]
    env_id = args.env_id or env_id
    threads = [{"OMP_NUM_THREADS": "1"}] + [{}] * (not args.one_thread)
    ratios, returns = [], []
    for seed in range(1, args.rounds + 1):
        common = [
            "--env-id",
            env_id,
            "--total-timesteps",
            str(args.total_timesteps),
            "--seed",
            str(seed),
        ]
        wrapped = (
            ROOT / "experiments" / "benchmarks" / "cleanrl.py",
            str(args.cleanrl.resolve()),
            *common,
            *theirs,
        )
        rates, (summary, *_) = zip(
            *[run(*wrapped, **variables) for variables in threads], strict=True
        )
        clusterenv, own = run(ROOT / script, *common, *ours, *shlex.split(args.flags))
        ratios.append(clusterenv / max(rates))
        returns.append((summary["mean_return_100"], own["mean_return_100"]))
        cleanrl = (
            f"CleanRL, one thread{', default' * len(rates[1:])}: "
            f"{', '.join(f'{rate:,.0f}' for rate in rates)}"
        )
        print(
            f"seed {seed}: {cleanrl}; ClusterEnv {clusterenv:,.0f} steps/s, {ratios[-1]:.2f} "
            f"times; "
            f"returns {returns[-1][0]:.0f} and {returns[-1][1]:.0f}",
            flush=True,
        )
    print(f"median ratio {np.median(ratios):.2f} ({env_id}, {os.cpu_count()} cores), ", end="")
    print("mean returns {:.0f} and {:.0f}".format(*np.mean(returns, 0)))
