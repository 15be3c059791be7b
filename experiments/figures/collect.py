"""The tables of finished runs, from which experiments/figures/plot.py draws.

    python -m experiments.figures.collect  # of experiments/figures/recipes/main
    python -m experiments.figures.collect --sweeps experiments/figures/recipes/quick \
        --runs runs/quick --results runs/quick/results

Reads the TensorBoard logs and the result.json of the runs that experiments/sweeps/run.py has
finished in RUNS/{name of the sweep file}. Writes two tables in the order of the sweep files:
runs.csv with a row for each run, and curves.csv with POINTS rows for each run. Runs that are
neither finished nor in the tables yet are left out. A run that is in the tables but no longer on
disk keeps its rows. A run that no sweep file has any more loses them.
"""

import argparse
import csv
import shlex
import sys
from pathlib import Path

import numpy as np

from experiments.sweeps.sweep import load
from experiments.tables import result_of, write_table
from tools.plot import LoggedRun, on_grid

POINTS = 50  # points per curve, evenly spaced in environment steps
MEAN = {"return": "charts/episodic_return", "kl": "sync/kl", "lag": "sync/policy_lag"}
LAST = {"pulls": "sync/pulls_per_worker", "bytes": "sync/bytes"}  # cumulative
SETTINGS = (
    "sync_mode",
    "kl_threshold",
    "sync_interval",
    "max_policy_lag",
    "weights",
    "decoupled",
    "seed",
)
MEASURED = (
    "global_step",
    "wall_seconds",
    "pulls_per_worker",
    "sync_bytes",
    "mean_return_100",
    "eval_return_mean",
)


def number(value):
    return f"{value:.7g}" if isinstance(value, float) else value


def curves(logs, total_steps):
    """Return the curves of TensorBoard logs, {name: POINTS values}, on a grid of environment steps.

    A point is the mean of the values that were logged since the previous point, or the last of them
    if they are cumulative. If nothing was logged, for example because no episode ended, it repeats
    the previous point.
    """
    run = LoggedRun(str(logs))
    grid = total_steps * np.arange(1, POINTS + 1) / POINTS
    table = {"step": [number(float(step)) for step in grid]}
    for name, tag in (MEAN | LAST).items():
        values = np.full(POINTS, np.nan)
        if tag in run.tags:
            scalars = run.scalars(tag)
            values = on_grid(scalars["steps"], scalars["values"], grid, last=name in LAST)
        table[name] = ["" if np.isnan(value) else number(float(value)) for value in values]
    return table


def read_run(name, sweep, configuration, directory):
    """Return a finished run's row and its curves, or None if the run is not on disk."""
    result = result_of(directory)
    logs = directory / result.get("run", "")
    if not list(logs.glob("events.out.tfevents.*")):
        return None
    args = result["args"]
    row = {
        "run": directory.name,
        "experiment": name,
        "program": sweep.program,
        "env_id": args["env_id"],
    }
    row |= {key: args.get(key, "") for key in SETTINGS}
    row |= {key: number(result[key]) for key in MEASURED}
    # The number of versions that could be pulled.
    row["versions"] = result.get("updates", result.get("policy_versions"))
    row |= {
        "worker_restarts": len(result["worker_restarts"]),
        "resumed": args["resume"] is not None,
    }
    # As one would type it in the repository's root.
    row["command"] = shlex.join(sweep.words(configuration, "python", sweep.program))
    row["machine"] = result["machine"]
    row["software"] = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return row, curves(logs, args["total_timesteps"])


def read_table(path):
    """Return a table's rows by run."""
    rows = {}
    if path.exists():
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                rows.setdefault(row["run"], []).append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(
        description="Collect the runs of experiments/figures/recipes/main/*.yaml into two tables."
    )
    parser.add_argument(
        "--sweeps",
        type=Path,
        default="experiments/figures/recipes/main",
        help="directory of the sweep files",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default="runs/main",
        help="directory of their runs, with a subdirectory for each file",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default="experiments/figures/results/main",
        help="directory of the tables",
    )
    args = parser.parse_args()
    paths = args.results / "runs.csv", args.results / "curves.csv"
    old_runs, old_curves = map(read_table, paths)
    runs, points, planned = [], [], set()
    for path in sorted(args.sweeps.glob("*.yaml")):
        sweep = load(path)
        for configuration in sweep.grid():
            directory = args.runs / path.stem / sweep.name_of(configuration)
            planned.add(directory.name)
            if found := read_run(path.stem, sweep, configuration, directory):
                row, table = found
                runs.append(row)
                columns = zip(*table.values(), strict=True)
                points += [
                    {"run": directory.name, **dict(zip(table, point, strict=True))}
                    for point in columns
                ]
            elif directory.name in old_runs:
                runs += old_runs[directory.name]
                points += old_curves[directory.name]
    if not runs:
        sys.exit(f"error: nothing in {args.runs} has finished, nor is anything in {args.results}")
    args.results.mkdir(parents=True, exist_ok=True)
    # The curves come first, so that an interrupt never leaves a run without its curves.
    write_table(paths[1], points)
    write_table(paths[0], runs)
    gone = len(set(old_runs) - planned)
    print(
        f"{len(runs)} of {len(planned)} runs in {args.results}"
        + f"; dropped {gone} that no sweep file has" * bool(gone)
    )


if __name__ == "__main__":
    main()
