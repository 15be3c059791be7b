"""PPO's training throughput, compared with a single process and with processes that do not learn.

    python -m experiments.benchmarks.throughput

All systems do the work of `experiments/benchmarks/work.py` in turn, `--rounds` times, with one
torch thread per process. The systems are: our script with `--no-overlap`, with `--overlap`,
compiled, with workers that yield to the learner, with all environments on one worker, and on
EnvPool (after `pip install envpool`); a loop in CleanRL's style in a single process, on
SyncVectorEnv and on AsyncVectorEnv; and as the floor under any wall time, as many processes as our
script has workers, which step and act without learning or communicating. Measures the steady state:
imports, start-up and the first iteration are left out for all systems. Prints medians, ranges and
ratios. Takes about twenty minutes on two cores.
"""

import importlib.util
import itertools
import multiprocessing
import signal
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import tyro

from . import collection, work
from .scripts import ROOT, measure, steady


@dataclass
class Args:
    env_ids: tuple[str, ...] = ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5")
    """the environments"""
    only: tuple[str, ...] = ()
    """names of the systems to measure, as printed; all by default"""
    rounds: int = 5
    """rounds; each measures all systems in turn"""
    iterations: int = 25
    """iterations per measurement, each of 8192 steps and one update"""
    timeout: float = 600
    """seconds after which a measurement is given up"""


def clusterenv(env_id, iterations, timeout, flags=()):
    is_discrete = isinstance(gym.make(env_id).action_space, gym.spaces.Discrete)
    script = "ppo_clusterenv.py" if is_discrete else "scripts/ppo_continuous_clusterenv.py"
    return steady(
        ROOT / script, "--env-id", env_id, "--total-timesteps", str(iterations * work.BATCH_SIZE),
        *work.FLAGS, *flags, timeout=timeout, OMP_NUM_THREADS="1",
    )  # fmt: skip


def clusterenv_with(*flags):
    return lambda env_id, iterations, timeout: clusterenv(env_id, iterations, timeout, flags)


def single_sync(env_id, iterations, timeout):
    return measure("experiments.benchmarks.single", env_id, iterations, "sync", timeout=timeout)


def single_async(env_id, iterations, timeout):
    return measure("experiments.benchmarks.single", env_id, iterations, "async", timeout=timeout)


def floor(env_id, iterations, timeout):
    """Step and act in as many processes as there are workers. The first round is warm-up."""
    args = collection.Args(
        env_id=env_id,
        envs_per_worker=work.ENVS_PER_WORKER,
        num_steps=work.NUM_STEPS,
        num_rollouts=iterations - 1,
    )
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for index in range(work.NUM_WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=collection.alone, args=(args, 1 + index * args.envs_per_worker, theirs)
            )
            process.start()
            pipes.append(ours)
            processes.append(process)
        for _ in range(2):
            start = time.perf_counter()
            for pipe in pipes:
                pipe.send(True)
            for pipe in pipes:
                if not pipe.poll(timeout):
                    raise TimeoutError(
                        f"the floor of {env_id} has not answered in {timeout:g} seconds"
                    )
                pipe.recv()
            seconds = time.perf_counter() - start
    finally:
        for process in processes:
            process.kill()
            process.join()
    return (iterations - 1) * work.BATCH_SIZE, seconds


FAST, ENVPOOL = ("--overlap", "--compile"), ("--envpool=1",)
# The learner has the other core.
ONE_WORKER = (
    "--num-workers",
    "1",
    "--envs-per-worker",
    str(work.NUM_ENVS),
)
SYSTEMS = {  # {name: (label, function that measures it)}
    "clusterenv": ("ClusterEnv, 2 workers, --no-overlap", clusterenv_with("--no-overlap")),
    "clusterenv-overlap": ("ClusterEnv, 2 workers, --overlap", clusterenv_with("--overlap")),
    "clusterenv-compile": ("ClusterEnv, 2 workers, --overlap --compile", clusterenv_with(*FAST)),
    "clusterenv-nice": (
        "ClusterEnv, 2 workers with nice, --overlap --compile",
        clusterenv_with(*FAST, "--worker-prefix", "nice -n 19"),
    ),
    "clusterenv-one": (
        "ClusterEnv, 1 worker, --overlap --compile",
        clusterenv_with(*FAST, *ONE_WORKER),
    ),
    "clusterenv-envpool": (
        "ClusterEnv on EnvPool, 2 workers, --overlap --compile",
        clusterenv_with(*FAST, *ENVPOOL),
    ),
    "clusterenv-envpool-one": (
        "ClusterEnv on EnvPool, 1 worker, --overlap --compile",
        clusterenv_with(*FAST, *ENVPOOL, *ONE_WORKER),
    ),
    "clusterenv-envpool-threads": (
        "ClusterEnv on EnvPool, 1 worker, 2 threads, --overlap --compile",
        clusterenv_with(*FAST, *ENVPOOL, *ONE_WORKER, "--envpool=2"),
    ),
    "single-sync": ("CleanRL-style loop, SyncVectorEnv", single_sync),
    "single-async": ("CleanRL-style loop, AsyncVectorEnv", single_async),
    "floor": ("no learner, 2 processes that step and act", floor),
}
if not importlib.util.find_spec("envpool"):
    SYSTEMS = {name: system for name, system in SYSTEMS.items() if "envpool" not in name}


def table(rates, systems, env_ids):
    """Return a Markdown table of medians and ranges, and ratios to one process and to the floor.

    ``rates[env_id, name]`` holds a rate for each round.
    """
    lines = [
        "| |" + "".join(f" {env_id}, steps/s | x single-sync | x floor |" for env_id in env_ids)
    ]
    lines.append("|---|" + "---|---|---|" * len(env_ids))
    for name, (label, _) in systems.items():
        cells = []
        for env_id in env_ids:
            mine, single, lowest = (
                rates.get((env_id, key), []) for key in (name, "single-sync", "floor")
            )
            cells.append(
                f"{np.median(mine):,.0f} ({min(mine):,.0f} to {max(mine):,.0f})"
                if mine
                else "not measured"
            )
            for other in (single, lowest):
                cells.append(f"{np.median(mine) / np.median(other):.2f}" if mine and other else "")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def select(systems, only):
    """Return the systems that `--only` names, or all systems if it names none."""
    if unknown := set(only) - set(systems):
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: choose from {' '.join(systems)}")
    return {name: system for name, system in systems.items() if name in only or not only}


if __name__ == "__main__":
    args = tyro.cli(Args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all started processes end
    systems, rates = select(SYSTEMS, args.only), {}
    for number, env_id, name in itertools.product(range(args.rounds), args.env_ids, systems):
        steps, seconds = systems[name][1](env_id, args.iterations, args.timeout)
        rates.setdefault((env_id, name), []).append(steps / seconds)
        print(
            f"round {number + 1} of {args.rounds}, {env_id}, {name}: {steps / seconds:,.0f} "
            f"steps/s",
            flush=True,
        )
    print(table(rates, systems, args.env_ids))
