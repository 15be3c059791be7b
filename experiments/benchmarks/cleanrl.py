"""Run an unmodified CleanRL script with Gymnasium 1 and a recent EnvPool.

    python experiments/benchmarks/cleanrl.py path/to/cleanrl/ppo_continuous_action.py --env-id ...

Most of CleanRL's scripts were written for older versions. This module restores the interfaces that
they expect. It writes `summary.json` into the run's directory, with the mean return of the last 100
episodes, from the environment's own rewards. For Gymnasium's environments, it also logs the return
of each episode, which most of these scripts look for where old versions have it.
"""

import importlib
import json
import runpy
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
from torch.utils.tensorboard import SummaryWriter

returns = deque(maxlen=100)
episodes = []


class Episodes(gym.Wrapper):
    """A wrapper that adds each episode to ``episodes``, and its return to ``returns``."""

    steps = 0  # steps of all environments together

    def reset(self, **kwargs):
        self.episodic_return = 0.0
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        Episodes.steps += 1
        self.episodic_return += reward
        if terminated or truncated:
            returns.append(self.episodic_return)
            episodes.append((Episodes.steps, time.time(), float(self.episodic_return)))
        return observation, reward, terminated, truncated, info


class Wrapper(gym.Wrapper):
    """Gym's wrapper, which also has the attributes of the wrapped environment."""

    def __getattr__(self, name):
        return getattr(self.env, name)


class SameStep(gym.vector.SyncVectorEnv):
    """Gymnasium's old vector environment, which resets within the step that ends an episode."""

    def __init__(self, env_fns):
        super().__init__(env_fns, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    def step(self, actions):
        *outcome, infos = super().step(actions)
        infos.pop("final_info", None)  # a list in old versions
        if "final_obs" in infos:
            infos["final_observation"] = infos["final_obs"]
        return *outcome, infos


class Pool(gym.Env):
    """EnvPool's environments with Gym's old interface: one "done" instead of two flags."""

    def __init__(self, *args, **kwargs):
        self.envs = envpool.make_gymnasium(*args, **kwargs)
        self.observation_space, self.action_space = (
            self.envs.observation_space,
            self.envs.action_space,
        )
        self.sums = 0

    def reset(self, **kwargs):
        return self.envs.reset()[0]

    def step(self, action):
        observations, rewards, terminations, truncations, infos = self.envs.step(action)
        self.sums = self.sums + infos["reward"]  # the game's own rewards
        ended = infos["terminated"].astype(bool) | truncations
        returns.extend(self.sums[ended])
        self.sums[ended] = 0
        return observations, rewards, terminations | truncations, infos


if __name__ == "__main__":
    make, wrappers = gym.make, gym.wrappers
    TransformObservation = wrappers.TransformObservation
    gym.make = lambda *args, **kwargs: Episodes(make(*args, **kwargs))
    wrappers.TransformObservation = lambda env, function: TransformObservation(
        env, function, env.observation_space
    )
    wrappers.GrayScaleObservation, wrappers.FrameStack = (
        wrappers.GrayscaleObservation,
        wrappers.FrameStackObservation,
    )
    with suppress(ModuleNotFoundError):
        import envpool

        sys.modules["gym"] = SimpleNamespace(Wrapper=Wrapper, spaces=gym.spaces)
        envpool.make = lambda *args, env_type, **kwargs: Pool(*args, **kwargs)
    with suppress(ModuleNotFoundError):
        gym.register_envs(importlib.import_module("ale_py"))
    del sys.argv[0]
    if "final_observation" in Path(sys.argv[0]).read_text():
        gym.vector.SyncVectorEnv = SameStep
    # The folder that contains cleanrl_utils.
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent.parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    (folder,) = Path("runs").iterdir()
    with SummaryWriter(folder) as writer:
        for steps, when, episodic_return in episodes:
            writer.add_scalar("charts/episodic_return", episodic_return, steps, when)
    (folder / "summary.json").write_text(json.dumps({"mean_return_100": float(np.mean(returns))}))
