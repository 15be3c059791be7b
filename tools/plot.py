"""Compare runs by their TensorBoard logs: curves over seeds, and a table.

    python tools/plot.py runs/A* runs/B* --output comparison.png

Runs with the same flags, except for the seed and flags that do not affect learning, form a setting.
Its curve is the interquartile mean (IQM) of its runs, https://arxiv.org/abs/2108.13264, with a 95%
bootstrap interval, or with the runs' range if there are fewer than 5. The IQM of fewer than 4 runs
is their mean. Where some of a setting's runs have no values yet, its curve ends.
"""

import csv
import dataclasses
import os
import re
import sys
from dataclasses import dataclass

import numpy as np
import tyro
from scipy.stats import bootstrap, trim_mean
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clusterenv_utils import ScriptArgs
from clusterenv_utils.errors import check, one_line_for, print_error

ENOUGH = 5  # the fewest seeds for an interval
POINTS = 100  # the most points of a curve
RETURNS = "charts/episodic_return", "rollout/ep_rew_mean"  # CleanRL's tag and ours, and SB3's
AXES = {"steps": "environment steps", "seconds": "seconds"}
# From Okabe and Ito's palette.
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"
FLAGS = "hyperparameters/text_summary"  # one text for each start or resume of a run
OF_LEARNING = {
    "exp_name", "num_envs", "num_workers", "env_kwargs", "sync_mode", "kl_threshold",
    "sync_interval", "max_policy_lag", "weights",
}  # fmt: skip
OTHERS = {"batch_size", "num_iterations", "chunk_size", "minibatch_size"}  # follow from flags
SAME = {field.name for field in dataclasses.fields(ScriptArgs)} - OF_LEARNING | OTHERS


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """the directories of the runs' logs, for example `runs/A*`"""
    output: str = "comparison.png"
    """the figure's file; its numbers go to a `.csv` file beside it"""
    metric: str | None = None
    """a scalar in the logs; by default the return in training"""
    smooth: int = 1
    """each value is the mean of this many logged values, itself and those before it"""


class LoggedRun:
    """A run of ours, CleanRL's or Stable-Baselines3's, as far as it is logged.

    Attributes:
        flags: the script's flags, as text by name; empty for Stable-Baselines3, which logs none.
        tags: the names of the scalars.
        last: the largest step and time that are logged, by axis.
    """

    def __init__(self, directory):
        check(os.path.isdir(directory), f"there is no run {directory}")
        self.name = os.path.basename(os.path.abspath(directory))
        self._events = EventAccumulator(directory, size_guidance={"scalars": 0, "tensors": 0})
        self._events.Reload()
        kinds = self._events.Tags()
        self.tags = sorted(kinds["scalars"])
        with one_line_for(ValueError, text=f"{directory} has no TensorBoard logs"):
            self._first = self._events.FirstEventTimestamp()
        texts = self._events.Tensors(FLAGS) if FLAGS in kinds["tensors"] else []
        self._starts = [text.wall_time for text in texts]
        table = texts[-1].tensor_proto.string_val[0].decode() if texts else ""
        self.flags = dict(re.findall(r"^\|(.*?)\|(.*)\|$", table, re.MULTILINE)[2:])
        events = [event for tag in self.tags for event in self._events.Scalars(tag)]
        self._times = np.array([event.wall_time for event in events])
        steps = max((event.step for event in events), default=0)
        self.last = {"steps": steps, "seconds": float(self._seconds(self._times).max(initial=0))}

    def scalars(self, tag):
        """Return a tag's steps, seconds and values, ``(number,)`` each, by name.

        Seconds are those since the run began, without the time between an end and its --resume.
        """
        events = self._events.Scalars(tag)
        times = np.array([event.wall_time for event in events])
        return {
            "steps": np.array([event.step for event in events], np.float64),
            "seconds": self._seconds(times),
            "values": np.array([event.value for event in events]),
        }

    def _seconds(self, times):
        seconds = times - self._first
        heard = np.concatenate([self._times, self._starts])
        for start in self._starts:
            before = heard[heard < start].max(initial=self._first)  # the end of the previous part
            seconds[times >= start] -= start - before
        return seconds


def iqm(values, axis=0):
    """Return the mean of the middle half of the values; NaN where a value is missing."""
    return trim_mean(values, 0.25, axis)


