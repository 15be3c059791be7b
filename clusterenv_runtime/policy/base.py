"""The contract of a policy: what acts on the workers, around the user's own ``nn.Module``.

A policy maps observations to the parameters of a distribution over actions (``forward``), and knows
how to draw an action from them (``act``), given noise that was drawn before, so that one vectorized
call draws the randomness of a whole rollout. Only parameters and buffers travel with each pull, and
``numbers`` with each request. Parameters of a distribution, actions, noise and states are tensors,
or dicts and tuples of tensors. docs/policies.md shows policies of one's own.

This module imports torch; a worker loads it when its first policy comes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution, Independent, kl_divergence

from ..arrays.trees import map_tree

KL_SAMPLES = 64  # actions of each state where the divergence has to be estimated

logger = logging.getLogger(__name__)


class Policy(nn.Module):
    """Base class. A subclass defines ``forward``, ``noise``, ``act`` and ``distribution``, and the
    other methods where it needs them.
    """

    numbers: Sequence[str] = ()
    """The names of attributes, floats, that may change at any time: they travel with each request,
    and need no pull.
    """
    float_observations = False
    """Whether all observations come as float32; else only floats do, and integers as they are."""

    def forward(self, observations: Any) -> Any:
        """Map observations ``(batch, ...)`` to distribution parameters ``(batch, ...)``.

        With an `initial_state` it is ``forward(observations, state)``, and returns the parameters
        and the next state.
        """
        raise NotImplementedError

    def noise(self, num_steps: int, params: Any, generator: torch.Generator) -> Any:
        """Draw the randomness of a rollout, ``(num_steps, batch, ...)``; ``params`` are those of
        its first step.

        A worker calls it for each of its environments by itself, with a batch of one and the
        environment's own generator.
        """
        raise NotImplementedError

    def act(self, params: Any, noise: Any) -> Any:
        """Return actions ``(batch, ...)``, which depend on the arguments alone."""
        raise NotImplementedError

    def to_env(self, actions: Any) -> Any:
        """Return what the environments get for actions ``(batch, ...)``, such as clipped or
        squashed ones.

        `Rollout.actions` are the actions themselves, whose log-probabilities are exact.
        """
        return actions

    def distribution(self, params: Any) -> Distribution:
        """Return the distribution over actions, whose ``log_prob`` is ``(...)`` for parameters
        ``(..., params)``.
        """
        raise NotImplementedError

    def mode(self, params: Any) -> Any:
        """Return the most likely actions ``(batch, ...)``, for an evaluation without noise."""
        return self.distribution(params).mode

    def extras(self, params: Any, actions: Any) -> dict[str, torch.Tensor]:
        """Return by name further values of each step, ``(num_steps, num_envs, ...)``, for
        `Rollout.extras`.
        """
        return {}

    def initial_state(self, num_envs: int) -> Any:
        """Return the state ``(num_envs, ...)`` in which episodes begin, on the CPU; None if the
        policy has none.
        """
        return None

    def started(self, state: Any, starts: torch.Tensor) -> Any:
        """Return a state ``(batch, ...)`` that is the initial one where ``starts`` ``(batch,)`` is
        True.
        """

        def choose(fresh: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
            return torch.where(starts.view(-1, *[1] * (old.dim() - 1)), fresh.to(old.device), old)

        return map_tree(choose, self.initial_state(starts.shape[0]), state)

    def unroll(self, observations: Any, starts: torch.Tensor, state: Any) -> tuple[Any, Any]:
        """Return the parameters ``(num_steps, batch, ...)`` along sequences, and the state after
        them.

        Args:
            observations: tensors ``(num_steps, batch, ...)``.
            starts: ``(num_steps, batch)``, where an episode begins: the state is the initial one
                there.
            state: ``(batch, ...)`` before the first step; None if the policy has none.
        """
        steps = []
        for step, begins in enumerate(starts):
            now = map_tree(lambda leaf: leaf[step], observations)  # noqa: B023
            if state is None:
                params = self(now)
            else:
                params, state = self(now, self.started(state, begins))
            steps.append(params)
        return map_tree(lambda *each: torch.stack(each), *steps), state

    def kl(self, behavior: Any, params: Any) -> torch.Tensor:
        """Return KL(behavior || params) in nats for each of a batch of distribution parameters,
        ``(batch,)``.

        It is exact where torch knows it for these distributions. Else it is estimated from some
        actions of each state, with a warning (http://joschu.net/blog/kl-approx.html); a subclass
        may know better.
        """
        old, new = self.distribution(behavior), self.distribution(params)
        try:
            return kl_divergence(old, new)
        except NotImplementedError:
            _warn_of_estimate(_kind(old))
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            actions = old.sample((KL_SAMPLES,))
        ratio = new.log_prob(actions) - old.log_prob(actions)
        return (ratio.exp() - 1 - ratio).mean(0)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def _kind(distribution: Any) -> str:
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return type(distribution).__name__


@functools.cache  # once for each kind
def _warn_of_estimate(kind: str) -> None:
    text = "torch has no KL divergence of %s: it is estimated; define the policy's kl"
    logger.warning(text, kind)
