"""Streaming: chunks come from whichever worker is ready, while all workers go on."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from clusterenv_runtime import ClusterEnv, Rollout


def ready_chunks(
    run: Any, envs: ClusterEnv, number: int, bound: int | None, taken: Callable[[], None]
) -> Iterator[Rollout]:
    """Yield ``number`` chunks, each from whichever worker is ready.

    ``taken`` is called before the worker is asked for another chunk. A ``bound`` on the policy lag
    holds if the policy is published once for each `num_workers` chunks, before them: no policy that
    acted is older than ``bound`` + `outstanding` versions, or ``bound`` + 1 with `deterministic`.
    The learner waits for a chunk that would otherwise be older.
    """
    args = run.args
    # Which worker's chunk to take next (None: whichever is ready), and which workers to ask for
    # chunks ahead. Every chunk that is asked for is also used.
    turns = itertools.cycle(range(args.num_workers) if args.deterministic else [None])
    ahead = list(range(args.num_workers)) * (1 if args.deterministic else args.outstanding)
    # For each worker's outstanding chunks, oldest first: the last version at which each may come.
    deadlines: list[deque[int]] = [deque() for _ in range(args.num_workers)]

    def send(worker: int) -> None:
        envs.send(args.num_steps, worker)
        if bound is not None:  # a worker that is further behind pulls
            acts = max(envs.held_versions[worker], envs.policy_version - bound)
            deadlines[worker].append(acts + bound + len(ahead) // args.num_workers)

    def late(slots: int) -> int | None:
        """Return the worker whose chunk must come next for all chunks to come in time, or None."""
        order = sorted((each, worker) for worker, own in enumerate(deadlines) for each in own)
        for place, (deadline, _) in enumerate(order, 1):
            if place >= slots + (deadline - envs.policy_version) * args.num_workers:
                return order[0][1]
        return None

    for worker in ahead[:number]:
        send(worker)
    for left in range(number, 0, -1):
        turn = next(turns)
        if bound is not None and turn is None:
            turn = late((left - 1) % args.num_workers + 1)
        start = time.monotonic()
        worker, chunk = envs.recv(turn)
        run.waiting += time.monotonic() - start
        if bound is not None:
            deadlines[worker].popleft()
        taken()
        if left > len(ahead):
            send(worker)
        yield chunk
