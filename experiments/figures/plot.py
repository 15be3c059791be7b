"""The figures and the table of claims, from experiments/figures/results/main/*.csv.

    python -m experiments.figures.plot  # *.png, claims.csv and claims.md of results/main
    python -m experiments.figures.plot --results runs/quick/results --output runs/quick

The same tables give the same bytes. Every value is an interquartile mean (IQM) over seeds, with a
95% bootstrap interval: the seeds are resampled, and for differences between two settings the pairs
of one seed (https://arxiv.org/abs/2108.13264; every figure is of one environment, so there is one
stratum). Settings that have not run yet are left out. Captions state the number of seeds.
"""

import argparse
import itertools
import sys
from pathlib import Path

from matplotlib.patheffects import withStroke

from tools.plot import ENOUGH, interval, iqm

from .claims import COLUMNS, claims, matched, write
from .drawing import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RETURN,
    SKY,
    draw,
    draw_all,
    finish,
    logarithmic,
    number_of,
    points,
    spread,
    subplots,
)
from .slow_figure import slow_network
from .tasks import ALWAYS, PLAIN, load


def learning_curves(task):
    """Draw the return against steps, with a panel for each threshold.

    Behind a threshold's curve are those of always and of a fixed interval with about as many pulls.
    """
    settings = [
        key
        for variant in task.variants()
        if variant != PLAIN
        for key in task.settings("kl", variant)
    ]
    if not settings:
        return None
    rows, columns = -(-len(settings) // 4), min(len(settings), 4)
    figure, grid = subplots(rows, columns, 8, 1 + 1.9 * rows, sharex=True, sharey=True)
    for axes in grid.flat[len(settings) :]:
        axes.remove()
    numbers = set()
    for axes, setting in zip(grid.flat, settings, strict=False):
        fair, shown = matched(task, setting, task.settings("interval")), [setting]
        for other in filter(None, (*task.always(), fair)):
            if task.shared(other, *shown):  # the runs so far may have no seed in common
                shown.append(other)
        seeds = task.shared(*shown)
        numbers.add(len(seeds))
        for key in (*shown[1:], setting):
            color = BLUE if key == setting else "#888888" if key == ALWAYS else ORANGE
            draw(axes, task, key, "return", color, seeds, linewidth=1.4 if key == setting else 1)
        axes.set_title(str(setting), fontsize=7.5, color=BLUE, loc="left")
        if fair in shown:
            axes.set_title(str(fair), fontsize=7.5, color=ORANGE, loc="right")
        axes.text(
            0.98, 0.03, number_of(len(seeds)), transform=axes.transAxes, fontsize=7, ha="right"
        )
    figure.supylabel("return", fontsize=9)
    size = len(task.curve(settings[0], "return")[0])
    caption = task.caption(settings, ", the same for all in a panel", numbers)
    caption += f"\nEach point is the mean of the logged returns in 1/{size} of the steps"
    title = (
        "learning curves\nBlue: by divergence; gray: always; orange, if any: an interval with "
        "about as many pulls"
    )
    return finish(figure, task, title, caption, "environment steps")


def synchronization(task):
    """Draw pulls and bytes so far against steps."""
    settings = task.settings("kl")
    settings = [key for key in settings if key.decoupled] or settings
    figure, ((left, right),) = subplots(1, 2, 8, 3.4)
    draw_all(left, task, settings, "pulls")
    draw_all(right, task, settings, "bytes")
    left.set(yscale="log", ylabel="pulls per worker so far")
    right.set(yscale="log", ylabel="bytes of weights so far, all workers")
    logarithmic(left.yaxis)
    logarithmic(right.yaxis)
    return finish(
        figure, task, "synchronization", task.caption(settings), "environment steps", legend=left
    )


def objectives(task):
    """Draw final return and pulls at each threshold, for the decoupled and for the plain objective.

    Both have whole weights.
    """
    settings = [key for key in task.settings("kl") if key.weights == "float32"]
    kinds = {
        name: [key for key in settings if key.decoupled == (name == "decoupled")]
        for name in ("decoupled", "plain")
    }
    if not all(kinds.values()):
        return None
    thresholds = sorted({setting.value for setting in settings})
    figure, ((left, right),) = subplots(1, 2, 8, 3.4)
    for axes, column, label in (
        (left, "mean_return_100", RETURN),
        (right, "pulls_per_worker", "pulls per worker"),
    ):
        for (name, which), shift, color, marker in zip(
            kinds.items(), (-0.15, 0.15), (BLUE, ORANGE), "os", strict=True
        ):
            places = [thresholds.index(setting.value) + shift for setting in which]
            points(
                axes,
                places,
                task,
                which,
                column,
                color,
                marker=marker,
                linestyle="none",
                label=name,
            )
        for always in task.always():
            middle, low, high = interval(iqm, task.column(always, column))
            axes.axhline(middle, color=BLACK, linestyle="--", linewidth=1, label="always")
            axes.axhspan(low, high, color=BLACK, alpha=0.1, linewidth=0)
        axes.set_xticks(range(len(thresholds)), [f"{value:g}" for value in thresholds], rotation=45)
        axes.set_ylabel(label)
    right.set_yscale("log")
    logarithmic(right.yaxis)
    title = "the decoupled objective and the plain one"
    return finish(figure, task, title, task.caption(settings), "KL threshold", legend=left)


def frontier(task):
    """Draw final return against bytes of weights, for divergence and for fixed intervals.

    If there are matched settings, draw their differences, too. Thresholds that are never reached,
    as with the plain objective, are left out: there, workers pull only once.
    """
    fixed = task.settings("interval")
    if not fixed:
        return None
    families = [(fixed, ORANGE, "s", "fixed interval")]
    styles = itertools.cycle([(BLUE, "o"), (GREEN, "^"), (PURPLE, "D"), (SKY, "v")])
    for variant, (color, marker) in zip(task.variants(), styles, strict=False):
        reached = [
            key
            for key in task.settings("kl", variant)
            if task.column(key, "pulls_per_worker").max() > 1
        ]
        if reached:
            families.append(
                (reached, color, marker, "by divergence" + variant.replace(", ", ",\n"))
            )
    settings = sum((family[0] for family in families), [])
    colors = {str(key): family[1] for family in families for key in family[0]}
    rows = [
        row
        for row in claims(task)
        if row["matched"] and not row["held_out"] and row["seeds"] >= ENOUGH
    ]
    shape = (
        {"columns": 2, "width": 9, "width_ratios": [3, 2]} if rows else {"columns": 1, "width": 6.5}
    )
    figure, grid = subplots(2, height=8.5, **shape, sharex="col")
    names = ("return", RETURN), ("training", "mean return of all of training")
    numbers = []
    for (left, *right), (name, label) in zip(grid, names, strict=True):
        numbers.append(frontier_of(left, task, families, COLUMNS[name]))
        left.set_ylabel(label)
        for axes in right:
            differences(axes, rows, name, colors)
            axes.set_title(label, fontsize=9)
    sent = [task.column(setting, "sync_bytes").mean() for setting in settings]
    grid[0, 0].set_xlim(min(sent) / 1.8, max(sent) * 1.4)
    logarithmic(grid[1, 0].xaxis)
    grid[1, 0].set_xlabel("bytes of weights, all workers (mean)")
    for axes in grid[1, 1:]:
        axes.set_xlabel("paired difference, divergence minus interval\n(in brackets their pulls)")
    caption = task.caption(
        settings, "\nBeside points their threshold or interval (orange 1: always)"
    )
    finish(figure, task, "divergence or a fixed interval?", caption, legend=grid[0, 0])
    spread(figure, *numbers)
    return figure


def frontier_of(axes, task, families, column):
    """Draw a column against bytes for each family. Return the texts of the points' numbers.

    A family is (settings, color, marker, name).
    """
    axes.set_xscale("log")
    numbers = []
    for family, color, marker, name in families:
        sent = [task.column(setting, "sync_bytes").mean() for setting in family]
        points(axes, sent, task, family, column, color, marker=marker, label=name)
        for setting, x in zip(family, sent, strict=True):
            number = axes.text(
                x, iqm(task.column(setting, column)), f"{setting.value:g}", color=color, fontsize=7
            )
            number.set_path_effects([withStroke(linewidth=2, foreground="white")])
            numbers.append(number)
    axes.margins(y=0.2)
    return numbers


def differences(axes, rows, name, colors):
    """Draw a column's difference between each threshold and its matched fixed interval."""
    for place, row in enumerate(rows):
        color = colors[row["setting"]]
        axes.plot(row[f"{name}_difference"], place, "o", color=color, markersize=4)
        axes.hlines(place, row[f"{name}_low"], row[f"{name}_high"], color=color, linewidth=1)
    label = "{setting} ({pulls:.3g})\n{against} ({pulls_against:.3g}), {number}"
    axes.set_yticks(
        range(len(rows)),
        [label.format(**row, number=number_of(row["seeds"])) for row in rows],
        fontsize=7,
    )
    axes.margins(y=0.1)
    axes.axvline(0, color=BLACK, linewidth=0.8)


def lag(task):
    """Draw KL and policy lag against steps, with a row of panels for each variant."""
    kinds = [task.settings("kl", variant) for variant in task.variants()]
    figure, grid = subplots(len(kinds), 2, 8, 1 + 2.6 * len(kinds), sharex=True)
    for (left, right), settings in zip(grid, kinds, strict=True):
        draw_all(left, task, settings, "kl")
        draw_all(right, task, settings, "lag")
        left.set_title(
            settings[0].variant.removeprefix(", ") or "decoupled" * (task.algorithm == "PPO"),
            fontsize=9,
            loc="left",
        )
        left.set_yscale("symlog", linthresh=1e-3)  # because KL may be 0
        left.set(ylabel="KL before a pull, nats")
        right.set(ylabel="policy lag, versions")
        right.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for below in grid[1:, 0]:
        below.sharey(grid[0, 0])
    grid[0, 0].set_ylim(bottom=0)  # last, because it also fixes the top
    title = (
        "KL after each update, whether a pull followed or not, and how old the policies are that "
        "act"
    )
    return finish(figure, task, title, task.caption(sum(kinds, [])), "environment steps")


def main():
    parser = argparse.ArgumentParser(
        description="Draw the figures from the tables of experiments.figures.collect."
    )
    parser.add_argument(
        "--results",
        type=Path,
        default="experiments/figures/results/main",
        help="directory of the tables and of the claims",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default="experiments/figures/results/main",
        help="directory of the figures; it is made if missing",
    )
    args = parser.parse_args()
    slow, runs = (args.results / name for name in ("slow_network.csv", "runs.csv"))
    if not slow.exists() and not runs.exists():
        collect = f"python -m experiments.figures.collect --results {args.results}"
        sys.exit(
            f"error: neither {slow} nor {runs} is there: run {collect}, see "
            f"experiments/figures/README.md"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    if slow.exists():
        slow_network(slow).savefig(
            args.output / "slow_network.png", dpi=150, metadata={"Software": None}
        )
        print(args.output / "slow_network.png")
    rows = []
    for task in load(args.results) if runs.exists() else ():
        for figure_of in (learning_curves, synchronization, objectives, frontier, lag):
            if task.variants() and (figure := figure_of(task)):
                path = args.output / f"{task.name}_{figure_of.__name__}.png"
                # The metadata omit Matplotlib's version.
                figure.savefig(path, dpi=150, metadata={"Software": None})
                print(path)
        rows += claims(task)
    if not rows:
        return
    write(rows, args.results)
    print(args.results / "claims.csv", args.results / "claims.md", sep="\n")


if __name__ == "__main__":
    main()
