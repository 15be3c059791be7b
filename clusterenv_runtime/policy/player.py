"""A policy that plays the episodes of an evaluation: how it travels, and how it acts on a worker.

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from ..arrays.trees import map_tree
from ..errors import one_line
from ..wire.protocol import Evaluate
from .base import Policy
from .probe import probe
from .structure import check_policy, pickled
from .sync import noise_seed
from .tensors import empty_copy, flat_weights, load_weights, numbers_of, set_numbers, to_tensors

NOISE_STEPS = 128  # steps of one episode for which noise is drawn at once


def packed(
    policy: Policy, space: Space, action_space: Space, seen: Any, deterministic: bool
) -> tuple[list[float], list[Any]]:
    """Return the numbers of a policy that is to play, and as buffers its structure and its weights.

    The arguments are those of `probe`, and `Evaluate.deterministic`.

    Raises:
        TypeError: it is no `Policy`.
        ValueError: it cannot play in these environments.
    """
    check_policy(policy)
    params = probe(policy, space, action_space, seen).example["params"]
    if deterministic:
        try:
            policy.distribution(map_tree(torch.from_numpy, params)).mode  # noqa: B018
        except Exception as error:
            text = f"the policy's distribution has no mode: {one_line(error)}"
            raise ValueError(f"{text}; evaluate it with its noise") from error
    weights = [part.cpu().numpy().data for part in flat_weights(policy)]
    return numbers_of(policy), [pickled(policy), *weights]


class Player:
    """Acts in a batch of environments. It shares nothing with the policy that acts in training.

    The noise follows from the evaluation's seed and the number of the episode, whichever
    environment plays it.

    Args:
        request: the evaluation.
        structure: the policy without its weights.
        weights: what `tensors.flat_weights` returns, as buffers.
    """

    def __init__(self, request: Evaluate, structure: Policy, weights: Sequence[Any]) -> None:
        self._request = request
        self._policy = empty_copy(structure, "cpu").eval()
        load_weights(self._policy, *weights)
        set_numbers(self._policy, request.numbers)
        self._state: Any = None
        self._drawn: Any = None  # the noise of the next steps, (NOISE_STEPS, num_envs, ...)

    @torch.inference_mode()
    def act(self, observations: Any, starts: np.ndarray, numbers: Sequence[int | None]) -> Any:
        """Return one action per environment, as the environments take them.

        Args:
            observations: a batch ``(num_envs, ...)``.
            starts: ``(num_envs,)`` bool, which of these are the first of an episode.
            numbers: of the evaluation's episode that each environment plays; None after its last.
        """
        tensors = to_tensors(observations, self._policy)
        params = self._params(tensors, torch.from_numpy(starts))
        if self._request.deterministic:
            actions = self._policy.distribution(params).mode
        else:
            actions = self._policy.act(params, self._noise(params, numbers))
        # A copy: `to_env` and the environments may write to it.
        given = self._policy.to_env(map_tree(torch.clone, actions))
        return map_tree(lambda leaf: leaf.numpy(), given)

    def _params(self, observations: Any, starts: torch.Tensor) -> Any:
        if self._state is None:
            self._state = self._policy.initial_state(len(starts))
        if self._state is None:
            return self._policy(observations)
        state = self._policy.started(self._state, starts)
        # A copy: `forward` may write to it.
        params, self._state = self._policy(observations, map_tree(torch.clone, state))
        return params

    def _noise(self, params: Any, numbers: Sequence[int | None]) -> Any:
        """Return the noise of the next step of each environment's episode."""
        if self._drawn is None:
            self._generators = [torch.Generator() for _ in numbers]
            self._numbers = [None] * len(numbers)
            self._steps = np.zeros(len(numbers), np.int64)
        for place, number in enumerate(numbers):
            if number not in (None, self._numbers[place]):
                self._numbers[place] = number
                self._steps[place] = 0
                seed = noise_seed(self._request.seed, number, 0)
                self._generators[place].manual_seed(seed)
        for place in np.flatnonzero(self._steps % NOISE_STEPS == 0).tolist():
            self._draw(params, place)
        steps = torch.from_numpy(self._steps % NOISE_STEPS)
        places = torch.arange(len(numbers))
        self._steps += 1
        return map_tree(lambda leaf: leaf[steps, places], self._drawn)

    def _draw(self, params: Any, place: int) -> None:
        """Draw the noise of the next steps of one environment's episode."""
        own = map_tree(lambda leaf: leaf[place : place + 1], params)
        drawn = self._policy.noise(NOISE_STEPS, own, self._generators[place])
        if self._drawn is None:
            sizes = [1, len(self._steps)]
            self._drawn = map_tree(lambda leaf: leaf.repeat(*sizes, *[1] * (leaf.dim() - 2)), drawn)
        map_tree(lambda room, leaf: room[:, place].copy_(leaf[:, 0]), self._drawn, drawn)
