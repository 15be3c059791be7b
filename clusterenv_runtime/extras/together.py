"""A worker's rows in a vector environment that steps them together: Gymnasium's own, or EnvPool's."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import create_empty_array

from ..arrays.spaces import are_stacks, leaves_of, map_space, take
from ..wire.part import RolloutPart
from ..worker.transitions import Transitions, stack
from .backends import EnvPoolVectorEnv

if TYPE_CHECKING:
    from ..policy.actor import Actor


class Together:
    """Environments that step together, as `ClusterEnv` takes them: ``ClusterEnv(Together(make),
    num_envs=64)``.

    Args:
        make: makes a `VectorEnv` of as many environments as it is told.
    """

    def __init__(self, make: Callable[[int], VectorEnv]) -> None:
        self._make = make

    def __call__(self, num_envs: int) -> VectorEnv:
        """Make so many, to read their spaces or to evaluate a policy in them."""
        return self._make(num_envs)

    def build(self, **arguments: Any) -> EnvsTogether:
        """Make a worker's rows; the arguments are those of `EnvsTogether`."""
        return EnvsTogether(**arguments)


class EnvsTogether:
    """Environments for a policy to act in, at a stretch. Errors in them cannot be told apart.

    Raises:
        RuntimeError: the environments are not as many, or not of the head's spaces.
    """

    def __init__(
        self,
        env_fns: Callable[[int], VectorEnv],
        num_envs: int,
        single_observation_space: gym.Space,
        single_action_space: gym.Space,
        info_keys: tuple[str, ...] = (),
        frame_stack: int | None = None,
        **_: Any,
    ) -> None:
        self._info_keys = info_keys
        self._stacks = are_stacks(single_observation_space, frame_stack)
        self.num_envs, self._envs = num_envs, env_fns(num_envs)
        if self._envs.num_envs != num_envs:
            raise RuntimeError(
                f"the function was asked for {num_envs} environments and made {self._envs.num_envs}"
            )
        for name, expected in (
            ("observation", single_observation_space),
            ("action", single_action_space),
        ):
            if (space := getattr(self._envs, f"single_{name}_space")) != expected:
                raise RuntimeError(
                    f"the environments' {name} space here is {space}, at the head it was {expected}"
                )
        self.single_observation_space, self.single_action_space = (
            single_observation_space,
            single_action_space,
        )
        self._example = create_empty_array(single_observation_space, 1)
        self._mode = AutoresetMode(
            self._envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        )
        self.infos: list[Any] = []  # those of a reset have no place in a rollout
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._dead = np.zeros(num_envs, bool)  # rows that the next step resets, whatever the action

    def close(self) -> None:
        self._envs.close()

    def reset(self, *, seed: list[int | None], options: dict[str, Any] | None) -> Any:
        one_each = isinstance(
            self._envs, EnvPoolVectorEnv | SyncVectorEnv
        )  # Gymnasium wants one for all
        observations, infos = self._envs.reset(seed=seed if one_each else seed[0], options=options)
        self._observations = self._of_space(observations)
        self._returns[:], self._lengths[:], self._dead[:] = 0, 0, False
        return deepcopy(
            self._observations
        ), infos  # it is sent without copying, perhaps while we go on

    def _of_space(self, observations: Any) -> Any:
        """Return a batch in the dtypes of the space, as `SyncVectorEnv` does it; not every vector
        environment does.
        """

        def cast(leaf: Any, example: Any) -> Any:
            return (
                leaf.astype(example.dtype, copy=False) if isinstance(example, np.ndarray) else leaf
            )

        return map_space(cast, self.single_observation_space, observations, self._example)

    def collect(self, actor: Actor, num_steps: int) -> RolloutPart:
        """Act and step until each row has ``num_steps`` transitions.

        Where the step after an episode's last one only resets (Gymnasium's next-step autoreset),
        rows get there at different times. What those that were first do until the last one has is
        not in the rollout.
        """
        space, num_envs = self.single_observation_space, self.num_envs
        starts = (self._lengths == 0) | self._dead
        transitions = Transitions(space, self._observations, num_steps, starts)
        (places,) = leaves_of(space, transitions.observations)
        final_observations = [_take(space, self._observations, slice(0))]
        episodes: list[np.ndarray] = [
            np.empty((0, 3))
        ]  # as `Transitions.part` takes them; those beyond it come last
        ends: list[np.ndarray] = [
            np.empty(0, np.int64)
        ]  # the transitions that ended one; not each may count
        actor.start(num_steps, starts)
        aligned, step, count = (
            self._mode != AutoresetMode.NEXT_STEP,
            0,
            np.zeros(num_envs, np.int64),
        )
        # Which of the actor's steps each transition was.
        step_of = None if aligned else np.zeros((num_steps, num_envs), np.int64)
        while True:
            # The rows whose next observation is still wanted, and where it goes.
            rows = slice(None) if aligned else np.flatnonzero(count <= num_steps)
            here = step if aligned else (count[rows], rows)
            for place, leaf in zip(places, *leaves_of(space, self._observations), strict=True):
                place[here] = leaf[rows]
            if count.min() >= num_steps:
                break
            if not aligned:  # the rows whose next transition is wanted
                rows = np.flatnonzero(~self._dead & (count < num_steps))
                here = count[rows], rows
                step_of[here] = step
            seen, reward, terminated, truncated, info = self._envs.step(
                actor.act(self._observations, starts)
            )
            if self._info_keys:
                wanted = np.arange(num_envs)[rows]
                self._keep_infos(
                    transitions,
                    info,
                    terminated | truncated,
                    wanted,
                    count[wanted] * num_envs + wanted,
                )
            transitions.rewards[here] = reward[rows]
            transitions.terminations[here], transitions.truncations[here] = (
                terminated[rows],
                truncated[rows],
            )
            self._returns += reward
            self._lengths += 1
            self._returns[self._dead] = self._lengths[self._dead] = 0
            count += ~self._dead
            ended = terminated | truncated
            if ended.any():
                rows = np.flatnonzero(ended)
                numbers = (count[rows] - 1) * num_envs + rows
                ends.append(numbers)
                # Environments that count their own episodes know better than the sum of rewards.
                counts = info.get("_episode", ended)[rows]
                own = info.get("episode", {"r": self._returns, "l": self._lengths})
                episodes.append(np.stack([numbers, own["r"][rows], own["l"][rows]], 1)[counts])
                final = info["final_obs"] if self._mode == AutoresetMode.SAME_STEP else seen
                final_observations.append(self._of_space(_take(space, final, rows)))
                self._returns[ended] = self._lengths[ended] = 0
                if self._mode == AutoresetMode.DISABLED:
                    seen, _ = self._envs.reset(options={"reset_mask": ended})
            starts = ended if aligned else self._dead
            if not aligned:
                self._dead = ended
            self._observations = self._of_space(seen)
            step += 1
        counted, all_ends = np.concatenate(episodes), np.concatenate(ends)
        order = all_ends.argsort()  # by transition, which is not always the order that they came in
        within = order[all_ends[order] < transitions.rewards.size]
        final = map_space(
            lambda *leaves: np.concatenate(leaves)[within], space, *final_observations
        )
        in_order = counted[counted[:, 0].argsort()]
        return transitions.part(actor, final, self._stacks, in_order, step_of)

    def _keep_infos(
        self,
        transitions: Transitions,
        infos: dict[str, Any],
        ended: np.ndarray,
        rows: np.ndarray,
        steps: np.ndarray,
    ) -> None:
        """Keep what ``infos`` have of these rows, whose transitions have these numbers."""
        all_rows = np.ones(len(ended), bool)
        sources = [(infos, all_rows)]
        if (
            self._mode == AutoresetMode.SAME_STEP
        ):  # where an episode has ended, those are of the reset
            sources = [(infos, ~ended), (infos.get("final_info", {}), ended)]
        for key in self._info_keys:
            for source, among in sources:
                if key in source:
                    there = (among & source.get(f"_{key}", all_rows))[rows]
                    if there.any():
                        transitions.add_info(
                            key, steps[there], np.asarray(source[key])[rows[there]]
                        )


def _take(space: gym.Space, batch: Any, rows: Any) -> Any:
    """Return a copy of these rows of a batch, or of an array of objects."""
    if isinstance(batch, np.ndarray) and batch.dtype == object:
        return stack(space, list(batch[rows]))
    return take(space, batch, rows)
