"""APS: when workers pull, its cost, the divergences deciding it, and what is kept of a policy."""

import math
from functools import partial

import cloudpickle
import numpy as np
import pytest
import scipy.special
import torch
from gymnasium import spaces
from torch import nn

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, EpsilonGreedyPolicy, GaussianPolicy
from clusterenv_runtime.messages import Collect
from clusterenv_runtime.policy.sync import SyncRule, measured_states
from clusterenv_runtime.policy.tensors import flat_weights, params_along
from clusterenv_runtime.policy.versions import PolicyCopy

from .envs import RandomEnv, assert_same
from .nets import change, divergence_of, linear, store_in
from .test_parts import a_part

KL, NEVER, ALWAYS = SyncRule("kl", 0.1), SyncRule("never"), SyncRule("always")
EVERY_THIRD, AT_MOST_TWO_BEHIND = SyncRule("interval", interval=3), SyncRule("never", max_lag=2)


@pytest.mark.parametrize(
    "rule, held, version, divergence, wants_pull",
    [
        (KL, 5, 9, 0.1, False),
        (KL, 5, 9, math.nextafter(0.1, 1), True),
        (KL, 5, 6, math.inf, True),
        (KL, 5, 6, math.nan, True),
        (SyncRule("kl", 0), 5, 6, 0.0, False),
        (KL, 6, 6, 0.5, False),  # rounding may leave it, and another pull would not reduce it
        (SyncRule("kl", math.inf), 5, 6, math.inf, False),
        (ALWAYS, 5, 6, 0.0, True),
        (ALWAYS, 5, 5, math.inf, False),
        (NEVER, 5, 10**6, math.inf, False),
        (EVERY_THIRD, 5, 7, math.inf, False),
        (EVERY_THIRD, 5, 8, 0.0, True),
        (AT_MOST_TWO_BEHIND, 5, 7, math.inf, False),
        (AT_MOST_TWO_BEHIND, 5, 8, 0.0, True),
        (SyncRule("kl", 0.1, max_lag=2), 5, 7, 0.0, False),
        (SyncRule("kl", 0.1, max_lag=2), 5, 8, 0.0, True),
        (SyncRule("kl", 0.1, max_lag=0), 5, 5, 0.0, False),
        (SyncRule("kl", 0.1, max_lag=0), 5, 6, 0.0, True),
    ],
)
def test_decisions(rule, held, version, divergence, wants_pull):
    assert rule.wants_pull(held, Collect(8, version, held, divergence, [])) is wants_pull


@pytest.mark.parametrize("rule", [KL, NEVER, ALWAYS, EVERY_THIRD, AT_MOST_TWO_BEHIND], ids=str)
@pytest.mark.parametrize("version", [1, 9])
def test_a_worker_without_weights_always_pulls(rule, version):
    assert rule.wants_pull(0, Collect(8, version, 0, 0.0, [])) is True


def num_bytes(policy):
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*policy.parameters(), *policy.buffers())
    )


def make_agent():
    """Return CleanRL's agent and its policy, which has the actor and not the critic."""
    agent = nn.ModuleDict({"actor": linear(3, 3), "critic": linear(3, 1)})
    return agent, CategoricalPolicy(agent["actor"])


VECTOR_ENVS = [partial(RandomEnv, spaces.Box(-1, 1, (3,)))] * 3


def test_kl_mode_pulls_exactly_when_the_divergence_exceeds_the_threshold():
    _, policy = make_agent()
    with ClusterEnv(VECTOR_ENVS, 2, sync_mode="kl", kl_threshold=0.02, weights="float32") as envs:
        envs.reset(seed=1)
        versions, pulled_so_far, apart = {}, [], 0
        held, seen = 0, [[], []]  # each worker's observations while it held that version
        for iteration in range(12):
            change(policy, 0.08 * (iteration % 3))
            pulls = envs.pulls
            rollout = envs.rollout(policy, 4)
            versions[envs.policy_version] = cloudpickle.loads(cloudpickle.dumps(policy))
            pulled = envs.pulls - pulls
            mean = np.average(envs.divergence, weights=[2, 1])  # of all rows
            assert_same(pulled, np.full(2, mean > 0.02, np.int64))  # both or none
            if iteration == 0:
                assert envs.divergence.tolist() == [math.inf] * 2
            else:
                each = [
                    kl_categorical(versions[held], policy, np.concatenate(part)[-256:])
                    for part in seen
                ]
                assert envs.divergence == pytest.approx(each, abs=1e-6)
                apart += (min(each) > 0.02) != (max(each) > 0.02)
            if pulled.any():
                held, seen = envs.policy_version, [[], []]
            assert set(rollout.policy_versions) == {held}
            for worker, rows in enumerate((slice(0, 2), slice(2, 3))):
                seen[worker].append(rollout.observations[:, rows].reshape(-1, 3))
            pulled_so_far.append(pulled)
        assert apart  # by itself, one would have pulled and the other not
        assert 2 < np.sum(pulled_so_far, 0).min() < 10  # some were pulled and some were not
        assert envs.sync_bytes == envs.pulls.sum() * num_bytes(policy)


