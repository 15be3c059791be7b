"""The head's records of each worker's policy and of the published policy, without workers."""

import logging
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv_runtime import CategoricalPolicy, GaussianPolicy
from clusterenv_runtime.arrays import leaves
from clusterenv_runtime.policy import tensors
from clusterenv_runtime.policy.sync import states_of_each_row
from clusterenv_runtime.policy.tensors import params_along
from clusterenv_runtime.policy.versions import MANY_CHANGES, PolicyCopy

from .nets import acted_by, change, linear, store_in
from .test_parts import a_part

SPACES = spaces.Box(-1, 1, (3,)), spaces.Discrete(3)


def made(number=1, **options):
    """Return ``number`` copies and their store."""
    copies = [PolicyCopy(range(2 * each, 2 * each + 2)) for each in range(number)]
    return copies, store_in(copies, *SPACES, rounds=True, **options)


def acted(version, num_steps=6, num_envs=2):
    """Return a part in which a worker acted on this version of a `CategoricalPolicy`."""
    part = a_part(SPACES[0], num_steps, num_envs)
    part.version = version
    return part


def test_the_first_version_is_1_and_a_worker_holds_no_known_version():
    (copy,), store = made()
    assert (store.version, store.bytes_sent, store.mismatches, store.structure) == (0, 0, 0, b"")
    assert store.publish(CategoricalPolicy(linear()))
    assert (store.version, store.since) == (1, 1)
    assert (copy.held, copy.behavior, copy.measured, copy.divergence) == (0, 0, 0, math.inf)


def test_an_object_that_cannot_be_a_policy_is_refused_and_changes_nothing():
    _, store = made()
    for wrong, name in (
        (linear(), "Sequential"),
        (CategoricalPolicy, "CategoricalPolicy"),
        (None, "NoneType"),
    ):
        with pytest.raises(
            TypeError, match=f"expected a Policy, such as .*, got {name}; see docs/policies.md"
        ):
            store.publish(wrong)
    with pytest.raises(ValueError, match="the policy has no parameters"):
        store.publish(CategoricalPolicy(nn.Identity()))
    assert (store.version, store.structure) == (0, b"")


def test_a_publish_without_memory_for_the_weights_changes_nothing(monkeypatch):
    _, store = made()
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "flat_weights", raise_memory_error)
        with pytest.raises(MemoryError):
            store.publish(CategoricalPolicy(linear()))
    assert (store.version, store.structure) == (0, b"")
    assert store.publish(CategoricalPolicy(linear()))


def raise_memory_error(_):
    raise MemoryError


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


class CallsItsOwn(CategoricalPolicy):
    """A policy whose methods call each other in ways in which a worker does not."""

    def act(self, params, noise=None):
        return params.argmax(-1) if noise is None else super().act(params, noise)

    def extras(self, params, actions):
        return {"greedy": self.to_env(actions=self.act(params))}


def test_a_policy_may_call_its_own_methods_in_any_way():
    acted_on = acted_by(CallsItsOwn(linear()), np.zeros((2, 3), np.float32), num_steps=5)
    assert acted_on["extras"]["greedy"].shape == (5, 2)


def test_a_new_structure_discards_what_workers_hold_and_their_parts_of_the_last_one():
    (copy,), store = made()
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


def test_pulls_and_bytes_are_counted_and_a_state_is_loaded():
    copies, store = made(2)
    policy = CategoricalPolicy(linear())
    store.publish(policy)
    sizes = []
    for copy, times in zip(copies, (1, 2), strict=True):
        for _ in range(times):
            buffers = store.pull(copy, copy.held).buffers
            sizes.append(sum(memoryview(buffer).nbytes for buffer in buffers))
    state = store.state_dict()
    assert state == {"policy_version": 1, "workers": 2, "pulls": 3, "sync_bytes": sum(sizes)}
    others, other = made(2)
    other.load_state_dict(state)
    assert other.state_dict() == state
    store.load_state_dict(state)
    for copy in (*copies, *others):
        assert (copy.held, copy.weights) == (0, None)
    for each in (store, other):  # no worker has this structure
        assert each.publish(policy) and each.version == each.since == 2


def test_many_changes_of_the_structure_are_warned_of_once(caplog):
    _, store = made()
    policy = CategoricalPolicy(linear())

    def publish(times, changes):
        for _ in range(times):
            if changes:
                policy.extra = getattr(policy, "extra", 0) + 1
            store.publish(policy)

    publish(MANY_CHANGES, changes=True)  # the first publication is no change
    publish(1, changes=False)
    assert not caplog.records
    publish(MANY_CHANGES, changes=True)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "the policy's structure changed 10 times, and workers got all weights each time"
    )


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
    (copy,), store = made()
    policy = CategoricalPolicy(linear())
    policy.kl = kl
    for version in (1, 2, 3):
        store.publish(policy)
        assert copy.divergence == math.inf
        store.acted(copy, acted(version))
    assert (copy.behavior, copy.measured) == (3, 2)
    (text,) = caplog.messages
    assert text.startswith(f"worker 0's divergence could not be measured, so it pulls: {why}")


