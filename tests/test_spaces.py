"""The head's knowledge of the environments: it makes none, and workers report their spaces."""

import contextlib
import os
import subprocess
import sys
from functools import partial

import gymnasium as gym
import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, ExternalLauncher
from clusterenv_runtime.envs.blueprint import Blueprint
from clusterenv_runtime.errors import ProtocolError
from clusterenv_runtime.wire.buffers import Arrays, to_buffers
from clusterenv_runtime.wire.codec import pack, unpack

from .envs import CountingEnv, RandomEnv
from .nets import linear
from .patience import PATIENCE

OF_GYMNASIUM = [
    spaces.Box(-1, 2, (3,), np.float32),
    spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 5]), dtype=np.float64),
    spaces.Box(0, 255, (4, 84, 84), np.uint8),
    spaces.Discrete(3, start=-1),
    spaces.MultiBinary((2, 3)),
    spaces.MultiDiscrete([2, 3], start=[1, 0]),
    spaces.Text(4, charset="abc"),
    spaces.Sequence(spaces.Discrete(2), stack=True),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1)]),
    spaces.Dict(b=spaces.Tuple([spaces.Discrete(2)]), a=spaces.Dict({"7": spaces.Box(0, 1)})),
]


def sent(value):
    arrays = []
    packed = pack(value, arrays)
    came = Arrays(to_buffers(arrays))
    unpacked = unpack(packed, came)
    came.end()
    return unpacked


@pytest.mark.parametrize("space", OF_GYMNASIUM, ids=lambda space: type(space).__name__)
def test_a_space_of_gymnasium_arrives_as_it_is(space):
    space.seed(5)
    again = sent(space)
    assert again == space and repr(again) == repr(space) and type(again) is type(space)
    again.seed(3)
    space.seed(3)
    assert repr(again.sample()) == repr(space.sample())


class Angle(spaces.Box):
    """A user's space, with an attribute that cannot be sent."""

    def __init__(self):
        super().__init__(-np.pi, np.pi, (2,))
        self.unit = "rad"
        self.cannot_be_sent = object()

    def __new__(cls):
        assert not hasattr(cls, "is_at_head"), "its own code was called"
        return super().__new__(cls)


def test_a_space_of_a_known_class_keeps_its_class_and_none_of_its_code_is_called(monkeypatch):
    angle = Angle()
    monkeypatch.setattr(Angle, "is_at_head", True, raising=False)
    again = sent(angle)
    assert type(again) is Angle and again.unit == "rad" and not hasattr(again, "cannot_be_sent")
    assert np.array_equal(again.low, angle.low)


def test_a_space_of_an_unknown_class_becomes_one_of_its_base_class():
    elsewhere = type("Elsewhere", (Angle,), {"__module__": "simulator"})()
    name, elsewhere.__class__.__qualname__ = "Elsewhere", "Nowhere.Elsewhere"
    arrays = []
    packed = pack(elsewhere, arrays)
    elsewhere.__class__.__qualname__ = name
    assert type(unpack(packed, Arrays(to_buffers(arrays)))) is Angle


@pytest.mark.parametrize("told", [None, (), (1, 2, {}, None, []), (spaces.Discrete(2),) * 5])
def test_a_worker_must_report_spaces(told):
    blueprint = Blueprint([CountingEnv], None, "same", "NextStep")
    with pytest.raises((ProtocolError, msgspec.MsgspecError)):
        blueprint.learn(told, slice(0, 1))
    assert blueprint.layout is None


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
        for name in (
            "single_observation_space",
            "observation_space",
            "single_action_space",
            "action_space",
            "render_mode",
            "num_envs",
        ):
            assert getattr(envs, name) == getattr(here, name), name
        # Metadata that cannot be sent stays on the workers.
        kept = {key: value for key, value in here.metadata.items() if key != "simulator"}
        assert envs.metadata == kept
        assert envs.call("action_space") == here.call("action_space")


def test_workers_whose_spaces_differ_end_the_start_with_one_error(workers):
    before = workers()
    env_fns = [CountingEnv, CountingEnv, partial(RandomEnv, spaces.Box(0, 1, (7,)))]
    with pytest.raises(RuntimeError, match=r"observation space is Box.*another's is Box") as caught:
        ClusterEnv(env_fns, 3)
    assert "worker" in str(caught.value.__cause__)
    assert workers() == before


SIMULATOR = """
import gymnasium as gym
import msgspec
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
