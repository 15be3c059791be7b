"""Streaming: a chunk of whichever worker is ready, while all go on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..env import ClusterEnv
from ..rollout import Rollout


def chunks(run: Any, envs: ClusterEnv, explore: Callable[[int], None]) -> Iterator[Rollout]:
    """Yield the chunks of `Run.stream`."""
    args = run.args
    # Who may send the next chunk, and whose to take next (None: whichever is ready). Nothing sent
    # is left unused.
    turns = itertools.cycle(range(args.num_workers) if args.deterministic else [None])
    ahead = list(range(args.num_workers)) * (1 if args.deterministic else args.outstanding)
    explore(run.global_step)
    left = args.num_iterations - -(-run.global_step // args.chunk_size)
    for worker in ahead[:left]:
        envs.send(args.num_steps, worker)
    for iteration in run.iterations(args.num_iterations, args.chunk_size):
        start = time.monotonic()
        worker, chunk = envs.recv(next(turns))
        run.waiting += time.monotonic() - start
        explore(iteration * args.chunk_size)
        if iteration + len(ahead) <= args.num_iterations:
            envs.send(args.num_steps, worker)
        # From here to the next chunk nothing waits for workers, so a checkpoint holds all of this
        # one or nothing.
        run.global_step += args.chunk_size
        run.add_episodes(chunk)
        yield chunk
