"""The real head and the real workers in a simulated world, through random schedules.

    python -m verification.simulate --schedules 10000
    python -m verification.simulate --seed 123 --trace     # one of them again, with its events

In a schedule, a user makes random calls, and processes die, hang and are cut off. A seed decides
all of it. The user must get exactly the steps of the environments, each once and in order. Every
call must return or raise an error. A worker must hold the weights that the head believes it holds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import sys
import time
import traceback
import warnings
from unittest import mock

import gymnasium as gym
import torch

from clusterenv_runtime import ClusterEnv, StartupError, WorkerDiedError
from clusterenv_runtime.head.pool import Pool

from . import ledger
from .ledger import Labelled
from .network import Network, Processes
from .schedule import SILENCE_S, Schedule
from .user import User, Wrong

STARTUP_S = 5.0


def run(seed: int, trace: bool = False) -> list[str]:
    """Run a schedule. Return its trace, which is empty without ``trace``.

    Raises:
        AssertionError: a check failed.
    """
    world = ledger.world = Schedule(seed)
    world.trace = [] if trace else None
    pool = functools.partial(Pool, clock=world.clock)
    launcher, envs, user = Processes(world), None, None
    try:
        with (
            mock.patch("clusterenv_runtime.env.Pool", pool),
            mock.patch("clusterenv_runtime.env.Transport", lambda *_: Network(world)),
        ):
            envs = ClusterEnv(
                [functools.partial(Labelled, row) for row in range(world.num_envs)],
                world.num_workers,
                launcher=launcher,
                startup_timeout=STARTUP_S,
                worker_timeout=SILENCE_S,
                **world.options,
            )
        user = User(world, envs)
        user.run()
    except (StartupError, WorkerDiedError) as error:
        world.note(f"the run ends: {error}")
        if user is not None:
            user.takes_what_is_left()
    except KeyboardInterrupt as error:
        world.note("the user presses Ctrl-C")
        places = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        if places & {"_serve", "_supervise"} and not envs._pool.is_closed:
            raise Wrong("Ctrl-C leaves a message half handled, and the pool open") from None
    finally:
        if envs is not None:
            envs.close()
        left = [each.name for each in launcher.of.values() if each.exit is None]
        world.end()
    if left:
        raise Wrong(f"{left} have not ended")
    if world.crashes:
        raise Wrong(world.crashes[0])
    return world.trace or []


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Put the head and its workers through random schedules."
    )
    parser.add_argument("--schedules", type=int, default=1000, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run only the schedule of this seed")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first failure")
    parser.add_argument("--trace", action="store_true", help="print the events")
    args = parser.parse_args()
    logging.disable()
    gym.logger.min_level = 100
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.set_threshold(100_000)  # a schedule leaves little garbage, and collecting it takes long
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.schedules)
    failed, start = [], time.monotonic()
    for number, seed in enumerate(seeds, 1):
        try:
            events = run(seed, args.trace)
        except Exception as error:
            failed.append(seed)
            events = list(ledger.world.trace or [])
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if args.trace or args.seed is not None:
                traceback.print_exc()
            if args.until_failure:
                break
        if args.trace:
            print(*events, sep="\n")
        if number % 1000 == 0:
            print(
                f"{number:,} schedules, {number / (time.monotonic() - start):.0f} a second",
                flush=True,
            )
    done = f"{number:,} schedules in {time.monotonic() - start:.0f} s, from seed {seeds[0]:,} on"
    print(f"{done}: {len(failed)} failed {failed[:20] or ''}".rstrip())
    sys.exit(bool(failed))


if __name__ == "__main__":
    # Pickle finds classes by this module's name, which must be the same in each schedule.
    from verification import simulate

    simulate.main()
