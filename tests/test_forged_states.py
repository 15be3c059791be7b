"""Forged parts of a checkpoint: a state that cannot be genuine is refused before it does harm."""

import functools
import operator

import msgspec
import numpy as np
import pytest
import torch
from gymnasium import spaces

from clusterenv_runtime import ClusterEnv
from clusterenv_utils import ReplayBuffer
from clusterenv_utils.checkpoint import (
    load_checkpoint,
    load_part,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from clusterenv_utils.curve import LearningCurve
from clusterenv_utils.frame_replay import ReplayBuffer as FrameReplayBuffer

from .envs import CountingEnv


@pytest.fixture(scope="module")
def envs():
    with ClusterEnv([CountingEnv], 1) as envs:
        yield envs


def an_optimizer(steps=0):
    """Return an optimizer like the scripts', and its parameters, of which one gets no gradient."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (2,), (5,))]
    optimizer = torch.optim.Adam(parameters, lr=0.1, eps=1e-5, fused=True)
    for _ in range(steps):
        for parameter in parameters[:2]:
            parameter.grad = parameter.detach() ** 2
        optimizer.step()
    return optimizer, parameters


@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_goes_on_as_it_was(tmp_path, steps):
    optimizer, parameters = an_optimizer(steps)
    save_checkpoint(tmp_path, {"state": optimizer.state_dict()}, 1)
    other, others = an_optimizer()
    load_part(other, load_checkpoint(tmp_path)["state"])
    with torch.no_grad():
        for parameter, of_other in zip(parameters, others, strict=True):
            of_other.copy_(parameter)
            of_other.grad = parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other.step()
    assert all(torch.equal(*each) for each in zip(parameters, others, strict=True))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("state.0.exp_avg", torch.zeros(1)),
        ("state.0.exp_avg", torch.zeros(1).expand(3, 2)),
        ("state.1.exp_avg_sq", torch.zeros(2, dtype=torch.float64)),
        ("state.1.step", torch.zeros(2)),
        ("state.1.step", 3),
        ("state.7", {}),
        ("state.0", {}),
        ("state", []),
        ("param_groups.0.betas", 5),
        ("param_groups.0.betas", (0.9, "x")),
        ("param_groups.0.eps", None),
        ("param_groups.0.lr", "x"),
        ("param_groups.0.params", [0, 1]),
        ("param_groups", []),
    ],
    ids=str,
)
def test_a_forged_state_of_an_optimizer_is_refused(path, value):
    state = an_optimizer(3)[0].state_dict()
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    functools.reduce(operator.getitem, way, state)[last] = value
    with pytest.raises((ValueError, TypeError, AttributeError)):
        load_part(an_optimizer()[0], state)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("numpy", lambda state: [state[0], state[1][:5], *state[2:]]),
        ("python", lambda state: (*state[:1], state[1][:5], *state[2:])),
        ("torch", lambda state: state[:100]),
    ],
)
def test_a_forged_state_of_random_numbers_is_refused(name, change):
    before = rng_state()
    try:
        with pytest.raises((ValueError, TypeError, RuntimeError, IndexError)):
            set_rng_state({**before, name: change(before[name])})
    finally:
        set_rng_state(before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("waiting_seconds", "long"),
        ("pulls", None),
        ("workers", 0),
        ("restarts", 5),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_forged_state_of_the_workers_is_refused(envs, name, value):
    before = envs.state_dict()
    with pytest.raises(ValueError, match="this is not the state of a ClusterEnv: "):
        envs.load_state_dict({**before, name: value})
    assert envs.state_dict() == before


@pytest.mark.parametrize(
    "state", [{"recent": ["x"]}, {"returns": 5}, {"lengths": [0.5]}, {"points": [(1, 2)]}], ids=str
)
def test_a_forged_state_of_the_learning_curve_is_refused(state):
    curve = LearningCurve()
    with pytest.raises(msgspec.ValidationError):
        LearningCurve().load_state_dict({**curve.state_dict(), **state})


@pytest.mark.parametrize(
    "change",
    [{"sample": 5}, {"size": 10**6}, {"inserted": "x"}, {"rewards": torch.zeros(3)}],
    ids=str,
)
def test_a_forged_state_of_a_replay_buffer_is_refused(change):
    def a_buffer():
        return ReplayBuffer(4, spaces.Box(-1, 1, (3,)), spaces.Discrete(2))

    state = a_buffer().state_dict()
    buffer = a_buffer()
    buffer.load_state_dict(state)
    buffer.load_state_dict({})  # a checkpoint without the content
    with pytest.raises(ValueError, match="the content of a replay buffer of another size or kind"):
        buffer.load_state_dict({**state, **change})


def test_a_buffer_of_frames_goes_on_with_other_workers_which_leave_room_for_other_frames():
    space = spaces.Box(0, 255, (4, 3, 3), np.uint8)
    buffer, other = FrameReplayBuffer(8, 30, space), FrameReplayBuffer(8, 40, space)
    buffer.frames += 1
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(other.frames, buffer.frames)
    wide = FrameReplayBuffer(8, 30, spaces.Box(0, 255, (4, 3, 5), np.uint8))
    with pytest.raises(ValueError, match="the content of a replay buffer of another size or kind"):
        wide.load_state_dict(buffer.state_dict())
