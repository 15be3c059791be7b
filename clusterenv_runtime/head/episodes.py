"""The episodes of one worker as the user has seen them, and the end of those that a process took
along when it died.
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
    """The episodes in one worker's environments. Masks are ``(num_envs,)`` bool."""

    seen: Any  # the user's last observations; None before the first reset
    ended: np.ndarray  # environments whose end the user has seen, but not what follows
    # Environments whose episode is lost, which the user does not know; None if there are none.
    cut: np.ndarray | None = None

    @classmethod
    def begun(cls, seen: Any, num_envs: int) -> Episodes:
        """Return episodes none of which has ended."""
        return cls(seen, np.zeros(num_envs, bool))

    def reset(self) -> None:
        """Note that the user resets all environments."""
        self.ended = np.zeros_like(self.ended)
        self.cut = None

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
        """Note a reset of the environments of ``mask``; return the user's observations after it."""
        self.ended = self.ended & ~mask
        if self.cut is not None:
            self.cut = self.cut & ~mask
            # Other lost episodes go on for the user until the next step ends them.
            observations = merge_rows(space, ~self.cut, observations, self.seen)
            self.cut = self.cut if self.cut.any() else None
        self.seen = observations
        return observations
