"""Gymnasium's vector API: the methods of a `ClusterEnv` that every vector environment has."""

from __future__ import annotations

import os
import weakref
from typing import Any, Self

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import VectorEnv

from .collect import Collector
from .evaluation import Evaluator
from .interrupts import interruptible
from .pool import WorkerPool
from .start import Head
from .stepping import Infos, Stepper


class VectorApi(VectorEnv):
    """A vector environment that equals ``SyncVectorEnv`` step for step.

    Like ``AsyncVectorEnv``, it also splits calls into halves, ``..._async`` and ``..._wait``.
    """

    _head: Head
    _stepper: Stepper
    _collector: Collector
    _evaluator: Evaluator
    _finalizer: weakref.finalize[Any, Any]
    _pool: WorkerPool

    @interruptible
    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        """Reset all environments, or those where ``options["reset_mask"]`` is True.

        Return observations and infos.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    @interruptible
    def reset_async(
        self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self._assert_idle("reset_async")
        self._stepper.reset(seed, options)

    @interruptible
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        self._assert_is_running()
        observations, infos = self._stepper.finish_reset(timeout)
        return observations, self._join_infos(infos)

    @interruptible
    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every environment.

        Return observations, rewards, terminations, truncations and infos.
        """
        self.step_async(actions)
        return self.step_wait()

    @interruptible
    def step_async(self, actions: Any) -> None:
        self._assert_idle("step_async")
        self._stepper.step(actions)

    @interruptible
    def step_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        self._assert_is_running()
        *arrays, infos = self._stepper.finish_step(timeout)
        return *arrays, self._join_infos(infos)

    @interruptible
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call each environment's method ``name``, or read its attribute.

        `pack` documents which results can be returned.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    @interruptible
    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        self._assert_idle("call_async")
        self._stepper.call(name, args, kwargs)

    @interruptible
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        self._assert_is_running()
        return self._stepper.finish_call(timeout)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return attribute ``name`` of each environment."""
        return self.call(name)

    @interruptible
    def set_attr(self, name: str, values: Any) -> None:
        """Set attribute ``name`` of each environment.

        ``values`` is one value for all environments, or a list or tuple of one value for each.
        While rollouts are outstanding, workers set the value after them, before the first step of
        the next request. A later call then raises a worker's error.
        """
        self._assert_idle("set_attr")
        self._stepper.set_attr(name, values, waits=not self._collector.granted)

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        return self.call("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.call("np_random_seed")

    @interruptible
    def close(self, **kwargs: Any) -> None:
        """End the workers, see `close_extras`. Safe to call twice."""
        super().close(**kwargs)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers: ask them, after ``timeout`` seconds terminate them, then kill them.

        The default ``timeout`` is the option ``close_timeout``. With ``terminate`` it is 0.
        """
        if pending := self._stepper.pending:
            gym.logger.warn(
                f"Calling `close` while waiting for a pending call to `{pending}` to complete."
            )
        self._finalizer.detach()
        seconds = self._head.close_timeout if timeout is None else timeout
        self._head.close(0 if terminate else seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join_infos(self, infos: Infos) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for env, info in infos:
            joined = self._add_info(joined, info, env)
        return joined

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if os.getpid() != self._head.pid:
            raise ClosedEnvironmentError(
                f"This environment belongs to process {self._head.pid}, of which this process is a "
                "fork: make one here."
            )

    def _assert_idle(self, method: str) -> None:
        self._assert_is_running()
        pending = self._stepper.pending or ("evaluate" if self._evaluator.is_pending else "")
        # Workers handle these requests in order, so they need not wait for each other.
        if self._collector.granted and method not in ("send", "evaluate", "set_attr"):
            asked = "send" if self._collector.overlapped is None else "rollout"
            pending = pending or asked
        if pending:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `{pending}` to complete.",
                pending,
            )
        if self._pool.failures.untold:  # errors of an interrupted call
            with self._collector.giving_up_after_errors():
                self._pool.failures.raise_untold()
