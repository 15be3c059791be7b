"""Several learners: the speedup of a second learner, and the cost of summing gradients.

    python -m experiments.benchmarks.learners --plot experiments/benchmarks/results/learners.png
    python -m experiments.benchmarks.learners --cleanrl path/to/cleanrl/ppo_atari_multigpu.py

Runs PPO on CartPole-v1 with networks of several widths, with one learner and with two, in turn.
Each learner has one thread. Learner throughput is the batch divided by the median of time/learn, so
the speedup is that of training where the learner is the limit. Then measures an all-reduce of 1 MB
and of 100 MB between 2, 4 and 8 processes of this machine. The result for 8 learners on 8 machines
is arithmetic: an eighth of one learner's time, plus an all-reduce for each minibatch over links of
`--gbit`.

With `--cleanrl`, it measures Atari instead, with one process and with two at the same batch:
CleanRL's own script for several GPUs, which is not part of this repository
(https://github.com/vwxyzjn/cleanrl), and `--atari`, your copy of `ppo_atari_clusterenv.py` with the
lines by which `ppo_multilearner_clusterenv.py` differs from `ppo_clusterenv.py`.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import tyro

from experiments.figures.drawing import BLACK, BLUE, GREEN, ORANGE, subplots

from .scripts import ROOT, call, steady, torchrun, train

NUM_ENVS, NUM_STEPS, NUM_MINIBATCHES, UPDATE_EPOCHS = 64, 128, 4, 4
# Samples and minibatches per iteration.
BATCH, MINIBATCHES = (
    NUM_ENVS * NUM_STEPS,
    NUM_MINIBATCHES * UPDATE_EPOCHS,
)
LATENCY_S = 1e-4  # latency of a message between two machines
ATARI = "BreakoutNoFrameskip-v4"


@dataclass
class Args:
    cleanrl: Path | None = None
    """path of CleanRL's ppo_atari_multigpu.py, to compare with it"""
    atari: Path | None = None
    """path of ppo_atari_clusterenv.py with several learners, for the same comparison"""
    widths: tuple[int, ...] = (64, 256, 512, 1024)
    """widths of the networks' two hidden layers"""
    iterations: int = 8
    """iterations per run"""
    rounds: int = 5
    """rounds; each runs with one learner and with two"""
    gbit: float = 10
    """Gbit/s of the links in the arithmetic for several machines"""
    plot: Path | None = None
    """file for a plot of the speedups"""
    all_reduce: int = 0
    """bytes of an all-reduce to time; the benchmark sets this in the processes that it starts"""


