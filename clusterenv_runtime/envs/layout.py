"""What the head and its workers agree on about the environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import gymnasium as gym
import numpy as np
from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import create_empty_array

from ..arrays.spaces import map_space
from ..arrays.trees import leaves


class SpacesError(RuntimeError, ValueError):
    """An environment has other spaces than another.

    `SyncVectorEnv` raises now the one, now the other error of Python.
    """


@dataclass(frozen=True)
class EnvLayout:
    """The spaces and the modes of a `ClusterEnv`'s environments; `ClusterEnv` explains each."""

    single_observation_space: Space
    single_action_space: Space
    observation_mode: str | tuple[Space, Space] = "same"
    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
    info_keys: tuple[str, ...] = ()
    frame_stack: int | None = None

    @classmethod
    def of(cls, observation_space: Space, action_space: Space, **modes: Any) -> Self:
        """Return the layout of environments of which one has these spaces.

        Raises:
            ValueError: there is a ``frame_stack``, and no observation is such a stack.
        """
        if isinstance(modes["observation_mode"], tuple):
            _, observation_space = modes["observation_mode"]
        layout = cls(observation_space, action_space, **modes)
        number = layout.frame_stack
        if number is not None and not any(leaves(layout.stacks)):
            raise ValueError(
                f"frame_stack is {number}, but no observation is a stack of {number} arrays: "
                f"{observation_space}; Gymnasium's wrapper FrameStackObservation makes stacks"
            )
        return layout

    @property
    def stacks(self) -> Any:
        """Whether each leaf of an observation is a stack of ``frame_stack`` arrays."""

        def is_stack(leaf: Any) -> bool:
            is_array = isinstance(leaf, np.ndarray)
            return is_array and leaf.ndim > 2 and leaf.shape[1] == self.frame_stack

        space = self.single_observation_space
        return map_space(is_stack, space, create_empty_array(space, 1))

    def spaces_of(self, envs: Sequence[gym.Env]) -> list[Space]:
        """Return the observation space of each environment if these may differ, else none.

        Raises:
            SpacesError: one has other spaces.
        """
        for env in envs:
            self.check(env.observation_space, env.action_space)
        differ = self.observation_mode == "different"
        return [env.observation_space for env in envs] if differ else []

    def check(self, observation_space: Space, action_space: Space) -> None:
        """Raise SpacesError if these spaces of another environment are others.

        Only with the observation mode "same" must the bounds of its observations be equal, too.
        """
        ours = self.single_observation_space
        is_alike = observation_space == ours
        if self.observation_mode != "same":
            is_alike = is_space_dtype_shape_equiv(observation_space, ours)
        if not is_alike:
            raise SpacesError(
                f"an environment's observation space is {observation_space}, another's is {ours}: "
                f"observation_mode {self.observation_mode!r} does not allow for that"
            )
        if action_space != self.single_action_space:
            raise SpacesError(
                f"an environment's action space is {action_space}, another's is "
                f"{self.single_action_space}"
            )
