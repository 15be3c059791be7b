"""The share of a streaming learner's time that publishing the policy takes.

    python -m experiments.benchmarks.publications
    python -m experiments.benchmarks.publications --script dqn_clusterenv.py

Runs a script with each `--sync-check-frequency` of `--frequencies`, and with a `--max-policy-lag`
of the same number of gradient steps each time. Counts the CPU time of the learner's thread, from
its second publication to the end of training. Prints the share of this time that `publish` takes,
including the divergences, and the time of one call. Also prints how often workers pulled, and their
mean divergence from the policy.
"""

import os
import runpy
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import tyro

from clusterenv_runtime import ClusterEnv
from clusterenv_utils import Run


@dataclass
class Args:
    script: str = "scripts/sac_clusterenv.py"
    """the script"""
    frequencies: tuple[int, ...] = (10, 20, 50, 100)
    """gradient steps between publications"""
    lag: int = 2000
    """gradient steps after which a worker pulls, whatever its divergence"""
    flags: str = "--env-id HalfCheetah-v5 --total-timesteps 6000 --learning-starts 2000"
    """further flags of the script, in one string"""


def timed(script: str, flags: list[str]) -> None:
    """Run a script. Add its publications and the CPU seconds of its thread to its summary."""
    publish, finish = ClusterEnv.publish, Run.finish
    spent = []

    def timed_publish(envs, policy):
        start = time.thread_time()
        version = publish(envs, policy)
        spent.append((start, time.thread_time() - start))
        return version

    def timed_finish(run, *results, **more):
        # The first call comes before training, and workers have not acted at the second.
        seconds = sum(each for _, each in spent[2:])
        learner = time.thread_time() - sum(spent[1])
        finish(
            run, *results, **more, publications=len(spent) - 2, publish_seconds=seconds,
            learner_seconds=learner,
        )  # fmt: skip

    sys.argv = [script, *flags]
    with (
        patch.multiple(ClusterEnv, publish=timed_publish),
        patch.multiple(Run, finish=timed_finish),
    ):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--timed"]:
        timed(sys.argv[2], sys.argv[3:])
        sys.exit()
    from .scripts import ROOT, train  # a relative import, which fails in the timed program

    args = tyro.cli(Args)
    print(f"{args.script} {args.flags}, {os.cpu_count()} cores", flush=True)
    for frequency in args.frequencies:
        every = ["--sync-check-frequency", str(frequency)]
        every += ["--max-policy-lag", str(max(args.lag // frequency, 1))]
        flags = [*shlex.split(args.flags), "--eval-episodes", "0", *every]
        script = str(ROOT / args.script)
        scalars, summary = train(Path(__file__), "--timed", script, *flags, OMP_NUM_THREADS="1")
        nats = statistics.mean(event.value for event in scalars("sync/kl"))
        number, seconds = summary["publications"], summary["publish_seconds"]
        print(
            f"every {frequency}: {number} publications, {1000 * seconds / max(number, 1):.2f} ms "
            f"each, {seconds / summary['learner_seconds']:.1%} of the learner's time; "
            f"{summary['pulls_per_worker']:.0f} pulls a worker, {nats:.3f} nats",
            flush=True,
        )
