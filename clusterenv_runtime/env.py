"""ClusterEnv: a ``gymnasium.vector.VectorEnv`` whose environments live in worker processes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from .envs.blueprint import Blueprint, EnvFns
from .errors import Interrupted
from .head.collect import Collector
from .head.evaluation import Evaluator
from .head.interrupts import interruptible
from .head.measures import Measures
from .head.start import start_head
from .head.stepping import Stepper
from .head.vector_api import VectorApi
from .options import parse_options
from .rollout import Evaluation, Rollout

if TYPE_CHECKING:
    from .policy.base import Policy


class ClusterEnv(Measures, VectorApi):
    """A vector environment on worker processes, and rollouts by workers that act on their own copy
    of the policy.

    As a `VectorEnv` it equals ``SyncVectorEnv(env_fns)`` step for step; row *i* is always
    ``env_fns[i]``. With `rollout` the workers act: they keep their policy until its KL divergence
    from the head's exceeds ``kl_threshold``.

    Args:
        env_fns: functions that make the environments, on workers alone. Or a `Together` of
            `extras`, which makes each worker's rows as one vector environment. Only `rollout`,
            `send` and `evaluate` step it.
        num_workers: worker processes; never more than environments. Each gets a contiguous share of
            the rows.
        num_envs: how many environments one function is to make, in all.
        copy, observation_mode, autoreset_mode: as in `gymnasium.vector.SyncVectorEnv`.
        info_keys: the keys of the steps' infos that `Rollout.infos` is to have: numbers, or arrays
            of one shape.
        frame_stack: observations of so many arrays are stacks; a rollout has each frame of them
            once, as `Frames`.
        log_dir: where the launcher has the workers write ``worker-I.log``; by default to this
            process's output. Workers on other machines need it on a file system that they share
            with the head: their keys are there, too.
        learners: an object, if this is one of several learners: ``first_row`` is the number of its
            first environment among those of all learners, and ``sum`` sums a float64 array over
            them. Each `rollout` calls it, as all workers pull together. There is no `send` then.
        options: the fields of `clusterenv_runtime.options.ClusterOptions`, which documents them.
            ``launcher`` may also be a `Launcher`, which has a ``log_dir`` and a prefix of its own.

    Raises:
        TypeError, ValueError: there is no such option, or an argument is out of range.
        SpacesError: the environments' spaces do not match. It is a RuntimeError.
        Exception: what an environment raised when it was built, caused by an `EnvError`.
        StartupError, WorkerDiedError: a worker does not come up.
    """

    def __init__(
        self,
        env_fns: EnvFns,
        num_workers: int = 2,
        *,
        num_envs: int | None = None,
        copy: bool = True,
        observation_mode: str | tuple[gym.Space[Any], gym.Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        info_keys: Sequence[str] = (),
        frame_stack: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        learners: Any = None,
        **options: Any,
    ) -> None:
        self.closed = True  # until there is something to close
        parsed, launcher, address = parse_options({"num_workers": num_workers, **options}, log_dir)
        blueprint = Blueprint(
            env_fns,
            num_envs,
            observation_mode,
            autoreset_mode,
            info_keys,
            frame_stack,
            0 if learners is None else learners.first_row,
        )
        self._head = start_head(blueprint, parsed, launcher, address, learners)
        blueprint.move_to(self)
        self._pool = self._head.pool
        self.num_workers = len(self._pool.workers)
        self.copy = copy
        self._stepper = Stepper(self._head, blueprint, copy)
        self._collector = Collector(self._head, blueprint)
        self._evaluator = Evaluator(self._head, blueprint)
        self._finalizer = weakref.finalize(self, self._head.close, parsed.close_timeout)
        self.closed = False

    # Workers act.
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
        self._collector.assert_can_act("rollout", num_steps)
        return self._collector.rollout(policy, num_steps, overlap)

    @interruptible
    def publish(self, policy: Policy) -> int:
        """Make the policy's current weights the next version, measure divergences, and return its
        number.

        `rollout` does this by itself. Called before the first `reset`, it lets the workers load
        torch while the environments are reset.
        """
        self._assert_is_running()
        return self._collector.publish(policy)

    @interruptible
    def send(self, num_steps: int, worker: int | None = None) -> None:
        """Ask one worker, or all, to act for another ``num_steps`` steps on the last published
        policy, or on theirs.

        A worker answers its requests one after the other, so with more than one it never waits for
        you. Workers that are idle and will pull get their weights before this returns: within
        milliseconds, except after the first `publish`, when they import torch, which takes seconds.

        Raises:
            ResetNeeded, AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: nothing is published, observations are no arrays, ``num_steps`` < 1, or
                there is no such worker.
        """
        self._assert_idle("send")
        self._collector.assert_can_act("send", num_steps)
        self._collector.send(num_steps, worker)

    @interruptible
    def recv(self, worker: int | None = None) -> tuple[int, Rollout]:
        """Return the next response to `send`, of this worker or of whichever is first: its number,
        and its rows' rollout.

        Raises:
            NoAsyncCallError: nothing that was sent is outstanding.
        """
        self._assert_is_running()
        return self._collector.recv(worker)

    @interruptible
    def evaluate(self, policy: Policy, episodes: int, **options: Any) -> Evaluation:
        """Have the workers play ``episodes`` episodes by ``policy``, and return their returns.

        All environments play at once, each its share: of each its first ones count, so that long
        episodes count like short ones. An episode is one that `Rollout.episodic_returns` counts, of
        Atari a whole game. Each environment is reset by a seed of its own, ``seed`` plus its
        number; its further episodes follow from that, as in all of Gymnasium's vector environments.
        So does the policy's noise: an evaluation is the same on any number of workers, except where
        a matrix product rounds differently.

        Training goes on after it as before, also with rollouts that are outstanding: versions,
        pulls and noise are as they were. Environments of workers that have played begin another
        episode with the next rollout, by seeds that follow from those of `reset`; before the next
        `step`, `reset` them.

        Args:
            policy: what is to act. It need not be the published one.
            episodes: how many.
            options: ``seed=100_000``, the first environment's. ``deterministic=False``, whether the
                policy takes the mode of its distribution in place of actions that it draws.
                ``max_steps=30_000``: after so many an episode counts as far as it went, with a
                warning. What is left of it is no other episode, unless it is as long again.

        Raises:
            ResetNeeded: an environment has raised, or a step was given up.
            AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            TypeError, ValueError: the policy cannot act here, its distribution has no mode, an
                argument is out of range, or an episode's return is not finite.
        """
        self.evaluate_async(policy, episodes, **options)
        return self.evaluate_wait()

    @interruptible
    def evaluate_async(self, policy: Policy, episodes: int, **options: Any) -> None:
        """Begin to `evaluate` the policy as it is now, with the same arguments.

        No other call may begin until `evaluate_wait` has returned.
        """
        self._assert_idle("evaluate")
        self._collector.assert_arrays()
        self._evaluator.ask(policy, episodes, **options)

    @interruptible
    def evaluate_wait(self, timeout: float | None = None) -> Evaluation:
        """Return what the episodes have returned.

        Raises:
            multiprocessing.TimeoutError: they have not within ``timeout`` seconds, and go on: call
                this again. With 0 it only looks.
            NoAsyncCallError: no evaluation is under way.
        """
        self._assert_is_running()
        with self._collector.giving_up_after_errors():
            return self._evaluator.wait(timeout)

    def interrupt(self) -> None:
        """Make the wait for workers that is under way, or else the next one, raise `Interrupted`
        within 0.3 seconds.

        Signal handlers and other threads may call it. The learner is whole then, as only methods of
        this class wait. The interrupted call is given up, except that requests of `send` remain
        outstanding.
        """
        self._pool.interrupt.request(Interrupted("interrupted while waiting for workers"))

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