def kl_categorical(behavior, policy, observations):
    seen = torch.as_tensor(observations)
    with torch.no_grad():
        p, q = (net(seen).double().log_softmax(-1) for net in (behavior, policy))
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.mark.parametrize(
    "arguments, versions",
    [
        ({"sync_mode": "always"}, [1, 2, 3, 6, 7, 8, 9]),
        ({"sync_mode": "interval", "sync_interval": 3}, [1, 1, 1, 6, 6, 6, 9]),
        ({"sync_mode": "never"}, [1, 1, 1, 1, 1, 1, 1]),
        ({"sync_mode": "never", "max_policy_lag": 2}, [1, 1, 1, 6, 6, 6, 9]),
        ({"sync_mode": "kl", "kl_threshold": 1e9, "max_policy_lag": 4}, [1, 1, 1, 6, 6, 6, 6]),
    ],
    ids=["always", "interval", "never", "never with a lag bound", "kl with a lag bound"],
)
def test_versions_pulls_and_bytes(arguments, versions):
    _, policy = make_agent()
    with ClusterEnv(VECTOR_ENVS, 1, weights="float32", **arguments) as envs:
        envs.reset(seed=1)
        assert (envs.policy_version, envs.pulls.tolist(), envs.sync_bytes) == (0, [0], 0)
        for number, expected in enumerate(versions):
            if number == 3:
                # A publication makes a version, with or without a rollout.
                assert [envs.publish(policy) for _ in range(2)] == [4, 5]
            change(policy, 0.1)
            rollout = envs.rollout(policy, 2)
            assert_same(rollout.policy_versions, np.full(3, expected))
        assert envs.policy_version == 9
        assert envs.pulls.tolist() == [len(set(versions))]
        assert envs.sync_bytes == len(set(versions)) * num_bytes(policy)


def divergence(old, new, observations):
    """Return the divergence of ``new`` from ``old``, as if a worker had acted on ``old``."""
    with torch.no_grad():
        params = old(torch.as_tensor(observations)).numpy()
    return divergence_of(new, [observations], [params]).item()


@pytest.fixture
def observations():
    return np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)


def two(make):
    torch.manual_seed(1)
    old, new = make(), make()
    new.load_state_dict(old.state_dict())
    change(new, 0.5)
    return old, new


def test_categorical_divergence(observations):
    old, new = two(lambda: CategoricalPolicy(linear(3, 4)))
    assert divergence(old, new, observations) == pytest.approx(
        kl_categorical(old, new, observations), rel=1e-4
    )


