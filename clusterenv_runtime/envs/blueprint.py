"""What a `ClusterEnv` is to consist of: how many environments, their spaces, and what builds each
worker's share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from ..arrays.spaces import are_stacks, observation_spaces
from ..arrays.trees import leaves
from .registry import packed_registry


class Vectorized(Protocol):
    """What makes environments that step together, for a policy to act in."""

    def __call__(self, num_envs: int) -> VectorEnv:
        """Make so many, to read their spaces."""

    def build(self, **arguments: Any) -> Any:
        """Make a worker's environments; the arguments are those of `Blueprint.setup`.

        They have `reset(seed=, options=)`, `collect(actor, num_steps)`, `close()`, `infos`,
        `num_envs` and `single_action_space`, as `worker.one_by_one.EnvsOneByOne` has them. It also
        gets ``built``, to be called after each environment that takes long to build.
        """


EnvFns = Sequence[Callable[[], gym.Env]] | Vectorized


class Blueprint:
    """The environments that ``env_fns`` make, either one by one or a worker's rows together; see
    `ClusterEnv`.

    Raises:
        ValueError: the arguments do not go together.
    """

    def __init__(
        self,
        env_fns: EnvFns,
        num_envs: int | None,
        observation_mode: str | tuple[gym.Space, gym.Space],
        autoreset_mode: str | AutoresetMode,
        info_keys: Sequence[str] = (),
        frame_stack: int | None = None,
        first_row: int = 0,
    ) -> None:
        self.first_row = first_row  # of all learners' environments, for seeds, noise and messages
        self.steps_together = callable(
            env_fns
        )  # a worker's rows are one vector environment, for a policy to act in
        if self.steps_together:
            self.env_fns = env_fns
            if not hasattr(env_fns, "build"):
                raise TypeError(
                    "env_fns must be a list of functions; one for all environments goes into a Together"
                )
            if num_envs is None or num_envs < 1:
                raise ValueError(
                    f"one function for all environments needs num_envs, at least 1, got {num_envs}"
                )
            if observation_mode != "same":
                raise ValueError(
                    f"one function for all environments has observation_mode 'same', got {observation_mode!r}"
                )
            self.num_envs = num_envs
        else:
            self.env_fns = list(env_fns)
            self.num_envs = len(self.env_fns)
            if self.num_envs < 1:
                raise ValueError("env_fns must hold at least one function, got none")
            if num_envs not in (None, self.num_envs):
                raise ValueError(f"num_envs is {num_envs}, but there are {self.num_envs} env_fns")
        if isinstance(info_keys, str) or not all(isinstance(key, str) for key in info_keys):
            raise TypeError(f"info_keys must be a tuple of strings, got {info_keys!r}")
        if masks := [key for key in info_keys if f"_{key}" in info_keys]:
            raise ValueError(
                f"info_keys must not have both {masks[0]!r} and '_{masks[0]}', which says where it is"
            )
        if frame_stack is not None and (type(frame_stack) is not int or frame_stack < 1):
            raise ValueError(f"frame_stack must be an integer from 1, got {frame_stack!r}")
        self.observation_mode, self.autoreset_mode = observation_mode, AutoresetMode(autoreset_mode)
        self.info_keys, self.frame_stack = tuple(info_keys), frame_stack
        self._read_spaces()
        space = self.single_observation_space
        if frame_stack is not None and not any(leaves(are_stacks(space, frame_stack))):
            how = "Gymnasium's wrapper FrameStackObservation makes such"
            raise ValueError(
                f"frame_stack is {frame_stack!r}, but no observations are so many arrays: {space}; {how}"
            )

    def _read_spaces(self) -> None:
        """Build one environment, or all if they differ, to read what they are."""
        env = self.env_fns(1) if self.steps_together else self.env_fns[0]()
        prefix = "single_" if self.steps_together else ""
        single: gym.Space = getattr(env, f"{prefix}observation_space")
        self.single_action_space: gym.Space = getattr(env, f"{prefix}action_space")
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata, self.render_mode = dict(env.metadata), env.render_mode
        if not self.steps_together:
            self.metadata["autoreset_mode"] = self.autoreset_mode
        env.close()
        self.single_observation_space, self.observation_space = observation_spaces(
            self.observation_mode, single, self.num_envs, self.env_fns
        )

    def describe(self, envs: VectorEnv) -> None:
        """Set what a `VectorEnv` of these environments has for attributes."""
        envs.num_envs, envs.env_fns = self.num_envs, self.env_fns
        envs.metadata, envs.render_mode = self.metadata, self.render_mode
        envs.single_action_space, envs.action_space = self.single_action_space, self.action_space
        envs.single_observation_space = self.single_observation_space
        envs.observation_space = self.observation_space
        envs.observation_mode, envs.autoreset_mode = self.observation_mode, self.autoreset_mode

    def shares(self, num_workers: int) -> list[slice]:
        """Return each worker's rows: contiguous, and as many as another's or one more."""
        shares = np.array_split(range(self.num_envs), num_workers)
        return [slice(int(share[0]), int(share[-1]) + 1) for share in shares]

    @functools.cached_property
    def _registry(self) -> dict[str, bytes | str]:
        return packed_registry()

    def setup(self, rows: slice) -> bytes:
        """Return a cloudpickle of the arguments of `worker.worker.build_environments` for these
        rows.
        """
        env_fns = self.env_fns if self.steps_together else self.env_fns[rows]
        arguments: dict[str, Any] = {
            "env_fns": env_fns,
            "num_envs": rows.stop - rows.start,
            "observation_mode": self.observation_mode,
            "autoreset_mode": self.autoreset_mode,
            "single_observation_space": self.single_observation_space,
            "single_action_space": self.single_action_space,
            "info_keys": self.info_keys,
            "frame_stack": self.frame_stack,
            "registry": self._registry,
        }
        return cloudpickle.dumps(arguments)
