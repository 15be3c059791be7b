"""The head's records of each worker's policy and of the published policy, without workers."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv_runtime import CategoricalPolicy
from clusterenv_runtime.policy.tensors import params_along
from clusterenv_runtime.policy.versions import PolicyCopy

from .nets import linear, store_in
from .test_parts import a_part

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
