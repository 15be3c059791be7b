"""The base class of policies, which act on workers and wrap the user's own ``nn.Module``.

A policy maps observations to the parameters of a distribution over actions (``forward``). It draws
an action from these parameters (``act``) with noise that was drawn beforehand: one call per
environment draws the randomness of a whole rollout. Each pull carries only parameters and
buffers, and each request carries ``numbers``. Distribution parameters, actions, noise and states
are tensors, or dicts and tuples of tensors. docs/policies.md shows how to write a policy.

This module imports torch. A worker imports it when its first policy arrives.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution, kl_divergence

from ..arrays import map_tree

KL_SAMPLES = 64  # actions drawn per state where the divergence must be estimated

logger = logging.getLogger(__name__)


class Policy(nn.Module):
    """The base class of policies.

    A subclass defines ``forward``, ``noise``, ``act`` and ``distribution``, and overrides the other
    methods where it needs to.

    Attributes:
        numbers: the names of float attributes that may change at any time. Their values travel with
            each request and need no pull.
        float_observations: whether all observations arrive as float32. Otherwise floats do, and
            others keep their dtype.
    """

    numbers: Sequence[str] = ()
    float_observations = False

    def forward(self, observations: Any) -> Any:
        """Map observations ``(batch, ...)`` to distribution parameters ``(batch, ...)``.

        A policy with an `initial_state` defines ``forward(observations, state)`` instead, which
        returns the parameters and the next state.
        """
        raise NotImplementedError

    def noise(self, num_steps: int, params: Any, generator: torch.Generator) -> Any:
        """Draw the noise of a rollout, ``(num_steps, batch, ...)``.

        ``params`` are the distribution parameters of the first step. A worker calls this method
        separately for each of its environments, with a batch of one and a generator seeded for that
        environment.
        """
        raise NotImplementedError

    def act(self, params: Any, noise: Any) -> Any:
        """Return actions ``(batch, ...)``, which depend only on the arguments and on `numbers`."""
        raise NotImplementedError

    def to_env(self, actions: Any) -> Any:
        """Return what environments get for actions ``(batch, ...)``.

        An override may clip or squash actions, for example. `Rollout.actions` holds the actions
        before this mapping, whose log-probabilities are exact.
        """
        return actions

    def distribution(self, params: Any) -> Distribution:
        """Return the distribution over actions for parameters ``(..., params)``.

        Its ``log_prob`` has the shape ``(...)``.
        """
        raise NotImplementedError

    def mode(self, params: Any) -> Any:
        """Return the most likely actions ``(batch, ...)``, for evaluation without noise."""
        return self.distribution(params).mode

    def extras(self, params: Any, actions: Any) -> dict[str, torch.Tensor]:
        """Return further values of each step by name, ``(num_steps, num_envs, ...)``.

        They become `Rollout.extras`.
        """
        return {}

    def initial_state(self, num_envs: int) -> Any:
        """Return the state in which episodes begin, ``(num_envs, ...)`` on the CPU.

        None means that the policy has no state.
        """
        return None

    def started(self, state: Any, starts: torch.Tensor) -> Any:
        """Return ``state``, reset to the initial state where ``starts`` is True.

        ``state`` is ``(batch, ...)``, and ``starts`` is ``(batch,)``.
        """

        def choose(fresh: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
            return torch.where(starts.view(-1, *[1] * (old.dim() - 1)), fresh.to(old.device), old)

        return map_tree(choose, self.initial_state(starts.shape[0]), state)

    def unroll(self, observations: Any, starts: torch.Tensor, state: Any) -> tuple[Any, Any]:
        """Return the distribution parameters along sequences, and the state after the last step.

        The parameters are ``(num_steps, batch, ...)``.

        Args:
            observations: tensors ``(num_steps, batch, ...)``.
            starts: ``(num_steps, batch)``, True where an episode begins. The state becomes the
                initial state there.
            state: ``(batch, ...)``, the state before the first step; None if the policy has none.
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
        """Return KL(behavior || params) in nats, ``(batch,)``, for batches of parameters.

        The divergence is exact where torch has a formula for these distributions. Otherwise it is
        estimated from some actions per state (http://joschu.net/blog/kl-approx.html), with a
        warning. A subclass may know a better formula.
        """
        old, new = self.distribution(behavior), self.distribution(params)
        try:
            return kl_divergence(old, new)
        except NotImplementedError as error:
            _warn_of_estimate(str(error))
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            actions = old.sample((KL_SAMPLES,))
        ratio = new.log_prob(actions) - old.log_prob(actions)
        return (ratio.exp() - 1 - ratio).mean(0)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


@functools.cache  # warns once for each kind
def _warn_of_estimate(why: str) -> None:
    logger.warning("the divergence is estimated, unless the policy defines kl: %s", why)
