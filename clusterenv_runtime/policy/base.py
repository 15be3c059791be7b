"""What acts on the workers: the contract of a policy, around the user's own ``nn.Module``.

A policy maps observations to the parameters of a distribution over actions (``forward``), and knows
how to draw an action from them (``act``), given noise drawn beforehand, so that a whole rollout's
randomness is one vectorized call. Only parameters and buffers travel with each pull, and
``numbers`` with each request. Parameters of a distribution, actions, noise and states are tensors,
or dicts and tuples of tensors. docs/policies.md shows policies of one's own.

This module imports torch; workers load it when they first need it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution, Independent, kl_divergence

from ..arrays.trees import leaves, map_tree

PASS_ELEMENTS = (
    2**20
)  # numbers in the observations of one forward pass at the head, so that its memory is bounded
KL_SAMPLES = 64  # actions for each state where the divergence has to be estimated

logger = logging.getLogger(__name__)
_estimated = set[str]()  # distributions of which that has been said


def to_tensor(observations: Any, device: torch.device, all_floats: bool = False) -> Any:
    """Turn a tree of arrays into tensors: floats, or all, as float32, as networks take them, and
    the rest as it is.
    """

    def convert(array: np.ndarray) -> torch.Tensor:
        dtype = torch.float32 if all_floats or array.dtype.kind == "f" else None
        return torch.tensor(array, dtype=dtype, device=device)  # a copy: the module may write to it

    return map_tree(convert, observations)


class Policy(nn.Module):
    """Base class. A subclass defines ``forward``, ``noise``, ``act`` and ``distribution``, and what
    else it needs.
    """

    numbers: Sequence[str] = ()
    """Attributes, floats, that may change at any time: they travel with each request, and need no
    pull.
    """
    float_observations = False
    """Whether all observations come as float32; else only floats do, and integers as they are."""

    def forward(self, observations: Any) -> Any:
        """Map observations ``(batch, ...)`` to distribution parameters ``(batch, ...)``.

        With an `initial_state` it is ``forward(observations, state)``, and returns the parameters
        and the next state.
        """
        raise NotImplementedError

    def initial_state(self, num_envs: int) -> Any:
        """Return the state ``(num_envs, ...)`` in which episodes begin, on the CPU; None if the
        policy has none.
        """
        return None

    def noise(self, num_steps: int, params: Any, generator: torch.Generator) -> Any:
        """Draw the randomness of a rollout, ``(num_steps, batch, ...)``; ``params`` are those of
        its first step.

        A worker asks for each of its environments by itself, with a batch of one and the
        environment's own generator.
        """
        raise NotImplementedError

    def act(self, params: Any, noise: Any) -> Any:
        """Return actions ``(batch, ...)``, a function of its arguments alone."""
        raise NotImplementedError

    def to_env(self, actions: Any) -> Any:
        """Return what the environments get of actions ``(batch, ...)``, such as clipped or squashed
        ones.

        `Rollout.actions` are the actions themselves, whose log-probabilities are exact.
        """
        return actions

    @property
    def is_identity(self) -> bool:
        """Whether environments get the actions as they are, as `to_env` is not another."""
        return getattr(self.to_env, "__func__", None) is Policy.to_env

    def distribution(self, params: Any) -> Distribution:
        """Return the distribution over actions: what has ``log_prob``, ``(...)`` of parameters
        ``(..., params)``.
        """
        raise NotImplementedError

    def extras(self, params: Any, actions: Any) -> dict[str, torch.Tensor]:
        """Return by name what else is wanted of each step, ``(num_steps, num_envs, ...)``, for
        `Rollout.extras`.
        """
        return {}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def started(self, state: Any, starts: torch.Tensor) -> Any:
        """Return a state ``(batch, ...)`` that is the initial one where ``starts`` ``(batch,)`` is
        True.
        """

        def choose(fresh: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
            return torch.where(starts.view(-1, *[1] * (old.dim() - 1)), fresh.to(old.device), old)

        return map_tree(choose, self.initial_state(len(starts)), state)

    def unroll(self, observations: Any, starts: torch.Tensor, state: Any) -> tuple[Any, Any]:
        """Return the parameters ``(num_steps, batch, ...)`` of a policy with a state, and the state
        afterwards.

        Args:
            observations: tensors ``(num_steps, batch, ...)``.
            starts: ``(num_steps, batch)``, where an episode begins: the state is the initial one
                there.
            state: ``(batch, ...)`` before the first step.
        """
        steps = []
        for step, begins in enumerate(starts):
            now = map_tree(lambda leaf: leaf[step], observations)  # noqa: B023
            params, state = self(now, self.started(state, begins))
            steps.append(params)
        return map_tree(lambda *each: torch.stack(each), *steps), state

    @torch.no_grad()
    def params_at(self, observations: Any) -> Any:
        """Return distribution parameters ``(batch, ...)`` at a batch of arrays, in eval mode, as on
        the workers.

        A policy with a state is in the initial one.
        """
        with _evaluating(self):
            size = len(leaves(observations)[0])
            most = max(
                PASS_ELEMENTS * size // max(sum(leaf.size for leaf in leaves(observations)), 1), 1
            )
            passes = []
            for start in range(0, size, most):
                some = map_tree(lambda leaf: leaf[start : start + most], observations)  # noqa: B023
                some = to_tensor(some, self.device, self.float_observations)
                state = self._initial(min(most, size - start))
                passes.append(self(some) if state is None else self(some, state)[0])
            return map_tree(lambda *each: torch.cat(each), *passes)

    @torch.no_grad()
    def params_along(self, observations: Any, starts: np.ndarray, state: Any) -> Any:
        """As `unroll`, of arrays, in eval mode, as on the workers; return the parameters alone."""
        elements = sum(
            leaf[0, 0].size for leaf in leaves(observations)
        )  # that one row sees in a step
        most, passes = max(PASS_ELEMENTS // max(elements, 1), 1), []
        with _evaluating(self):
            for first in range(0, starts.shape[1], most):
                rows = slice(first, first + most)
                some = map_tree(lambda leaf: leaf[:, rows], observations)  # noqa: B023
                seen = to_tensor(some, self.device, self.float_observations)
                before = map_tree(lambda leaf: leaf[rows], state)  # noqa: B023
                begun, before = (to_tensor(tree, self.device) for tree in (starts[:, rows], before))
                passes.append(self.unroll(seen, begun, before)[0])
        return map_tree(lambda *each: torch.cat(each, 1), *passes)

    def _initial(self, num_envs: int) -> Any:
        state = self.initial_state(num_envs)
        return None if state is None else map_tree(lambda leaf: leaf.to(self.device), state)

    def check(self) -> None:
        """Raise ValueError if this cannot travel."""
        if not list(self.parameters()):
            raise ValueError(
                "the policy has no parameters, so there is nothing to learn or to pull"
            )
        if any(map(nn.parameter.is_lazy, [*self.parameters(), *self.buffers()])):
            raise ValueError(
                "the policy has lazy modules that have not seen an input: call it once, then publish it"
            )
        self.numbers_now()

    def numbers_now(self) -> list[float]:
        """Return the values of ``numbers``; raise ValueError if one is none."""
        if isinstance(self.numbers, str):
            raise ValueError(f"the policy's numbers must be a tuple of names, got {self.numbers!r}")
        for name in self.numbers:
            if not isinstance(value := getattr(self, name, None), Real):
                raise ValueError(
                    f"{name!r} is among the policy's numbers, but is no number: {value!r}"
                )
        return [float(getattr(self, name)) for name in self.numbers]

    @torch.no_grad()
    def divergence(
        self,
        observations: Sequence[Any],
        behavior_params: Sequence[Any],
        starts: Sequence[np.ndarray] | None = None,
        states: Sequence[Any] | None = None,
    ) -> np.ndarray:
        """Return KL(behavior || this policy) in nats for each of several workers, a mean over
        states.

        Args:
            observations: of each worker ``(states, ...)``; of a policy with a state ``(num_steps,
                batch, ...)``.
            behavior_params: of each ``(states, ...)``, for a policy with a state those of one step
                after the other.
            starts: of each, for a policy with a state, as in `unroll`.
            states: likewise, before the first step.
        """
        if states is not None:
            if (
                len({len(each) for each in starts}) > 1
            ):  # of workers that were asked for different numbers of steps
                workers = zip(observations, behavior_params, starts, states, strict=True)
                return np.concatenate(
                    [self.divergence(*([part] for part in worker)) for worker in workers]
                )
            shape = len(starts[0]), sum(each.shape[1] for each in starts)
            steps = [map_tree(lambda leaf, own=own: leaf.reshape(*own.shape, *leaf.shape[1:]), params)
                     for params, own in zip(behavior_params, starts, strict=True)]  # fmt: skip
            params = self.params_along(
                _join(observations, 1), np.concatenate(starts, 1), _join(states)
            )
            behavior, params = map_tree(
                lambda leaf: leaf.flatten(0, 1), (self.to_device(_join(steps, 1)), params)
            )
            kl, sizes = (
                self.kl(behavior, params).view(shape).mean(0),
                [each.shape[1] for each in starts],
            )
        else:
            sizes = [len(leaves(params)[0]) for params in behavior_params]
            kl = self.kl(
                self.to_device(_join(behavior_params)), self.params_at(_join(observations))
            )
        return np.add.reduceat(kl.cpu().numpy(), np.cumsum([0, *sizes[:-1]])) / sizes

    def to_device(self, arrays: Any) -> Any:
        """Return a tree of arrays as tensors on the policy's device, with their dtypes."""
        return map_tree(lambda leaf: torch.as_tensor(leaf, device=self.device), arrays)

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
            inner = old
            while isinstance(inner, Independent):
                inner = inner.base_dist
            if (kind := type(inner).__name__) not in _estimated:
                _estimated.add(kind)
                logger.warning(
                    "torch has no KL divergence of %s: it is estimated; define the policy's kl",
                    kind,
                )
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            actions = old.sample((KL_SAMPLES,))
        ratio = new.log_prob(actions) - old.log_prob(actions)
        return (ratio.exp() - 1 - ratio).mean(0)

    # What travels: the structure once, then one flat buffer per pull.
    def _tensors(self) -> list[torch.Tensor]:
        tensors = [*self.parameters(), *self.buffers()]
        return sorted(
            tensors, key=lambda tensor: not _is_rounded(tensor)
        )  # first what `rounded_sizes` are of

    @property
    def rounded_sizes(self) -> list[int]:
        """How many elements each of the first tensors of `flat_weights` has: float32 parameters, no
        buffers.

        A buffer may be a normalizer's, or an index: it travels as it is.
        """
        return [tensor.numel() for tensor in self._tensors() if _is_rounded(tensor)]

    def with_empty_tensors(self, device: str) -> Policy:
        """Return a copy whose parameters and buffers have shapes but no data, on this device."""

        # Through deepcopy's memo, so that nothing is copied and tied weights stay tied.
        def empty(tensor: torch.Tensor) -> torch.Tensor:
            # Not empty_like, which imports sympy for a tensor on torch's meta device: 0.4 s.
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            return (
                nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
            )

        memo = {id(tensor): empty(tensor) for tensor in self._tensors()}
        for (
            module
        ) in self.modules():  # what a module keeps of its last forward cannot be copied otherwise
            kept = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
            memo |= {id(tensor): tensor.detach() for tensor in kept if tensor.grad_fn is not None}
        return copy.deepcopy(self, memo)

    @torch.no_grad()
    def flat_weights(self) -> torch.Tensor:
        """Return all parameters and buffers as one fresh flat uint8 tensor on the policy's device."""
        return torch.cat(
            [
                tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                for tensor in self._tensors()
            ]
        )

    def split_weights(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of what `flat_weights` returns the part that may be rounded, as float32, and the
        bytes of the rest.
        """
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


def _join(trees: Sequence[Any], axis: int = 0) -> Any:
    return map_tree(lambda *arrays: np.concatenate(arrays, axis), *trees)


@contextlib.contextmanager
def _evaluating(policy: nn.Module) -> Iterator[None]:
    """Have a policy in eval mode for a while."""
    training = [module for module in policy.modules() if module.training]
    policy.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