def test_states_of_one_version_add_up_and_states_of_the_next_replace_them():
    (copy,), store = made()
    policy = CategoricalPolicy(linear())
    store.publish(policy)
    for _ in range(3):
        store.acted(copy, acted(1))
    assert [seen.starts.size for seen in copy.recent] == [12, 12, 12]
    store.publish(policy)
    store.acted(copy, acted(2))
    assert [seen.starts.size for seen in copy.recent] == [12]


def test_one_worker_whose_divergence_cannot_be_measured_is_warned_of_once(caplog):
    copies, store = made(2)
    policy = CategoricalPolicy(linear())
    store.publish(policy)
    for _ in range(2):
        for number, copy in enumerate(copies):
            part = acted(store.version)
            part.params[:] = math.nan if number == 1 else 1
            store.acted(copy, part)
        store.publish(policy)
        assert [copy.divergence < math.inf for copy in copies] == [True, False]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "worker 1's divergence could not be measured, so it pulls: "
    )


def test_all_workers_get_the_mean_divergence_of_the_workers_that_have_acted():
    copies, store = made(3)
    policy = CategoricalPolicy(linear())
    store.publish(policy)
    assert [request.divergence for request in store.requests(copies, 5)] == [math.inf] * 3
    for copy in copies[:2]:
        store.acted(copy, acted(1))
    copies[0].recent[0].params[:] = 1  # a different distribution from the other worker's
    change(policy, 1)
    store.publish(policy)
    first, second, third = store.requests(copies, 5)
    assert first.divergence == second.divergence == third.divergence
    assert first.divergence == pytest.approx(np.mean([copy.divergence for copy in copies[:2]]))
    assert (first.num_steps, first.version, first.behavior, third.behavior) == (5, 2, 1, 0)
    assert store.requests(copies[2:], 5)[0].divergence == math.inf


def test_with_several_learners_the_mean_is_of_all_their_workers():
    sums = []

    def sum_over_learners(numbers):
        sums.append(numbers.tolist())
        return numbers + [3.0, 1.0, 62.0]

    (copy,), store = made(learners=SimpleNamespace(sum=sum_over_learners))
    policy = CategoricalPolicy(linear())
    store.publish(policy)
    assert store.requests([copy], 5)[0].divergence == 3
    store.acted(copy, acted(1))
    store.publish(policy)
    assert store.requests([copy], 5)[0].divergence == pytest.approx((2 * copy.divergence + 3) / 3)
    assert sums == [[0, 0, 2], [2 * copy.divergence, 2, 2]]  # for its two rows
    # As for one learner that has all of these rows.
    assert store.requests([copy], 128)[0].states == states_of_each_row(128, 64, 3) == 16


def test_a_worker_that_does_not_hold_what_it_was_sent_gets_all_weights_and_is_counted(caplog):
    (copy,), store = made()
    policy = CategoricalPolicy(nn.Sequential(nn.Linear(3, 100), nn.Linear(100, 3)))
    store.publish(policy)
    for held, mismatches in ((0, 0), (1, 0), (0, 1), (1, 1), (7, 2)):
        change(policy, 1e-3)
        store.publish(policy)
        store.pull(copy, copy.held if held == 1 else held)
        assert store.mismatches == mismatches
    said = "worker 0 does not hold the weights it was sent, and gets all weights (%d times so far)"
    assert caplog.messages == [said % 1, said % 2]
    assert torch.is_tensor(copy.weights)


def test_the_divergence_is_divided_by_the_dimensions_of_an_action():
    class Far(GaussianPolicy):
        def kl(self, behavior, params):
            return torch.full((len(params),), 6.0)

    copy, policy = PolicyCopy(), Far(linear(3, 2), nn.Parameter(torch.zeros(1, 2)))
    store = store_in([copy], SPACES[0], spaces.Box(-1, 1, (2,)), rounds=True)
    store.publish(policy)
    store.acted(copy, acted(1))
    store.publish(policy)
    assert copy.divergence == 3


IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)


@pytest.mark.parametrize(
    ("space", "num_workers", "each"),
    [
        (SPACES[0], 1, 128),
        (SPACES[0], 8, 64),
        (SPACES[0], 1000, 1),
        (IMAGE, 1, 74),
        (IMAGE, 5, 14),
        (IMAGE, 100, 1),
        (spaces.Dict(a=IMAGE, b=IMAGE), 1, 37),
        (spaces.Box(-1, 1, (0,)), 1, 128),
    ],
    ids=str,
)
def test_fewer_states_are_kept_of_large_observations_and_of_many_rows(space, num_workers, each):
    copies = [PolicyCopy(range(2 * index, 2 * index + 2)) for index in range(num_workers)]
    store = store_in(copies, space, SPACES[1], rounds=True)
    assert states_of_each_row(128, 2 * num_workers, store._elements) == each
    part = a_part(space, num_steps=128, num_envs=2)
    part.params = part.params[: 2 * each]
    store.acted(copies[0], part)
    (seen,) = copies[0].recent
    assert leaves(seen.observations)[0].shape[:2] == seen.params.shape[:2] == (1, 2 * each)


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
