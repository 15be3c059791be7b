"""What the user has seen of a worker's environments, and how the episodes that a lost process took
along are ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space

from ..arrays.spaces import merge_rows
from ..wire.protocol import CutOff, Message, Step


@dataclass
class Episodes:
    """The episodes in one worker's environments, as far as the user knows them. Masks are
    ``(num_envs,)`` bool.
    """

    seen: Any  # the observations the user has; None before the first reset
    ended: np.ndarray  # environments whose end the user has seen, but not what follows
    cut: np.ndarray | None = (
        None  # environments whose episode is lost, which the user does not know; None for none
    )

    @classmethod
    def begun(cls, seen: Any, num_envs: int) -> Episodes:
        """Return episodes none of which has ended."""
        return cls(seen, np.zeros(num_envs, bool))

    def reset(self) -> None:
        """Note that the user resets all environments."""
        self.ended, self.cut = np.zeros_like(self.ended), None

    def lost(self) -> None:
        """Note that the worker's process has died with its episodes."""
        if self.seen is not None:
            self.cut = ~self.ended

    def step(self, actions: Any) -> tuple[Message, bytes]:
        """Return the request to step the environments, or to say that their episodes are lost."""
        if self.cut is not None:
            return CutOff(), cloudpickle.dumps((self.seen, self.cut))
        return Step(), cloudpickle.dumps(actions)

    def saw_reset(self, space: Space, observations: Any, mask: np.ndarray) -> Any:
        """Note a reset of the environments of ``mask``; return the observations that the user is to
        get.
        """
        self.ended = self.ended & ~mask
        if self.cut is not None:
            self.cut = self.cut & ~mask
            # What has begun without the user's knowledge is for the next step to tell.
            observations = merge_rows(space, ~self.cut, observations, self.seen)
            self.cut = self.cut if self.cut.any() else None
        self.seen = observations
        return observations