def test_gaussian_divergence(observations):
    old, new = two(lambda: GaussianPolicy(linear(3, 2), nn.Parameter(torch.tensor([[-0.5, 0.3]]))))
    means, stds = [], []
    for policy in (old, new):
        with torch.no_grad():
            means.append(policy.actor_mean(torch.as_tensor(observations)).double())
        stds.append(policy.actor_logstd.detach().double().exp())
    (m1, m2), (s1, s2) = means, stds
    kl = (s2 / s1).log() + (s1**2 + (m1 - m2) ** 2) / (2 * s2**2) - 0.5
    assert divergence(old, new, observations) == pytest.approx(kl.sum(-1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_divergence_is_that_of_a_softmax_with_the_gap_as_temperature(
    observations, epsilon
):
    old, new = two(lambda: EpsilonGreedyPolicy(linear(3, 4), epsilon))
    with torch.no_grad():
        behavior, values = (
            policy(torch.as_tensor(observations)).double().numpy() for policy in (old, new)
        )
    gap = (values.max(-1) - np.median(values, -1)).mean()
    p, q = (scipy.special.softmax(each / gap, -1) for each in (behavior, values))
    expected = (p * np.log(p / q)).sum(-1).mean()
    assert expected > 0.1
    assert divergence(old, new, observations) == pytest.approx(expected, rel=1e-4)
    for policy in (old, new):  # rewards in another unit, and a constant added to all values
        with torch.no_grad():
            policy.q_network[-1].weight.mul_(1000)
            policy.q_network[-1].bias.mul_(1000).add_(70_000)
    assert divergence(old, new, observations) == pytest.approx(expected, rel=1e-3)


def test_the_divergence_of_values_that_are_all_the_same_is_finite(observations):
    old, new = two(lambda: EpsilonGreedyPolicy(linear(3, 4), 0.0))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()
    assert divergence(new, new, observations) == 0
    assert 1 < divergence(old, new, observations) < math.inf


def test_the_divergence_of_values_is_finite_at_underflow_and_nan_where_a_value_is_nan():
    policy, old = EpsilonGreedyPolicy(linear(3, 2)), torch.full((512, 2), 0.01)
    old[:, 0] = 0
    new = old.clone()
    old[0], new[0] = torch.tensor([[0.2, -0.2], [2.0, -2.0]])  # 200 times as far apart as elsewhere
    assert policy.kl(old, new).sum() == pytest.approx(0, abs=1e-9)
    new[1, 1] = math.nan
    assert policy.kl(old, new).isnan().any()


@pytest.mark.parametrize(
    "policy",
    [
        CategoricalPolicy(linear(3, 4)),
        GaussianPolicy(linear(3, 2), nn.Parameter(torch.tensor([[-0.5, 0.3]]))),
        EpsilonGreedyPolicy(linear(3, 4), 0.1),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_divergence_from_itself_is_zero_and_divergence_is_a_mean_over_states(policy, observations):
    assert divergence(policy, policy, observations) == pytest.approx(0, abs=1e-6)
    new = cloudpickle.loads(cloudpickle.dumps(policy))
    change(new, 0.5)
    one = divergence(policy, new, observations)
    assert one > 0.01
    assert divergence(policy, new, np.tile(observations, (8, 1))) == pytest.approx(one, rel=1e-4)
    with torch.no_grad():
        parts = [observations, observations[:7], observations[7:]]
        params = [policy(torch.as_tensor(part)).numpy() for part in parts]
    # Several workers at once, each with its own number of states.
    whole, *split = divergence_of(new, parts, params)
    assert whole == pytest.approx(one, rel=1e-4)
    assert np.average(split, weights=[7, 43]) == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3), nn.Dropout(0.5)], ids=lambda layer: type(layer).__name__
)
def test_divergence_is_measured_in_eval_mode_and_changes_nothing(layer, observations):
    policy = CategoricalPolicy(nn.Sequential(layer, linear(3, 4)))
    assert policy.training  # as a learner leaves it; workers act in eval mode
    weights, others = flat_weights(policy)
    acting = cloudpickle.loads(cloudpickle.dumps(policy)).eval()
    assert divergence(acting, policy, observations) == pytest.approx(0, abs=1e-6)
    assert all(map(torch.equal, flat_weights(policy), (weights, others)))
    assert policy.training and layer.training


@pytest.mark.parametrize(("num_steps", "number"), [(1, 1), (7, 7), (128, 16), (128, 1), (100, 33)])
def test_the_states_of_a_row_are_spread_evenly_whichever_worker_has_it(num_steps, number):
    def steps_by_row(*shares):
        found = {}
        for rows in shares:
            indices = measured_states(num_steps, rows, number, in_sequence=False)
            steps, places = np.divmod(indices, len(rows))
            found |= {
                row: sorted(steps[places == place].tolist()) for place, row in enumerate(rows)
            }
        return found

    of_one = steps_by_row(range(12))
    assert of_one == steps_by_row(range(5), range(5, 6), range(6, 12))
    for steps in of_one.values():
        assert len(set(steps)) == number and min(steps) >= 0 and max(steps) < num_steps
        assert max(np.diff([max(steps) - num_steps, *steps])) <= num_steps / number + 1
    if number == 1:  # one state of each row, spread over the rollout
        assert np.histogram(np.concatenate(list(of_one.values())), 4, (0, num_steps))[0].min() >= (
            num_steps > 1
        )


def test_in_sequence_each_rows_first_states_are_measured():
    found = measured_states(9, range(3, 5), 4, in_sequence=True)
    assert found.tolist() == list(range(8))


SPACES = spaces.Box(-1, 1, (3,)), spaces.Discrete(3)


def made():
    """Return a copy and its store."""
    copy = PolicyCopy(range(2))
    return copy, store_in([copy], *SPACES, rounds=True)


@pytest.mark.parametrize(
    ("num_rows", "shape", "each"),
    [(2, (3,), 128), (16, (3,), 64), (2000, (3,), 1), (2, (4, 84, 84), 74), (200, (4, 84, 84), 1)],
)
def test_fewer_states_are_kept_of_large_observations_and_of_many_rows(num_rows, shape, each):
    copy = PolicyCopy(range(num_rows))
    store = store_in([copy], spaces.Box(-1, 1, shape), SPACES[1])
    store.publish(CategoricalPolicy(nn.Linear(3, 3)))
    assert store.requests([copy], 128)[0].states == each


def acted(version, num_steps=6, num_envs=2):
    """Return a part in which a worker acted on this version of a `CategoricalPolicy`."""
    part = a_part(SPACES[0], num_steps, num_envs)
    part.version = version
    return part


def test_a_new_object_is_noticed_even_at_the_address_of_the_last_one():
    _, store = made()
    policy = CategoricalPolicy(linear())
    for number in range(20):
        # The next object has the address of this one, unless something keeps this one alive.
        policy.actor.scale = partial(leave, number)
        assert store.publish(policy)
        del policy.actor.scale


def leave(*_):
    """Leave a module's output unchanged."""


def test_a_new_structure_discards_what_workers_hold_and_their_parts_of_the_last_one():
    copy, store = made()
    store.publish(CategoricalPolicy(linear()))
    store.pull(copy, 0)
    store.acted(copy, acted(1))
    assert not store.publish(CategoricalPolicy(linear(seed=1)))
    assert (copy.held, copy.behavior, copy.measured) == (1, 1, 1) and 0 < copy.divergence < math.inf
    assert store.publish(CategoricalPolicy(nn.Linear(3, 3)))
    assert store.since == 3
    for _ in range(2):
        assert (copy.held, copy.behavior, copy.measured, copy.divergence) == (0, 0, 0, math.inf)
        assert copy.recent == [] and copy.weights is None
        store.acted(copy, acted(2))
    store.acted(copy, acted(3))
    assert copy.behavior == 3


def no_divergence(behavior, params):
    raise NotImplementedError("it has none")


@pytest.mark.parametrize(
    ("kl", "why"),
    [
        (no_divergence, "NotImplementedError: it has none"),
        (lambda behavior, params: behavior[:1, 0], "RuntimeError: shape "),
        (lambda behavior, params: torch.full((len(params),), math.nan), "it is nan"),
        (lambda behavior, params: -torch.ones(len(params)), "it is -1.0"),
    ],
)
def test_a_policy_without_a_divergence_is_warned_of_once_and_always_pulled(caplog, kl, why):
    copy, store = made()
    policy = CategoricalPolicy(linear())
    policy.kl = kl
    for version in (1, 2, 3):
        store.publish(policy)
        assert copy.divergence == math.inf
        store.acted(copy, acted(version))
    assert (copy.behavior, copy.measured) == (3, 2)
    (text,) = caplog.messages
    assert text.startswith(f"worker 0's divergence could not be measured, so it pulls: {why}")


class Remembers(CategoricalPolicy):
    """A policy whose actions depend on the number of steps in the episode."""

    def initial_state(self, num_envs):
        return torch.zeros(num_envs, 1)

    def forward(self, observations, state):
        return self.actor(observations) * (1 + state), state + 1


def test_for_a_policy_with_a_state_each_rows_first_steps_and_their_starts_are_kept():
    copy = PolicyCopy(range(3))
    store = store_in([copy], *SPACES, rounds=True)
    policy = Remembers(linear())
    store.publish(policy)
    for number in range(2):  # the second part replaces the first: they are not one sequence
        part = acted(1, num_steps=5, num_envs=3)
        part.truncations[3, 1] = True
        part.states = np.full((3, 1), number, np.float32)
        starts = np.zeros((5, 3), bool)
        starts[1:] = (part.terminations | part.truncations)[:-1]
        with torch.no_grad():
            along = params_along(policy, part.observations, starts, part.states)
        part.params = along.flatten(0, 1).numpy()
        store.acted(copy, part)
        (seen,) = copy.recent
        expected = part.observations, along, starts, part.states
        assert all(map(np.array_equal, seen, expected))
    assert starts.any()
    store.publish(policy)
    assert copy.divergence == pytest.approx(0, abs=1e-6)
