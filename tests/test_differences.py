"""Weights sent as rounded differences: the differences are small, and head and worker agree on the
weights to the last bit.
"""

import math

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_runtime.policy import versions
from clusterenv_runtime.policy.actor import Actor
from clusterenv_runtime.policy.differences import FROM_HELD, FROM_ZEROS, WHOLE
from clusterenv_runtime.policy.tensors import flat_weights, pickled, rounded_sizes
from clusterenv_runtime.policy.versions import PolicyCopy

from .envs import CountingEnv
from .nets import change, linear, store_in
from .patience import kill


def spaces_of(policy):
    """Return the observation and action spaces for a policy.

    Its first and last layers must be linear.
    """
    layers = [module for module in policy.modules() if isinstance(module, nn.Linear)]
    return spaces.Box(-1, 1, (layers[0].in_features,), np.float32), spaces.Discrete(
        layers[-1].out_features
    )


class Odd(nn.Module):
    """A network of odd tensors: their sizes are not multiples of five, one has a single element and
    one has none, and some may not be rounded.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.norm = nn.Linear(3, 7), nn.BatchNorm1d(7)
        self.one, self.none = nn.Parameter(torch.randn(1)), nn.Parameter(torch.empty(0))
        self.doubles = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.tied = self.layers.weight

    def forward(self, x):
        return self.norm(self.layers(x)) * self.one


def worker(policy):
    actor = Actor()
    actor.load_structure(cloudpickle.loads(pickled(policy)))
    return actor


def pull(store, copy, actor):
    """Let a worker pull. Return the kind of the response, and its size in bytes."""
    message = store.pull(copy, actor.version)
    message.buffers = [bytes(buffer) for buffer in message.buffers]
    actor.load_weights(message)
    return message.levels, sum(map(len, message.buffers))


def same_weights(policy, other):
    """Return whether two policies have the same weights, to the last bit."""
    parts = zip(flat_weights(policy), flat_weights(other), strict=True)
    return all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in parts)


def same(actor, copy):
    """Return whether a worker's policy has the weights that the head believes it has, to the last
    bit.
    """
    weights, _ = flat_weights(actor.policy)
    return torch.equal(weights.view(torch.int32), copy.weights.view(torch.int32))


@pytest.mark.parametrize(
    "make", [Odd, lambda: linear(3, 3), lambda: nn.Linear(300, 300)], ids=["odd", "small", "large"]
)
def test_head_and_worker_agree_to_the_last_bit(make):
    policy, copy = CategoricalPolicy(make()), PolicyCopy()
    store, actor = store_in([copy], *spaces_of(policy), rounds=True), worker(policy)
    for number in range(50):
        change(policy, 0.01)
        for buffer in policy.buffers():
            buffer.copy_(torch.rand(buffer.shape))
        store.publish(policy)
        assert pull(store, copy, actor)[0] == (FROM_HELD if number else FROM_ZEROS)
        assert (actor.version, same(actor, copy)) == (store.version, True)
        exact = [*policy.buffers(), *(p for p in policy.parameters() if p.dtype != torch.float32)]
        there = actor.policy.parameters()
        others = [*actor.policy.buffers(), *(p for p in there if p.dtype != torch.float32)]
        assert all(map(torch.equal, exact, others))
    assert store.mismatches == 0


def test_errors_do_not_add_up_and_vanish_when_a_policy_stays_the_same():
    policy, copy = CategoricalPolicy(nn.Linear(100, 100)), PolicyCopy()
    store, actor = store_in([copy], *spaces_of(policy), rounds=True), worker(policy)
    errors = []
    for number in range(250):
        if number < 200:
            change(policy, 0.01)
        # One weight is far off. In steps of a quarter's mean distance, it would take hundreds of
        # pulls to reach.
        if number == 199:
            with torch.no_grad():
                next(policy.parameters())[0, 0] += 0.5
        store.publish(policy)
        pull(store, copy, actor)
        weights, _ = flat_weights(policy)
        errors.append((copy.weights - weights).square().mean().sqrt().item())
    # The error stays within the size of a few updates, 0.01 each, and vanishes after the last
    # update.
    assert max(errors[:200]) < 0.03
    assert np.mean(errors[150:200]) < 1.2 * np.mean(errors[50:100])
    assert errors[-1] < 1e-6


def test_after_a_large_change_a_pull_sends_all_weights():
    policy, copy = CategoricalPolicy(nn.Linear(100, 100)), PolicyCopy()
    store, actor = store_in([copy], *spaces_of(policy), rounds=True), worker(policy)
    levels = []
    for other in (False, False, True, False):
        torch.manual_seed(1)
        if other:
            policy.load_state_dict(CategoricalPolicy(nn.Linear(100, 100)).state_dict())
        else:
            change(policy, 0.01)
        store.publish(policy)
        levels.append(pull(store, copy, actor)[0])
        assert same(actor, copy)
        weights, _ = flat_weights(policy)
        assert (copy.weights - weights).norm() < 0.25 * weights.norm()
    assert levels == [FROM_ZEROS, FROM_HELD, FROM_ZEROS, FROM_HELD]


def test_a_difference_takes_about_one_bit_per_weight_and_all_weights_take_eight():
    policy = CategoricalPolicy(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)))
    copy = PolicyCopy()
    store, actor = store_in([copy], *spaces_of(policy), rounds=True), worker(policy)
    sizes = []
    for _ in range(5):
        change(policy, 0.01)
        store.publish(policy)
        sizes.append(pull(store, copy, actor)[1] * 8 / 180_600)
    assert sizes[0] < 8
    assert max(sizes[1:]) < 1.15
    assert store.bytes_sent == pytest.approx(sum(sizes) * 180_600 / 8)


def test_workers_with_the_same_weights_are_sent_the_same_and_others_are_not():
    policy, copies = CategoricalPolicy(linear()), [PolicyCopy() for _ in range(3)]
    store = store_in(copies, *spaces_of(policy), rounds=True)
    actors = [worker(policy) for _ in range(3)]
    for pulling in ([0, 1, 2], [0, 1], [0, 1, 2]):
        change(policy, 0.1)
        store.publish(policy)
        for index in pulling:
            pull(store, copies[index], actors[index])
    assert copies[0].weights is copies[1].weights
    assert not torch.equal(copies[0].weights, copies[2].weights)
    assert copies[0].held == copies[2].held == 3
    assert all(map(same, actors, copies))


def test_the_weights_that_the_head_keeps_are_bounded(monkeypatch):
    policy, copies = CategoricalPolicy(linear()), [PolicyCopy() for _ in range(10)]
    store = store_in(copies, *spaces_of(policy), rounds=True)
    actors = [worker(policy) for _ in range(10)]
    monkeypatch.setattr(versions, "HELD_BYTES", 3 * 4 * sum(rounded_sizes(policy)))
    for _ in range(3):
        for copy, actor in zip(copies, actors, strict=True):  # each at its own version
            change(policy, 0.01)
            store.publish(policy)
            is_kept = any(copy is kept for kept in copies[:3]) and store.version > 10
            assert pull(store, copy, actor)[0] == (FROM_HELD if is_kept else FROM_ZEROS)
            assert actor.version == store.version
            assert len({copy.weights for copy in copies if copy.weights is not None}) <= 3
    assert all(map(same, actors[:3], copies[:3]))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_weights_without_a_finite_difference_are_sent_whole(value):
    policy, copy = CategoricalPolicy(linear()), PolicyCopy()
    store, actor = store_in([copy], *spaces_of(policy), rounds=True), worker(policy)
    store.publish(policy)
    assert pull(store, copy, actor)[0] == FROM_ZEROS
    with torch.no_grad():
        policy.actor[0].weight[0, 0] = value
    store.publish(policy)
    assert pull(store, copy, actor)[0] == WHOLE
    assert same_weights(actor.policy, policy)
    with torch.no_grad():
        policy.actor[0].weight[0, 0] = 0.5
    store.publish(policy)
    assert pull(store, copy, actor)[0] == FROM_ZEROS
    assert same(actor, copy)


def test_weights_are_sent_whole_by_option_and_if_a_difference_would_be_larger():
    for rounds, policy in (
        (False, CategoricalPolicy(linear())),
        (True, CategoricalPolicy(nn.Linear(1, 1))),
    ):
        copy = PolicyCopy()
        store, actor = store_in([copy], *spaces_of(policy), rounds), worker(policy)
        for _ in range(3):
            change(policy, 0.1)
            store.publish(policy)
            size = sum(part.nbytes for part in flat_weights(policy))
            assert pull(store, copy, actor) == (WHOLE, size)
            assert same_weights(actor.policy, policy)


def test_a_worker_that_holds_something_else_gets_all_weights_and_is_told_of(caplog):
    policy, copy, another = CategoricalPolicy(linear()), PolicyCopy(), PolicyCopy()
    actor = worker(policy)
    store, other = (store_in([each], *spaces_of(policy)) for each in (copy, another))
    store.publish(policy)
    store.pull(copy, 0)  # the worker gets the weights of another head instead
    change(policy, 1e-3)
    other.publish(policy)
    pull(other, PolicyCopy(), actor)
    assert actor.version == copy.held == 1 and not same(actor, copy)
    store.publish(policy)
    assert pull(store, copy, actor)[0] == FROM_HELD
    assert actor.version == 0 and not caplog.messages
    assert pull(store, copy, actor)[0] == FROM_ZEROS
    says = "worker 0 does not hold the weights it was sent, and gets all weights (1 times so far)"
    assert caplog.messages == [says]
    assert (actor.version, store.mismatches, same(actor, copy)) == (2, 1, True)


def test_head_and_workers_agree_after_kills_and_another_structure(caplog):
    policy, other = CategoricalPolicy(linear(1, 2)), CategoricalPolicy(nn.Linear(1, 2))
    with ClusterEnv([CountingEnv] * 2, 2, sync_mode="always") as envs:
        envs.reset(seed=1)
        for number in range(7):
            if number in (2, 5):
                kill(envs.call("pid")[number % 2])
            acting = policy if number < 4 else other
            change(acting, 0.1)
            rollout = envs.rollout(acting, 4)
            assert set(rollout.policy_versions) == {envs.policy_version}
        assert len(envs.restarts) == 2
        # By their checksums, each difference fits the worker's weights at the first attempt.
        assert envs.pulls.tolist() == [7, 7]
    assert "does not hold the weights it was sent" not in caplog.text
