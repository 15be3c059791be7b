"""Policies: what acts on the workers, around the user's own ``nn.Module``.

A policy maps observations to the parameters of a distribution over actions (``forward``), and knows how to draw an
action from them (``act``), given noise drawn beforehand, so that a whole rollout's randomness is one vectorized call.
Only the policy's parameters and buffers travel. This module imports torch; workers load it when they first need it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence


def to_tensor(observations: Any, device: torch.device) -> Any:
    """Turn a (nested) batch of arrays into float32 tensors, as CleanRL feeds its networks."""
    if isinstance(observations, dict):
        return {key: to_tensor(value, device) for key, value in observations.items()}
    if isinstance(observations, tuple):
        return tuple(to_tensor(value, device) for value in observations)
    return torch.tensor(observations, dtype=torch.float32, device=device)  # a copy: the module may write to it


class Policy(nn.Module):
    """Base class. A subclass defines ``forward``, ``noise``, ``act`` and ``distribution``."""

    def forward(self, observations: Any) -> torch.Tensor:
        """Map observations ``(batch, ...)`` to distribution parameters ``(batch, params)``."""
        raise NotImplementedError

    def noise(self, num_steps: int, num_envs: int, params: int, generator: torch.Generator) -> torch.Tensor:
        """Draw the randomness of a rollout, ``(num_steps, num_envs, ...)``."""
        raise NotImplementedError

    def act(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions ``(batch, ...)``, a function of its arguments alone."""
        raise NotImplementedError

    def to_env(self, actions: torch.Tensor) -> torch.Tensor:
        """Return what the environments get of actions ``(batch, ...)``, such as clipped or squashed ones.

        `Rollout.actions` are the actions themselves, whose log-probabilities are exact.
        """
        return actions

    def distribution(self, params: torch.Tensor) -> Distribution:
        """Return the distribution over actions, batched like ``params`` without its last dimension."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @torch.no_grad()
    def params_at(self, observations: Any) -> torch.Tensor:
        """Return distribution parameters ``(batch, params)`` at a batch of arrays, in eval mode, as on the workers."""
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            return self(to_tensor(observations, self.device))
        finally:
            for module in training:
                module.training = True

    @torch.no_grad()
    def action_at(self, params: torch.Tensor) -> torch.Tensor:
        """Return actions ``(batch, ...)``, on the CPU, for parameters of `params_at`, always with the same noise."""
        with torch.device("cpu"):  # where a worker acts
            noise = self.noise(1, len(params), params.shape[-1], torch.Generator().manual_seed(0))
            return self.act(params.cpu(), noise[0])

    @torch.no_grad()
    def divergence(self, observations: Any, behavior_params: Any) -> np.ndarray:
        """Mean KL(behavior || this policy) in nats for each of several (observations, parameters) pairs.

        A mean over states, so it does not depend on how many environments a worker has; summed over action dimensions.
        """
        sizes = [len(params) for params in behavior_params]
        behavior = torch.as_tensor(np.concatenate(behavior_params), device=self.device)
        params = self.params_at(_concatenate(observations))
        kl = self.kl(behavior, params).cpu().numpy()
        return np.add.reduceat(kl, np.cumsum([0, *sizes[:-1]])) / sizes

    def kl(self, behavior: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Return KL(behavior || params) in nats for each of a batch of distribution parameters, ``(batch,)``."""
        return kl_divergence(self.distribution(behavior), self.distribution(params))

    # What travels: the structure once, then one flat buffer per pull.
    def _tensors(self) -> list[torch.Tensor]:
        tensors = [*self.parameters(), *self.buffers()]
        return sorted(tensors, key=lambda tensor: not _is_rounded(tensor))  # first what `rounded_sizes` are of

    @property
    def rounded_sizes(self) -> list[int]:
        """How many elements each of the first tensors of `flat_weights` has: float32 parameters, no buffers.

        A buffer may be a normalizer's, or an index: it travels as it is.
        """
        return [tensor.numel() for tensor in self._tensors() if _is_rounded(tensor)]

    def layout(self) -> list[Any]:
        """Return shape and dtype of each parameter and buffer, in the order in which they travel."""
        return [(tensor.shape, tensor.dtype) for tensor in self._tensors()]

    def with_empty_tensors(self, device: str) -> Policy:
        """Return a copy whose parameters and buffers have shapes but no data, on this device."""

        # Through deepcopy's memo, so that nothing is copied and tied weights stay tied.
        def empty(tensor: torch.Tensor) -> torch.Tensor:
            # Not empty_like, which imports sympy for a tensor on torch's meta device: 0.4 s.
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new

        return copy.deepcopy(self, {id(tensor): empty(tensor) for tensor in self._tensors()})

    def structure(self) -> Policy:
        """Return a copy whose parameters and buffers have shapes but no data (torch's meta device)."""
        return self.with_empty_tensors("meta")

    @torch.no_grad()
    def flat_weights(self) -> torch.Tensor:
        """Return all parameters and buffers as one fresh flat uint8 tensor on the policy's device."""
        return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in self._tensors()])

    def split_weights(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of what `flat_weights` returns the part that may be rounded, as float32, and the bytes of the rest."""
        size = 4 * sum(self.rounded_sizes)
        return flat[:size].view(torch.float32), flat[size:]

    @torch.no_grad()
    def load_flat_weights(self, weights: Any) -> None:
        """Undo `flat_weights` in place, from any readable buffer."""
        flat, start = torch.from_numpy(np.frombuffer(weights, np.uint8).copy()), 0
        for tensor in self._tensors():
            end = start + tensor.numel() * tensor.element_size()
            # clone: a view as another dtype needs an aligned start
            tensor.copy_(flat[start:end].clone().view(tensor.dtype).view(tensor.shape))
            start = end
        if start != len(flat):
            raise ValueError(f"the weights have {len(flat)} bytes, this policy has {start}")


def _is_rounded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.dtype == torch.float32


def _concatenate(batch: Sequence[Any]) -> Any:
    if isinstance(batch[0], dict):
        return {key: _concatenate([part[key] for part in batch]) for key in batch[0]}
    if isinstance(batch[0], tuple):
        return tuple(_concatenate(list(parts)) for parts in zip(*batch, strict=True))
    return np.concatenate(batch)


class CategoricalPolicy(Policy):
    """Discrete actions: ``actor`` maps observations to logits ``(batch, n)``."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observations: Any) -> torch.Tensor:
        return self.actor(observations)

    def noise(self, num_steps: int, num_envs: int, params: int, generator: torch.Generator) -> torch.Tensor:
        return -torch.empty(num_steps, num_envs, params).exponential_(generator=generator).log()

    def act(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return (params + noise).argmax(-1)  # Gumbel-max: a sample of softmax(logits) without computing it

    def distribution(self, params: torch.Tensor) -> Distribution:
        return Categorical(logits=params)


class GaussianPolicy(Policy):
    """Continuous actions: ``actor_mean`` maps observations to means ``(batch, n)``, ``actor_logstd`` is a parameter.

    The environments get actions clipped to the bounds of ``space``, if there is one.
    """

    def __init__(self, actor_mean: nn.Module, actor_logstd: nn.Parameter, space: Box | None = None) -> None:
        super().__init__()
        self.actor_mean, self.actor_logstd = actor_mean, actor_logstd
        self._bounds = None if space is None else (space.low, space.high)  # no buffers: these travel once

    def forward(self, observations: Any) -> torch.Tensor:
        mean = self.actor_mean(observations)
        return torch.cat([mean, self.actor_logstd.expand_as(mean)], -1)

    def noise(self, num_steps: int, num_envs: int, params: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(num_steps, num_envs, params // 2, generator=generator)

    def act(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, logstd = params.chunk(2, -1)
        return mean + logstd.exp() * noise

    def to_env(self, actions: torch.Tensor) -> torch.Tensor:
        return actions if self._bounds is None else actions.clamp(*map(torch.from_numpy, self._bounds))

    def distribution(self, params: torch.Tensor) -> Distribution:
        mean, logstd = params.chunk(2, -1)
        return Independent(Normal(mean, logstd.exp()), 1)


class EpsilonGreedyPolicy(Policy):
    """Discrete actions, greedy except in a share ``epsilon`` of steps: ``q_network`` gives values ``(batch, n)``.

    ``epsilon`` belongs to the head and travels with each request.
    """

    def __init__(self, q_network: nn.Module, epsilon: float = 1.0) -> None:
        super().__init__()
        self.q_network, self.epsilon = q_network, epsilon

    def forward(self, observations: Any) -> torch.Tensor:
        return self.q_network(observations)

    def noise(self, num_steps: int, num_envs: int, params: int, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(num_steps, num_envs, 2, generator=generator)

    def act(self, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        explore, choice = noise.unbind(-1)
        random = (choice * params.shape[-1]).long().clamp(max=params.shape[-1] - 1)
        return torch.where(explore < self.epsilon, random, params.argmax(-1))

    def distribution(self, params: torch.Tensor) -> Distribution:
        greedy = nn.functional.one_hot(params.argmax(-1), params.shape[-1])
        return Categorical(probs=greedy * (1 - self.epsilon) + self.epsilon / params.shape[-1])

    def structure(self) -> Policy:
        """As in `Policy`, whatever ``epsilon`` is now."""
        structure = super().structure()
        structure.epsilon = 0.0
        return structure

    def kl(self, behavior: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """As in `Policy`, but of the softmax of both value functions, whatever ``epsilon`` is.

        Two greedy policies are infinitely far apart wherever their actions differ, also where these are worth the same.
        The temperature is what this policy's best action is worth above the median one, in the mean over all these
        states, so that the unit of reward does not matter, nor how much worse the worst action is.
        """
        behavior, params = behavior.double(), params.double()  # values may be large beside what they differ by
        temperature = (params.amax(-1) - params.quantile(0.5, -1)).mean().clamp(min=1e-8)
        # Not Categorical's, which is inf where a probability underflows.
        old, new = (values.div(temperature).log_softmax(-1) for values in (behavior, params))
        return (old.exp() * (old - new)).sum(-1)
