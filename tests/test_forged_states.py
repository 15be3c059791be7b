"""Forged parts of a checkpoint: a state that cannot be genuine is refused before it does harm."""

import msgspec
import pytest

from clusterenv_runtime import ClusterEnv
from clusterenv_utils.checkpoint import (
    rng_state,
    set_rng_state,
)
from clusterenv_utils.logs import LearningCurve

from .envs import CountingEnv


@pytest.fixture(scope="module")
def envs():
    with ClusterEnv([CountingEnv], 1) as envs:
        yield envs


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
        envs.load_state_dict({**before, "policy_version": 77, "seed": 77, name: value})
    assert envs.state_dict() == before


@pytest.mark.parametrize(
    "state", [{"recent": ["x"]}, {"returns": 5}, {"lengths": [0.5]}, {"points": [(1, 2)]}], ids=str
)
def test_a_forged_state_of_the_learning_curve_is_refused(state):
    curve = LearningCurve()
    with pytest.raises(msgspec.ValidationError):
        LearningCurve().load_state_dict({**curve.state_dict(), **state})
