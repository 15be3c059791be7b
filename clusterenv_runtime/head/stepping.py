"""Gymnasium's vector API on workers, with actions from the head."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array

from ..arrays import map_space
from ..messages import Call, Message, Reset, SetAttr, Step
from .pool import Pool
from .workers import Worker

# Workers handle these requests after those outstanding, so they need not wait for each other.
WAITING = "send", "evaluate", "call", "get_attr", "set_attr", "render"


class SteppedEnv(VectorEnv):
    """A vector environment that equals ``SyncVectorEnv`` step for step."""

    _pool: Pool
    _close_timeout: float
    _finalizer: weakref.finalize[Any, Any]

    def _set_spaces(self, num_envs: int, first_row: int, copy: bool) -> None:
        """Set the attributes that follow from what the workers have built."""
        built = self._pool.environments
        self.num_envs, self._first_row, self.copy = num_envs, first_row, copy
        self.single_observation_space = built["observation_space"]
        self.single_action_space = built["action_space"]
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.autoreset_mode = AutoresetMode(built["metadata"]["autoreset_mode"])
        self.metadata = built["metadata"] | {"autoreset_mode": self.autoreset_mode}
        self.render_mode = built["render_mode"]
        self._granted: dict[int, int] = {}  # requests not taken yet, seq -> worker, oldest first
        self._overlapped: int | None = None  # the ``num_steps`` of the rollout requested ahead
        self._evaluation: list[int] = []  # the requests of the evaluation under way
        self._observations: Any = None  # the last observations of all environments
        self._left_out: set[str] = set()  # infos that the user was warned about

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those where ``options["reset_mask"]`` is True.

        Return observations and infos.
        """
        self._assert_idle("reset")
        mask = (options or {}).pop("reset_mask", None)
        if mask is not None:
            _check_reset_mask(mask, self.num_envs)
            self._assert_none_waits_for_reset("reset` with a `reset_mask")
            mask = None if mask.all() else mask
        seeds: list[int | None]
        if isinstance(seed, int):
            first = seed + self._first_row
            seeds = list(range(first, first + self.num_envs))
        else:
            seeds = [None] * self.num_envs if seed is None else seed
        if len(seeds) != self.num_envs:
            raise ValueError(
                "If seeds are passed as a list the length must match num_envs="
                f"{self.num_envs} but got length={len(seeds)}."
            )
        data = cloudpickle.dumps(options)
        if mask is None:
            self._pool.note_reset(seeds, data)

        def request(worker: Worker) -> Reset:
            rows = worker.rows
            return Reset(seeds[rows], data, None if mask is None else mask[rows])

        requests = self._ask(request)
        if mask is None:
            self._pool.to_reset.clear()
        for each in requests:
            own = each.worker.rows
            ended = each.worker.ended & (mask is not None and ~mask[own])
            self._pool.note_seen(each, each.response["arrays"][0], ended)
        return self._joined(requests)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every environment.

        Return observations, rewards, terminations, truncations and infos.
        """
        self._assert_idle("step")
        self._assert_none_waits_for_reset("step")

        def sequence(leaf: Any) -> Any:
            leaf = leaf if isinstance(leaf, list | tuple) else np.asarray(leaf)
            if len(leaf) != self.num_envs:
                raise ValueError(
                    f"Expected {self.num_envs} actions, one for each environment, got {len(leaf)}"
                )
            return leaf

        space = self.single_action_space
        actions = map_space(sequence, space, actions)
        try:
            requests = self._ask(
                lambda each: Step(map_space(lambda leaf: leaf[each.rows], space, actions))
            )
        except BaseException:  # the step may have ended episodes unseen
            self._pool.to_reset |= {worker.index for worker in self._pool.workers}
            raise
        # Where the user sees an episode's end, but not the reset after it.
        shows_end = self.autoreset_mode != AutoresetMode.SAME_STEP
        for each in requests:
            seen, _, terminations, truncations = each.response["arrays"]
            self._pool.note_seen(each, seen, (terminations | truncations) & shows_end)
        return self._joined(requests)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call each environment's method ``name``, or read its attribute."""
        return self._call("call", name, *args, **kwargs)

    def _call(self, method: str, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self._assert_idle(method)
        request = Call(name, cloudpickle.dumps((args, kwargs)))
        requests = self._ask(lambda _: request)
        return tuple(result for each in requests for result in each.response)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return attribute ``name`` of each environment."""
        return self._call("get_attr", name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set attribute ``name`` of each environment, also of those that a replacement builds.

        ``values`` is one value for all environments, or a list or tuple of one value for each.
        While rollouts are outstanding, this waits for them, as `call` does. The value is then set
        before the first step of the next request.
        """
        self._assert_idle("set_attr")
        values = list(values) if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        pool = self._pool
        pickles = [cloudpickle.dumps(values[worker.rows]) for worker in pool.workers]
        before = pool.attributes
        # Replacements get the value from now on, because a worker may die right after responding.
        others = {key: each for key, each in before.items() if key != name}
        pool.attributes = {**others, name: pickles}  # in order of the names' last calls
        try:
            self._ask(lambda each: SetAttr(name, pickles[each.index]))
        except BaseException:
            pool.attributes = before
            raise

    def render(self) -> tuple[Any, ...]:
        return self._call("render", "render")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        return self.call("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.call("np_random_seed")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers: ask them, after ``timeout`` seconds terminate them, then kill them.

        The default ``timeout`` is the option ``close_timeout``. With ``terminate`` it is 0.
        """
        self._finalizer.detach()
        seconds = self._close_timeout if timeout is None else timeout
        self._pool.close(0 if terminate else seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Callable[[Worker], Message]) -> list[Any]:
        """Ask each worker, and return the requests with their responses."""
        pool = self._pool
        pool.require(*pool.workers)
        with pool.closing_on_ctrl_c():
            requests = pool.gather([pool.ask(each, request(each)) for each in pool.workers])
        dropped = {key for each in requests for key in each.dropped}
        for key in sorted(dropped - self._left_out):
            gym.logger.warn(
                "Info %s is left out: only arrays, numbers, strings and their containers leave a "
                "worker, and classes named in ClusterEnv(allow=(...,)).",
                key,
            )
        self._left_out |= dropped
        return requests

    def _joined(self, requests: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results of a reset or step of all workers."""
        parts, *arrays = zip(*(each.response["arrays"] for each in requests), strict=True)
        return self._join(parts), *map(np.concatenate, arrays), self._infos(requests)

    def _infos(self, requests: Sequence[Any]) -> dict[str, Any]:
        """Return the infos of all rows, as one vector environment of these rows would."""
        infos: dict[str, Any] = {}
        for request in requests:
            of_worker, rows = request.response["infos"], request.worker.rows
            if any(isinstance(key, str) for key in of_worker):  # of the user's vector environment
                parts = [each.response["infos"] for each in requests]
                return merge_infos(parts, [each.worker.num_envs for each in requests])
            for row, info in of_worker.items():
                infos = self._add_info(infos, info, rows.start + row)
        return infos

    def _join(self, parts: Sequence[Any]) -> Any:
        """Join the workers' observations. Without ``copy``, all calls return the same arrays."""
        space = self.single_observation_space
        if self.copy or self._observations is None:
            self._observations = create_empty_array(space, self.num_envs, np.empty)

        def join(out: Any, *leaves: Any) -> Any:
            if isinstance(out, np.ndarray):
                return np.concatenate(leaves, out=out)
            return tuple(item for leaf in leaves for item in leaf)

        self._observations = map_space(join, space, self._observations, *parts)
        return self._observations

    def _assert_is_running(self) -> None:
        if self.closed or self._pool.is_closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if os.getpid() != self._pool.pid:
            raise ClosedEnvironmentError(
                f"This environment belongs to process {self._pool.pid}, of which this process is a "
                "fork: make one here."
            )

    def _assert_idle(self, method: str) -> None:
        self._assert_is_running()
        if self._evaluation:
            raise AlreadyPendingCallError(
                f"Calling `{method}` during an evaluation: call `evaluate_wait` first.", "evaluate"
            )
        if self._granted and method not in WAITING:
            pending, todo = "send", "`recv` all chunks first"
            if self._overlapped is not None:
                pending, todo = "rollout", "ask for the rollout before with overlap=False"
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `{pending}` to complete: "
                f"{todo}.",
                pending,
            )
        self._pool.raise_errors()  # of an interrupted call

    def _assert_none_waits_for_reset(self, method: str) -> None:
        if self._pool.to_reset:
            raise reset_needed(method)
        if any(worker.evaluated for worker in self._pool.workers):
            raise ResetNeeded(
                f"Cannot call `{method}` after `evaluate` before all environments are `reset`."
            )


def reset_needed(method: str) -> ResetNeeded:
    """Return the error of a method that cannot run until `Pool.to_reset` is empty."""
    return ResetNeeded(
        f"Cannot call `{method}` before all environments are `reset`, because one has raised, or a "
        "step was given up."
    )


def merge_infos(infos: Sequence[dict[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Merge the infos of several vector environments, as one of all their rows would have them.

    ``sizes`` are their numbers of rows.
    """
    if len(infos) == 1:
        return infos[0]
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for each in infos for key in each):
        values = [each.get(key) for each in infos]
        if any(isinstance(value, dict) for value in values):
            merged[key] = merge_infos([value or {} for value in values], sizes)
            continue
        like = next(value for value in values if value is not None)
        merged[key] = np.zeros((sum(sizes), *like.shape[1:]), like.dtype)
        if like.dtype == object:
            merged[key].fill(None)
        for value, last, size in zip(values, np.cumsum(sizes), sizes, strict=True):
            if value is not None:
                merged[key][last - size : last] = value
    return merged


def _check_reset_mask(mask: Any, num_envs: int) -> None:
    """Check what `SyncVectorEnv.reset` checks, but would check only of a worker's share."""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must be a bool array, got {mask!r:.100}")
    if mask.shape != (num_envs,) or not mask.any():
        raise ValueError(
            f"`options['reset_mask']` must have shape `({num_envs},)` and at least one True value, "
            f"got {mask!r:.100}"
        )
