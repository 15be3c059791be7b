"""Forged parts of a checkpoint: a state that cannot be genuine is refused before it does harm."""

import msgspec
import pytest
import torch

from clusterenv_runtime import ClusterEnv
from clusterenv_utils.checkpoint import (
    load_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from clusterenv_utils.logs import LearningCurve

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
    other.load_state_dict(load_checkpoint(tmp_path)["state"])
    with torch.no_grad():
        for parameter, of_other in zip(parameters, others, strict=True):
            of_other.copy_(parameter)
            of_other.grad = parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other.step()
    assert all(torch.equal(*each) for each in zip(parameters, others, strict=True))


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
