"""The ready-made policies. Their networks get all observations as float32, like CleanRL's."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from ..policy.base import Policy


def _gaussian(params: Tensor) -> Distribution:
    """Return the Gaussian of ``params`` ``(..., 2 n)``: means, then log standard deviations."""
    mean, logstd = params.chunk(2, -1)
    return Independent(Normal(mean, logstd.exp()), 1)


class CategoricalPolicy(Policy):
    """A policy for discrete actions: ``actor`` maps observations to logits ``(batch, n)``."""

    float_observations = True

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observations: Any) -> Tensor:
        logits: Tensor = self.actor(observations)
        return logits

    def noise(self, num_steps: int, params: Tensor, generator: torch.Generator) -> Tensor:
        return -torch.empty(num_steps, *params.shape).exponential_(generator=generator).log()

    def act(self, params: Tensor, noise: Tensor) -> Tensor:
        # Gumbel-max: a sample from softmax(logits), without computing the softmax
        return (params + noise).argmax(-1)

    def distribution(self, params: Tensor) -> Distribution:
        return Categorical(logits=params)


class GaussianPolicy(Policy):
    """A policy for continuous actions, which draws them from a Gaussian.

    ``actor_mean`` maps observations to means ``(batch, n)``. ``actor_logstd`` is a parameter, the
    log standard deviations. With a ``space``, environments get actions clipped to its bounds.

    Raises:
        TypeError: ``actor_logstd`` is not a parameter. A tensor computed from one would not change
            with it.
    """

    float_observations = True

    def __init__(
        self, actor_mean: nn.Module, actor_logstd: nn.Parameter, space: Box | None = None
    ) -> None:
        super().__init__()
        if not isinstance(actor_logstd, nn.Parameter):
            raise TypeError(
                f"actor_logstd must be an nn.Parameter, got a {type(actor_logstd).__name__}"
            )
        self.actor_mean = actor_mean
        self.actor_logstd = actor_logstd
        # not a buffer, so that the bounds travel only once
        self._bounds = None if space is None else (space.low, space.high)

    def forward(self, observations: Any) -> Tensor:
        mean = self.actor_mean(observations)
        return torch.cat([mean, self.actor_logstd.expand_as(mean)], -1)

    def noise(self, num_steps: int, params: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(num_steps, len(params), params.shape[-1] // 2, generator=generator)

    def act(self, params: Tensor, noise: Tensor) -> Tensor:
        mean, logstd = params.chunk(2, -1)
        return mean + logstd.exp() * noise

    def to_env(self, actions: Tensor) -> Tensor:
        if self._bounds is None:
            return actions
        low, high = (torch.from_numpy(bound).expand_as(actions) for bound in self._bounds)
        return actions.clamp(low, high)

    def distribution(self, params: Tensor) -> Distribution:
        return _gaussian(params)


class SquashedGaussianPolicy(Policy):
    """A policy for continuous actions within bounds, which squashes draws from a Gaussian.

    ``actor`` maps observations to means and log standard deviations, ``(batch, n)`` each. An action
    is the hyperbolic tangent of a draw, scaled to the bounds of ``space``.

    `Rollout.actions` holds the draws, and `to_env` turns them into the environments' actions.
    Because this mapping is invertible, the divergence of the draws equals the divergence of the
    actions (Kullback and Leibler, "On Information and Sufficiency", 1951, section 4).
    Log-probabilities and divergences are those of the Gaussian, whatever ``uniform`` is.

    Attributes:
        uniform: the share of steps whose actions are drawn uniformly between the bounds, for
            example before there is anything to learn from. It is one of the policy's `numbers`.

    Raises:
        ValueError: ``space`` is not bounded.
    """

    numbers, float_observations = ("uniform",), True

    def __init__(self, actor: nn.Module, space: Box, uniform: float = 0.0) -> None:
        super().__init__()
        if not space.is_bounded():
            raise ValueError(f"actions are scaled to bounds, but {space} is not bounded")
        self.actor = actor
        self.uniform = uniform
        # not buffers, so that the bounds travel only once
        self._bounds = torch.from_numpy(space.low), torch.from_numpy(space.high)
        low, high = (bound.float() for bound in self._bounds)
        self.scale = (high - low) / 2
        self.bias = (high + low) / 2

    def forward(self, observations: Any) -> Tensor:
        return torch.cat(self.actor(observations), -1)

    def noise(self, num_steps: int, params: Tensor, generator: torch.Generator) -> Any:
        shape = num_steps, len(params), params.shape[-1] // 2
        drawn = torch.randn(shape, generator=generator)
        chosen = torch.rand(*shape[:2], 1, generator=generator)
        return drawn, torch.rand(shape, generator=generator), chosen

    def act(self, params: Tensor, noise: Any) -> Tensor:
        drawn, even, chosen = noise
        mean, logstd = params.chunk(2, -1)
        # Without the clamp, the numbers nearest to -1 and 1 would become infinite.
        evenly = torch.atanh((2 * even - 1).clamp(-1 + 1e-6, 1 - 1e-6))
        return torch.where(chosen < self.uniform, evenly, mean + logstd.exp() * drawn)

    def to_env(self, actions: Tensor) -> Tensor:
        # Rounding may exceed the bounds by the last bit.
        return (actions.tanh() * self.scale + self.bias).clamp(*self._bounds)

    def distribution(self, params: Tensor) -> Distribution:
        return _gaussian(params)


class EpsilonGreedyPolicy(Policy):
    """A policy for discrete actions that is greedy except in a share ``epsilon`` of steps.

    ``q_network`` maps observations to values ``(batch, n)``.
    """

    numbers, float_observations = ("epsilon",), True

    def __init__(self, q_network: nn.Module, epsilon: float = 1.0) -> None:
        super().__init__()
        self.q_network, self.epsilon = q_network, epsilon

    def forward(self, observations: Any) -> Tensor:
        values: Tensor = self.q_network(observations)
        return values

    def noise(self, num_steps: int, params: Tensor, generator: torch.Generator) -> Tensor:
        return torch.rand(num_steps, len(params), 2, generator=generator)

    def act(self, params: Tensor, noise: Tensor) -> Tensor:
        explore, choice = noise.unbind(-1)
        random = (choice * params.shape[-1]).long().clamp(max=params.shape[-1] - 1)
        return torch.where(explore < self.epsilon, random, params.argmax(-1))

    def distribution(self, params: Tensor) -> Distribution:
        greedy = nn.functional.one_hot(params.argmax(-1), params.shape[-1])
        return Categorical(probs=greedy * (1 - self.epsilon) + self.epsilon / params.shape[-1])

    def mode(self, params: Tensor) -> Tensor:
        """Return the greedy actions, even where ``epsilon`` makes all actions equally likely."""
        return params.argmax(-1)

    def kl(self, behavior: Tensor, params: Tensor) -> Tensor:
        """Return KL(behavior || params) between softmaxes of the values, whatever ``epsilon`` is.

        Two greedy policies are infinitely far apart wherever their actions differ, even where these
        actions are worth the same. The temperature of the softmax is how much more this policy's
        best action is worth than its median action, as a mean over all these states. So neither the
        unit of reward nor the value of the worst action matters.
        """
        # in float64, because values may be large compared to their differences
        behavior, params = behavior.double(), params.double()
        temperature = (params.amax(-1) - params.quantile(0.5, -1)).mean().clamp(min=1e-8)
        # Not Categorical's divergence, which is inf where a probability underflows.
        old, new = (values.div(temperature).log_softmax(-1) for values in (behavior, params))
        return (old.exp() * (old - new)).sum(-1)
