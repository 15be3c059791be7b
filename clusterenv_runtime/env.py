"""ClusterEnv: a ``gymnasium.vector.VectorEnv`` whose environments live in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv

from .launchers import Launcher
from .protocol import Structure
from .rollout import Rollout
from .spaces import is_batched
from .sync import SyncRule
from .vector import WorkerVectorEnv

if TYPE_CHECKING:
    from .policy import Policy


class ClusterEnv(WorkerVectorEnv):
    """A vector environment on worker processes, and rollouts by workers that act on their own copy of the policy.

    As a `VectorEnv` it equals ``SyncVectorEnv(env_fns)`` step for step; row *i* is always ``env_fns[i]``. With
    `rollout` the workers act: they keep their policy until its KL divergence from the head's exceeds ``kl_threshold``.

    Args:
        env_fns: functions that make the environments. The first is also called once here, to read the spaces. Or one
            function that makes a `VectorEnv` of as many as it is told, as ``functools.partial(make_vec, "envpool",
            "CartPole-v1")`` does: each worker's rows. These only `rollout` and `send` can step.
        num_workers: worker processes; never more than environments. Each gets a contiguous share of the rows.
        num_envs: how many environments that one function is to make, in all.
        copy, observation_mode, autoreset_mode: as in `gymnasium.vector.SyncVectorEnv`.
        launcher: starts the workers; ``None`` or "local" for subprocesses on this machine, "slurm" for steps of the job
            that this runs in, "external" to print their commands and wait for you to run them. Or a `Launcher`.
        sync_mode: "kl", "interval" (pull every ``sync_interval`` versions), "always" or "never" (pull once).
        kl_threshold: in nats, for "kl".
        sync_interval: in policy versions, for "interval".
        max_policy_lag: pull, whatever the mode, when more than this many versions behind at the time of the request.
        on_worker_loss: "restart" a worker that dies, or "raise" `WorkerDiedError`.
        max_worker_restarts: that many of one worker's processes in a row may be replaced without an answer of them.
        min_workers: return when so many workers are up; the others join when they come. ``None`` for all.
        startup_timeout: seconds for a worker to start, and then to build its environments.
        worker_timeout: seconds of silence of a worker's process or link (not of a slow step) until it counts as dead.
        bind_address: an IP address or the name of a network interface, to listen there over tcp; ``None`` for ipc, or
            with "slurm" for the address that the workers' nodes reach.
        port: to listen on; 0 for a random free one.
        security: over tcp "curve" encrypts, and admits only workers that have this run's keys; "none" does not.
        allow_insecure: permit ``security="none"`` on an address that is not loopback.
        key_file: of `clusterenv_runtime.keys`, so that the keys are known ahead; by default there are fresh ones.
        log_dir: where the launcher has the workers write ``worker-I.log``; by default to this process's output. With
            "slurm" on a file system that the nodes share: their keys are there, too.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: the environments' spaces do not match.
        StartupError, WorkerDiedError: a worker does not come up.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]] | Callable[[int], VectorEnv],
        num_workers: int = 2,
        *,
        num_envs: int | None = None,
        copy: bool = True,
        observation_mode: str | tuple[gym.Space, gym.Space] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        launcher: str | Launcher | None = None,
        sync_mode: str = "kl",
        kl_threshold: float = 0.1,
        sync_interval: int | None = None,
        max_policy_lag: int | None = None,
        on_worker_loss: str = "restart",
        max_worker_restarts: int = 3,
        min_workers: int | None = None,
        startup_timeout: float = 60.0,
        worker_timeout: float = 30.0,
        bind_address: str | None = None,
        port: int = 0,
        security: str = "curve",
        allow_insecure: bool = False,
        key_file: str | None = None,
        log_dir: str | None = None,
    ) -> None:
        self.closed = True  # until there is something to close
        self._granted: dict[int, int] = {}  # seq -> worker, of `send`'s requests that are outstanding, oldest first
        self._overlapped = 0  # the steps of the rollout that was requested ahead; 0 for none
        self._rule = SyncRule(sync_mode, kl_threshold, sync_interval, max_policy_lag)
        super().__init__(
            env_fns,
            num_workers,
            num_envs=num_envs,
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
            launcher=launcher,
            on_worker_loss=on_worker_loss,
            max_worker_restarts=max_worker_restarts,
            min_workers=min_workers,
            startup_timeout=startup_timeout,
            worker_timeout=worker_timeout,
            bind_address=bind_address,
            port=port,
            security=security,
            allow_insecure=allow_insecure,
            key_file=key_file,
            log_dir=log_dir,
            settings={"rule": self._rule},
        )
        self._waiting_seconds = np.zeros(self.num_workers)

    # What APS has done so far.
    @property
    def policy_version(self) -> int:
        """The version last published; 0 before the first."""
        return self._store.version

    @property
    def pulls(self) -> np.ndarray:
        """Weight pulls so far, ``(num_workers,)`` int64."""
        return self._store.pulls.copy()

    @property
    def sync_bytes(self) -> int:
        """Bytes of weights sent so far, to all workers."""
        return self._store.bytes_sent

    @property
    def divergence(self) -> np.ndarray:
        """Mean KL(policy a worker last acted on || published policy) in nats, ``(num_workers,)``; inf before it has.

        `rollout`, and `send` to all, have the workers compare the mean of these, so that all pull or none does.
        """
        return self._store.divergence.copy()

    @property
    def waiting_seconds(self) -> np.ndarray:
        """Seconds each worker has spent so far without a request to work on, or without weights, ``(num_workers,)``."""
        return self._waiting_seconds.copy()

    def publish(self, policy: Policy) -> int:
        """Make the policy's current weights the next version, measure divergences, and return its number.

        `rollout` does this by itself. Called before the first `reset`, it lets the workers load torch meanwhile.
        """
        self._assert_is_running()
        if self._store.publish(policy):
            for worker in range(self.num_workers):
                self._head.forget([self._head.ask(worker, Structure(0), self._store.structure)])
        return self._store.version

    def rollout(self, policy: Policy, num_steps: int, *, overlap: bool = False) -> Rollout:
        """Publish ``policy`` and let all workers act on it, or on the version they hold, for ``num_steps`` steps.

        Nothing crosses the network between a worker's first and last step. Episodes that end are reset within the
        step, whatever ``autoreset_mode`` is. With ``overlap`` the next rollout is requested before this one is
        returned, so that the workers collect while you learn; when it comes, it is one version older than without.

        Raises:
            ResetNeeded, AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: the observations are not arrays, or ``num_steps`` is not positive.
        """
        self._assert_is_running()
        if self._overlapped not in (0, num_steps):
            raise ValueError(f"the overlapped rollout was requested with {self._overlapped} steps, not {num_steps}")
        overlapped, self._overlapped = self._overlapped, 0
        if not overlapped:
            self._assert_idle("rollout")
            self._assert_can_act("rollout", num_steps)
            self.publish(policy)
        try:
            if not overlapped:
                self.send(num_steps)
            seqs = sorted(self._granted, key=self._granted.__getitem__)
            parts = [reply.value for reply in self._head.gather(seqs, copy=False)]
        finally:  # also of an interrupted rollout nothing is left
            self._head.forget(self._granted)
            self._granted = {}
        for worker, part in enumerate(parts):
            self._acted(worker, part)
        if overlapped:
            self.publish(policy)
        if overlap:
            try:
                self.send(num_steps)
            finally:
                self._overlapped = num_steps * bool(self._granted)
        return Rollout.join(self.single_observation_space, parts, np.arange(self.num_envs))

    def send(self, num_steps: int, worker: int | None = None) -> None:
        """Ask one worker, or all, to act for another ``num_steps`` steps on the last published policy, or on theirs.

        A worker answers its requests one after the other, so with more than one it never waits for you.

        Raises:
            ResetNeeded, AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: nothing is published, the observations are not arrays, ``num_steps`` is not positive, or there
                is no such worker.
        """
        super()._assert_idle("send")
        self._assert_can_act("send", num_steps)
        if not self._store.version:
            raise ValueError("there is no policy to act on: `publish` it first")
        if self._overlapped:
            raise AlreadyPendingCallError("Calling `send` while an overlapped `rollout` is outstanding.", "rollout")
        if worker is not None and not 0 <= worker < self.num_workers:
            raise ValueError(f"worker must be 0 to {self.num_workers - 1}, got {worker}")
        pulling = []  # workers that have nothing else to do, and that will ask for weights now
        workers = range(self.num_workers) if worker is None else [worker]
        divergence = self._store.mean_divergence(workers)  # one for all that are asked: they pull together
        for index in workers:
            request = self._store.request(index, num_steps, divergence)
            if self._rule.wants_pull(self._store.held[index], request) and index not in self._granted.values():
                pulling.append(index)
            self._granted[self._head.ask(index, request, *self._recovery.generator(index))] = index

        def waits(index: int) -> bool:
            return self._head.links[index].ready and self._store.held[index] != self._store.version

        # Answered now, so that they need not wait until you have learned, and get these weights and no later ones.
        self._head.wait_until(lambda: self._head.failed or not any(map(waits, pulling)), self._granted)

    def recv(self, worker: int | None = None) -> tuple[int, Rollout]:
        """Return the next answer to `send`, of this worker or of whichever is first: its number, and its rows' rollout.

        Row *i* of it is environment ``rollout.rows[i]``.

        Raises:
            NoAsyncCallError: there is nothing outstanding.
        """
        self._assert_is_running()
        seqs = self._granted  # of all; or the oldest of one
        if worker is not None:
            seqs = [seq for seq, index in seqs.items() if index == worker][:1]
        if not seqs:
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "recv")
        seq, reply = self._head.first(seqs)
        index = self._granted.pop(seq)
        self._acted(index, reply.value)
        rows = self._head.links[index].rows
        return index, Rollout.join(self.single_observation_space, [reply.value], np.arange(rows.start, rows.stop))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs of this: the counters, and the state of each worker's random numbers.

        The latter is the one after the last rollout or chunk that has arrived. Environments are not in it. It holds
        nothing but dicts, lists, numbers, bytes and None.
        """
        return {
            **self._store.state_dict(),
            **self._recovery.state_dict(),
            "waiting_seconds": self._waiting_seconds.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of as many workers. They pull the policy that is published next.

        Raises:
            AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: it is of another number of workers.
        """
        self._assert_idle("load_state_dict")
        self._recovery.load_state_dict(state)
        self._store.load_state_dict(state)
        self._waiting_seconds[:] = state["waiting_seconds"]

    def interrupt(self) -> None:
        """Make the wait for workers that is under way, or else the next one, raise `Interrupted` within 0.3 seconds.

        Signal handlers and other threads may call it. What the learner holds is whole when it is raised, for only
        `rollout`, `recv`, `send`, `step` and the like wait. A request that was interrupted is given up; those of `send`
        remain outstanding.
        """
        self._head.interrupted = True

    def _acted(self, worker: int, part: dict[str, Any]) -> None:
        self._waiting_seconds[worker] += part["waited"]
        self._store.acted(worker, part)
        self._recovery.saw(worker, part["next_observations"])

    def _assert_can_act(self, method: str, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        if not self._was_reset:
            raise ResetNeeded(f"Cannot call `{method}` before calling `reset`.")
        if not is_batched(self.single_observation_space):
            raise ValueError(f"a policy needs observations that become arrays, got {self.single_observation_space}")

    def _assert_idle(self, method: str) -> None:
        super()._assert_idle(method)
        if self._granted:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `send` to complete.", "send"
            )
