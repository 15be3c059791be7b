"""The time until a task is solved, for several seeds and several ways to run the script.

    python -m experiments.benchmarks.time_to_solve
    python -m experiments.benchmarks.time_to_solve --env-id LunarLander-v3 --ways="--gamma 0.99"
    python -m experiments.benchmarks.time_to_solve --ways="--no-overlap,--overlap,--stream" \
        --seeds 10 --stop --output runs/time_to_solve

A task is solved once the mean return of the last 100 episodes reaches the task's target. Trains
with the environment's script to the end, or with --stop until the task is solved, all ways in turn
for each seed. Seconds count from the start of the process, with its imports and the start of the
workers. Also prints the seconds of training alone, the environment steps, and without --stop the
returns at the end and after equal times. With --output, runs that are already there are not
repeated. With --plot, draws the returns against the seconds of training.
"""

import json
import math
import shlex
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.figures.claims import difference
from experiments.figures.drawing import subplots
from tools import plot
from tools.plot import interval, iqm

from .scripts import ROOT, train

RETURN, SPEED = "charts/mean_return_100", "charts/SPS"
CARTPOLE = "--num-steps 64 --update-epochs 8 --learning-rate 1e-3 --total-timesteps 400000"
TASKS = {  # environment: (the return at which it counts as solved, script, flags)
    "LunarLander-v3": (200, "ppo_clusterenv.py", ""),
    "CartPole-v1": (475, "ppo_clusterenv.py", CARTPOLE),
    # What CleanRL reports for ppo_continuous_action.py after a million steps of v4.
    "HalfCheetah-v5": (1443, "scripts/ppo_continuous_clusterenv.py", ""),
}


@dataclass
class Args:
    env_id: tuple[Literal["LunarLander-v3", "CartPole-v1", "HalfCheetah-v5"], ...] = tuple(TASKS)
    """the environments"""
    ways: str = ""
    """flags of each way, in one string, with commas between the ways"""
    common: str = ""
    """flags of all ways, in one string"""
    seeds: int = 5
    """number of seeds, from 1"""
    stop: bool = False
    """end each run once the task is solved"""
    output: Path | None = None
    """directory for a file per run; by default the runs are not kept"""
    plot: Path | None = None
    """file for a plot of the returns"""


class Watch:
    """A condition that is True once a run has solved its task, according to its logs."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._events: EventAccumulator | None = None

    def __call__(self, directory: Path) -> bool:
        if self._events is None:
            for logs in directory.glob("runs/*/events.*"):
                self._events = EventAccumulator(str(logs.parent))
            return False
        self._events.Reload()
        if not {RETURN, SPEED} <= set(self._events.Tags()["scalars"]):
            return False
        returns, speeds = map(self._events.Scalars, (RETURN, SPEED))
        return any(each.value >= self._target for each, _ in zip(returns, speeds, strict=False))


def measure(env_id: str, way: str, seed: int, stop: bool) -> dict:
    """Train. Return when the task was solved, and the results of the run.

    ``solved`` is None, or the seconds since the start of the process, the seconds of training, and
    the environment steps at which the task was solved.
    """
    target, script, own = TASKS[env_id]
    start = time.time()
    flags = "--env-id", env_id, "--seed", str(seed), *shlex.split(own), *shlex.split(way)
    scalars, summary = train(ROOT / script, *flags, stop=Watch(target) if stop else None)
    found = {"solved": None, "eval": summary and summary["eval_return_mean"], "curve": []}
    for returned, sps in zip(scalars(RETURN), scalars(SPEED), strict=not stop):
        seconds, training = returned.wall_time - start, returned.step / sps.value
        found["curve"].append((training, returned.value))
        if returned.value >= target and found["solved"] is None:
            found["solved"] = seconds, training, returned.step
    found["seconds"], found["return"] = found["curve"][-1]
    return found


def kept(output: Path, env_id: str, way: str, seed: int, stop: bool) -> dict:
    """Return the result of a run from its file. If there is no file, train and write it."""
    file = output / f"{env_id}{way.replace(' ', '')}-{seed}{'-stopped' * stop}.json"
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_text(json.dumps(measure(env_id, way, seed, stop)))
        part.rename(file)
    return json.loads(file.read_text())


def return_at(found: dict, seconds: float) -> float:
    """Return a run's return after ``seconds`` of training, or at its end if that is earlier."""
    return [value for when, value in found["curve"] if when <= seconds or when == 0][-1]


