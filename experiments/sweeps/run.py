"""Run a Weights & Biases sweep file without Weights & Biases: here, or as an array of Slurm jobs.

    python experiments/sweeps/run.py FILE  # all configurations
    python experiments/sweeps/run.py FILE --jobs 4  # four at once
    python experiments/sweeps/run.py FILE --one  # only the next, as a task of a job array
    python experiments/sweeps/run.py FILE --count  # how many are left, for sbatch --array

OUTPUT has an Optuna study, study.db; the table of the finished runs, results.csv; and a directory
for each configuration, named after its content. Start the same command again to go on, or several
times at once to share the work: finished configurations are skipped, failed ones are tried again,
and interrupted ones go on from their last checkpoint. On Ctrl-C or SIGTERM, the runs save and end,
and this script exits with 75 if there is a checkpoint to resume from, otherwise with 143. It exits
with 1 if some of its runs have failed.
"""

import signal

if __name__ == "__main__":  # before the other imports, which take a second
    SIGNALS: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: SIGNALS.append(number))

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

if not __package__:  # run by its path, perhaps from another directory
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.sweeps.process import Process, is_running
from experiments.sweeps.study import Study
from experiments.sweeps.sweep import Sweep, load
from experiments.tables import result_of

LOOK_S = 0.2  # seconds between two looks at the runs
# The exit status after a signal, with checkpoints (EX_TEMPFAIL) and without (128 + SIGTERM)
SAVED, STOPPED = 75, 143


@dataclass
class Args:
    """Run a W&B sweep file without W&B.

    Attributes:
        file: the sweep, in YAML
        output: where everything goes; by default runs/{name of the file}
        jobs: runs at once; by default one for each three cores, for its head and two workers
        one: run only the next configuration
        count: only print how many configurations have not finished
    """

    file: tyro.conf.Positional[Path]
    output: Path | None = None
    jobs: int = max(len(os.sched_getaffinity(0)) // 3, 1)
    one: bool = False
    count: bool = False


def run(sweep: Sweep, study: Study, jobs: int, is_one: bool) -> int:
    """Run the next configuration, or all that are left, ``jobs`` at once. Return the exit status.

    If this raises an error, the kernel tells the runs to stop.
    """
    running: dict[Process, Any] = {}
    failed, has_news, was_told, has_saved = 0, True, False, False
    while True:
        with study.alone():
            for process in [each for each in running if each.poll() is not None]:
                trial = running.pop(process)
                process.end()
                if process.returncode and SIGNALS:  # it was told to stop
                    has_saved |= process.returncode == SAVED
                    continue
                if failure := process.conclude():
                    failed += 1
                    print(
                        f"error: {trial.params} {failure}; see {process.directory}/log.txt",
                        file=sys.stderr,
                    )
                study.finish(trial)
                has_news = True
            while not SIGNALS and len(running) < jobs and (trial := study.take()):
                directory = study.directory(trial.params)
                if result_of(directory) or is_running(directory):  # by another trial
                    study.finish(trial)
                    has_news = True
                    continue
                running[Process(sweep, trial.params, directory)] = trial
                print(f"{directory}: {trial.params}", flush=True)
                jobs -= is_one
            if has_news:
                print(f"{study.write_results()}; {failed} failed", flush=True)
                has_news = False
            is_over = is_one or not study.is_busy()
        if SIGNALS and not was_told:
            was_told = True
            for process in running:
                process.terminate()
            print(f"stopping {len(running)} runs; a second Ctrl-C ends them now", file=sys.stderr)
        if SIGNALS.count(signal.SIGINT) > 1:
            for process in running:
                process.end()
        if not running and (SIGNALS or is_over):
            break
        time.sleep(LOOK_S)
    if SIGNALS:
        return SAVED if has_saved else STOPPED
    return min(failed, 1)


def main() -> None:
    args = tyro.cli(Args)
    sweep = load(args.file)
    study = Study(sweep, args.output or Path("runs", args.file.stem))
    if args.count:
        return print(study.left())
    sys.exit(run(sweep, study, 1 if args.one else args.jobs, args.one))


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"error: {error}")
