"""What the head and its workers agree on about the environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import create_empty_array

from ..arrays.spaces import map_space


@dataclass(frozen=True)
class EnvLayout:
    """The spaces and the modes of a `ClusterEnv`'s environments; `ClusterEnv` explains each."""

    single_observation_space: Space
    single_action_space: Space
    observation_mode: str | tuple[Space, Space] = "same"
    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
    info_keys: tuple[str, ...] = ()
    frame_stack: int | None = None

    @property
    def stacks(self) -> Any:
        """Whether each leaf of an observation is a stack of ``frame_stack`` arrays."""

        def is_stack(leaf: Any) -> bool:
            is_array = isinstance(leaf, np.ndarray)
            return is_array and leaf.ndim > 2 and leaf.shape[1] == self.frame_stack

        space = self.single_observation_space
        return map_space(is_stack, space, create_empty_array(space, 1))

    def check(self, observation_space: Space, action_space: Space) -> None:
        """Raise RuntimeError if these spaces of an environment here are not those at the head.

        Only with the observation mode "same" must the bounds of its observations be equal, too.
        """
        ours = self.single_observation_space
        is_alike = observation_space == ours
        if self.observation_mode != "same":
            is_alike = is_space_dtype_shape_equiv(observation_space, ours)
        if not is_alike:
            raise RuntimeError(
                f"an environment's observation space is {observation_space}, at the head it is "
                f"{ours}: observation_mode {self.observation_mode!r} does not allow for that"
            )
        if action_space != self.single_action_space:
            raise RuntimeError(
                f"an environment's action space is {action_space}, at the head it is "
                f"{self.single_action_space}"
            )
