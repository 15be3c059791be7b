"""The head: its workers, what it knows of them, the policy's versions, and how it starts."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from ..envs.blueprint import Blueprint
from ..envs.likeness import Likeness
from ..launchers import Launcher
from ..options import ClusterOptions
from ..policy.sync import SyncRule
from ..policy.versions import PolicyStore
from ..wire.protocol import shared_versions
from .messenger import Messenger
from .pool import WorkerPool
from .recovery import Recovery
from .supervisor import Supervisor
from .transport import Transport
from .worker import Worker

logger = logging.getLogger(__name__)


Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Restart(msgspec.Struct, forbid_unknown_fields=True):
    """The form of one of `Measures.restarts`."""

    worker: Count
    time: float
    reason: str
    seeds: list[int | None] | None


class HeadState(msgspec.Struct, forbid_unknown_fields=True):
    """The form of `Head.state_dict`, which may come from an untrusted file."""

    policy_version: Count
    sync_bytes: Count
    # how many workers the sums below are over
    workers: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    pulls: Count
    waiting_seconds: float
    seed: Count
    rollouts: Count
    restarts: list[Restart]


@dataclass
class Head:
    """The parts of a `ClusterEnv` on the head's side of the wire."""

    pool: WorkerPool
    recovery: Recovery
    store: PolicyStore
    rule: SyncRule
    close_timeout: float  # seconds
    pid: int = field(default_factory=os.getpid)

    def close(self, timeout: float) -> None:
        """End the workers, see `WorkerPool.close`. Do nothing in a forked child of the head."""
        if os.getpid() == self.pid:
            self.pool.close(timeout)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, summed over all workers, and the state of the noise."""
        workers = self.pool.workers
        waiting = {"waiting_seconds": math.fsum(worker.waited for worker in workers)}
        return {**self.store.state_dict(), **self.recovery.state_dict(workers), **waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, which may come from a head with another number of workers.

        Raises:
            ValueError: ``state`` is not the state of a head.
        """
        try:
            msgspec.convert(state, HeadState)
        except msgspec.ValidationError as error:
            raise ValueError(f"this is not the state of a ClusterEnv: {error}") from None
        self.recovery.load_state_dict(self.pool.workers, state)
        self.store.load_state_dict(state)
        for worker in self.pool.workers:
            worker.waited = state["waiting_seconds"] / state["workers"]


def start_head(
    blueprint: Blueprint,
    options: ClusterOptions,
    launcher: Launcher,
    address: str | None,
    learners: Any = None,
    make_transport: Callable[..., Transport] = Transport,
    clock: Callable[[], float] = time.monotonic,
) -> Head:
    """Listen at ``address``, start the workers, and return once ``min_workers`` of them are up.

    A simulation passes its own transport and clock.

    Raises:
        StartupError, WorkerDiedError: the head cannot listen, or a worker does not come up.
        EnvError: an environment raised an exception, see `WorkerPool.settle`.
    """
    began = clock()
    # Read these versions from files now. By the time a worker says hello, strangers may have used
    # up the number of files that this process may open.
    shared_versions()
    likeness = Likeness.of_this_process(launcher)
    num_workers = min(options.num_workers, blueprint.num_envs)
    min_workers = min(options.min_workers or num_workers, num_workers)
    if blueprint.observation_mode == "different":
        min_workers = num_workers  # each one reports the bounds of its observations
    workers = [
        Worker(index, rows, *blueprint.setup(rows), blueprint.first_row)
        for index, rows in enumerate(blueprint.shares(num_workers))
    ]
    rule = options.rule
    copies = [worker.copy for worker in workers]
    rounds = options.weights == "difference"
    store = PolicyStore(copies, rounds, rule.mode == "kl", learners)
    recovery = Recovery(rule, store, likeness, launcher.can_fork)
    supervisor = Supervisor(workers, launcher, options, clock)
    transport = make_transport(
        address, options.port, options.security, options.keys(), launcher.directory
    )
    pool = WorkerPool(Messenger(transport, supervisor, recovery, store, blueprint))
    flags = options.worker_flags(launcher, transport.address, transport.key_file)
    launcher.resources = options.resources
    launcher.may_fork = options.worker_start == "fork"
    launcher.preload = options.worker_preload.split()
    launcher.startup_timeout = options.startup_timeout
    try:
        launcher.prepare(num_workers, flags, transport.directory)
        pool.start(min_workers)
    except BaseException:
        pool.close(timeout=0)
        raise
    ready = sum(worker.has_been_ready for worker in workers)
    plural = "s" * (ready > 1)
    logger.info("%d worker%s ready in %.1f s", ready, plural, clock() - began)
    return Head(pool, recovery, store, rule, options.close_timeout)
