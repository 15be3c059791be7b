"""The cost of old policies and what corrects for it: a figure and a table of recipes/staleness.

    python -m experiments.figures.collect --sweeps experiments/figures/recipes/staleness \
        --runs runs/staleness --results experiments/figures/results/staleness
    python -m experiments.figures.staleness

Policies act up to `sync_interval` - 1 versions behind. Values are interquartile means (IQM) over
seeds, and pale points are single seeds. The table has differences between pairs of one seed, with
95% bootstrap intervals where there are enough seeds.
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from tools.plot import ENOUGH, interval, iqm

from .claims import difference
from .drawing import BLUE, ORANGE, subplots

HELD_OUT = 4  # the first seed of confirm_*.yaml; the screening has the seeds before it
BASE = "decoupled"
RULES = {BASE: BLUE, "V-trace": ORANGE}  # both have the decoupled objective
MEASURES = {  # {column: title of its axis and heading in the table}
    "eval_return_mean": "evaluation of the learned policy",
    "training_return": "mean return of all of training",
}


def load(results):
    """Return the rows of runs.csv with means of curves.csv, by a key and the seed.

    A key is (environment, rule, mode, trigger).
    """
    curves = defaultdict(list)
    with open(results / "curves.csv", newline="") as file:
        for row in csv.DictReader(file):
            curves[row["run"]].append([float(row[name] or "nan") for name in ("return", "kl")])
    runs = {}
    with open(results / "runs.csv", newline="") as file:
        for row in csv.DictReader(file):
            rule = list(RULES)["--vtrace=True" in row["command"]]
            by_interval = row["sync_mode"] == "interval"
            trigger = int(row["sync_interval"]) - 1 if by_interval else float(row["kl_threshold"])
            row["training_return"], row["divergence"] = np.nanmean(curves[row["run"]], axis=0)
            key = row["env_id"], rule, row["sync_mode"], trigger
            runs.setdefault(key, {})[int(row["seed"])] = row
    return runs


def column(rows, name, seeds):
    return np.array([float(rows[seed][name]) for seed in seeds])


def triggers(runs, env_id, mode):
    return sorted({key[3] for key in runs if key[0] == env_id and key[2] == mode})


def draw(runs):
    """Return the figure: a column for each environment, a row for each measure."""
    env_ids = sorted({key[0] for key in runs})
    figure, grid = subplots(len(MEASURES), len(env_ids), 8, 5, sharex=True)
    for axes, env_id in zip(grid[0], env_ids, strict=True):
        axes.set_title(env_id, fontsize=9)
    for row, (name, title) in zip(grid, MEASURES.items(), strict=True):
        row[0].set_ylabel(title)
        for axes, env_id in zip(row, env_ids, strict=True):
            lags = triggers(runs, env_id, "interval")
            for shift, (rule, color) in zip((-0.1, 0.1), RULES.items(), strict=True):
                there = [lag for lag in lags if (env_id, rule, "interval", lag) in runs]
                places = np.array([lags.index(lag) for lag in there]) + shift
                found = [runs[env_id, rule, "interval", lag] for lag in there]
                for place, rows in zip(places, found, strict=True):
                    values = column(rows, name, sorted(rows))
                    axes.plot([place] * len(values), values, ".", color=color, alpha=0.3)
                means = [iqm(column(rows, name, sorted(rows))) for rows in found]
                axes.plot(places, means, "o-", color=color, markersize=4, label=rule)
            axes.set_xticks(range(len(lags)), lags)
    figure.supxlabel("versions by which the policies that act are at most behind", fontsize=9)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right center")
    return figure


def table(runs):
    """Return lines of Markdown with each rule's means, and their differences from BASE."""
    lines = [
        "| environment | at most behind | seeds | rule | mean divergence, nats | "
        + " | ".join(MEASURES.values())
        + " |",
        "|---" * (5 + len(MEASURES)) + "|",
    ]
    for env_id, mode in sorted({(key[0], key[2]) for key in runs}):
        for trigger in triggers(runs, env_id, mode):
            name = f"{trigger:g}" if mode == "interval" else f"KL > {trigger:g}"
            for rule in RULES:
                base, rows = (runs.get((env_id, each, mode, trigger), {}) for each in (BASE, rule))
                shared = sorted(set(base) & set(rows))
                screened = [seed for seed in shared if seed < HELD_OUT]
                for seeds in filter(None, (screened, shared[len(screened) :])):
                    cells = [f"{iqm(column(rows, 'divergence', seeds)):.3f}"]
                    cells += [compare(base, rows, measure, seeds) for measure in MEASURES]
                    which = f"{seeds[0]} to {seeds[-1]}"
                    lines.append("| " + " | ".join((env_id, name, which, rule, *cells)) + " |")
    return lines


def compare(base, rows, name, seeds):
    """Return a measure's mean, and its difference from that of ``base``, as text."""
    values, others = (column(each, name, seeds) for each in (rows, base))
    if rows is base:
        return f"{iqm(values):.0f}"
    text = f"{iqm(values):.0f}: {difference(values, others):+.0f}"
    if len(seeds) < ENOUGH:
        return text
    _, low, high = interval(difference, values, others, resamples=10000)
    return f"{text} ({low:.0f} to {high:.0f})"


def main():
    parser = argparse.ArgumentParser(description="Draw the figure of recipes/staleness.")
    parser.add_argument(
        "--results",
        type=Path,
        default="experiments/figures/results/staleness",
        help="directory of the tables and of the figure",
    )
    results = parser.parse_args().results
    runs = load(results)
    draw(runs).savefig(results / "staleness.png", dpi=150, metadata={"Software": None})
    (results / "staleness.md").write_text("\n".join(table(runs)) + "\n")
    print(results / "staleness.png", results / "staleness.md", sep="\n")


if __name__ == "__main__":
    main()
