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
    """A vector environment in worker processes, where each worker can act on its own policy copy.

    As a `VectorEnv`, it behaves like ``SyncVectorEnv(env_fns)`` step for step, and row *i* is
    always ``env_fns[i]``. With `rollout`, the workers act: each keeps its copy of the policy until
    the KL divergence from the head's policy exceeds ``kl_threshold``, in the mean over all workers,
    and then pulls.

    Args:
        env_fns: functions that make one environment each; only workers call them. A `Together` from
            `extras` can take their place: it makes each worker's rows as one vector environment,
            which only `rollout`, `send` and `evaluate` can step.
        num_workers: the number of worker processes, at most the number of environments. Each worker
            gets a contiguous share of the rows.
        num_envs: the total number of environments, required with a `Together`.
        copy, observation_mode, autoreset_mode: as in `gymnasium.vector.SyncVectorEnv`.
        info_keys: the keys of step infos that `Rollout.infos` holds. Their values must be numbers,
            or arrays of one shape per key.
        frame_stack: the number of frames in a stacked observation. A rollout holds each frame of
            such observations once, as `Frames`.
        log_dir: the directory where workers write ``worker-I.log``; by default they write to this
            process's output. Workers on other machines need it on a file system that they share
            with the head, because it also holds their keys.
        learners: for one of several learners, an object with two attributes: ``first_row`` is the
            number of this learner's first environment among the environments of all learners, and
            ``sum`` sums a float64 array over all learners. Each `rollout` calls ``sum``, because
            the workers of all learners pull together. `send` is then not available.
        options: the fields of `clusterenv_runtime.options.ClusterOptions`, which documents them.
            ``launcher`` may also be a `Launcher`, which has its own ``log_dir`` and prefix.

    Raises:
        TypeError, ValueError: an option does not exist, or an argument is out of range.
        SpacesError: the environments' spaces do not match. It is a RuntimeError and a ValueError.
        Exception: an environment raised it while it was built. Its cause is an `EnvError`.
        StartupError, WorkerDiedError: the head cannot listen or start workers, or a worker does not
            come up.
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
        self.closed = True  # False once there is something to close
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
        self._finalizer = weakref.finalize(self, self._head.close, parsed.close_timeout)
        try:
            blueprint.move_to(self)
        except Exception:  # Gymnasium cannot batch the spaces
            self._finalizer()
            raise
        self._pool = self._head.pool
        self.num_workers = len(self._pool.workers)
        self.copy = copy
        self._stepper = Stepper(self._head, blueprint, copy)
        self._collector = Collector(self._head, blueprint)
        self._evaluator = Evaluator(self._head, blueprint)
        self.closed = False

    # Methods for which the workers act.
    @interruptible
    def rollout(self, policy: Policy, num_steps: int, *, overlap: bool = False) -> Rollout:
        """Publish ``policy``, let all workers act for ``num_steps`` steps, and return the rollout.

        Each worker acts on the published version or on the version that it holds. Nothing crosses
        the network between its first and last step. An episode that ends is reset within the same
        step, regardless of ``autoreset_mode``. With ``overlap``, the next rollout is requested
        before this one is returned: the workers act while you learn, on a policy that is one
        version older.

        Raises:
            ResetNeeded, AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            TypeError, ValueError: the policy cannot act in these environments, ``num_steps`` is
                less than 1, or it differs from the overlapped rollout's ``num_steps``.
            Exception: an environment or the policy raised it on a worker. Its cause is an
                `EnvError`.
            WorkerDiedError: too many replacements of a worker have died in a row.
        """
        self._assert_is_running()
        if self._collector.overlapped is None:
            self._assert_idle("rollout")
        self._collector.assert_can_act("rollout", num_steps)
        return self._collector.rollout(policy, num_steps, overlap)

    @interruptible
    def publish(self, policy: Policy) -> int:
        """Publish the policy's current weights as the next version. Return the version number.

        This also measures each worker's divergence from the new version. `rollout` publishes by
        itself. If it is called before the first `reset`, the workers load torch before they reset
        their environments, and the first rollout does not wait for it.

        Raises:
            ClosedEnvironmentError: as for `step`.
            TypeError, ValueError: the policy cannot act in these environments.
        """
        self._assert_is_running()
        return self._collector.publish(policy)

    @interruptible
    def send(self, num_steps: int, worker: int | None = None) -> None:
        """Ask one worker, or all workers, to act for another ``num_steps`` steps.

        A worker acts on the last published version or on the version that it holds. It answers its
        requests in order, so a worker with more than one request never waits for you. Idle workers
        that will pull get their weights before this method returns. That takes milliseconds, except
        after the first `publish`: then the workers import torch, which takes seconds.

        Raises:
            ResetNeeded, AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: no policy has been published, the observations are not arrays,
                ``num_steps`` is less than 1, there is no such worker, or there are several
                learners.
        """
        self._assert_idle("send")
        self._collector.assert_can_act("send", num_steps)
        self._collector.send(num_steps, worker)

    @interruptible
    def recv(self, worker: int | None = None) -> tuple[int, Rollout]:
        """Wait for the next response to `send`. Return the worker's number and its chunk.

        The chunk is the rollout of the worker's rows. Without ``worker``, the next response of any
        worker is returned.

        Raises:
            NoAsyncCallError: no request of `send` is outstanding.
        """
        self._assert_is_running()
        return self._collector.recv(worker)

    @interruptible
    def evaluate(self, policy: Policy, episodes: int, **options: Any) -> Evaluation:
        """Have the workers play ``episodes`` episodes with ``policy``. Return the results.

        All environments play at once, and each plays its share of the episodes. The first episodes
        of each environment count, so that long episodes count as much as short ones. An episode is
        what `Rollout.episodic_returns` counts as one: in Atari, a whole game. Each environment is
        reset with its own seed, ``seed`` plus the environment's number. Its later episodes follow
        from that seed, as in all of Gymnasium's vector environments, and so does the policy's
        noise. Therefore an evaluation gives the same result on any number of workers, except where
        a matrix product rounds differently.

        Afterwards training continues as before, even with outstanding rollouts: versions, pulls and
        noise do not change. The environments of workers that have played begin another episode with
        the next rollout, with seeds that follow from those of `reset`. Before the next `step`, they
        must be `reset`.

        Args:
            policy: the policy to evaluate. It need not be the published one.
            episodes: the number of episodes.
            options: ``seed=100_000``: the seed of the first environment. ``deterministic=False``:
                whether the policy takes the mode of its distribution instead of drawing actions.
                ``max_steps=30_000``: the number of steps after which an unfinished episode counts
                as it is, with a warning. The rest of it does not count as another episode, unless
                the rest reaches ``max_steps``, too.

        Raises:
            ResetNeeded: an environment has raised an exception, or a step was given up.
            AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            TypeError, ValueError: the policy cannot act in these environments, its distribution has
                no mode, an argument is out of range, or an episode's return is not finite.
        """
        self.evaluate_async(policy, episodes, **options)
        return self.evaluate_wait()

    @interruptible
    def evaluate_async(self, policy: Policy, episodes: int, **options: Any) -> None:
        """Start to evaluate the policy as it is now, with the arguments of `evaluate`.

        Until `evaluate_wait` has returned, only `publish`, `recv` and the next overlapped `rollout`
        may be called.
        """
        self._assert_idle("evaluate")
        self._collector.assert_arrays()
        self._evaluator.ask(policy, episodes, **options)

    @interruptible
    def evaluate_wait(self, timeout: float | None = None) -> Evaluation:
        """Wait for the evaluation to end, and return its results.

        Raises:
            multiprocessing.TimeoutError: the evaluation has not ended within ``timeout`` seconds.
                It goes on: call this method again. A ``timeout`` of 0 only checks for the end.
            NoAsyncCallError: no evaluation is under way.
        """
        self._assert_is_running()
        with self._collector.giving_up_after_errors():
            return self._evaluator.wait(timeout)

    def interrupt(self) -> None:
        """Make the current or next wait for workers raise `Interrupted`, mostly within 0.3 seconds.

        Signal handlers and other threads may call this method. An interrupt never leaves an update
        of the learner half done, because only methods of this class wait. The interrupted call is
        given up, but requests of `send` remain outstanding.
        """
        self._pool.interrupt.request(Interrupted("interrupted while waiting for workers"))

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the state of the noise as plain data, without environments."""
        return self._head.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, which may come from any number of workers.

        The workers pull the next policy that is published.

        Raises:
            AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: ``state`` is not such a state.
        """
        self._assert_idle("load_state_dict")
        self._head.load_state_dict(state)
