"""Networks for tests of policies, one for each kind of observation."""

import pickle

import numpy as np
import torch
from torch import nn

from clusterenv_runtime.messages import Collect
from clusterenv_runtime.policy.actor import Actor
from clusterenv_runtime.policy.tensors import (
    Sample,
    divergence,
    flat_weights,
    numbers_of,
    params_along,
    pickled,
)
from clusterenv_runtime.policy.versions import PolicyStore


def linear(inputs=3, outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class ImageNet(nn.Module):
    """A network for uint8 images. It accepts only float32, to which a policy must convert them."""

    def __init__(self, channels, outputs):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(channels, 2, 2), nn.LazyLinear(outputs)

    def forward(self, image):
        assert image.dtype == torch.float32
        return self.head(self.conv(image / 255).flatten(1))


class MixedNet(nn.Module):
    """A network for Dict and Tuple observations, which it flattens in the order of the keys."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layers = linear(inputs, outputs)

    def forward(self, observations):
        return self.layers(torch.cat(list(flat(observations)), 1))


def flat(observations):
    if isinstance(observations, torch.Tensor):
        yield observations.reshape(len(observations), -1)
        return
    for part in observations.values() if isinstance(observations, dict) else observations:
        yield from flat(part)


def change(policy, scale):
    """Add normal noise to all parameters."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def params_at(policy, observations):
    """Return the distribution parameters ``(batch, ...)`` for a batch of arrays, as on workers."""
    starts = np.ones((1, len(observations)), bool)
    return params_along(policy, observations[None], starts, None)[0]


def divergence_of(policy, observations, params):
    """Return the policy's divergence on each worker's observations.

    ``params`` are the distribution parameters of the policies with which the workers acted.
    """
    parts = zip(observations, params, strict=True)
    return divergence(
        policy,
        [
            [Sample(states[None], np.asarray(old)[None], np.ones((1, len(states)), bool), None)]
            for states, old in parts
        ],
    )


def store_in(copies, space, action_space, rounds=True, **options):
    """Return a store of policies that act in environments of these spaces."""
    store = PolicyStore(copies, rounds=rounds, **options)
    store.act_in(space, action_space)
    return store


def copy_on_worker(policy):
    """Return an actor whose policy has travelled as to a worker."""
    actor = Actor()
    actor.load(pickle.loads(pickled(policy)), [part.numpy() for part in flat_weights(policy)])
    return actor


def acted_by(policy, observations, num_steps=3):
    """Return what a worker's actor makes of a rollout in which every step has these observations.

    ``observations`` are an array ``(num_envs, ...)``, and each environment begins an episode.
    """
    actor, starts = copy_on_worker(policy), np.ones(len(observations), bool)
    request = Collect(num_steps, 0, 0, 0.0, numbers_of(policy), states=num_steps)
    actor.start(request, range(len(observations)), starts)
    for step in range(num_steps):
        actor.act(observations, starts & (step == 0))
    return actor.finish()
