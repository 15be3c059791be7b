"""Compare runs by their TensorBoard logs: curves over seeds, and a table.

    python -m clusterenv_utils.plot runs/A* runs/B* --output comparison.png

Runs with the same flags, except for the seed and flags that do not affect learning, form a setting.
Its value is the interquartile mean (IQM) of its runs, with a 95% bootstrap interval, or with the
runs' range if there are fewer than 5. Unfinished runs count as far as they have come: after the end
of the shortest run there is no interval, and where fewer than half of the runs are left there is no
value. Over seconds, a run that has done as many steps as any run of its setting keeps its last
value.
"""

import csv
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tyro

from clusterenv_runtime.errors import printable

from .arguments import ScriptArgs
from .checkpoint import replaced
from .checks import check, one_line_for
from .curve import on_grid
from .estimates import ENOUGH, interval, iqm
from .flags import names
from .logged import LoggedRun
from .output import print_line
from .types import Positive, check_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 100  # the most points of a curve
RETURNS = "charts/episodic_return", "rollout/ep_rew_mean"  # CleanRL's tag and ours, and SB3's
AXES = {"steps": "environment steps", "seconds": "seconds"}
# From Okabe and Ito's palette.
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"
LINES = "-", "--", ":", "-."
OF_LEARNING = {
    "exp_name", "num_envs", "num_workers", "env_backend", "env_kwargs", "sync_mode",
    "kl_threshold", "sync_interval", "max_policy_lag", "weights",
}  # fmt: skip
# Flags that follow from others, and flags of CleanRL's own that do not affect learning.
OTHERS = {"num_iterations", "chunk_size", "minibatch_size", "upload_model", "hf_entity"}
SAME = {*names(ScriptArgs)} - OF_LEARNING | OTHERS


class Row(NamedTuple):
    """A point of the figure: the IQM of ``runs`` runs, and the ends of its band or NaN."""

    axis: str
    x: float
    setting: str
    runs: int
    iqm: float
    low: float
    high: float


@dataclass
class Args:
    """Compare runs by their TensorBoard logs."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """the directories of the runs' logs, for example `runs/A*`"""
    output: str = "comparison.png"
    """the figure's file; its numbers go to a `.csv` file beside it"""
    metric: str | None = None
    """a scalar in the logs; by default the return in training"""
    smooth: Positive = 1
    """each value is the mean of this many logged values, itself and those before it"""


def with_metric(runs: Iterable[LoggedRun], metric: str | None) -> dict[LoggedRun, str]:
    """Return the metric's tag in each run that has it. If none has, exit with a one-line error."""
    found: dict[LoggedRun, str] = {}
    without: list[str] = []
    tags: set[str] = set()
    for run in runs:
        tag = next((tag for tag in ([metric] if metric else RETURNS) if tag in run.tags), None)
        if tag is None:
            without.append(run.name)
            tags |= {*run.tags}
        else:
            found[run] = tag
    wanted = metric or " or ".join(RETURNS)
    check(found, f"no run has {wanted}; there are: {', '.join(sorted(tags)) or 'none'}")
    if without:
        _warn(f"left out because they have no {wanted} so far: {', '.join(without)}")
    return found


def settings_of(runs: Iterable[LoggedRun]) -> dict[str, list[LoggedRun]]:
    """Return each setting's runs by a label, made of the flags in which the settings differ."""
    flags = {run: _flags_of_learning(run) for run in runs}
    values: dict[str, set[str]] = {}
    for each in flags.values():
        for name, value in each.items():
            values.setdefault(name, set()).add(value)
    differing = [name for name, found in values.items() if len(found) > 1]
    settings: dict[frozenset[tuple[str, str]], list[LoggedRun]] = {}
    for run, each in flags.items():
        settings.setdefault(frozenset(each.items()), []).append(run)
    labelled: dict[str, list[LoggedRun]] = {}
    for members in settings.values():
        each = flags[members[0]]
        parts = [f"{name}={each[name]}" for name in differing if name in each]
        label = printable(", ".join(parts) or _what(members[0]))
        if label in labelled:  # one of the two settings has more flags
            label += f" ({members[0].name})"
        labelled[label] = members
        seeds = [run.flags["seed"] for run in members if "seed" in run.flags]
        twice = {seed for seed in seeds if seeds.count(seed) > 1}
        if twice:
            _warn(f"{label}: several runs of seed {', '.join(sorted(twice))}; each counts")
    return labelled


