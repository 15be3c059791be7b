"""How a worker's policy acts, and the errors of policies that do not fit their contract."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Distribution, Normal

from clusterenv_runtime import (
    CategoricalPolicy,
    ClusterEnv,
    EnvError,
    EpsilonGreedyPolicy,
    GaussianPolicy,
)

from .envs import CountingEnv
from .nets import acted_by, linear

ZEROS = np.zeros((2, 1), np.float32)  # two environments


class Unsummed(Normal):
    def log_prob(self, value):
        return super().log_prob(value[..., None])


class Infinite:
    def log_prob(self, actions):
        return torch.full(actions.shape, math.inf)


def policy_whose(method, does, actor=None):
    """Return a policy with one method of its own."""
    return type("Own", (CategoricalPolicy,), {method: does})(actor or linear(1, 2))


def forgetful(change):
    """Return a policy whose next state is ``change(state)``."""
    policy = policy_whose("forward", lambda self, x, state: (self.actor(x), change(state)))
    policy.initial_state = lambda num_envs: torch.zeros(num_envs, 3)
    return policy


WRONG = {
    "the policy's forward must give tensors (2, ...), got list": policy_whose(
        "forward", lambda self, x: [self.actor(x)]
    ),
    "the policy's forward must give tensors (2, ...), got (1, 2)": policy_whose(
        "forward", lambda self, x: self.actor(x)[:1]
    ),
    "the policy's forward must give tensors (2, ...), got NoneType": forgetful(lambda state: None),
    "the policy's forward returns a state (torch.float64, 2, 3), but its initial_state is "
    "(torch.float32, 2, 3)": forgetful(lambda state: state.double()),
    "the policy's forward returns a state ((torch.float32, 2, 3),), but its initial_state is "
    "(torch.float32, 2, 3)": forgetful(lambda state: (state,)),
    "the policy's noise must give tensors (3, 1, ...), got NoneType": policy_whose(
        "noise", lambda *_: None
    ),
    "the policy's noise must give tensors (3, 1, ...), got (3, 2)": policy_whose(
        "noise", lambda self, num_steps, params, generator: torch.zeros(num_steps, 2)
    ),
    "the policy's act must give tensors (2, ...), got (1,)": policy_whose(
        "act", lambda self, params, noise: params[:1].argmax(-1)
    ),
    "the policy's to_env must give tensors (2, ...), got ()": policy_whose(
        "to_env", lambda self, actions: actions.sum()
    ),
    "the policy's to_env must give tensors (2, ...), got ndarray": policy_whose(
        "to_env", lambda self, actions: actions.numpy()
    ),
    "the policy's log_prob gives (3, 2, 2) for (3, 2) actions, not one number for each: sum over "
    "the last dimensions": policy_whose("distribution", lambda self, params: Unsummed(params, 1)),
    "the policy's extras must give tensors (3, 2, ...), got ()": policy_whose(
        "extras", lambda *_: {"value": torch.zeros(())}
    ),
    "the policy's extras must give tensors (3, 2, ...), got float": policy_whose(
        "extras", lambda *_: {"value": 1.0}
    ),
}


DIVERGED = [
    CategoricalPolicy(nn.Sequential(linear(1, 2), nn.Threshold(math.inf, math.nan))),
    EpsilonGreedyPolicy(nn.Sequential(linear(1, 2), nn.Threshold(math.inf, math.nan)), 0.5),
    policy_whose("distribution", lambda self, params: Infinite()),
]


@pytest.fixture(autouse=True, scope="module")
def validates():
    """Restore torch's own default, which other tests' scripts and libraries may have changed."""
    Distribution.set_default_validate_args(__debug__)


@pytest.mark.parametrize("says", WRONG)
def test_a_policy_that_does_not_fit_its_contract_is_a_one_line_error(says):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        acted_by(WRONG[says], ZEROS)
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


def test_a_wrong_policy_is_an_error_of_the_first_rollout_and_a_reset_continues_the_run():
    wrong = policy_whose("extras", lambda *_: {"value": torch.zeros(())})
    cases = [
        (CategoricalPolicy(linear(7, 2)), RuntimeError, "shapes cannot be multiplied"),
        (CategoricalPolicy(nn.Linear(1, 2).double()), RuntimeError, "dtype"),
        *((policy, ValueError, "log-probabilities are not finite: has") for policy in DIVERGED),
        (wrong, ValueError, "the policy's extras must give tensors"),
    ]
    with ClusterEnv([CountingEnv] * 2, 1) as envs:
        envs.reset()
        with pytest.raises(
            TypeError, match=r"expected a Policy, such as CategoricalPolicy\(actor\), got Linear"
        ):
            envs.rollout(nn.Linear(1, 2), 5)
        for policy, kind, says in cases:
            with pytest.raises(kind, match=says) as caught:
                envs.rollout(policy, 5)
            assert isinstance(caught.value.__cause__, EnvError)
            envs.reset()
        rollout = envs.rollout(CategoricalPolicy(linear(1, 2)), 3)
        assert rollout.observations[:, 0, 0].tolist() == [0, 1, 2]
        assert len(envs.restarts) == 0  # a mistake of the policy is not one of the worker


class Offset(CategoricalPolicy):
    """Draws actions from 0 on, and adds 5 for the environment."""

    def to_env(self, actions):
        return actions.add_(5)  # it may change its argument


class FromFive(CountingEnv):
    action_space = spaces.Discrete(3, start=5)

    def step(self, action):
        assert self.action_space.contains(action)
        return super().step(action)


def test_environments_get_the_mapped_actions_and_the_rollout_has_the_drawn_ones():
    with ClusterEnv([FromFive] * 2, 1, sync_mode="always") as envs:
        envs.reset(seed=1)
        assert set(np.unique(envs.rollout(Offset(linear(1, 3)), 20).actions)) == {0, 1, 2}
        with pytest.raises(AssertionError):  # the environment's own
            envs.rollout(CategoricalPolicy(linear(1, 3)), 5)


def test_a_logstd_that_is_computed_from_a_parameter_is_refused():
    with pytest.raises(TypeError, match="actor_logstd must be an nn.Parameter, got a Tensor"):
        GaussianPolicy(linear(1, 2), nn.Parameter(torch.zeros(1, 2)).clamp(-5, 2))
