"""The figure of training behind slow links, from the table of `slow_network`."""

import csv

import numpy as np

from .drawing import BLACK, BLUE, GREEN, ORANGE, RETURN, logarithmic, subplots

SOLVED = 475  # the return at which CartPole-v1 counts as solved
SLOW_COLORS = {
    "always": BLACK,
    "KL > 0.1": BLUE,
    "always, differences": ORANGE,
    "KL > 0.01, differences": GREEN,
}


def slow_network(path):
    """Draw return against seconds with workers behind slow links.

    Each link has a panel, and each seed a line.
    """
    runs, numbers = {}, set()  # {(Mbit/s, milliseconds): {rule: {seed: [(seconds, return)]}}}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            link = float(row["mbits"]), float(row["delay_ms"])
            seeds = runs.setdefault(link, {}).setdefault(row["rule"], {})
            seeds.setdefault(row["seed"], []).append((float(row["seconds"]), float(row["return"])))
    rows, columns = -(-len(runs) // 2), min(len(runs), 2)
    figure, grid = subplots(rows, columns, 8, 1 + 2.2 * rows, sharex=True, sharey=True)
    for axes in grid.flat[len(runs) :]:
        axes.remove()
    for axes, ((mbits, delay_ms), rules) in zip(grid.flat, sorted(runs.items()), strict=False):
        for rule, seeds in sorted(rules.items()):
            color, reached = SLOW_COLORS[rule], []
            for curve in seeds.values():
                axes.plot(*np.array(curve).T, color=color, linewidth=0.8)
                reached.append(
                    next((seconds for seconds, value in curve if value >= SOLVED), np.inf)
                )
            middle = np.median(reached)
            when = f"{middle:.0f} s" if np.isfinite(middle) else "not reached"
            axes.plot([], color=color, label=f"{rule}: {when}")
            numbers.add(len(seeds))
        title = f"{mbits:g} Mbit/s" + f", {delay_ms:g} ms" * (delay_ms > 0)
        axes.set(title=title, xscale="log")
        logarithmic(axes.xaxis)
        axes.legend(frameon=False, fontsize=7, title=f"reaches {SOLVED} after", title_fontsize=7)
    count = " or ".join(map(str, sorted(numbers)))
    figure.supxlabel("seconds of training", fontsize=9)
    figure.supylabel(RETURN, fontsize=9)
    title = (
        "PPO on CartPole-v1, hidden layers of 512, workers behind a slow link: 200,000 steps or "
        "500 seconds\n"
    )
    many = f"Each line is one of {count} seeds, the times are their medians"
    figure.suptitle(title + ("One seed" if numbers == {1} else many), fontsize=9)
    return figure
