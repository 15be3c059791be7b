"""The arrays that cross the boundary: from a worker to the head, and from the runtime to the user's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array

from .codec import pack, unpack
from .errors import ProtocolError
from .spaces import map_space
from .sync import sampled_states


class RolloutPart(msgspec.Struct):
    """What one worker sends of a rollout: ``num_steps`` steps of its ``num_envs`` environments.

    Observations are arrays, or for Dict and Tuple spaces dicts and tuples of arrays. Dtypes are the spaces' own.
    """

    version: int  # of the policy that acted
    observations: Any  # (num_steps, num_envs, ...) what the policy acted on
    actions: np.ndarray  # (num_steps, num_envs, ...)
    logprobs: np.ndarray  # (num_steps, num_envs) float32, of the actions under the policy that took them
    rewards: np.ndarray  # (num_steps, num_envs) float64
    terminations: np.ndarray  # (num_steps, num_envs) bool
    truncations: np.ndarray  # (num_steps, num_envs) bool
    final_observations: Any  # (ends, ...) what the steps that ended an episode led to, ordered as their nonzero()
    next_observations: Any  # (num_envs, ...) after the last step
    episodes: np.ndarray  # (num_episodes,) int64, which step ended each that counts: step * num_envs + environment
    episodic_returns: np.ndarray  # (num_episodes,) float64
    episodic_lengths: np.ndarray  # (num_episodes,) int64
    params: np.ndarray  # (states, ...) the policy's distribution parameters at `sampled_states`

    def pack(self, buffers: list[Any]) -> dict[str, Any]:
        """Return what `protocol.Part` holds, and append the data of the arrays to ``buffers``."""
        return {name: pack(getattr(self, name), buffers) for name in self.__struct_fields__}

    @classmethod
    def unpack(
        cls, fields: dict[str, Any], buffers: list[Any], space: Space, num_steps: int, num_envs: int
    ) -> RolloutPart:
        """Undo `pack`, with views of ``buffers``; ``space`` is the single observation space.

        Raises:
            ProtocolError: it is not such a part, or not one of so many steps and environments.
        """
        values = {name: unpack(value, buffers, copy=False) for name, value in fields.items()}
        try:
            part = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"a part of a rollout is malformed: {error}") from None
        part._check(space, num_steps, num_envs)
        return part

    def _check(self, space: Space, num_steps: int, num_envs: int) -> None:
        steps = num_steps, num_envs

        def require(name: str, array: Any, shape: tuple[int, ...], kind: str) -> None:
            fits = isinstance(array, np.ndarray) and array.shape[: len(shape)] == shape and array.dtype.kind in kind
            if not fits:
                found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise ProtocolError(f"{name} in a part of a rollout must be {shape} and of kind {kind!r}, got {found}")

        for name, kind in (("rewards", "f"), ("logprobs", "f"), ("terminations", "b"), ("truncations", "b")):
            require(name, getattr(self, name), steps, kind)
            if getattr(self, name).ndim != 2:
                raise ProtocolError(f"{name} in a part of a rollout has {getattr(self, name).ndim} dimensions, not 2")
        require("actions", self.actions, steps, "biuf")
        require("params", self.params, (len(sampled_states(num_steps * num_envs)),), "f")
        for name, kind in (("episodes", "i"), ("episodic_returns", "f"), ("episodic_lengths", "i")):
            require(name, getattr(self, name), (self.episodes.size,), kind)
        ends = int(np.count_nonzero(self.terminations | self.truncations))
        leading = {"observations": steps, "next_observations": steps[1:], "final_observations": (ends,)}
        for name, shape in leading.items():
            try:
                map_space(
                    lambda leaf, one, name=name, shape=shape: require(name, leaf, shape + one.shape[1:], one.dtype.kind),
                    space, getattr(self, name), _one(space),
                )  # fmt: skip
            except (KeyError, TypeError, ValueError) as error:  # not of the space's structure
                raise ProtocolError(f"{name} in a part of a rollout are not of {space}: {error!r}") from None


def _one(space: Space) -> Any:
    return create_empty_array(space, 1)


@dataclass
class Rollout:
    """``num_steps`` steps of all environments, or of one worker's. There are no dead steps in it.

    Observations are arrays, or for Dict and Tuple spaces dicts and tuples of arrays. Dtypes are the spaces' own.
    """

    rows: np.ndarray  # (num_envs,) int64, which environments these are
    observations: Any  # (num_steps, num_envs, ...) what the policy acted on
    actions: np.ndarray  # (num_steps, num_envs, ...)
    logprobs: np.ndarray  # (num_steps, num_envs) float32, of the actions under the policy that took them
    rewards: np.ndarray  # (num_steps, num_envs) float64
    terminations: np.ndarray  # (num_steps, num_envs) bool
    truncations: np.ndarray  # (num_steps, num_envs) bool
    final_observations: Any  # (episodes, ...) what the steps that ended one led to, ordered as their nonzero()
    next_observations: Any  # (num_envs, ...) after the last step; docs/limits.md says what "vector" ones make of it
    policy_versions: np.ndarray  # (num_envs,) int64, the version that acted
    episodic_returns: np.ndarray  # (num_episodes,) float64, of the episodes that ended here, by step, then environment
    episodic_lengths: np.ndarray  # (num_episodes,) int64

    @classmethod
    def join(cls, space: Space, parts: list[RolloutPart], rows: np.ndarray) -> Rollout:
        """Join the workers' parts, given in row order; ``space`` is the single observation space."""
        sizes = [part.rewards.shape[1] for part in parts]
        # Not every environment counts every episode.
        ended = _in_order((np.flatnonzero(part.terminations | part.truncations) for part in parts), sizes)
        counted = _in_order((part.episodes for part in parts), sizes)

        def join(name: str, joined: Callable[[Sequence[np.ndarray]], np.ndarray]) -> Any:
            return joined([getattr(part, name) for part in parts])

        def join_observations(name: str, joined: Callable[[Sequence[np.ndarray]], np.ndarray]) -> Any:
            return map_space(lambda *leaves: joined(leaves), space, *(getattr(part, name) for part in parts))

        def by_episode(order: Any) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
            return lambda leaves: np.concatenate(leaves)[order]

        return cls(
            rows=rows,
            observations=join_observations("observations", _join_steps),
            final_observations=join_observations("final_observations", by_episode(ended)),
            next_observations=join_observations("next_observations", np.concatenate),
            policy_versions=np.repeat([part.version for part in parts], sizes),
            episodic_returns=join("episodic_returns", by_episode(counted)),
            episodic_lengths=join("episodic_lengths", by_episode(counted)),
            **{
                name: join(name, _join_steps)
                for name in ("actions", "logprobs", "rewards", "terminations", "truncations")
            },
        )


def _join_steps(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays ``(num_steps, num_envs, ...)`` along the environments."""
    if len(leaves) > 1:
        return np.concatenate(leaves, 1)
    (leaf,) = leaves
    # A large one remains a view of its message, whose memory is nobody else's; small ones would each keep all of it.
    # Where a frame begins, not every dtype may.
    large = leaf.nbytes >= 2**16 and leaf.flags.aligned and leaf.flags.writeable
    return leaf if large else leaf.copy()


def _in_order(flat: Iterable[np.ndarray], sizes: list[int]) -> Any:
    """Return the order by step, then environment, of what each worker has numbered ``step * its environments + one``."""
    if len(sizes) == 1:
        return ...
    first_rows, num_envs = np.cumsum([0, *sizes[:-1]]), sum(sizes)
    numbers = [k // n * num_envs + first + k % n for k, n, first in zip(flat, sizes, first_rows, strict=True)]
    return np.argsort(np.concatenate(numbers))
