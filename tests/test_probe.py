"""Checks before any action: whether a policy can act, and whether its structure has changed."""

import threading
from typing import NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Distribution, Normal

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, GaussianPolicy
from clusterenv_runtime.policy.actor import Actor, is_identity
from clusterenv_runtime.policy.tensors import flat_weights, load_weights
from clusterenv_runtime.policy.versions import PolicyCopy

from .envs import CountingEnv
from .nets import linear, store_in


class Number(CategoricalPolicy):
    numbers = ("temperature",)


class Vector(CategoricalPolicy):
    def distribution(self, params):
        return Normal(params, 1)


class Nothing(nn.Module):
    def forward(self, x):
        return torch.zeros(len(x), 2)


def Silly(method, does=None):  # noqa: N802
    """Return a policy class with one method that does something else, or raises."""

    def fail(self, *_):
        raise RuntimeError("silly")

    fail.__code__ = fail.__code__.replace(co_name=method)
    return type("Silly", (CategoricalPolicy,), {method: does or fail})


class Aside(nn.Module):
    """Has a network that it does not register."""

    def __init__(self, network):
        super().__init__()
        self.network, self.bias = network, nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (self.network[0] if isinstance(self.network, list) else self.network)(x) + self.bias


def with_attribute(name, value):
    policy = CategoricalPolicy(linear(1, 2))
    setattr(policy, name, value)
    return policy


class Memory(NamedTuple):
    hidden: torch.Tensor


class Forgetful(CategoricalPolicy):
    """Returns a different state than it should."""

    def __init__(self, change, initial=lambda num_envs: torch.zeros(num_envs, 3)):
        super().__init__(linear(1, 2))
        self.change, self.initial_state = change, initial

    def forward(self, observations, state):
        return self.actor(observations), self.change(state)


WRONG = [
    (lambda: CategoricalPolicy(Nothing()), "the policy has no parameters"),
    (
        lambda: CategoricalPolicy(nn.LazyLinear(2)),
        "lazy modules that have not seen an input: call it once",
    ),
    (lambda: CategoricalPolicy(nn.Linear(1, 2).double()), r"cannot act on Box.*float32"),
    (lambda: CategoricalPolicy(linear(7, 2)), r"cannot act on Box.*shapes cannot be multiplied"),
    (
        lambda: CategoricalPolicy(linear(1, 5)),
        r"actions are not of Discrete\(2\), but int64 \(\), such as",
    ),
    (
        lambda: GaussianPolicy(linear(1, 2), nn.Parameter(torch.zeros(1, 2))),
        r"not of Discrete\(2\), but float32 \(2,\)",
    ),
    (
        lambda: Number(linear(1, 2)),
        "'temperature' is among the policy's numbers .* but is not a number",
    ),
    (
        lambda: Vector(linear(1, 2)),
        "its distribution or log_prob fails: ValueError: Value is not broadcastable",
    ),
    (lambda: Silly("noise")(linear(1, 2)), "its noise fails: RuntimeError: silly"),
    (lambda: Silly("act")(linear(1, 2)), "its act fails: RuntimeError: silly"),
    (lambda: Silly("extras")(linear(1, 2)), "its extras fails: RuntimeError: silly"),
    (
        lambda: Silly("kl")(linear(1, 2)),
        "the policy has no KL divergence: RuntimeError: silly; define its kl",
    ),
    (
        lambda: Silly("kl", lambda *_: torch.zeros(()))(linear(1, 2)),
        r"for 2 states it must be 2 non-negative numbers, got \(\)",
    ),
    (lambda: Silly("kl", lambda *_: -torch.ones(2))(linear(1, 2)), "2 non-negative numbers"),
    (
        lambda: Silly("kl", lambda *_: torch.full((2,), torch.nan))(linear(1, 2)),
        "2 non-negative numbers",
    ),
    (
        lambda: Silly("extras", lambda *_: {"v": torch.zeros(())})(linear(1, 2)),
        r"extras gives \(\), but \(3, 23, ",
    ),
    (
        lambda: Silly("extras", lambda *_: {"v": {}})(linear(1, 2)),
        "must be tensors by name, got 'v': {}",
    ),
    (
        lambda: Silly("act", lambda self, p, n: p[:1].argmax(-1))(linear(1, 2)),
        r"act gives \(1,\), but \(23, \.\.\.\)",
    ),
    (
        lambda: Forgetful(lambda state: state, lambda num_envs: torch.zeros(1, num_envs, 3)),
        r"initial_state gives \(1, \d+, 3\), but \(\d+, \.\.\.\)",
    ),
    (
        lambda: Forgetful(lambda state: state, lambda num_envs: [torch.zeros(num_envs, 3)]),
        "its initial_state must give a tensor, or a dict or plain tuple of tensors, got a list",
    ),
    (
        lambda: Forgetful(
            lambda state: state, lambda num_envs: (Memory(torch.zeros(num_envs, 3)),)
        ),
        "its initial_state must give a tensor, or a dict or plain tuple of tensors, got a Memory",
    ),
    (
        lambda: GaussianPolicy(
            linear(1, 1), nn.Parameter(torch.zeros(1, 1)), spaces.Box(-1, 1, (2,))
        ),
        r"its to_env fails: RuntimeError: The expanded size of the tensor \(1\) must match the "
        r"existing size \(2\)",
    ),
    (
        lambda: CategoricalPolicy(nn.Sequential(linear(1, 2), nn.Threshold(torch.inf, torch.nan))),
        "params hold NaN: has the policy diverged[?]",
    ),
    (lambda: Silly("kl", lambda *_: threading.Lock())(linear(1, 2)), "no attribute 'shape'"),
    (
        lambda: with_attribute("lock", threading.Lock()),
        "cannot be sent to workers: TypeError: cannot pickle",
    ),
    (
        lambda: with_attribute("numbers", "temperature"),
        "'t' is among the policy's numbers 'temperature', but is not a number: None",
    ),
    (
        lambda: Forgetful(lambda state: state.double()),
        "a state .torch.float64, .*initial_state is .torch.float32",
    ),
    (
        lambda: Forgetful(lambda state: (state,)),
        r"a state \(\(torch.float32, .*initial_state is \(torch.float32",
    ),
    (lambda: Forgetful(lambda state: None), "its forward must give a tensor, .*, got a NoneType"),
    (
        lambda: Silly("forward", lambda self, x: Memory(self.actor(x)))(linear(1, 2)),
        "forward must give .* a Memory",
    ),
    (
        lambda: Silly("forward", lambda self, x: [self.actor(x)])(linear(1, 2)),
        "its forward must give .* got a list",
    ),
    (
        lambda: Silly("noise", lambda *_: None)(linear(1, 2)),
        "its noise must give a tensor, .* got a NoneType",
    ),
    (
        lambda: Silly("noise", lambda self, steps, params, generator: torch.zeros(params.shape))(
            linear(1, 2)
        ),
        r"its noise gives \(1, 2\), but \(3, 1, \.\.\.\) is expected",
    ),
    (
        lambda: CategoricalPolicy(Aside([linear(1, 2)])),
        r"parameter \(8, 1\) that no module registers, as in a list",
    ),
    (
        lambda: CategoricalPolicy(Aside(lambda x, net=linear(1, 2): net(x))),
        "no module registers, .* Use nn.ModuleList",
    ),
]


