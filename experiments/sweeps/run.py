"""Run a Weights & Biases sweep file without Weights & Biases: here, or as an array of Slurm jobs.

    python experiments/sweeps/run.py FILE  # all configurations, then the results
    python experiments/sweeps/run.py FILE --jobs 4  # four at once
    python experiments/sweeps/run.py FILE --index 3  # only this one, as a task of a job array
    python experiments/sweeps/run.py FILE --count  # the number, for sbatch --array=0-...
    python experiments/sweeps/run.py FILE --list  # the configurations, and which have finished
    python experiments/sweeps/run.py FILE --results  # results.csv and .png of the finished runs

A configuration's directory is named after its content, so it is found again when the grid grows.
Once it holds `result.json`, the configuration has finished and is skipped. Every attempt to run it
has a subdirectory with its log. The next attempt resumes the last one that has a checkpoint.
On Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP, this script stops its runs, and exits with 75 if there is a
checkpoint to resume from, otherwise with 143. It exits with 1 if some runs have failed.
"""

import argparse
import sys
from pathlib import Path

if not __package__:  # run by its path, perhaps from another directory
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.sweeps.attempts import directory_of, first_of, result_of
from experiments.sweeps.capacity import jobs_for
from experiments.sweeps.checks import check
from experiments.sweeps.configurations import Listed, label, load
from experiments.sweeps.execution import Execution, Interrupted, Signals
from experiments.sweeps.metrics import value_of
from experiments.sweeps.progress import Progress
from experiments.sweeps.results import collect


def parse():
    parser = argparse.ArgumentParser(
        description="Run a W&B sweep file without W&B; without --index, all of it."
    )
    parser.error = lambda message: check(False, f"{message}; see --help")
    parser.add_argument("file", help="the sweep, in YAML")
    parser.add_argument(
        "--output", type=Path, help="where runs and results go; default runs/{name of the file}"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the methods random and bayes; default 1"
    )
    parser.add_argument(
        "--jobs", type=int, help="runs at once; by default as many as cores and memory carry"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--index", type=int, help="run this configuration only, counted from 0")
    what.add_argument("--count", action="store_true", help="print the number of configurations")
    what.add_argument(
        "--list", action="store_true", help="print all configurations, and which have finished"
    )
    what.add_argument(
        "--results",
        action="store_true",
        help="write a table and a plot of the finished runs to --output",
    )
    args = parser.parse_args()
    check(args.seed >= 0, f"--seed must be at least 0, got {args.seed}")
    check(args.jobs is None or args.jobs > 0, f"--jobs must be at least 1, got {args.jobs}")
    runs_all = args.index is None and not (args.count or args.list or args.results)
    check(args.jobs is None or runs_all, "--jobs is for all configurations: give it alone")
    args.output = args.output or Path("runs", Path(args.file).stem)
    return args


def plan_of(sweep, args):
    if sweep["method"] != "bayes":
        return Listed(sweep, args.seed)
    from experiments.sweeps.search import Search  # here, because it needs Optuna

    return Search(sweep, args.seed, args.output)


def show(sweep, plan, output):
    """Print the configurations."""
    known = plan.known()
    for index, flat in known.items():
        directory = directory_of(sweep, flat, output)
        state = "open" if result_of(directory) is None else "finished"
        print(index, state, directory, label(sweep, flat))
    if plan.number > len(known):
        print(f"{plan.number - len(known)} more are drawn when they are about to run")


def run(sweep, plan, args, signals):
    """Run the configurations that have not finished. Return how many have failed."""
    known = plan.known()
    first = first_of(sweep, known, args.output)
    results = {directory: result_of(directory) for directory in first}
    finished = {each: result for each, result in results.items() if result is not None}
    values = {each: value_of(sweep, each, result) for each, result in finished.items()}
    indices = range(plan.number) if args.index is None else [args.index]
    over = {first[directory] for directory in finished}
    waiting = [index for index in indices if index not in over]
    jobs, why = args.jobs or 1, "as --jobs says"
    if args.jobs is None and args.index is None:
        jobs, why = jobs_for(sweep, len(waiting))
    progress = Progress(sweep, plan.number - len(known) + len(first), jobs)
    for directory, value in values.items():
        progress.add(directory, known[first[directory]], value)
    if args.index is None:
        texts = [f"{progress.total} configurations"]
        if finished:
            texts.append(f"{len(finished)} of them have finished before")
        if waiting:
            texts.append(f"{jobs} at once: {why}")
        print("; ".join(texts), flush=True)
    elif not waiting:
        print(f"configuration {args.index} has finished: {label(sweep, known[args.index])}")
    with progress:
        return Execution(sweep, plan, args.output, jobs, progress, signals).run(waiting)


def main(signals):
    args = parse()
    sweep = load(args.file)
    plan = plan_of(sweep, args)
    if args.count:
        return print(plan.number)
    if args.list:
        return show(sweep, plan, args.output)
    if args.results:
        return collect(sweep, plan, args.output)
    if args.index is not None:
        check(
            0 <= args.index < plan.number,
            f"--index must be from 0 to {plan.number - 1}, got {args.index}",
        )
    failures = run(sweep, plan, args, signals)
    if args.index is None and failures < plan.number:
        collect(sweep, plan, args.output)
    return sys.exit(1 if failures else 0)


if __name__ == "__main__":
    try:
        main(Signals())
    except Interrupted as interruption:
        print(f"error: {interruption}", file=sys.stderr)
        sys.exit(interruption.status)
    except OSError as error:
        check(False, error)
