"""Run a Weights & Biases sweep file without Weights & Biases: here, or as an array of Slurm jobs.

    python experiments/sweeps/run.py FILE  # all configurations in turn, then the results
    python experiments/sweeps/run.py FILE --index 3  # only this one, as a task of a job array
    python experiments/sweeps/run.py FILE --count  # how many there are, for sbatch --array=0-...
    python experiments/sweeps/run.py FILE --list  # lists them, and says which have finished
    python experiments/sweeps/run.py FILE --results  # results.csv and results.png of the finished

A configuration's directory is named after its content, so it is found again when the grid grows.
Once it holds `result.json` the configuration has finished and is skipped. Every attempt to run it
has a subdirectory with its log. The next attempt goes on with the last one that has a checkpoint.
On SIGTERM or SIGUSR1, this script stops its run, and exits with 75 if there is a checkpoint to go
on from, otherwise with 143.
"""

import argparse
import signal
import sys
from pathlib import Path

if not __package__:  # called by its path, perhaps from elsewhere
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.sweeps.attempts import directory_of, first_of, result_of, run, stop
from experiments.sweeps.checks import check
from experiments.sweeps.configurations import configurations, label, load
from experiments.sweeps.results import collect


def main():
    parser = argparse.ArgumentParser(
        description="Run a W&B sweep file without W&B; without --index, all of it."
    )
    parser.error = lambda message: check(False, f"{message}; see --help")
    parser.add_argument("file", help="the sweep, in YAML")
    parser.add_argument(
        "--output", type=Path, help="where runs and results go; default runs/{name of the file}"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of what method random draws; default 1"
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
        help="write what has finished as table and plot to --output",
    )
    args = parser.parse_args()
    check(args.seed >= 0, f"--seed must be at least 0, got {args.seed}")
    sweep = load(args.file)
    flats = configurations(sweep, args.seed)
    output = args.output or Path("runs", Path(args.file).stem)
    if args.count:
        return print(len(flats))
    if args.list:
        for index, flat in enumerate(flats):
            directory = directory_of(sweep, flat, output)
            print(
                index, "finished" if result_of(directory) else "open", directory, label(sweep, flat)
            )
        return None
    if args.results:
        return collect(sweep, flats, output)
    if args.index is not None:
        check(
            0 <= args.index < len(flats),
            f"--index must be from 0 to {len(flats) - 1}, got {args.index}",
        )
    failures, first = [], first_of(sweep, flats, output)
    for index, flat in enumerate(flats):
        directory = directory_of(sweep, flat, output)
        if args.index not in (None, index):
            continue
        if first[directory] != index:
            print(
                f"configuration {index} is the same as {first[directory]}, which runs it: "
                f"{label(sweep, flat)}"
            )
        elif failure := run(sweep, flat, directory):
            failures.append(f"configuration {index} {failure}")
            print(f"error: {failures[-1]}", file=sys.stderr, flush=True)
    if args.index is None and len(failures) < len(first):
        collect(sweep, flats, output)
    return sys.exit(1 if failures else 0)


def interrupt(*_):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may send the signal twice
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGUSR1, interrupt)
    try:
        main()
    except KeyboardInterrupt:
        stop(143)
    except OSError as error:
        check(False, error)
