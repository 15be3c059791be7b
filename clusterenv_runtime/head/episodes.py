"""What the user has seen of a worker's environments, and how the episodes that a lost process took along are ended."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space

from ..protocol import CutOff, Message, Step
from ..spaces import merge_rows


class Episodes:
    """The episodes in one worker's ``num_envs`` environments, as far as the user knows them."""

    def __init__(self, num_envs: int, space: Space) -> None:
        self._space = space
        self._seen: Any = None  # the observations the user has; None before the first reset
        self._ended = np.zeros(num_envs, bool)  # environments whose end the user has seen, but not what follows
        self._cut = np.zeros(num_envs, bool)  # environments whose episode is lost, which the user does not know

    def reset(self) -> None:
        """Note that the user resets all environments."""
        self._cut[:] = self._ended[:] = False

    def lost(self) -> None:
        """Note that the worker's process has died with its episodes."""
        if self._seen is not None:
            self._cut = ~self._ended

    @property
    def are_cut(self) -> bool:
        """Whether there are episodes whose loss the user must still be told, by the next step."""
        return bool(self._cut.any())

    def step(self, actions: Any) -> tuple[Message, bytes]:
        """Return the request to step the environments, or to say that their episodes are lost."""
        if self.are_cut:
            return CutOff(), cloudpickle.dumps((self._seen, self._cut.copy()))
        return Step(), cloudpickle.dumps(actions)

    def saw(self, observations: Any, ended: Any = False) -> None:
        """Note what the user gets of all environments; ``ended`` are those that show the end of an episode."""
        self._cut[:], self._ended[:] = False, ended
        self._seen = observations

    def saw_reset(self, observations: Any, mask: np.ndarray) -> Any:
        """Note a reset of the environments of ``mask``; return the observations that the user is to get."""
        self._cut &= ~mask
        self._ended &= ~mask
        if self._cut.any():  # what has begun without the user's knowledge is for the next step to tell
            observations = merge_rows(self._space, ~self._cut, observations, self._seen)
        self._seen = observations
        return observations
