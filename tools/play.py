"""Play episodes with a trained model.

python tools/play.py runs/NAME --video
"""

import os
import shutil
import sys
from dataclasses import dataclass

import numpy as np
import tyro

from clusterenv_runtime import ClusterEnv
from clusterenv_utils.arguments import check_ranges
from clusterenv_utils.errors import check, one_line_for_environments, print_error
from clusterenv_utils.evaluation import FIRST_SEED
from clusterenv_utils.trained import Trained, TrainedArgs

MOST_FILMED = 2_000  # the most steps of an episode, whose pictures are in memory until its end


@dataclass
class Args(TrainedArgs):
    episodes: int = 10
    """the number of episodes to play"""
    deterministic: bool = False
    """take the policy's most likely actions, not sampled actions"""
    seed: int | None = None
    """the seed of the first episode, which increases by one with each episode; by default the first
    seed of the run's evaluation
    """
    video: bool = False
    """record one more episode, with the first episode's seed, as `play.mp4` beside the model"""


def play(args, trained):
    """Play episodes on a local worker, and print their returns."""
    seed = trained.args.seed + FIRST_SEED if args.seed is None else args.seed
    with one_line_for_environments(trained.args):
        envs = ClusterEnv([trained.make_env()], num_workers=1)
    with envs:
        modes = envs.metadata.get("render_modes", ())
        check("rgb_array" in modes or not args.video, f"{trained.args.env_id} renders no pictures")
        policy = trained.policy(envs)
        print(f"{trained.path}, by {trained.script}, plays {trained.args.env_id}", flush=True)
        returns = []
        for episode in range(args.episodes):
            found = envs.evaluate(policy, 1, seed=seed + episode, deterministic=args.deterministic)
            returns += found.returns.tolist()
            print(f"episode {episode + 1}: return {returns[-1]:.1f} in {found.lengths[0]} steps")
    spread = f"standard deviation {np.std(returns):.1f}"
    print(f"mean return {np.mean(returns):.1f} of {len(returns)} episodes, {spread}")
    if args.video:
        film(trained, policy, seed, args.deterministic)


def film(trained, policy, seed, deterministic):
    """Play an episode in an environment that records it, and move the video beside the model."""
    video = os.path.join(os.path.dirname(trained.path), "play.mp4")
    folder = f"{video}.parts"
    trained.args.capture_video = True
    try:
        with one_line_for_environments(trained.args):
            env_fn = trained.make_env(os.path.relpath(folder, "videos"))
            with ClusterEnv([env_fn], num_workers=1) as envs:
                how = {"deterministic": deterministic, "max_steps": MOST_FILMED}
                envs.evaluate(policy, 1, seed=seed, **how)
        os.replace(f"{folder}/rl-video-episode-0.mp4", video)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"recorded {video}")


if __name__ == "__main__":
    sys.excepthook = print_error
    sys.path.append(os.getcwd())
    args = tyro.cli(Args, description=__doc__)
    check_ranges(args)
    play(args, Trained(args))
