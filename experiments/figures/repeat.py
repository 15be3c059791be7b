"""A check that the runs of the figures repeat at this commit, on some runs drawn at random.

    python -m experiments.figures.repeat
    python -m experiments.figures.repeat --results experiments/figures/results/sac --runs 2

Runs the `command` of rows of the tables again, and compares pulls, bytes of weights, and returns.
They are the same to the last digit on a machine of the same kind with the same versions, unless a
commit since then has changed what is random. Runs of other machines, resumed runs, and runs that
lost a worker are not drawn. Prints a line for each run. The exit code is 1 if a run differs.
"""

import csv
import random
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.benchmarks.scripts import ROOT, train
from experiments.figures.collect import number
from experiments.machine import here

COMPARED = "global_step", "pulls_per_worker", "sync_bytes", "mean_return_100", "eval_return_mean"


@dataclass
class Args:
    results: Path = ROOT / "experiments/figures/results/main"
    """directory of the tables"""
    runs: int = 4
    """number of runs, from different programs and environments where possible"""
    seed: int = 1
    """seed of the draw"""


def drawn(rows: list[dict[str, str]], runs: int, seed: int) -> list[dict[str, str]]:
    """Return ``runs`` rows, from each program and environment in turn."""
    random.Random(seed).shuffle(rows)
    taken: dict[tuple[str, str], int] = {}
    turns = []
    for row in rows:
        kind = row["program"], row["env_id"]
        taken[kind] = taken.get(kind, 0) + 1
        turns.append(taken[kind])
    return [row for _, row in sorted(zip(turns, rows, strict=True), key=lambda pair: pair[0])][
        :runs
    ]


def main() -> None:
    args = tyro.cli(Args)
    machine = here()["machine"]
    with open(args.results / "runs.csv", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["machine"] == machine
            and row["resumed"] == "False"
            and row["worker_restarts"] == "0"
        ]
    if not rows:
        sys.exit(f"error: {args.results} has no run of this kind of machine: {machine}")
    differing = 0
    for row in drawn(rows, args.runs, args.seed):
        _, program, *flags = shlex.split(row["command"])
        _, summary = train(ROOT / program, *flags, OMP_NUM_THREADS="1")  # as in the original runs
        found = {name: str(number(summary[name])) for name in COMPARED}
        differs = [f"{name} {found[name]}, was {row[name]}" for name in COMPARED
                   if float(found[name]) != float(row[name])]  # fmt: skip
        differing += bool(differs)
        print(f"{row['command']}: {'; '.join(differs) or 'the same'}", flush=True)
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
