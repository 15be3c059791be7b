"""Play episodes with a trained model.

python tools/play.py runs/NAME --video
"""

import os
import shutil
import sys
import time
from dataclasses import dataclass

import numpy as np
import tyro

from clusterenv_runtime import ClusterEnv
from clusterenv_utils.arguments import check_ranges
from clusterenv_utils.errors import check, one_line_for_environments, print_error
from clusterenv_utils.evaluation import FIRST_SEED
from clusterenv_utils.trained import Trained

MOST_FILMED = 2_000  # the most steps of an episode, whose pictures are in memory until its end


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """the run's directory, `runs/NAME`, or the file of a model"""
    best: bool = False
    """take the best model of `--eval-interval`, not the last one"""
    script: str | None = None
    """the script's file; by default the script with the recorded name, here or in `scripts/`"""
    env_id: str | None = None
    """the environment, to replace that of training, or to confirm one whose id can run code"""
    env_kwargs: str | None = None
    """arguments for the environment's constructor, to replace or confirm those of training"""
    num_episodes: int = 10
    """the number of episodes to play"""
    deterministic: bool = False
    """take the policy's most likely actions, not sampled actions"""
    seed: int | None = None
    """the seed of the first episode, which increases by one with each episode; by default the first
    seed of the run's evaluation
    """
    video: bool = False
    """record one more episode, with the first episode's seed, as `play.mp4` beside the model"""


def play(args, trained, policy=None):
    """Play episodes on a local worker, print their returns, and return the policy."""
    seed = trained.args.seed + FIRST_SEED if args.seed is None else args.seed
    with one_line_for_environments(trained.args):
        envs = ClusterEnv([trained.make_env()], num_workers=1)
    with envs:
        modes = envs.metadata.get("render_modes", ())
        check("rgb_array" in modes or not args.video, f"{trained.args.env_id} renders no pictures")
        policy = trained.policy(envs)
        print(f"{trained.path}, by {trained.script}, plays {trained.args.env_id}", flush=True)
        start, returns = time.monotonic(), []
        for episode in range(args.num_episodes):
            how = {"seed": seed + episode, "deterministic": args.deterministic}
            found = envs.evaluate(policy, 1, **how)
            returns += found.returns.tolist()
            print(f"episode {episode + 1}: return {returns[-1]:.1f} in {found.lengths[0]} steps")
    spread = f"standard deviation {np.std(returns):.1f}, {time.monotonic() - start:.1f} s"
    print(f"mean return {np.mean(returns):.1f} of {len(returns)} episodes, {spread}")
    if args.video:
        film(trained, policy, {"seed": seed, "deterministic": args.deterministic})


def film(trained, policy, how):
    """Play an episode on a worker, whose environment records it, and move the video."""
    folder = f"{os.path.dirname(trained.path) or '.'}/play.parts"
    trained.args.capture_video = True
    try:
        with one_line_for_environments(trained.args):
            # make_env records into videos/NAME
            env_fn = trained.make_env(os.path.relpath(folder, "videos"))
            with ClusterEnv([env_fn], num_workers=1) as envs:
                envs.evaluate(policy, 1, **how, max_steps=MOST_FILMED)
        recorded = f"{folder}/rl-video-episode-0.mp4"
        check(os.path.isfile(recorded), "there is no video: make_env has recorded nothing")
        os.replace(recorded, folder.replace("play.parts", "play.mp4"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"recorded {folder.replace('play.parts', 'play.mp4')}")


if __name__ == "__main__":
    sys.excepthook = print_error
    sys.path.append(os.getcwd())
    args = tyro.cli(Args, description=__doc__)
    check_ranges(args)
    play(args, Trained(args.run, args.best, args.script, args.env_id, args.env_kwargs))
