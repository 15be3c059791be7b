"""Saved models of continuous PPO, reloaded: whether they return as much as in training.

    python -m experiments.benchmarks.saved_models runs/HalfCheetah-v5__ppo_continuous__...

For each of the run directories, plays as many episodes with the saved model as the run's own
evaluation did, in environments of another seed. Prints their mean beside the interval that holds 95
of the last 100 episodes of training.
"""

import json
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import gymnasium as gym
import msgspec
import numpy as np
import torch
import tyro

from clusterenv_runtime.script import evaluate
from clusterenv_runtime.script.checkpoint import load_checkpoint
from scripts.ppo_continuous_clusterenv import Agent, make_env
from scripts.ppo_continuous_clusterenv import Args as ScriptArgs


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """directories of finished runs"""


def play(args, model):
    """Return the returns of a model's episodes, in environments that training did not have."""
    env = gym.make(args.env_id, **args.make_kwargs)
    space = env.action_space
    spaces = Namespace(single_observation_space=env.observation_space, single_action_space=space)
    agent = Agent(spaces, args.hidden_size)
    agent.load_state_dict(torch.load(model))
    torch.manual_seed(args.seed)

    def act(obs):
        action, _, _, _ = agent.get_action_and_value(torch.Tensor(obs))
        return action.numpy().clip(space.low, space.high)

    return evaluate(replace(args, seed=args.seed + 1000), make_env, act)


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