@pytest.fixture(autouse=True, scope="module")
def validates():
    """Restore torch's own default, which other tests' scripts and libraries may have changed."""
    Distribution.set_default_validate_args(__debug__)


@pytest.fixture(scope="module")
def store():
    """Return a store that publishes policies for a CountingEnv."""
    return store_in(
        [PolicyCopy()], CountingEnv.observation_space, CountingEnv.action_space, rounds=True
    )


@pytest.mark.parametrize(("make", "says"), WRONG)
def test_a_policy_that_cannot_act_is_a_one_line_error_and_changes_nothing(store, make, says):
    policy = CategoricalPolicy(linear(1, 2))
    store.publish(policy)
    published, structure, state = store.published, store.structure, store.state_dict()
    with pytest.raises(ValueError, match=says) as caught:
        store.publish(make())
    assert "\n" not in str(caught.value)
    assert store.published is published and (store.structure, store.state_dict()) == (
        structure,
        state,
    )
    assert not store.publish(policy)  # As if the other policy had never been published.
    assert (store.published.version, store.published.since) == (
        published.version + 1,
        published.since,
    )


def test_a_wrong_policy_is_an_error_before_the_first_step_and_the_run_goes_on():
    with ClusterEnv([CountingEnv], 1) as envs:
        envs.reset()
        with pytest.raises(ValueError, match="cannot act on"):
            envs.rollout(CategoricalPolicy(linear(7, 2)), 5)
        with pytest.raises(
            TypeError, match=r"expected a Policy, such as CategoricalPolicy\(actor\), got Linear"
        ):
            envs.rollout(nn.Linear(1, 2), 5)
        assert envs.rollout(CategoricalPolicy(linear(1, 2)), 3).observations[:, 0, 0].tolist() == [
            0,
            1,
            2,
        ]


