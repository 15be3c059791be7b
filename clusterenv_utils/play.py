"""Play episodes with a trained model.

python -m clusterenv_utils.play runs/NAME --video
"""

import os
import time
from dataclasses import dataclass

import numpy as np
import tyro

from clusterenv_runtime.env import ClusterEnv
from clusterenv_runtime.errors import StartupError, WorkerDiedError

from .arguments import Seed, check_moviepy
from .checks import one_line_for
from .environments import one_line_for_environments
from .evaluation import FIRST_SEED, check_pictures, film
from .progress import say
from .trained import Trained, TrainedArgs
from .types import Positive, check_values


@dataclass
class Args(TrainedArgs):
    """The model to play, and how to play it."""

    episodes: Positive = 10
    """the number of episodes to play"""
    deterministic: bool = False
    """take the policy's most likely actions, not sampled actions"""
    seed: Seed | None = None
    """the seed of the first episode, which increases by one with each episode; by default the first
    seed of the run's evaluation
    """
    video: bool = False
    """record one more episode, with the first episode's seed, as `play.mp4` beside the model"""


def play(args: Args) -> None:
    """Play episodes on a local worker, and print their returns."""
    trained = Trained(args)
    if args.video:
        check_moviepy("--video")
    seed = trained.args.seed + FIRST_SEED if args.seed is None else args.seed
    how = {"seed": seed, "deterministic": args.deterministic}
    with one_line_for_environments(trained.args):
        envs = ClusterEnv([trained.env_fn], num_workers=1)
    with envs:
        if args.video:
            check_pictures("--video", envs, trained.args.env_id)
        policy = trained.policy(envs)
        say(f"{trained.path}, by {trained.script}, plays {trained.args.env_id}")
        began = time.monotonic()
        returns = []
        for episode in range(args.episodes):
            how["seed"] = seed + episode
            found = envs.evaluate(policy, 1, **how)
            returns += found.returns.tolist()
            say(f"episode {episode + 1}: return {returns[-1]:.1f} in {found.lengths[0]} steps")
        seconds = time.monotonic() - began
    spread = f"standard deviation {np.std(returns):.1f}, {seconds:.1f} s"
    say(f"mean return {np.mean(returns):.1f} of {len(returns)} episodes, {spread}")
    if args.video:
        how["seed"] = seed
        video = os.path.join(os.path.dirname(trained.path), "play.mp4")
        film(trained.args, trained.module.make_env, policy, video, {"num_workers": 1}, **how)


def main() -> None:
    """Play the episodes that the command line asks for."""
    args = tyro.cli(Args, description=__doc__)
    with one_line_for(ValueError):
        check_values(args)
    with one_line_for(StartupError, WorkerDiedError):
        play(args)


if __name__ == "__main__":
    main()
