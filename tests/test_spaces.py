"""The head's knowledge of the environments: it makes none, and workers report their spaces."""

import contextlib
import os
import subprocess
import sys
from functools import partial

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, ExternalLauncher

from .envs import CountingEnv
from .nets import linear
from .patience import PATIENCE


class AtWorkers(CountingEnv):
    """An environment that the head must not make."""

    head = os.getpid()
    metadata = {"render_modes": ["ansi"], "render_fps": 7, "simulator": object()}

    def __init__(self, head):
        assert os.getpid() != head, "the head has made an environment"
        super().__init__()
        self.render_mode = "ansi"


def test_the_head_makes_no_environment_but_knows_their_spaces():
    with ClusterEnv([partial(AtWorkers, os.getpid())] * 3, 2) as envs:
        here = SyncVectorEnv([partial(AtWorkers, 0)] * 3)
        names = "single_observation_space observation_space single_action_space action_space"
        for name in (*names.split(), "render_mode", "num_envs"):
            assert getattr(envs, name) == getattr(here, name), name
        # Metadata that cannot be sent stays on the workers.
        kept = {key: value for key, value in here.metadata.items() if key != "simulator"}
        assert envs.metadata == kept
        assert envs.call("action_space") == here.call("action_space")


SIMULATOR = """
import gymnasium as gym
import numpy as np

class Room(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}
    def step(self, action):
        self.steps += 1
        return np.full(3, 0.5, np.float32), 1.0, self.steps == 5, False, {}

gym.register("Room-v0", "simulator_of_workers:Room")
"""


class StartsWith(ExternalLauncher):
    """Starts the workers as a user does, with packages that this process does not have."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.processes = []

    def start_worker(self, index):
        variables = {**os.environ, "PYTHONPATH": str(self.path)}
        command = [sys.executable, *self.arguments(index)]
        self.processes.append(subprocess.Popen(command, env=variables))

    def stop(self, timeout):
        for process in self.processes:
            process.wait(PATIENCE)


def test_the_head_needs_no_package_of_the_environments(tmp_path):
    (tmp_path / "simulator_of_workers.py").write_text(SIMULATOR)
    launcher = StartsWith(tmp_path)
    make = [lambda: gym.make("simulator_of_workers:Room-v0")] * 2
    with contextlib.closing(
        ClusterEnv(make, 2, launcher=launcher, bind_address="127.0.0.1")
    ) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(CategoricalPolicy(linear(3, 3)), 10)
    assert "simulator_of_workers" not in sys.modules
    assert rollout.episodic_returns.tolist() == [5] * 4
    assert envs.single_observation_space == spaces.Box(-1, 1, (3,), np.float32)
