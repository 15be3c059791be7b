"""Streaming: chunks come from whichever worker is ready, while all workers go on."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from clusterenv_runtime.env import ClusterEnv
from clusterenv_runtime.rollout import Rollout


def chunks(run: Any, envs: ClusterEnv, explore: Callable[[int], None]) -> Iterator[Rollout]:
    """Yield the chunks of `Run.stream`, and count their steps in `global_step`.

    Before each request, ``explore(steps)`` sets the `Policy.numbers` that travel with it. The run's
    `args` have `num_iterations`, `chunk_size`, `num_steps`, `outstanding` and `deterministic`.
    """
    number, size = run.args.num_iterations, run.args.chunk_size
    done = -(-run.global_step // size)
    explore(run.global_step)
    steps = itertools.count((done + 1) * size, size)
    ready = _ready(run, envs, number - done, None, lambda: explore(next(steps)))
    for _, chunk in zip(run.iterations(number, size), ready, strict=False):
        # From here to the next chunk, nothing waits for workers, so a checkpoint holds this chunk
        # either completely or not at all. If it is not finite, the run ends before it counts.
        run.add_episodes(chunk)
        run.global_step += size
        yield chunk


def stream(run: Any, envs: ClusterEnv) -> Iterator[Rollout]:
    """Yield the remaining chunks of a run, `num_workers` in each iteration.

    If each iteration publishes the policy once, before its chunks, no policy that acted is older
    than `max_policy_lag` + `outstanding` versions, or `max_policy_lag` + 1 with `deterministic`.
    The learner waits for a chunk that would otherwise be older.
    """
    left = run.args.num_iterations - run.global_step // run.args.batch_size
    return _ready(run, envs, left * run.args.num_workers, run.args.max_policy_lag, lambda: None)


def _ready(
    run: Any, envs: ClusterEnv, number: int, bound: int | None, taken: Callable[[], None]
) -> Iterator[Rollout]:
    """Yield ``number`` chunks, each from whichever worker is ready.

    Call ``taken`` before the worker is asked for another chunk.
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
