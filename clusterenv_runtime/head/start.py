"""Starting a head: its handles, socket, supervisor and workers."""

from __future__ import annotations

import time

from ..blueprint import Blueprint
from ..launchers import Launcher
from ..options import ClusterOptions
from ..versions import PolicyStore
from .episodes import Episodes
from .handle import WorkerHandle
from .pool import WorkerPool
from .recovery import Recovery
from .supervisor import Supervisor
from .transport import Transport


def start_pool(
    blueprint: Blueprint, options: ClusterOptions, launcher: Launcher
) -> tuple[WorkerPool, Recovery, PolicyStore]:
    """Start the workers, and return when as many as must be are up.

    Raises:
        StartupError, WorkerDiedError: the head cannot listen, or a worker does not come up.
    """
    space = blueprint.single_observation_space
    workers = [
        WorkerHandle(index, rows, blueprint.setup(rows), Episodes.begun(None, rows.stop - rows.start))
        for index, rows in enumerate(blueprint.shares(options.num_workers))
    ]
    store = PolicyStore([worker.copy for worker in workers], space)
    recovery = Recovery(options.rule, store)
    max_restarts = options.max_worker_restarts if options.on_worker_loss == "restart" else 0
    startup_timeout, worker_timeout = options.startup_timeout, options.worker_timeout
    supervisor = Supervisor(workers, launcher, startup_timeout, worker_timeout, max_restarts, time.monotonic)
    transport = Transport(
        options.address(launcher), options.port, options.security, options.keys(), worker_timeout, launcher.directory
    )
    pool = WorkerPool(workers, transport, launcher, supervisor, recovery, store)
    try:
        pool.start(min(options.min_workers or len(workers), len(workers)), startup_timeout, worker_timeout)
    except BaseException:
        pool.close(timeout=0)
        raise
    return pool, recovery, store