def interval(statistic, *samples, resamples=2000):
    """Return a statistic of samples ``(seeds, ...)``, and the ends of its 95% percentile interval.

    ``statistic`` is a function of as many arrays, along an ``axis``. The seeds are resampled, and
    several samples in pairs. With fewer than `ENOUGH` seeds, the interval is NaN.
    """
    value = statistic(*samples, axis=0)
    if len(samples[0]) < ENOUGH:
        return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
    found = bootstrap(
        samples, statistic, n_resamples=resamples, vectorized=True, paired=True, axis=0,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return value, found.low, found.high


def on_grid(places, values, grid, last=False):
    """Return values at the points of an ascending grid, ``(points,)`` float64.

    A point gets the mean of the values since the previous point, or with ``last`` the last of these
    values. A point without values repeats the previous point. Points before the first value are
    NaN.
    """
    points = np.searchsorted(grid, places)
    found = np.full(len(grid), np.nan)
    filled = np.full(len(grid), -1)
    for point in np.unique(points[points < len(grid)]):
        new = values[points == point]
        found[point] = new[-1] if last else new.mean()
        filled[point] = point
    latest = np.maximum.accumulate(filled)
    return np.where(latest < 0, np.nan, found[latest])


def make_settings(runs):
    """Return each setting's runs by a label, made of the flags in which the settings differ."""
    environments = sorted({run.flags.get("env_id", "") for run in runs} - {""})
    check(len(environments) <= 1, f"draw each environment alone: {', '.join(environments)}")
    same = SAME | {"env_id"}
    flags = {run: {k: v for k, v in run.flags.items() if k not in same} for run in runs}
    for run, own in flags.items():
        if not own:  # of Stable-Baselines3: the name without the number at the end
            own["run"] = re.sub(r"_\d+$", "", run.name)
    names = dict.fromkeys(name for own in flags.values() for name in own)
    differing = [name for name in names if len({own.get(name) for own in flags.values()}) > 1]
    settings = {}
    for run, own in flags.items():
        parts = [f"{name}={own[name]}" for name in differing if name in own]
        label = ", ".join(parts) or run.flags.get("exp_name") or own["run"]
        settings.setdefault(label, []).append(run)
    return settings


def make_curve(run, tag, axis, grid, smooth=1):
    """Return a curve, ``(points,)`` float64; NaN before its first value and after its last."""
    scalars = run.scalars(tag)
    sums = np.convolve(scalars["values"], np.ones(smooth))[: len(scalars["values"])]
    means = sums / np.minimum(np.arange(len(sums)) + 1, smooth)
    curve = on_grid(scalars[axis], means, grid)
    curve[np.searchsorted(grid, run.last[axis]) + 1 :] = np.nan
    return curve


def make_band(curves):
    """Return the IQM of ``(runs, points)``, and the ends of its interval or of the runs' range."""
    if len(curves) >= ENOUGH:
        return np.array(interval(iqm, curves, resamples=1000))
    return np.array([iqm(curves), curves.min(axis=0), curves.max(axis=0)])


def make_table(settings, tags):
    """Return each setting's IQM, over the last tenth of its steps and over all of training."""
    lines = [("setting", "runs", "steps", "seconds", "last tenth", "all of training")]
    for label, runs in settings.items():
        cells = []
        for axis in AXES:
            lasts = [round(run.last[axis]) for run in runs]
            low, high = min(lasts), max(lasts)
            cells.append(f"{low:,}" if low == high else f"{low:,} to {high:,}")
        curves = []
        for run in runs:
            points = min(len(run.scalars(tags[run])["values"]), POINTS)
            grid = np.linspace(0, run.last["steps"], points + 1)[1:]
            curves.append(make_curve(run, tags[run], "steps", grid))
        ends = np.array([curve[-max(len(curve) // 10, 1) :].mean() for curve in curves])
        wholes = np.array([np.nanmean(curve) for curve in curves])
        for values in (ends, wholes):
            middle, low, high = interval(iqm, values)
            range_of = f" ({low:.4g} to {high:.4g})" if np.isfinite(low) else ""
            cells.append(f"{middle:.4g}{range_of}")
        lines.append((label, str(len(runs)), *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def draw(axes, x, values, color, label, **style):
    """Draw a curve with its band; ``values`` are the rows that `make_band` returns."""
    middle, low, high = values
    axes.plot(x, middle, color=color, label=label, **style)
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def draw_figure(settings, tags, table, smooth):
    """Return a figure of all settings, with a table below, and the rows of its numbers."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(10, 4.4 + 0.3 * len(settings)), layout="constrained")
    rows = [("axis", "x", "setting", "runs", "iqm", "low", "high")]
    points = min(max(len(run.scalars(tag)["values"]) for run, tag in tags.items()), POINTS)
    for axes, (axis, name) in zip(figure.subplots(1, 2, sharey=True), AXES.items(), strict=True):
        grid = np.linspace(0, max(run.last[axis] for run in tags), points + 1)[1:]
        for index, (label, runs) in enumerate(settings.items()):
            curves = np.array([make_curve(run, tags[run], axis, grid, smooth) for run in runs])
            band = make_band(curves)
            draw(axes, grid, band, COLORS[index % len(COLORS)], label)
            found = zip(grid.tolist(), *band.tolist(), strict=True)
            rows += [(axis, x, label, len(runs), *values) for x, *values in found]
        axes.set_xlabel(name)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.spines[["top", "right"]].set_visible(False)
    left = figure.axes[0]
    left.set_ylabel(" or ".join(dict.fromkeys(tags.values())))
    handles = left.get_legend_handles_labels()
    legend = figure.legend(*handles, loc="outside upper left", frameon=False, fontsize=8)
    below = figure.supxlabel(table, x=0.01, ha="left", family="monospace", fontsize=7)
    for text in (*legend.get_texts(), below):
        text.set_parse_math(False)
    return figure, rows


def main(args):
    check(args.runs, "name the runs to compare")
    base, ending = os.path.splitext(args.output)
    check(ending, f"--output must end as in comparison.png, got {args.output}")
    runs = [LoggedRun(path) for path in dict.fromkeys(map(os.path.realpath, args.runs))]
    wanted = [args.metric] if args.metric else RETURNS
    found = {run: [tag for tag in wanted if tag in run.tags] for run in runs}
    tags = {run: own[0] for run, own in found.items() if own}
    known = sorted({tag for run in runs for tag in run.tags})
    check(tags, f"no run has {' or '.join(wanted)}, but {', '.join(known)}")
    for run in runs:
        if run not in tags:
            print(f"warning: left out: {run.name} has no {wanted[0]}", file=sys.stderr)
    settings = make_settings(tags)
    table = make_table(settings, tags)
    print(table)
    figure, rows = draw_figure(settings, tags, table, args.smooth)
    with one_line_for(OSError, ValueError, text=f"cannot write {args.output}"):
        figure.savefig(args.output, dpi=150)
        with open(f"{base}.csv", "w") as file:
            csv.writer(file).writerows(rows)
    print(f"see {args.output}")


if __name__ == "__main__":
    sys.excepthook = print_error
    main(tyro.cli(Args, description=__doc__))
