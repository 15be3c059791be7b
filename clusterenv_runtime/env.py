"""ClusterEnv: a ``gymnasium.vector.VectorEnv`` whose environments live in worker processes."""

import logging
import operator
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal, Unpack

import numpy as np
from gymnasium.vector import AutoresetMode

from .errors import Interrupted
from .head.acting import ActingEnv
from .head.pool import Pool
from .head.transport import Transport
from .head.workers import Worker
from .options import Options, parse_options
from .setup import EnvFns, pack_environments

logger = logging.getLogger(__name__)


class ClusterEnv(ActingEnv):
    """A vector environment in worker processes, where each worker can act on its own policy copy.

    As a `VectorEnv`, it behaves like ``SyncVectorEnv(env_fns)`` step for step, and row *i* is
    always ``env_fns[i]``. With `rollout`, the workers act: each keeps its copy of the policy until
    the KL divergence from the head's policy exceeds ``kl_threshold``, in the mean over all workers,
    and then pulls.

    Args:
        env_fns: functions that make one environment each; only workers call them. Or one function
            that takes a number and returns a `VectorEnv` of that many environments, from which each
            worker makes its rows. Its autoreset mode must be "SameStep" or "Disabled".
        num_workers: the number of worker processes, at most the number of environments. Each worker
            gets a contiguous share of the rows.
        num_envs: the total number of environments, required with one function.
        copy, autoreset_mode: as in `gymnasium.vector.SyncVectorEnv`.
        observation_mode: "same": the environments' spaces must be alike.
        info_keys: the keys of step infos that `Rollout.infos` holds. Their values must be numbers,
            or arrays of one shape per key.
        frame_stack: the number of frames in a stacked observation. A rollout holds each frame of
            such observations once, as `Frames`.
        allow: classes of values that may come to this process in infos, results of `call`, and
            exceptions, besides arrays, numbers, strings and containers of these. Such a value's
            class decides which code of it runs here.
        log_dir: the directory where workers write ``worker-I.log``; by default they write to this
            process's output. Workers on other machines need it on a file system that they share
            with the head, because it also holds their keys.
        learners: for one of several learners, an object with two attributes: ``first_row`` is the
            number of this learner's first environment among the environments of all learners, and
            ``sum`` sums a float64 array over all learners. Each `rollout` calls ``sum``, because
            the workers of all learners pull together. `send` is then not available.
        options: the fields of `clusterenv_runtime.options.ClusterOptions`, which documents them.
            ``launcher`` may also be a `Launcher`, which has its own ``log_dir``, prefix and
            resources.

    Raises:
        TypeError, ValueError: an option does not exist, or an argument is out of range.
        RuntimeError: the environments' spaces are not alike.
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
        observation_mode: Literal["same"] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        info_keys: Sequence[str] = (),
        frame_stack: int | None = None,
        allow: Sequence[type] = (),
        log_dir: str | os.PathLike[str] | None = None,
        learners: Any = None,
        **options: Unpack[Options],
    ) -> None:
        self.closed = True  # False once there is something to close
        number = _count(env_fns, num_envs)
        if isinstance(num_workers, int):
            num_workers = min(num_workers, number)
        parsed, launcher, address = parse_options({"num_workers": num_workers, **options}, log_dir)
        if observation_mode != "same":
            raise ValueError(
                f"observation_mode must be 'same', got {observation_mode!r}: give environments of "
                "different spaces one space by a wrapper, such as TransformObservation"
            )
        _check_info_keys(info_keys)
        if frame_stack is not None and (type(frame_stack) is not int or frame_stack < 1):
            raise ValueError(f"frame_stack must be an integer from 1, got {frame_stack!r}")
        shares = np.array_split(range(number), num_workers)
        rows = [slice(int(share[0]), int(share[-1]) + 1) for share in shares]
        modes = AutoresetMode(autoreset_mode), tuple(info_keys), frame_stack
        allowed = tuple(allow)
        made = [env_fns if callable(env_fns) else list(env_fns[own]) for own in rows]
        environments = pack_environments(
            [(make, len(share), modes, allowed) for make, share in zip(made, shares, strict=True)],
            is_shared=launcher.can_fork,
        )
        first_row = 0 if learners is None else learners.first_row
        workers = [
            Worker(index, share, first_row, *packed)
            for index, (share, packed) in enumerate(zip(rows, environments, strict=True))
        ]
        transport = Transport(address, parsed.port, parsed.keys(), launcher.directory)
        self._pool = Pool(workers, launcher, parsed, transport, allowed, learners)
        began = time.monotonic()
        self._pool.start()
        logger.info("%d workers ready in %.1f s", len(workers), time.monotonic() - began)
        self._close_timeout = parsed.close_timeout
        self._finalizer = weakref.finalize(self, self._pool.close, self._close_timeout)
        try:
            self._set_spaces(number, first_row, copy)
        except Exception:  # Gymnasium cannot batch the spaces
            self._finalizer()
            raise
        self.env_fns = env_fns
        self.num_workers = len(rows)
        self.observation_mode = observation_mode
        self._known_infos = {key: np.zeros(()) for key in info_keys}
        self.closed = False

    def interrupt(self) -> None:
        """Make the current or next wait for workers raise `Interrupted`, mostly within 0.3 seconds.

        Signal handlers and other threads may call this method. An interrupt never leaves an update
        of the learner half done, because only methods of this class wait. The interrupted call is
        given up, but requests of `send` remain outstanding.
        """
        self._pool.interrupt = Interrupted("interrupted while waiting for workers")

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the state of the noise as plain data, without environments."""
        return self._pool.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, which may come from any number of workers.

        The workers pull the next policy that is published.

        Raises:
            AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
        """
        self._assert_idle("load_state_dict")
        self._pool.load_state_dict(state)

    # What APS has done so far, and which processes were lost. Reading it asks no worker.
    @property
    def policy_version(self) -> int:
        """The last published policy version; 0 before the first."""
        return self._pool.store.version

    @property
    def pulls(self) -> np.ndarray:
        """The number of each worker's pulls so far, ``(num_workers,)`` int64."""
        return np.array([worker.copy.pulls for worker in self._pool.workers], np.int64)

    @property
    def held_versions(self) -> np.ndarray:
        """The version that each worker holds, ``(num_workers,)`` int64; 0 before its first pull."""
        return np.array([worker.copy.held for worker in self._pool.workers], np.int64)

    @property
    def sync_bytes(self) -> int:
        """The bytes of weights sent to all workers so far."""
        return self._pool.store.bytes_sent

    @property
    def divergence(self) -> np.ndarray:
        """The mean KL(policy a worker last acted on || published policy), ``(num_workers,)``.

        The divergence is in nats per action dimension; a discrete action has one dimension. It is
        inf before a worker has acted.
        """
        return np.array([worker.copy.divergence for worker in self._pool.workers])

    @property
    def hosts(self) -> list[str]:
        """The name of each worker's machine; empty before the worker has connected."""
        return [worker.process.host for worker in self._pool.workers]

    @property
    def steps(self) -> np.ndarray:
        """The environment steps in each worker's rollouts so far, ``(num_workers,)`` int64."""
        return np.array([worker.steps for worker in self._pool.workers], np.int64)

    @property
    def waiting_seconds(self) -> np.ndarray:
        """The seconds that each worker has waited for requests or weights, ``(num_workers,)``."""
        return np.array([worker.waited for worker in self._pool.workers])

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """One dict per replaced process: worker, time (Unix), reason, and seeds.

        The seeds are those by which the replacement resets its environments first.
        """
        return list(self._pool.restarts)


def _count(env_fns: Any, num_envs: int | None) -> int:
    """Return the number of environments, after a check of both arguments."""
    if callable(env_fns):
        if num_envs is None or operator.index(num_envs) < 1:
            raise ValueError(
                f"one function for all environments needs num_envs, at least 1, got {num_envs}"
            )
        return num_envs
    if not len(env_fns):
        raise ValueError("env_fns must hold at least one function, got none")
    if num_envs not in (None, len(env_fns)):
        raise ValueError(f"num_envs is {num_envs}, but there are {len(env_fns)} env_fns")
    return len(env_fns)


def _check_info_keys(info_keys: Sequence[str]) -> None:
    if isinstance(info_keys, str) or not all(isinstance(key, str) for key in info_keys):
        raise TypeError(f"info_keys must be a tuple of strings, got {info_keys!r}")
