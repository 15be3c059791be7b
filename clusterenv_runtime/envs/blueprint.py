"""The environments of a `ClusterEnv`: their number, the functions that make them, and their layout.

The head and its workers agree on the layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import gymnasium as gym
import msgspec
import numpy as np
from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, create_empty_array

from ..arrays.trees import leaves, map_space
from .large import LargeArray, LargeArrays
from .script import dumps_noting, packed_registry, register_script


class SpacesError(RuntimeError, ValueError):
    """The spaces of one environment differ from those of another.

    `SyncVectorEnv` raises RuntimeError in some of these cases and ValueError in others.
    """


@dataclass(frozen=True)
class EnvLayout:
    """The spaces and modes of a `ClusterEnv`'s environments. `ClusterEnv` explains them."""

    single_observation_space: Space
    single_action_space: Space
    observation_mode: str | tuple[Space, Space] = "same"
    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
    info_keys: tuple[str, ...] = ()
    frame_stack: int | None = None

    @classmethod
    def of(cls, observation_space: Space, action_space: Space, **modes: Any) -> Self:
        """Return the layout of environments, given the spaces of one of them.

        Raises:
            ValueError: ``frame_stack`` is given, but no observation is a stack of that many arrays.
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
        """Return each environment's observation space if these may differ, otherwise an empty list.

        Raises:
            SpacesError: the spaces of an environment do not fit this layout.
        """
        for env in envs:
            self.check(env.observation_space, env.action_space)
        differ = self.observation_mode == "different"
        return [env.observation_space for env in envs] if differ else []

    def check(self, observation_space: Space, action_space: Space) -> None:
        """Raise SpacesError if another environment's spaces do not fit this layout.

        The bounds of observations must be equal, too, but only with the observation mode "same".
        """
        ours = self.single_observation_space
        is_alike = observation_space == ours
        if self.observation_mode != "same":
            is_alike = is_space_dtype_shape_equiv(observation_space, ours)
        if not is_alike:
            raise SpacesError(
                f"an environment's observation space is {observation_space}, another's is {ours}: "
                f"observation_mode {self.observation_mode!r} does not allow that"
            )
        if action_space != self.single_action_space:
            raise SpacesError(
                f"an environment's action space is {action_space}, another's is "
                f"{self.single_action_space}"
            )


LayoutOf = Callable[[Space, Space], EnvLayout]  # from an observation space and an action space


class Vectorized(Protocol):
    """An object that makes environments that step together, in which a policy acts."""

    def build(self, layout_of: LayoutOf, num_envs: int) -> Any:
        """Make a worker's environments, whose layout follows from their spaces.

        The returned object has `num_envs`, `layout`, `metadata`, `render_mode`, `spaces`, `infos`,
        `reset(seeds, options)`, `collect(actor, num_steps)`, `set_attr(name, values)` and
        `close()`, which mean the same as in `worker.one_by_one.EnvsOneByOne`.
        """


EnvFns = Sequence[Callable[[], gym.Env]] | Vectorized
# What a worker tells the head about its environments once they are built: one observation space and
# one action space, the metadata, the render mode, and each environment's observation space if these
# may differ.
Told = tuple[Space, Space, dict[str, Any], str | None, list[Space]]


class Blueprint:
    """The environments that ``env_fns`` make: one by one, or all of a worker's rows together.

    Only workers make environments. The first worker that has built its own tells the head what it
    must know about them. The arguments are those of `ClusterEnv`.

    Attributes:
        layout: the environments' spaces and modes; None until a worker has told the head.

    Raises:
        TypeError, ValueError: an argument is invalid, or does not fit another one.
    """

    def __init__(
        self,
        env_fns: EnvFns,
        num_envs: int | None,
        observation_mode: str | tuple[Space, Space],
        autoreset_mode: str | AutoresetMode,
        info_keys: Sequence[str] = (),
        frame_stack: int | None = None,
        first_row: int = 0,
    ) -> None:
        self.first_row = first_row  # this learner's first row among all learners' rows
        self.steps_together = hasattr(env_fns, "build")
        if callable(env_fns) and not self.steps_together:
            raise TypeError(
                "env_fns must be a list of functions; "
                "one for all environments goes into a Together of clusterenv_runtime.extras"
            )
        self.env_fns = env_fns if self.steps_together else list(env_fns)
        self.num_envs = self._count(num_envs)
        if self.steps_together and observation_mode != "same":
            raise ValueError(
                f"one function for all environments has observation_mode 'same', got "
                f"{observation_mode!r}"
            )
        _check_observation_mode(observation_mode)
        _check_info_keys(info_keys)
        if frame_stack is not None and (type(frame_stack) is not int or frame_stack < 1):
            raise ValueError(f"frame_stack must be an integer from 1, got {frame_stack!r}")
        self.observation_mode = observation_mode
        self._layout_of = functools.partial(
            EnvLayout.of,
            observation_mode=observation_mode,
            autoreset_mode=AutoresetMode(autoreset_mode),
            info_keys=tuple(info_keys),
            frame_stack=frame_stack,
        )
        self.layout: EnvLayout | None = None
        self._metadata: dict[str, Any] = {}
        self._render_mode: str | None = None
        self._spaces: list[Space | None] = [None] * self.num_envs  # see `Told`
        register_script()
        self._of_script: dict[str, Any] = {}
        self._large = LargeArrays()
        self._registry = packed_registry(self._of_script)

    def _count(self, num_envs: int | None) -> int:
        if self.steps_together:
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

    def learn(self, told: Any, rows: slice) -> None:
        """Take over what a worker tells about its rows; see `Told`.

        Raises:
            msgspec.ValidationError: ``told`` does not have the form of `Told`.
            SpacesError: the worker's spaces differ from those of another worker.
        """
        space, action_space, metadata, render_mode, spaces = msgspec.convert(told, Told)
        if self.layout is None:
            self.layout = self._layout_of(space, action_space)
            self._metadata = metadata | {"autoreset_mode": self.layout.autoreset_mode}
            self._render_mode = render_mode
        else:
            self.layout.check(space, action_space)
        if self.observation_mode == "different":  # otherwise workers send none
            self._spaces[rows] = spaces

    @functools.cached_property
    def action_space(self) -> Space:
        """The action space of all environments together."""
        return batch_space(self.layout.single_action_space, self.num_envs)

    @property
    def observation_space(self) -> Space:
        """The observation space of all environments together."""
        if isinstance(self.observation_mode, tuple):
            return self.observation_mode[0]
        if self.observation_mode == "different":
            return batch_differing_spaces(self._spaces)
        return batch_space(self.layout.single_observation_space, self.num_envs)

    def move_to(self, envs: VectorEnv) -> None:
        """Set the attributes of the `VectorEnv` that has these environments.

        This object then forgets the functions that make environments, because all workers' setups
        are made by now. The functions may refer to the `VectorEnv`, which could never be garbage
        collected while its head held them.
        """
        layout = self.layout
        envs.num_envs, envs.env_fns = self.num_envs, self.env_fns
        envs.metadata, envs.render_mode = self._metadata, self._render_mode
        envs.single_observation_space = layout.single_observation_space
        if self.observation_mode == "different":  # the layout is from the first worker to report
            envs.single_observation_space = self._spaces[0]
        envs.observation_space = self.observation_space
        envs.single_action_space = layout.single_action_space
        envs.action_space = self.action_space
        envs.observation_mode = layout.observation_mode
        envs.autoreset_mode = layout.autoreset_mode
        self.env_fns = []
        self._of_script = {}
        self._large = LargeArrays()

    def shares(self, num_workers: int) -> list[slice]:
        """Return each worker's rows: contiguous shares whose sizes differ by at most one."""
        shares = np.array_split(range(self.num_envs), num_workers)
        return [slice(int(share[0]), int(share[-1]) + 1) for share in shares]

    def setup(self, rows: slice) -> tuple[bytes, list[LargeArray]]:
        """Return a cloudpickle of what a worker builds and needs from the script, and large arrays.

        The pickle holds the first arguments of `worker.worker.build_environments`, and then the
        script's classes and functions that these refer to, by name. The large arrays are not in
        it, but are returned separately.
        """
        env_fns = self.env_fns if self.steps_together else self.env_fns[rows]
        of_script = self._of_script
        setup = env_fns, rows.stop - rows.start, self._layout_of, self._registry, of_script
        arrays: list[LargeArray] = []
        return dumps_noting(setup, of_script, self._large.collector(arrays)), arrays


def _check_observation_mode(mode: Any) -> None:
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(f"Expected both elements of observation_mode to be spaces, got {mode}")
    elif mode not in ("same", "different"):
        wanted = "'same', 'different', or a tuple of the batched and the single space"
        raise ValueError(f"Invalid `observation_mode`: {wanted} are possible, got {mode!r}")


def _check_info_keys(info_keys: Sequence[str]) -> None:
    if isinstance(info_keys, str) or not all(isinstance(key, str) for key in info_keys):
        raise TypeError(f"info_keys must be a tuple of strings, got {info_keys!r}")
    for key in info_keys:
        if f"_{key}" in info_keys:
            raise ValueError(
                f"info_keys must not have both {key!r} and '_{key}', which says where it is"
            )