def _flags_of_learning(run: LoggedRun) -> dict[str, str]:
    if not run.flags:
        return {"run": _what(run)}
    is_ppo = "minibatch_size" in run.flags  # its batch_size follows from other flags
    same = SAME | {"batch_size"} if is_ppo else SAME
    return {name: value for name, value in run.flags.items() if name not in same}


def _what(run: LoggedRun) -> str:
    """Return a run's script and environment, or its name without the number at the end."""
    if {"exp_name", "env_id"} <= run.flags.keys():
        return f"{run.flags['exp_name']} on {run.flags['env_id']}"
    return re.sub(r"_\d+$", "", run.name)


def _warn(text: str) -> None:
    print(f"warning: {printable(text, most=10_000)}", file=sys.stderr)


def curve_of(
    run: LoggedRun, tag: str, axis: str, grid: np.ndarray, until: float, smooth: int = 1
) -> np.ndarray:
    """Return a curve, ``(points,)`` float64; NaN before its first value and after ``until``."""
    scalars = run.scalars(tag)
    sums = np.convolve(scalars.values, np.ones(smooth))[: len(scalars.values)]
    means = sums / np.minimum(np.arange(len(sums)) + 1, smooth)
    curve = on_grid(getattr(scalars, axis), means, grid)
    curve[np.searchsorted(grid, until) + 1 :] = np.nan
    return curve


def band(curves: np.ndarray) -> np.ndarray:
    """Return the IQM of runs, and the ends of its interval or of their range, ``(3, points)``.

    At each point, those ``curves``, ``(runs, points)``, count that are not NaN. If some are NaN,
    there is only the IQM.
    """
    there = ~np.isnan(curves)
    found = np.full((3, curves.shape[1]), np.nan)
    for members in np.unique(there, axis=1).T:
        points = (there == members[:, None]).all(axis=0)
        values = curves[members][:, points]
        if members.all() and len(values) >= ENOUGH:
            found[:, points] = interval(iqm, values, resamples=1000)
        elif members.any():
            found[0, points] = iqm(values)
        if members.all() and len(values) < ENOUGH:
            found[1:, points] = values.min(axis=0), values.max(axis=0)
    return found


def rows_of(
    settings: dict[str, list[LoggedRun]], tags: dict[LoggedRun, str], smooth: int
) -> list[Row]:
    """Return the points of the figure."""
    rows = []
    points = min(max(len(run.scalars(tag).values) for run, tag in tags.items()), POINTS)
    for axis in AXES:
        lasts = {run: run.last_step if axis == "steps" else run.last_seconds for run in tags}
        grid = np.linspace(0, max(lasts.values()), points + 1)[1:]
        for label, runs in settings.items():
            farthest = max(run.last_step for run in runs)
            found = []
            for run in runs:
                waits = axis == "seconds" and run.last_step == farthest
                until = grid[-1] if waits else lasts[run]
                found.append(curve_of(run, tags[run], axis, grid, until, smooth))
            curves = np.array(found)
            numbers = np.count_nonzero(~np.isnan(curves), axis=0).tolist()
            for x, number, values in zip(grid, numbers, band(curves).T, strict=True):
                if 2 * number >= len(runs):
                    rows.append(Row(axis, float(x), label, number, *map(float, values)))
    return rows