class Offset(CategoricalPolicy):
    """Draws actions from 0 on, and adds an offset for the environment."""

    def __init__(self, actor, offset):
        super().__init__(actor)
        self.offset = offset

    def to_env(self, actions):
        return actions.add_(self.offset)  # it may change its argument


def test_the_actions_for_the_environments_are_checked_and_not_the_drawn_ones():
    class FromFive(CountingEnv):
        action_space = spaces.Discrete(3, start=5)

    with ClusterEnv([FromFive] * 2, 1, sync_mode="always") as envs:
        envs.reset(seed=1)
        policy = Offset(linear(1, 3), 5)
        actions = envs.rollout(policy, 20).actions
        assert set(np.unique(actions)) == {0, 1, 2}
        with pytest.raises(ValueError, match=r"actions are not of Discrete\(3, start=5\)"):
            envs.rollout(Offset(linear(1, 3), 4), 5)


class RarelyWrong(CategoricalPolicy):
    """Gives valid actions while it is tried, and invalid ones soon after."""

    def to_env(self, actions):
        self.calls = getattr(self, "calls", 0) + 1
        return actions + 7 * (self.calls > 10)


def test_an_invalid_action_for_an_environment_ends_the_run():
    with ClusterEnv([CountingEnv], 1, sync_mode="always") as envs:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match=r"actions are not of Discrete\(2\)"):
            envs.rollout(RarelyWrong(linear(1, 2)), 20)


def take_last(policy):
    last = policy.last
    del policy.last
    policy.last = last


CHANGES = {
    "a number": lambda policy: setattr(policy, "extra", np.float32(2)),
    "an array": lambda policy: policy.array.__iadd__(1),
    "a tensor": lambda policy: policy.tensor.add_(1),
    "a view of every other number": lambda policy: policy.view.add_(1),
    "a list": lambda policy: policy.items.append(1),
    "a dict": lambda policy: policy.names.update(a=2),
    "an object": lambda policy: setattr(policy, "thing", object()),
    "a private attribute": lambda policy: setattr(policy, "_private", 1),
    "an activation": lambda policy: policy.actor.__setitem__(1, nn.Sigmoid()),
    "a hook": lambda policy: policy.actor.register_forward_hook(lambda *_: None),
    "the order of parameters": lambda policy: take_last(policy),
    "its numbers": lambda policy: setattr(policy, "numbers", ("extra",)),
}


def changeable():
    policy = CategoricalPolicy(nn.Sequential(nn.Linear(1, 2), nn.Tanh()))
    policy.last, policy.later = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    policy.extra, policy.array, policy.tensor, policy.items = (
        np.float32(1),
        np.zeros(2),
        torch.zeros(2),
        [],
    )
    policy.names, policy.thing = {"a": 1}, object()
    policy.view = torch.zeros(4)[::2]
    return policy


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_any_part_of_a_policy_changes_its_structure(store, name):
    policy = changeable()
    store.publish(policy)
    assert not store.publish(policy)
    CHANGES[name](policy)
    since = store.published.since
    store.publish(policy)
    # Another plain object makes no difference in the pickled policy.
    assert store.published.since > since or name in ("an object",)
    assert not store.publish(policy)


class Busy(CategoricalPolicy):
    """Counts its calls and keeps its results, while it acts and while it is measured."""

    calls = measured = 0

    def forward(self, observations):
        self.calls += 1
        self.features = self.actor(observations)
        return self.features

    def kl(self, behavior, params):
        self.measured += 1
        return super().kl(behavior, params)


def test_attributes_that_change_in_every_action_do_not_change_the_structure(caplog):
    with ClusterEnv([CountingEnv], 1, kl_threshold=1e9) as envs:
        envs.reset(seed=1)
        policy = Busy(linear(1, 2))
        for _ in range(4):
            envs.rollout(policy, 3)
            policy(torch.ones(1, 1)).sum().backward()
        assert envs.pulls.tolist() == [1]


def test_a_structure_that_changes_every_time_is_warned_of_once(caplog):
    spaces_here = CountingEnv.observation_space, CountingEnv.action_space
    store, policy = store_in([PolicyCopy()], *spaces_here, rounds=True), changeable()
    for policy.extra in range(15):
        store.publish(policy)
    (record,) = [
        record for record in caplog.records if "structure changed 10 times" in record.getMessage()
    ]
    assert "by its .extra," in record.getMessage()


def test_trying_a_policy_leaves_its_class_alone(store):
    measured = []

    class Mine(CategoricalPolicy):  # it travels by value, and so does the list
        def kl(self, behavior, params):
            measured.append(params)
            return super().kl(behavior, params)

    policy = Mine(linear(1, 2))
    store.publish(policy)
    measured.clear()
    policy.kl(torch.zeros(1, 2), torch.ones(1, 2))
    assert torch.equal(*measured, torch.ones(1, 2))


