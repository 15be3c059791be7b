"""ClusterEnv: a ``gymnasium.vector.VectorEnv`` whose environments live in worker processes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from .envs.blueprint import Blueprint, EnvFns
from .errors import Interrupted
from .head.collect import Collector
from .head.interrupts import interruptible
from .head.start import Head, start_head
from .head.stepping import Stepper
from .options import parse_options, with_options
from .rollout import Rollout

if TYPE_CHECKING:
    from .policy.base import Policy


class Counters(VectorEnv):
    """What APS has done so far, and what has been lost."""

    _head: Head

    @property
    def policy_version(self) -> int:
        """The version last published; 0 before the first."""
        return self._head.store.version

    @property
    def pulls(self) -> np.ndarray:
        """Weight pulls so far, ``(num_workers,)`` int64."""
        return np.array([worker.copy.pulls for worker in self._head.pool.workers], np.int64)

    @property
    def sync_bytes(self) -> int:
        """Bytes of weights sent so far, to all workers."""
        return self._head.store.bytes_sent

    @property
    def divergence(self) -> np.ndarray:
        """Mean KL(policy a worker last acted on || published policy), ``(num_workers,)``; inf
        before it has acted.

        In nats per action dimension, of which a discrete action has one.
        """
        return np.array([worker.copy.divergence for worker in self._head.pool.workers])

    @property
    def waiting_seconds(self) -> np.ndarray:
        """Seconds each worker has spent so far without a request to work on, or without weights,
        ``(num_workers,)``.
        """
        return np.array([worker.waited for worker in self._head.pool.workers])

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """One dict for each worker process that was replaced: worker, time (Unix), reason, its
        environments' seeds.
        """
        return list(self._head.recovery.restarts)


@with_options
class ClusterEnv(Counters):
    """A vector environment on worker processes, and rollouts by workers that act on their own copy
    of the policy.

    As a `VectorEnv` it equals ``SyncVectorEnv(env_fns)`` step for step; row *i* is always
    ``env_fns[i]``. With `rollout` the workers act: they keep their policy until its KL divergence
    from the head's exceeds ``kl_threshold``.

    Args:
        env_fns: functions that make the environments; the first is also called here, to read the
            spaces. Or a `Vectorized`, which makes each worker's rows as one vector environment.
            Only `rollout` and `send` step it.
        num_workers: worker processes; never more than environments. Each gets a contiguous share of
            the rows.
        num_envs: how many environments that one function is to make, in all.
        copy, observation_mode, autoreset_mode: as in `gymnasium.vector.SyncVectorEnv`.
        info_keys: what of the steps' infos is wanted in `Rollout.infos`: numbers, or arrays of one
            shape.
        frame_stack: observations of so many arrays are stacks; a rollout has each frame of them
            once, as `Frames`.
        log_dir: where the launcher has the workers write ``worker-I.log``; by default to this
            process's output. With workers on other machines on a file system that these share:
            their keys are there, too.
        first_row, sum_over_learners: for one of several learners: the number of its first
            environment, and what sums a float64 array over all of them. For each `rollout` it is
            called, as all workers pull together; no `send`.
        options: the fields of `clusterenv_runtime.options.ClusterOptions`, which says what they
            mean. ``launcher`` may also be a `Launcher`, which then has a ``log_dir`` and a prefix
            of its own.

    Raises:
        TypeError, ValueError: there is no such option, or an argument is out of range.
        RuntimeError: the environments' spaces do not match.
        StartupError, WorkerDiedError: a worker does not come up.
    """

    def __init__(
        self,
        env_fns: EnvFns,
        num_workers: int = 2,
        *,
        num_envs: int | None = None,
        copy: bool = True,
        observation_mode: str | tuple[gym.Space, gym.Space] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        info_keys: Sequence[str] = (),
        frame_stack: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        first_row: int = 0,
        sum_over_learners: Callable[[np.ndarray], np.ndarray] | None = None,
        **options: Any,
    ) -> None:
        self.closed = True  # until there is something to close
        parsed, launcher, address = parse_options({"num_workers": num_workers, **options}, log_dir)
        blueprint = Blueprint(
            env_fns, num_envs, observation_mode, autoreset_mode, info_keys, frame_stack, first_row
        )
        blueprint.describe(self)
        self._head = start_head(blueprint, parsed, launcher, address, sum_over_learners)
        self._pool, self._store = self._head.pool, self._head.store
        self.num_workers, self.copy = len(self._pool.workers), copy
        self._stepper, self._collector = (
            Stepper(self._head, blueprint, copy),
            Collector(self._head, blueprint),
        )
        self._finalizer = weakref.finalize(self, self._head.close, timeout=2)
        self.closed = False

    # Gymnasium's API.
    @interruptible
    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        """Reset all environments, or those where ``options["reset_mask"]`` is True; return
        observations and infos.
        """
        self.reset_async(seed=seed, options=options)
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
        return observations, self._stepper.join_infos(infos, self._add_info)

    @interruptible
    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every environment; return observations, rewards, terminations, truncations and
        infos.
        """
        self.step_async(actions)
        return self.step_wait()

    @interruptible
    def step_async(self, actions: Any) -> None:
        self._assert_idle("step_async")
        self._stepper.step(actions)

    @interruptible
    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self._assert_is_running()
        *arrays, infos = self._stepper.finish_step(timeout)
        return *arrays, self._stepper.join_infos(infos, self._add_info)

    @interruptible
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call each environment's method ``name``, or read its attribute; the results must be what
        `pack` takes.
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
        """Set attribute ``name`` of each environment, to one value or to a list or tuple of one for
        each.
        """
        self._assert_idle("set_attr")
        self._stepper.set_attr(name, values)

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:
        return self.get_attr("np_random_seed")

    @interruptible
    def close(self, **kwargs: Any) -> None:
        """End the workers, see `close_extras`. Safe to call twice."""
        super().close(**kwargs)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers: ask them, after ``timeout`` (3) seconds terminate, then kill them."""
        if (state := self._stepper.state) != AsyncState.DEFAULT:
            gym.logger.warn(
                f"Calling `close` while waiting for a pending call to `{state.value}` to complete."
            )
        self._finalizer.detach()
        self._head.close(0 if terminate else 3 if timeout is None else timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Workers that act.
    @interruptible
    def publish(self, policy: Policy) -> int:
        """Make the policy's current weights the next version, measure divergences, and return its
        number.

        `rollout` does this by itself. Called before the first `reset`, it lets the workers load
        torch meanwhile.
        """
        self._assert_is_running()
        return self._collector.publish(policy)

    @interruptible
    def rollout(self, policy: Policy, num_steps: int, *, overlap: bool = False) -> Rollout:
        """Publish ``policy`` and let all workers act on it, or on the version they hold, for
        ``num_steps`` steps.

        Nothing crosses the network between a worker's first and last step. Episodes that end are
        reset within the step, whatever ``autoreset_mode`` is. With ``overlap`` the next rollout is
        requested before this one is returned: the workers collect while you learn, on a policy that
        is one version older.

        Raises:
            ResetNeeded, AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: the observations are not arrays, or ``num_steps`` is not positive.
        """
        self._assert_is_running()
        if self._collector.overlapped is None:
            self._assert_idle("rollout")
        self._collector.assert_can_act("rollout", num_steps, self._stepper.was_reset)
        return self._collector.rollout(policy, num_steps, overlap)

    @interruptible
    def send(self, num_steps: int, worker: int | None = None) -> None:
        """Ask one worker, or all, to act for another ``num_steps`` steps on the last published
        policy, or on theirs.

        A worker answers its requests one after the other, so with more than one it never waits for
        you. Workers that are idle and will pull are given their weights before this returns: within
        milliseconds, except after the first `publish`, when they import torch, which takes seconds.

        Raises:
            ResetNeeded, AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: nothing is published, observations are no arrays, ``num_steps`` < 1, or
                there is no such worker.
        """
        self._assert_idle("send")
        self._collector.assert_can_act("send", num_steps, self._stepper.was_reset)
        self._collector.send(num_steps, worker)

    @interruptible
    def recv(self, worker: int | None = None) -> tuple[int, Rollout]:
        """Return the next answer to `send`, of this worker or of whichever is first: its number,
        and its rows' rollout.

        Raises:
            NoAsyncCallError: there is nothing outstanding that was sent.
        """
        self._assert_is_running()
        return self._collector.recv(worker)

    def state_dict(self) -> dict[str, Any]:
        """Return, as plain data, counters and what the noise follows from, but no environments."""
        return self._head.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, of any number of workers. They pull the policy that is
        published next.

        Raises:
            AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: it is no such state.
        """
        self._assert_idle("load_state_dict")
        self._head.load_state_dict(state)

    def interrupt(self) -> None:
        """Make the wait for workers that is under way, or else the next one, raise `Interrupted`
        within 0.3 seconds.

        Signal handlers and other threads may call it. The learner is whole then, as only methods of
        this wait. What was interrupted is given up, except that requests of `send` remain
        outstanding.
        """
        self._pool.interrupt.request(Interrupted("interrupted while waiting for workers"))

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if os.getpid() != self._head.pid:
            raise ClosedEnvironmentError(
                f"This is process {self._head.pid}'s, of which this one is a fork: make one here."
            )

    def _assert_idle(self, method: str) -> None:
        self._assert_is_running()
        state, granted = (
            self._stepper.state,
            self._collector.granted and method != "send",
        )  # one after another is fine
        if pending := state.value if state != AsyncState.DEFAULT else "send" if granted else None:
            text = (
                f"Calling `{method}` while waiting for a pending call to `{pending}` to complete."
            )
            raise AlreadyPendingCallError(text, str(pending))
        self._pool.failures.raise_untold()  # of a call that was interrupted
