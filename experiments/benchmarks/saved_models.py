"""Saved models of continuous PPO, reloaded: whether they return as much as in training.

    python -m experiments.benchmarks.saved_models runs/HalfCheetah-v5__ppo_continuous__...

For each of the run directories, plays as many episodes with the saved model as the run's own
evaluation did, with other seeds. Prints their mean beside the interval that holds 95
of the last 100 episodes of training.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import tyro

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime.script.checkpoint import load_checkpoint
from clusterenv_runtime.script.model import load_model
from scripts.ppo_continuous_clusterenv import Args as ScriptArgs
from scripts.ppo_continuous_clusterenv import make_env, make_policy


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """directories of finished runs"""


def play(args, model):
    """Return the returns of a model's episodes, with seeds that training did not have."""
    env_fn = make_env(args.env_id, 1, False, "", **args.make_kwargs)
    with ClusterEnv([env_fn] * args.num_workers, args.num_workers) as envs:
        agent, policy = make_policy(args, envs)
        agent.load_state_dict(load_model(model).model)
        return envs.evaluate(policy, args.eval_episodes, seed=args.seed + 200_000).returns


if __name__ == "__main__":
    inside, runs = 0, tyro.cli(Args).runs
    for run in runs:
        args = msgspec.convert(json.loads((run / "summary.json").read_text())["args"], ScriptArgs)
        returns = play(args, run / f"{args.exp_name}.cleanrl_model")
        low, high = np.percentile(load_checkpoint(run)["parts"]["curve"]["recent"], [2.5, 97.5])
        inside += low <= returns.mean() <= high
        task = (
            f"{args.env_id}, {args.sync_mode} {args.weights} {args.kl_threshold:g}, seed "
            f"{args.seed}"
        )
        print(f"{task}: {returns.mean():.0f}, in training {low:.0f} to {high:.0f}", flush=True)
    print(f"{inside} of {len(runs)} inside")