def table_of(settings: dict[str, list[LoggedRun]], tags: dict[LoggedRun, str]) -> str:
    """Return the table below the figure: each setting's IQM, at the end and over all training."""
    lines = [("setting", "runs", "steps", "seconds", "last tenth", "all of training")]
    for label, runs in settings.items():
        curves = []
        for run in runs:
            points = min(len(run.scalars(tags[run]).values), POINTS)
            grid = np.linspace(0, run.last_step, points + 1)[1:]
            curves.append(curve_of(run, tags[run], "steps", grid, run.last_step))
        ends = np.array([curve[-max(len(curve) // 10, 1) :].mean() for curve in curves])
        known = [curve[~np.isnan(curve)] for curve in curves]
        wholes = np.array([values.mean() if len(values) else np.nan for values in known])
        steps = _range(run.last_step for run in runs)
        seconds = _range(round(run.last_seconds) for run in runs)
        estimates = _estimate(ends), _estimate(wholes)
        lines.append((label, f"{len(runs)}", steps, seconds, *estimates))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    return "\n".join(padded)


def _range(numbers: Iterable[int]) -> str:
    low, *_, high = sorted([*numbers] * 2)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _estimate(values: np.ndarray) -> str:
    middle, low, high = interval(iqm, values)
    return f"{middle:.4g}" + f" ({low:.4g} to {high:.4g})" * bool(np.isfinite(low))


def draw(
    axes: "Axes", x: np.ndarray, values: Sequence[np.ndarray], color: Any, label: str, **style: Any
) -> None:
    """Draw a curve with its band. ``values`` are the rows that `band` returns."""
    middle, low, high = values
    marker = "o" if np.count_nonzero(~np.isnan(middle)) == 1 else None
    axes.plot(x, middle, color=color, label=label, marker=marker, **style)
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def figure_of(rows: list[Row], table: str, metric: str) -> "Figure":
    """Return a figure of the points from `rows_of`, with a table below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    labels = dict.fromkeys(row.setting for row in rows)
    longest = max(map(len, table.splitlines()))
    size = max(10, 0.06 * longest), 4.4 + 0.3 * len(labels)
    figure = Figure(figsize=size, layout="constrained")
    for axes, (axis, name) in zip(figure.subplots(1, 2, sharey=True), AXES.items(), strict=True):
        for index, label in enumerate(labels):
            own = [row for row in rows if (row.axis, row.setting) == (axis, label)]
            points = [(row.x, row.iqm, row.low, row.high) for row in own]
            x, *values = np.array(points).reshape(-1, 4).T
            line = LINES[index // len(COLORS) % len(LINES)]
            style = {"color": COLORS[index % len(COLORS)], "linestyle": line}
            draw(axes, x, values, label=label, linewidth=0.7, **style)
            axes.plot(x, np.where(np.isnan(values[1]), np.nan, values[0]), **style)
        axes.set_xlabel(name)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.spines[["top", "right"]].set_visible(False)
    left = figure.axes[0]
    left.set_ylabel(metric)
    legend = figure.legend(
        *left.get_legend_handles_labels(), loc="outside upper left", frameon=False, fontsize=8
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    below = figure.supxlabel(table, x=0.01, ha="left", family="monospace", fontsize=7)
    below.set_parse_math(False)
    return figure


def write(args: Args, rows: list[Row], figure: "Figure") -> str:
    """Write the figure and its numbers. Return the path of the numbers.

    If a file cannot be written, exit with a one-line error.
    """
    base, ending = os.path.splitext(args.output)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([Row._fields, *rows])
    with one_line_for(OSError, ValueError, text=f"cannot write {args.output}"):
        with replaced(f"{base}.csv") as file:
            file.write(text.getvalue().encode())
        with replaced(args.output) as file:
            figure.savefig(file, dpi=150, format=ending.removeprefix("."))
    return f"{base}.csv"


def main() -> None:
    args = tyro.cli(Args)
    with one_line_for(ValueError):
        check_values(args)
    check(args.runs, "name the runs to compare, such as runs/A* runs/B*")
    ending = "a file's name with an ending, such as comparison.png"
    check(os.path.splitext(args.output)[1], f"--output must be {ending}, got {args.output}")
    paths = {os.path.realpath(path): path for path in args.runs}  # each run once
    tags = with_metric(map(LoggedRun, paths.values()), args.metric)
    settings = settings_of(tags)
    table = table_of(settings, tags)
    print_line(table)
    metric = " or ".join(dict.fromkeys(tags.values()))
    rows = rows_of(settings, tags, args.smooth)
    numbers = write(args, rows, figure_of(rows, table, metric))
    print_line(f"see {args.output} and {numbers}")


if __name__ == "__main__":
    main()
