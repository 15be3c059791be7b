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


class CategoricalPolicy(Policy):
    """Discrete actions: ``actor`` maps observations to logits ``(batch, n)``."""

    float_observations = True

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observations: Any) -> Tensor:
        return self.actor(observations)

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
        mean, logstd = params.chunk(2, -1)
        return Independent(Normal(mean, logstd.exp()), 1)


class EpsilonGreedyPolicy(Policy):
    """Discrete actions, greedy except in a share ``epsilon`` of steps: ``q_network`` gives values
    ``(batch, n)``.
    """

    numbers, float_observations = ("epsilon",), True

    def __init__(self, q_network: nn.Module, epsilon: float = 1.0) -> None:
        super().__init__()
        self.q_network, self.epsilon = q_network, epsilon

    def forward(self, observations: Any) -> Tensor:
        return self.q_network(observations)

    def noise(self, num_steps: int, params: Tensor, generator: torch.Generator) -> Tensor:
        return torch.rand(num_steps, len(params), 2, generator=generator)

    def act(self, params: Tensor, noise: Tensor) -> Tensor:
        explore, choice = noise.unbind(-1)
        random = (choice * params.shape[-1]).long().clamp(max=params.shape[-1] - 1)
        return torch.where(explore < self.epsilon, random, params.argmax(-1))

    def distribution(self, params: Tensor) -> Distribution:
        greedy = nn.functional.one_hot(params.argmax(-1), params.shape[-1])
        return Categorical(probs=greedy * (1 - self.epsilon) + self.epsilon / params.shape[-1])

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