class Picky(CategoricalPolicy):
    """Accepts numbers up to 10, although its space goes up to 255."""

    float_observations = False

    def __init__(self):
        super().__init__(linear(4, 2))
        self.letters = nn.Embedding(11, 4)

    def forward(self, observations):
        return self.actor(self.letters(observations[:, 0].long()))


def test_a_policy_is_tried_on_real_observations_if_there_are_any():
    space = spaces.Box(0, 255, (1,), np.uint8)
    store = store_in([PolicyCopy()], space, spaces.Discrete(2), rounds=True)
    store.publish(Picky())  # zeros will do
    store.publish(Picky(), np.full((3, 1), 10, np.uint8))
    with pytest.raises(
        ValueError,
        match="its forward fails: IndexError: index out of range in self .*observations[)]$",
    ):
        store.publish(Picky(), np.full((3, 1), 11, np.uint8))
    with pytest.raises(
        ValueError, match="observations[)] [(]the observation was drawn from the space"
    ):
        store.publish(CategoricalPolicy(linear(7, 2)))


@pytest.mark.parametrize("size", [0, 2, 3, 5])
def test_no_size_of_actions_hides_a_sum_over_the_wrong_axis(size):
    space = spaces.Box(-1, 1, (size,), np.float32)
    store = store_in([PolicyCopy()], CountingEnv.observation_space, space, rounds=True)
    policy = GaussianPolicy(linear(1, size), nn.Parameter(torch.zeros(1, size)), space)
    store.publish(policy)
    policy.distribution = lambda params: Summed(params[..., :size], 1.0)
    if size:
        with pytest.raises(
            ValueError, match=rf"log_prob gives \(\d+, {size}\) for .* sum over the last dimensions"
        ):
            store.publish(policy)


class Summed(Normal):
    def log_prob(self, value):
        return super().log_prob(value).sum(1)


def test_the_learners_default_dtype_is_kept_and_not_used(store):
    policy = GaussianPolicy(linear(1, 2), nn.Parameter(torch.zeros(1, 2)))
    space = spaces.Box(-1, 1, (2,), np.float32)
    store = store_in([PolicyCopy()], CountingEnv.observation_space, space, rounds=True)
    torch.set_default_dtype(torch.float64)
    try:
        store.publish(policy)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert store.published.example["actions"].dtype == np.float32


def test_a_divergence_that_fails_later_means_a_pull_and_a_warning(caplog):
    class Fragile(CategoricalPolicy):
        def kl(self, behavior, params):
            if self.breaks:
                raise RuntimeError("not positive definite")
            return super().kl(behavior, params)

    with ClusterEnv([CountingEnv], 1, kl_threshold=1e9) as envs:
        envs.reset(seed=1)
        policy = Fragile(linear(1, 2))
        policy.breaks = torch.zeros(1, dtype=torch.bool)
        policy.register_buffer("breaks", policy.__dict__.pop("breaks"))
        for breaks in (False, False, True, True):
            envs.rollout(policy, 3)
            policy.breaks.fill_(breaks)
        assert envs.pulls.tolist() == [2]
    assert [record for record in caplog.records if "could not be measured" in record.getMessage()][
        1:
    ] == []


def test_a_to_env_that_changes_actions_is_recognized():
    policy = CategoricalPolicy(linear(1, 2))
    assert is_identity(policy) and not is_identity(RarelyWrong(linear(1, 2)))
    policy.to_env = lambda actions: 1 - actions
    assert not is_identity(policy)


def test_a_logstd_that_is_computed_from_a_parameter_is_refused():
    with pytest.raises(TypeError, match="actor_logstd must be an nn.Parameter, got a Tensor"):
        GaussianPolicy(linear(1, 2), nn.Parameter(torch.zeros(1, 2)).clamp(-5, 2))


def test_a_frozen_network_need_not_be_registered(store):
    policy, actor = CategoricalPolicy(Aside([linear(1, 2).requires_grad_(False)])), Actor()
    store.publish(policy)
    actor.load_structure(cloudpickle.loads(store.structure))
    load_weights(actor.policy, *(part.numpy() for part in flat_weights(policy)))
    observations = torch.randn(5, 1)
    assert torch.equal(actor.policy(observations), policy(observations))


def test_trying_a_policy_leaves_the_learners_random_numbers_alone(store):
    def act(self, params, noise):  # seeded as docs/policies.md says, but for all of torch
        torch.manual_seed(0)
        return (params + noise).argmax(-1)

    policy = Silly("act", act)(linear(1, 2))
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    store.publish(policy)
    assert torch.rand(1) == expected
