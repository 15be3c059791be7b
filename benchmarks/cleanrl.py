"""Runs a script of CleanRL's, unmodified, with Gymnasium 1, for which most were not written.

    python benchmarks/cleanrl.py path/to/cleanrl/ppo_continuous_action.py --env-id HalfCheetah-v5 --seed 1

What they call differently is put back, and the mean return of the last 100 episodes, as the environment gave the
rewards, is left in `summary.json` in the run's directory.
"""

import json
import runpy
import sys
from collections import deque
from pathlib import Path

import gymnasium as gym
import numpy as np

returns = deque(maxlen=100)


class Episodes(gym.Wrapper):
    """Adds each episode's return to ``returns``."""

    def reset(self, **kwargs):
        self.episodic_return = 0.0
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.episodic_return += reward
        if terminated or truncated:
            returns.append(self.episodic_return)
        return observation, reward, terminated, truncated, info


if __name__ == "__main__":
    make, TransformObservation = gym.make, gym.wrappers.TransformObservation
    gym.make = lambda *args, **kwargs: Episodes(make(*args, **kwargs))
    gym.wrappers.TransformObservation = lambda env, function: TransformObservation(env, function, env.observation_space)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    (folder,) = Path("runs").iterdir()
    (folder / "summary.json").write_text(json.dumps({"mean_return_100": np.mean(returns)}))
