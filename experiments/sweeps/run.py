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

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

if not __package__:  # run by its path, perhaps from another directory
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.sweeps.process import Process, checkpoints, is_running, result_of
from experiments.sweeps.study import Study
from experiments.sweeps.sweep import Sweep, check, load

JOBS = max(len(os.sched_getaffinity(0)) // 3, 1)  # a run has a head and, by default, two workers
LOOK_S = 0.2  # seconds between two looks at the runs
# The exit status after a signal, with checkpoints (EX_TEMPFAIL) and without (128 + SIGTERM)
SAVED, STOPPED = 75, 143


class Runner:
    """Runs configurations, several at once."""

    def __init__(self, sweep: Sweep, study: Study, jobs: int) -> None:
        self._sweep = sweep
        self._study = study
        self._jobs = jobs
        self._running: dict[int, Process] = {}  # by the trial's number
        self._failed = 0
        self._signals: list[int] = []
        self._has_saved = False  # whether an interrupted run has a checkpoint
        self._has_news = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, _: self._signals.append(number))

    def run(self, is_one: bool) -> int:
        """Run the next configuration, or all that are left. Return the exit status."""
        try:
            while not self._signals:
                with self._study.alone():
                    self._conclude()
                    while len(self._running) < self._jobs and (taken := self._study.take()):
                        self._begin(*taken)
                        if is_one and self._running:
                            self._jobs = 0
                    self._tell()
                    if not self._running and (is_one or not self._study.is_busy()):
                        break
                time.sleep(LOOK_S)
        finally:
            self._stop()
        if self._signals:
            return SAVED if self._has_saved else STOPPED
        return min(self._failed, 1)

    def _begin(self, number: int, configuration: dict[str, Any], directory: Path) -> None:
        """Start a trial's process, unless another trial has run or runs its configuration."""
        if result_of(directory) or is_running(directory):
            self._study.finish(number, directory)
            self._has_news = True
        else:
            self._running[number] = Process(self._sweep, configuration, directory)
            print(f"{directory}: {self._sweep.label(configuration)}", flush=True)

    def _conclude(self) -> None:
        """Note how runs have ended."""
        ended = [number for number, each in self._running.items() if each.poll() is not None]
        for number in ended:
            process = self._running.pop(number)
            process.end()
            if process.returncode and self._signals:  # it was told to stop
                self._has_saved |= bool(checkpoints(process.directory))
                continue
            if failure := process.conclude():
                self._failed += 1
                text = f"error: {self._sweep.label(process.configuration)} {failure}"
                print(f"{text}; see {process.directory}/log.txt", file=sys.stderr)
            self._study.finish(number, process.directory)
            self._has_news = True

    def _tell(self) -> None:
        """Write the table and print the progress, if there is any."""
        if self._has_news:
            print(f"{self._study.write_results()}; {self._failed} failed", flush=True)
        self._has_news = False

    def _stop(self) -> None:
        """Have all runs save and end, or kill them after a second Ctrl-C."""
        running = self._running.values()
        for process in running:
            process.terminate()
        if running:
            self._signals.append(signal.SIGTERM)  # if the reason is an error
            text = f"stopping {len(running)} runs, which may save; a second Ctrl-C ends them now"
            print(text, file=sys.stderr)
        while any(process.poll() is None for process in running):
            time.sleep(LOOK_S)
            if self._signals.count(signal.SIGINT) > 1:
                for process in running:
                    process.end()
        with self._study.alone():
            self._conclude()
            self._tell()


@dataclass
class Args:
    """Run a W&B sweep file without W&B.

    Attributes:
        file: the sweep, in YAML
        output: where everything goes; by default runs/{name of the file}
        jobs: runs at once; by default one for each three cores
        one: run only the next configuration
        count: only print how many configurations have not finished
    """

    file: tyro.conf.Positional[Path]
    output: Path | None = None
    jobs: int = JOBS
    one: bool = False
    count: bool = False


def main() -> None:
    args = tyro.cli(Args)
    sweep = load(args.file)
    study = Study(sweep, args.output or Path("runs", args.file.stem))
    if args.count:
        return print(study.left())
    sys.exit(Runner(sweep, study, jobs=1 if args.one else args.jobs).run(is_one=args.one))


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        check(False, str(error))