def compare(name: str, values: dict[str, np.ndarray]) -> None:
    """Print a measure of each way, and its difference from the first way."""
    first, *_ = values
    print(f"  {name}:")
    for way, column in values.items():
        text = f"    {way or 'as it is'}: {iqm(column):.1f}"
        if way != first:
            value, low, high = interval(difference, column, values[first], resamples=10000)
            text += f", {value:+.1f} ({low:.1f} to {high:.1f})"
        print(text)


def draw(path: Path, tasks: dict[str, dict[str, list[dict]]]) -> None:
    """Draw the interquartile mean and the quartiles of the returns over seconds of training."""
    figure, (row,) = subplots(1, len(tasks), 5 * len(tasks), 3.6)
    for axes, (env_id, ways) in zip(row, tasks.items(), strict=True):
        for color, (way, runs) in zip(plot.COLORS, ways.items(), strict=False):
            first = max(found["curve"][0][0] for found in runs)
            seconds = np.linspace(first, max(found["seconds"] for found in runs), 200)
            returns = np.array([[return_at(found, when) for when in seconds] for found in runs])
            band = [iqm(returns), *np.quantile(returns, (0.25, 0.75), axis=0)]
            plot.draw(axes, seconds, band, color, way or "as it is")
        axes.set(title=env_id, xlabel="seconds of training", ylabel="return of 100 episodes")
    row[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def report(env_id: str, ways: dict[str, list[dict]]) -> None:
    """Print when each way solved a task, and its returns."""
    print(f"{env_id} to {TASKS[env_id][0]}, {len(next(iter(ways.values())))} seeds:")
    for way, runs in ways.items():
        # An unsolved run counts as longer than any solved one.
        solved = np.array([found["solved"] or [math.inf] * 3 for found in runs])
        seconds, training, steps = np.median(solved, axis=0)
        low, high = solved[:, 0].min(), solved[:, 0].max()
        print(
            f"  {way or 'as it is'}: median {seconds:.1f} s ({low:.1f} to {high:.1f}), "
            f"{training:.1f} of them training; {steps:,.0f} steps; "
            f"{np.isinf(solved[:, 0]).sum()} not solved; "
            f"all {np.median([found['seconds'] for found in runs]):.1f} s"
        )
    if len(ways) == 1 or next(iter(ways.values()))[0]["eval"] is None:
        return
    end = min(found["seconds"] for runs in ways.values() for found in runs)
    for share in (0.25, 0.5, 1):
        compare(
            f"return after {share * end:.0f} s of training",
            {way: np.array([return_at(f, share * end) for f in ways[way]]) for way in ways},
        )  # fmt: skip
    for key, name in (("return", "return of the last 100 episodes"), ("eval", "evaluation")):
        compare(name, {way: np.array([found[key] for found in ways[way]]) for way in ways})


def main() -> None:
    args = tyro.cli(Args)
    with ExitStack() as stack:
        output = args.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        output.mkdir(parents=True, exist_ok=True)
        tasks: dict[str, dict[str, list[dict]]] = {}
        for env_id in args.env_id:
            ways = tasks[env_id] = {way: [] for way in args.ways.split(",")}
            for seed in range(1, args.seeds + 1):
                for way, runs in ways.items():
                    flags = f"{args.common} {way}".strip()
                    runs.append(kept(output, env_id, flags, seed, args.stop))
                    seconds, training, steps = runs[-1]["solved"] or [math.nan] * 3
                    print(
                        f"{env_id} {way}, seed {seed}: {seconds:.1f} s, {training:.1f} of them "
                        f"training; {steps:,.0f} steps; return {runs[-1]['return']:.1f}",
                        flush=True,
                    )
            report(env_id, ways)
        if args.plot is not None:
            draw(args.plot, tasks)


if __name__ == "__main__":
    main()
