"""Gymnasium's vector API on workers, with actions from the head.

Each call is one request to each worker.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.error import NoAsyncCallError, ResetNeeded
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import create_empty_array, iterate

from ..arrays.trees import map_space
from ..envs.blueprint import Blueprint
from ..errors import DeadlineError, printable
from ..wire.protocol import Call, Message, Reset, SetAttr
from .requests import reset_needed
from .responses import OpenedReply
from .start import Head
from .worker import Episodes, Worker

Infos = list[tuple[int, dict[str, Any]]]  # (environment, info)


class Stepper:
    """The call that is under way, and the results made from the responses.

    Args:
        head: the workers, and the orders for their replacements.
        blueprint: the environments.
        copy: whether each batch of observations consists of fresh arrays.
    """

    def __init__(self, head: Head, blueprint: Blueprint, copy: bool) -> None:
        self._pool = head.pool
        self._recovery = head.recovery
        self._blueprint = blueprint
        self._space = blueprint.layout.single_observation_space
        self._copy = copy
        self._under_way = AsyncState.DEFAULT
        self._seqs: list[int] = []  # the requests of the call under way
        self._behind: list[int] = []  # requests for which nobody waits
        self._mask: np.ndarray | None = None  # the mask of the reset under way; None for all
        self._observations: Any = None  # the last observations of all environments
        self._lost: list[Worker] = []  # workers replaced after they had answered the last call
        self._left_out: set[str] = set()  # keys of infos that the user was warned about

    @property
    def pending(self) -> str:
        """The name of the call that is under way; empty if there is none."""
        return "" if self._under_way == AsyncState.DEFAULT else self._under_way.value

    def reset(self, seed: int | list[int | None] | None, options: dict[str, Any] | None) -> None:
        """Ask for a reset of all environments, or of those in ``options["reset_mask"]``."""
        num_envs = self._blueprint.num_envs
        mask = None
        if options is not None and "reset_mask" in options:
            mask = options.pop("reset_mask")
            _check_reset_mask(mask, num_envs)
            self._assert_none_waits_for_reset("reset` with a `reset_mask")
            mask = None if mask.all() else mask
        seeds = [None] * num_envs if seed is None else seed
        if isinstance(seed, int):
            first = seed + self._blueprint.first_row
            seeds = list(range(first, first + num_envs))
        if len(seeds) != num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={num_envs} "
                f"but got length={len(seeds)}."
            )
        self._mask = mask
        if mask is None:
            self._recovery.reset(self._pool.workers, seeds, options)

        def request(worker: Worker) -> tuple[Message, bytes]:
            part = None if mask is None else mask[worker.rows]
            return Reset(mask is not None), cloudpickle.dumps((seeds[worker.rows], options, part))

        self._ask(AsyncState.WAITING_RESET, request)

    def finish_reset(self, timeout: float | None) -> tuple[Any, Infos]:
        """Return the observations and the infos."""
        replies = self._replies(AsyncState.WAITING_RESET, timeout)
        parts = []
        for worker, reply in zip(self._pool.workers, replies, strict=True):
            observations = reply.value
            if self._mask is None:
                worker.episodes = Episodes.begun(observations, worker.num_envs)
                self._pool.failures.to_reset.clear()
            else:
                mask = self._mask[worker.rows]
                observations = worker.episodes.saw_reset(self._space, observations, mask)
            parts.append(observations)
        self._note_losses()
        return self._join(parts), self._infos(replies)

    def step(self, actions: Any) -> None:
        """Ask for a step of all environments."""
        self._assert_none_waits_for_reset("step")
        space, num_envs = self._blueprint.action_space, self._blueprint.num_envs
        is_array = isinstance(actions, np.ndarray) and actions.ndim > 0
        if not (is_array and isinstance(space, Box | MultiDiscrete)):
            actions = list(iterate(space, actions))
        if len(actions) != num_envs:
            raise ValueError(
                f"Expected {num_envs} actions, one for each environment, got {len(actions)}"
            )
        self._ask(
            AsyncState.WAITING_STEP, lambda worker: worker.episodes.step(actions[worker.rows])
        )

    def finish_step(
        self, timeout: float | None
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, Infos]:
        """Return observations, rewards, terminations, truncations and infos."""
        replies = self._replies(AsyncState.WAITING_STEP, timeout)
        # In the mode SAME_STEP, the user sees an end together with the reset after it.
        shows_ends = self._blueprint.layout.autoreset_mode != AutoresetMode.SAME_STEP
        for worker, reply in zip(self._pool.workers, replies, strict=True):
            observations, _, terminations, truncations = reply.value
            worker.episodes = Episodes(observations, (terminations | truncations) & shows_ends)
        self._note_losses()
        parts, *arrays = zip(*(reply.value for reply in replies), strict=True)
        return self._join(parts), *map(np.concatenate, arrays), self._infos(replies)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask for a call of each environment's method, or for the value of its attribute."""
        _check_name(name)
        arguments = cloudpickle.dumps((args, kwargs))
        self._ask(AsyncState.WAITING_CALL, lambda _: (Call(name), arguments))

    def finish_call(self, timeout: float | None) -> tuple[Any, ...]:
        """Return one result for each environment."""
        replies = self._replies(AsyncState.WAITING_CALL, timeout)
        return tuple(result for reply in replies for result in reply.value)

    def set_attr(self, name: str, values: Any, waits: bool) -> None:
        """Set an attribute of each environment, also of environments that a replacement builds.

        Workers set it after they have handled all earlier requests. Unless this method ``waits``
        for them, a later call raises their errors.
        """
        _check_name(name)
        num_envs = self._blueprint.num_envs
        values = list(values) if isinstance(values, list | tuple) else [values] * num_envs
        if len(values) != num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {num_envs} environments."
            )
        pickles = [cloudpickle.dumps(values[worker.rows]) for worker in self._pool.workers]
        before = self._recovery.attributes
        # Replacements get the value from now on, because a worker may die right after responding.
        others = {key: values for key, values in before.items() if key != name}
        self._recovery.attributes = {**others, name: pickles}  # in order of the names' last calls
        try:
            self._ask(
                AsyncState.WAITING_CALL,
                lambda worker: (SetAttr(name), pickles[worker.index]),
                fits_together=True,
            )
            if waits:
                self._replies(AsyncState.WAITING_CALL, None)
            else:
                self._under_way = AsyncState.DEFAULT
                self._behind = self._pool.outstanding(self._behind) + self._seqs
        except BaseException:
            self._recovery.attributes = before
            raise

    def _assert_none_waits_for_reset(self, method: str) -> None:
        if self._pool.failures.to_reset:
            raise reset_needed(method)
        if any(worker.evaluated for worker in self._pool.workers):
            raise ResetNeeded(
                f"Cannot call `{method}` after `evaluate` before all environments are `reset`."
            )

    def _ask(
        self,
        state: AsyncState,
        request: Callable[[Worker], tuple[Message, bytes]],
        fits_together: bool = False,
    ) -> None:
        workers = self._pool.workers
        is_reset = state == AsyncState.WAITING_RESET and self._mask is None
        if self._blueprint.steps_together and not (is_reset or fits_together):
            raise ValueError(
                "environments that step together allow only calls in which a policy acts: "
                "`rollout`, `send`, `recv` and `evaluate`"
            )
        self._pool.require(*workers)
        requests = [request(worker) for worker in workers]  # first, because it may raise
        self._seqs = []
        for worker, (message, buffer) in zip(workers, requests, strict=True):
            seq = self._pool.ask(worker, message, buffer)
            if is_reset and not worker.has_been_ready:
                self._pool.forget([seq])  # nobody waits for workers that have not come up yet
            else:
                self._seqs.append(seq)
        self._pool.exchange()
        self._under_way = state

    def _replies(self, state: AsyncState, timeout: float | None) -> list[OpenedReply]:
        """Return one opened reply per worker, with zeros for workers that have not come up yet."""
        name = state.value
        if self._under_way != state:
            raise NoAsyncCallError(
                f"Calling `{name}_wait` without any prior call to `{name}_async`.", name
            )
        try:
            requests = self._pool.gather(self._seqs, timeout)
        except BaseException as error:
            if state == AsyncState.WAITING_STEP:  # the step may have ended episodes unseen
                self._pool.failures.to_reset |= {worker.index for worker in self._pool.workers}
            if not isinstance(error, DeadlineError):
                raise
            raise multiprocessing.TimeoutError(
                f"The call to `{name}_wait` has timed out after {timeout} second(s). {error}"
            ) from None
        finally:
            self._under_way = AsyncState.DEFAULT
        self._lost = [request.worker for request in requests if request.process_is_gone]
        replies = {request.worker.index: request.response for request in requests}
        dropped = {key for reply in replies.values() for key in reply.dropped}
        for key in sorted(dropped - self._left_out):
            kinds = "only arrays, numbers, strings and their containers leave a worker"
            gym.logger.warn("Info %s is left out: %s.", printable(key), kinds)
        self._left_out |= dropped
        return [
            replies.get(worker.index)
            or OpenedReply(create_empty_array(self._space, worker.num_envs), [])
            for worker in self._pool.workers
        ]

    def _note_losses(self) -> None:
        """Have the next step report episodes that were lost after the response to this call."""
        for worker in self._lost:
            worker.episodes.lost()

    def _infos(self, replies: list[OpenedReply]) -> Infos:
        return [
            (worker.rows.start + env, info)
            for worker, reply in zip(self._pool.workers, replies, strict=True)
            for env, info in reply.infos
        ]

    def _join(self, parts: Sequence[Any]) -> Any:
        """Join the workers' observations. Without ``copy``, all calls return the same arrays."""
        if self._copy or self._observations is None:
            num_envs = self._blueprint.num_envs
            self._observations = create_empty_array(self._space, num_envs, np.empty)
        self._observations = map_space(_joined, self._space, self._observations, *parts)
        return self._observations


def _joined(out: Any, *leaves: Any) -> Any:
    if isinstance(out, np.ndarray):
        return np.concatenate(leaves, out=out)
    return tuple(item for leaf in leaves for item in leaf)


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"an attribute's name must be a string, got {name!r}")


def _check_reset_mask(mask: Any, num_envs: int) -> None:
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(
            f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}"
        )
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, "
            f"got reset_mask={mask}"
        )
