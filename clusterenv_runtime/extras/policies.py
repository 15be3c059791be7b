"""The policies that come with the runtime. Their networks get all observations as float32, as
CleanRL's do.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from ..policy.base import Policy


def _gaussian(params: Tensor) -> Distribution:
    """Return the distribution whose means and logarithms of deviations are ``(..., 2 n)``."""
    mean, logstd = params.chunk(2, -1)
    return Independent(Normal(mean, logstd.exp()), 1)


class CategoricalPolicy(Policy):
    """Discrete actions: ``actor`` maps observations to logits ``(batch, n)``."""

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
        # Gumbel-max: a sample of softmax(logits) without computing it
        return (params + noise).argmax(-1)

    def distribution(self, params: Tensor) -> Distribution:
        return Categorical(logits=params)


class GaussianPolicy(Policy):
    """Continuous actions: ``actor_mean`` maps observations to means ``(batch, n)``,
    ``actor_logstd`` is a parameter.

    The environments get actions clipped to the bounds of ``space``, if there is one.

    Raises:
        TypeError: ``actor_logstd`` is no parameter: what is computed from one would stay as it is.
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
        # no buffers: these travel once
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
    """Continuous actions within bounds: ``actor`` maps observations to means and logarithms of
    deviations, ``(batch, n)`` each. An action is the hyperbolic tangent of what is drawn, scaled to
    the bounds of ``space``.

    `Rollout.actions` are what is drawn. `to_env` makes the environments' actions of them. As that
    is invertible, the divergence of what is drawn is that of the actions (Kullback and Leibler, "On
    Information and Sufficiency", 1951, section 4). Log-probabilities and divergences are those of
    the Gaussian, whatever ``uniform`` is.

    Attributes:
        uniform: the share of steps whose actions are drawn evenly between the bounds, as before
            there is anything to learn from. It is one of the policy's `numbers`.

    Raises:
        ValueError: the space is not bounded.
    """

    numbers, float_observations = ("uniform",), True

    def __init__(self, actor: nn.Module, space: Box, uniform: float = 0.0) -> None:
        super().__init__()
        if not space.is_bounded():
            raise ValueError(f"actions are scaled to bounds, which {space} has not")
        self.actor = actor
        self.uniform = uniform
        # no buffers: these travel once
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
        # The nearest numbers to -1 and 1 would become infinite.
        evenly = torch.atanh((2 * even - 1).clamp(-1 + 1e-6, 1 - 1e-6))
        return torch.where(chosen < self.uniform, evenly, mean + logstd.exp() * drawn)

    def to_env(self, actions: Tensor) -> Tensor:
        # Rounding may leave the bounds by the last bit.
        return (actions.tanh() * self.scale + self.bias).clamp(*self._bounds)

    def distribution(self, params: Tensor) -> Distribution:
        return _gaussian(params)


class EpsilonGreedyPolicy(Policy):
    """Discrete actions, greedy except in a share ``epsilon`` of steps: ``q_network`` gives values
    ``(batch, n)``.
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
        """As in `Policy`, and the greedy action also where ``epsilon`` makes all equally likely."""
        return params.argmax(-1)

    def kl(self, behavior: Tensor, params: Tensor) -> Tensor:
        """As in `Policy`, but of the softmax of both value functions, whatever ``epsilon`` is.

        Two greedy policies are infinitely far apart wherever their actions differ, also where these
        are worth the same. The temperature is what this policy's best action is worth above the
        median one, in the mean over all these states, so that the unit of reward does not matter,
        nor how much worse the worst action is.
        """
        # values may be large beside what they differ by
        behavior, params = behavior.double(), params.double()
        temperature = (params.amax(-1) - params.quantile(0.5, -1)).mean().clamp(min=1e-8)
        # Not Categorical's, which is inf where a probability underflows.
        old, new = (values.div(temperature).log_softmax(-1) for values in (behavior, params))
        return (old.exp() * (old - new)).sum(-1)
