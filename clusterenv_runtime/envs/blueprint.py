"""The environments of a `ClusterEnv`: how many there are, their layout, and who builds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from ..arrays.trees import leaves
from .large import LargeArray, LargeArrays
from .layout import EnvLayout
from .registry import packed_registry
from .script import dumps_noting


class Vectorized(Protocol):
    """Makes environments that step together, in which a policy acts."""

    def __call__(self, num_envs: int) -> VectorEnv:
        """Make ``num_envs`` environments, to read their spaces."""

    def build(self, layout: EnvLayout, num_envs: int) -> Any:
        """Make a worker's environments.

        The object has `num_envs`, `layout`, `infos`, `reset(seeds, options)`, `collect(actor,
        num_steps)`, `set_attr(name, values)` and `close()`, which mean the same as in
        `worker.one_by_one.EnvsOneByOne`.
        """


EnvFns = Sequence[Callable[[], gym.Env]] | Vectorized


class Blueprint:
    """The environments that ``env_fns`` make: one by one, or each worker's rows together.

    The arguments are those of `ClusterEnv`.

    Raises:
        TypeError, ValueError: an argument is wrong, or does not go with another.
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
        self.first_row = first_row  # among the environments of all learners
        self.steps_together = callable(env_fns)
        self.env_fns = env_fns if self.steps_together else list(env_fns)
        self.num_envs = self._count(num_envs)
        if self.steps_together and observation_mode != "same":
            raise ValueError(
                f"one function for all environments has observation_mode 'same', got "
                f"{observation_mode!r}"
            )
        _check_info_keys(info_keys)
        if frame_stack is not None and (type(frame_stack) is not int or frame_stack < 1):
            raise ValueError(f"frame_stack must be an integer from 1, got {frame_stack!r}")
        mode = AutoresetMode(autoreset_mode)
        # This process builds one environment, or all if their spaces differ, to read the spaces.
        if self.steps_together:
            envs = self.env_fns(1)
        else:
            some = self.env_fns if observation_mode == "different" else self.env_fns[:1]
            envs = SyncVectorEnv(some, observation_mode=observation_mode, autoreset_mode=mode)
        self.metadata = dict(envs.metadata)
        self.render_mode = envs.render_mode
        space, action_space = envs.single_observation_space, envs.single_action_space
        self.action_space = batch_space(action_space, self.num_envs)
        self.observation_space = envs.observation_space
        if observation_mode == "same":
            self.observation_space = batch_space(space, self.num_envs)
        envs.close()
        self.layout = EnvLayout(
            space, action_space, observation_mode, mode, tuple(info_keys), frame_stack
        )
        if frame_stack is not None and not any(leaves(self.layout.stacks)):
            raise ValueError(
                f"frame_stack is {frame_stack}, but no observation is a stack of {frame_stack} "
                f"arrays: {space}; Gymnasium's wrapper FrameStackObservation makes stacks"
            )
        self._of_script: dict[str, Any] = {}
        self._large = LargeArrays()
        self._registry = packed_registry(self._of_script)

    def _count(self, num_envs: int | None) -> int:
        if self.steps_together:
            if not hasattr(self.env_fns, "build"):
                raise TypeError(
                    "env_fns must be a list of functions; one for all environments goes into a "
                    "Together"
                )
            if num_envs is None or num_envs < 1:
                raise ValueError(
                    f"one function for all environments needs num_envs, at least 1, got {num_envs}"
                )
            return num_envs
        if not self.env_fns:
            raise ValueError("env_fns must hold at least one function, got none")
        if num_envs not in (None, len(self.env_fns)):
            raise ValueError(f"num_envs is {num_envs}, but there are {len(self.env_fns)} env_fns")
        return len(self.env_fns)

    def describe(self, envs: VectorEnv) -> None:
        """Set the attributes that a `VectorEnv` of these environments has."""
        layout = self.layout
        envs.num_envs, envs.env_fns = self.num_envs, self.env_fns
        envs.metadata, envs.render_mode = self.metadata, self.render_mode
        envs.single_observation_space = layout.single_observation_space
        envs.observation_space = self.observation_space
        envs.single_action_space = layout.single_action_space
        envs.action_space = self.action_space
        envs.observation_mode = layout.observation_mode
        envs.autoreset_mode = layout.autoreset_mode

    def shares(self, num_workers: int) -> list[slice]:
        """Return each worker's rows: contiguous, and of two workers one has one more at most."""
        shares = np.array_split(range(self.num_envs), num_workers)
        return [slice(int(share[0]), int(share[-1]) + 1) for share in shares]

    def setup(self, rows: slice) -> tuple[bytes, list[LargeArray]]:
        """Return a cloudpickle of what a worker builds, and of what it then has of the script.

        They are the arguments of `worker.worker.build_environments`, and then the classes and
        functions of the script that came along, by name. The large arrays in it are apart.
        """
        env_fns = self.env_fns if self.steps_together else self.env_fns[rows]
        of_script = self._of_script
        setup = env_fns, rows.stop - rows.start, self.layout, self._registry, of_script
        arrays: list[LargeArray] = []
        return dumps_noting(setup, of_script, self._large.collector(arrays)), arrays


def _check_info_keys(info_keys: Sequence[str]) -> None:
    if isinstance(info_keys, str) or not all(isinstance(key, str) for key in info_keys):
        raise TypeError(f"info_keys must be a tuple of strings, got {info_keys!r}")
    for key in info_keys:
        if f"_{key}" in info_keys:
            raise ValueError(
                f"info_keys must not have both {key!r} and '_{key}', which says where it is"
            )