def learner_seconds(number, width, iterations, seed):
    """Return the median seconds of an iteration's learning."""
    scalars, _ = train(
        ROOT / "scripts/ppo_multilearner_clusterenv.py", "--env-id", "CartPole-v1",
        "--num-workers", "2", "--envs-per-worker", str(NUM_ENVS // 2), "--num-steps",
        str(NUM_STEPS), "--num-minibatches", str(NUM_MINIBATCHES),
        "--update-epochs", str(UPDATE_EPOCHS), "--hidden-size", str(width), "--seed", str(seed),
        "--eval-episodes", "1", "--total-timesteps", str(iterations * BATCH), "--no-overlap",
        launcher=torchrun(number), OMP_NUM_THREADS="1",
    )  # fmt: skip
    return np.median([event.value for event in scalars("time/learn")[2:]])


def bytes_of_gradients(width):
    actor = 4 * width + width + width * width + width + 2 * width + 2
    critic = 4 * width + width + width * width + width + width + 1
    return 4 * (actor + critic)


def ring(number, size, gbit):
    """Return the seconds of an all-reduce of ``size`` bytes around a ring of machines."""
    return 2 * (number - 1) * (LATENCY_S + size / number / (gbit * 1e9 / 8))


def time_all_reduce(size):
    dist.init_process_group("gloo")
    values, seconds = torch.ones(size // 4), []
    for _ in range(3 + (200 if size < 1e7 else 20)):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(f"seconds {np.median(seconds[3:])}")
    dist.destroy_process_group()


def all_reduce_seconds(number, size):
    command = [
        sys.executable,
        *torchrun(number),
        "-m",
        "experiments.benchmarks.learners",
        "--all-reduce",
        str(size),
    ]
    text = call(command, ROOT, OMP_NUM_THREADS="1")
    return float(text.split("seconds ")[1].split()[0])


def plot(speedups, modelled, path):
    figure, ((axes,),) = subplots(1, 1, 5.5, 3.4)
    axes.plot([1, 8], [1, 8], color="0.8", label="all learners at full speed")
    for (width, measured), color in zip(
        speedups.items(), (BLACK, GREEN, BLUE, ORANGE), strict=False
    ):
        axes.plot(
            [1, 2], [1, measured], "o-", color=color, markersize=4, label=f"{width} units a layer"
        )
        axes.plot(*zip(*modelled[width].items(), strict=True), ":", color=color)
    axes.set(xscale="log", yscale="log", xticks=[1, 2, 4, 8], yticks=[1, 2, 4, 8])
    axes.set(xticklabels=[1, 2, 4, 8], yticklabels=[1, 2, 4, 8])
    axes.set(xlabel="learners", ylabel="times one learner's throughput")
    axes.minorticks_off()
    axes.set_title(
        "PPO on CartPole-v1: measured on 2 cores (points),\nand by arithmetic on several "
        "machines (dotted)"
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def compare_with_cleanrl(args):
    flags = ["--env-id", ATARI, "--total-timesteps", str(args.iterations * 1024)]
    ratios = {"CleanRL": [], "ClusterEnv": []}
    for seed in range(1, args.rounds + 1):
        rates = {}
        for number in (1, 2):
            common = [*flags, "--seed", str(seed)]
            wrapped = (
                ROOT / "experiments" / "benchmarks" / "cleanrl.py",
                str(args.cleanrl.resolve()),
                *common,
            )
            for name, command in {
                "CleanRL": (*wrapped, "--local-num-envs", str(8 // number)),
                "ClusterEnv": (args.atari.resolve(), *common, "--eval-episodes", "1"),
            }.items():
                steps, seconds = steady(*command, launcher=torchrun(number), OMP_NUM_THREADS="1")
                rates[name, number] = steps / seconds
        for name, of in ratios.items():
            of.append(rates[name, 2] / rates[name, 1])
        texts = (f"{name}, {number}: {rate:,.0f}" for (name, number), rate in rates.items())
        print(f"seed {seed}, steps/s, processes: {'; '.join(texts)}", flush=True)
    for name, of in ratios.items():
        print(
            f"{name}: two processes train {np.median(of):.2f} times as fast as one ({ATARI}, "
            f"{os.cpu_count()} cores)"
        )


def main(args):
    if args.all_reduce:
        return time_all_reduce(args.all_reduce)
    if args.cleanrl:
        return compare_with_cleanrl(args)
    speedups, modelled = {}, {}
    for width in args.widths:
        rounds = range(1, args.rounds + 1)
        seconds = np.array(
            [
                [learner_seconds(number, width, args.iterations, seed) for number in (1, 2)]
                for seed in rounds
            ]
        )
        one, two = np.median(seconds, 0)
        speedups[width] = np.median(seconds[:, 0] / seconds[:, 1])
        size = bytes_of_gradients(width)
        modelled[width] = {
            number: one / (one / number + MINIBATCHES * ring(number, size, args.gbit))
            for number in (1, 2, 4, 8)
        }
        print(
            f"{width} units, {size / 1e6:.2f} MB of gradients: one learner {BATCH / one:,.0f} "
            f"samples/s, two "
            f"{BATCH / two:,.0f}, {speedups[width]:.2f} times; 8 by arithmetic "
            f"{modelled[width][8]:.1f} times",
            flush=True,
        )
    if args.plot:
        plot(speedups, modelled, args.plot)
    for size in (10**6, 10**8):
        texts = (
            f"{number}: {1e3 * all_reduce_seconds(number, size):.1f} ms" for number in (2, 4, 8)
        )
        print(
            f"all-reduce of {size / 1e6:.0f} MB among processes of this machine, "
            f"{', '.join(texts)}",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Args))
