"""The figures and the table of claims, from figures/results/*.csv; the same tables give the same bytes.

    python -m figures.plot                                        # figures/*.png, and results/claims.csv and .md
    python -m figures.plot --results runs/quick/results --output runs/quick

Every value is an interquartile mean (IQM) over seeds with a 95% bootstrap interval: the seeds are drawn anew, and for
differences between two settings the pairs of one seed (https://arxiv.org/abs/2108.13264; every figure is of one
environment, so there is one stratum). What has not run yet is left out, and captions say how many seeds there are.
"""

import argparse
import csv
import functools
import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator
from scipy.stats import trim_mean

BLACK, BLUE, ORANGE, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"  # of Okabe and Ito's colors
RETURN = "return of the last 100 episodes"
COLUMNS = {"return": "mean_return_100", "eval": "eval_return_mean", "training": "training_return"}  # of claims.csv
SOLVED = 475  # CartPole-v1
PLAIN = ", plain"  # a variant of settings
ENOUGH = 5  # seeds for an interval
HELD_OUT = 6  # the first seed of headline_*.yaml
HEADER = "| | against | seeds | pulls | last 100 episodes | evaluation | all of training |\n" + "|---" * 7 + "|\n"
CLAIM = (
    "| {task}: {setting} | {against} | {which} | {pulls:.1f} instead of {pulls_against:.1f} | {return:.1f}: "
    "{return_difference:+.1f} ({return_low:.1f} to {return_high:.1f}) | {eval:.1f}: {eval_difference:+.1f} "
    "({eval_low:.1f} to {eval_high:.1f}) | {training:.1f}: {training_difference:+.1f} ({training_low:.1f} to "
    "{training_high:.1f}) |\n"
)
matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


class Setting(NamedTuple):
    """What decides when a worker pulls: `kl` above a threshold, or `interval`, every so many versions."""

    mode: str
    value: float
    decoupled: bool = True
    bound: float = np.inf  # on the lag, in versions: whoever is further behind pulls, too

    def __str__(self):
        if self == ALWAYS:
            return "always"
        return (f"KL > {self.value:g}" if self.mode == "kl" else f"every {self.value:g}") + self.variant

    @property
    def variant(self):
        return PLAIN * (not self.decoupled) + (f", lag ≤ {self.bound:g}" if self.bound < np.inf else "")


ALWAYS = Setting("interval", 1)


class Task:
    """The runs of one script in one environment: for each setting, the rows of its seeds and their curves."""

    def __init__(self, program, env_id):
        self.algorithm = program.removesuffix("_clusterenv.py").upper()
        self.title = f"{self.algorithm}, {env_id}"
        self.name = f"{self.algorithm}_{env_id}".lower().replace("-", "_")
        self.runs = {}  # {setting: {seed: row}}
        self.curves = {}  # {setting: {seed: {name: array}}}

    def variants(self):
        """What runs by divergence differ in besides their threshold; the decoupled objective and loose bounds first."""
        keys = sorted((not key.decoupled, -key.bound, key.variant) for key in self.runs if key.mode == "kl")
        return list(dict.fromkeys(variant for *_, variant in keys))

    def settings(self, mode, variant=None):
        """All of a mode, or those of one variant."""
        return sorted(key for key in self.runs if key.mode == mode and variant in (None, key.variant))

    def column(self, setting, name, seeds=None):
        runs = self.runs[setting]
        return np.array([float(runs[seed][name] or "nan") for seed in seeds or sorted(runs)])

    def shared(self, *settings):
        return sorted(set.intersection(*(set(self.runs.get(setting, ())) for setting in settings)))

    def curve(self, setting, name, seeds=None):
        curves = self.curves[setting]
        return np.array([curves[seed][name] for seed in seeds or sorted(curves)])  # (seeds, points)

    def always(self):
        return [ALWAYS] if ALWAYS in self.runs else []

    def caption(self, settings, more="", numbers=None):
        numbers = sorted(numbers or {len(self.runs[setting]) for setting in [*settings, *self.always()]})
        if numbers == [1]:
            return f"1 seed{more}"
        count = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        few = f" (of fewer than {ENOUGH} no interval)" * (numbers[0] < ENOUGH)
        return f"Interquartile mean and 95% bootstrap interval over {count} seeds{few}{more}"


def load(results):
    """Read the tables; return tasks by name."""
    with open(results / "curves.csv", newline="") as file:
        columns = {}
        for row in csv.DictReader(file):
            for name, value in row.items():
                columns.setdefault(row["run"], {}).setdefault(name, []).append(value)
    tasks = {}
    with open(results / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        mode, decoupled = row["sync_mode"], row["decoupled"] != "False"
        value = float(row["sync_interval" if mode == "interval" else "kl_threshold"])
        setting = Setting(mode, value, decoupled, float(row["max_policy_lag"] or "inf"))
        task = tasks.setdefault((row["program"], row["env_id"]), Task(row["program"], row["env_id"]))
        texts = columns[row["run"]]
        curves = {name: np.array([float(text or "nan") for text in texts[name]]) for name in texts.keys() - {"run"}}
        row["training_return"] = str(np.nanmean(curves["return"]))
        if int(row["seed"]) in task.runs.setdefault(setting, {}):
            sys.exit(f"error: {results / 'runs.csv'} has two runs of {task.title}, {setting}, seed {row['seed']}")
        task.runs[setting][int(row["seed"])] = row
        task.curves.setdefault(setting, {})[int(row["seed"])] = curves
    return sorted(tasks.values(), key=lambda task: task.name)


def number_of(seeds):
    return f"{seeds} seed" + "s" * (seeds != 1)


def iqm(values, axis=0):
    missing = np.isnan(values)  # not measured yet; SciPy would take a minute over these
    return np.where(missing.any(axis), np.nan, trim_mean(np.where(missing, 0, values), 0.25, axis=axis))


def difference(a, b, axis=0):
    return iqm(a, axis) - iqm(b, axis)


def interval(statistic, *samples, resamples=2000):
    """Return a statistic of samples (seeds, ...), paired if there are several, and its 95% percentile interval.

    Of few seeds that would be little but their range, so it is NaN.
    """
    draws = np.random.default_rng(0).integers(len(samples[0]), size=(resamples, len(samples[0])))
    found = statistic(*(sample[draws] for sample in samples), axis=1)
    low, high = np.percentile(found, [2.5, 97.5], axis=0) + (0 if len(samples[0]) >= ENOUGH else np.nan)
    return statistic(*samples), low, high


def matched(task, setting, others):
    """Return the one of others (but not always) with about as many pulls as a setting, on the same seeds, or None.

    Of several that one which shares most seeds with it, and of these the closest.
    """
    near = []
    for other in others:
        if other != ALWAYS and (seeds := task.shared(setting, other)):
            a, b = (task.column(key, "pulls_per_worker", seeds).mean() for key in (setting, other))
            if (ratio := max(a / b, b / a)) < 1.25:
                near.append((-len(seeds), ratio, other))
    return min(near)[-1] if near else None


@functools.cache
def claims(task):
    """Compare each setting with always, and by divergence with a fixed interval of as many pulls, seed by seed.

    A variant, such as the plain objective, also with what it is one of: with as many pulls, and at the same threshold.
    Once more with the held-out seeds alone, where there are some: no setting was chosen for what it did with these.
    """
    rows, first = [], task.settings("kl", next(iter(task.variants()), None))
    for setting in sorted(task.runs):
        fair, others = None, [ALWAYS]
        if setting.mode == "kl":
            fair = matched(task, setting, task.settings("interval"))
            others.append(fair)
            if setting not in first:
                others += [matched(task, setting, first), *(key for key in first if key.value == setting.value)]
        pairs = [(key, task.shared(setting, key)) for key in dict.fromkeys(others) if key not in (None, setting)]
        held_out = [(other, [seed for seed in seeds if seed >= HELD_OUT]) for other, seeds in pairs]
        for other, seeds in pairs + [pair for pair in held_out if pair not in pairs]:
            if not seeds:
                continue
            row = {"task": task.title, "setting": str(setting), "against": str(other), "matched": other == fair}
            pulls, fewer = (task.column(key, "pulls_per_worker", seeds).mean() for key in (other, setting))
            row |= {
                "seeds": len(seeds),
                "held_out": seeds[0] >= HELD_OUT,
                "pulls": fewer,
                "pulls_against": pulls,
                "times_fewer_pulls": pulls / fewer,
            }
            for name, column in COLUMNS.items():
                samples = [task.column(key, column, seeds) for key in (setting, other)]
                values = [*map(iqm, samples), *interval(difference, *samples, resamples=10000)]
                keys = name, f"{name}_against", f"{name}_difference", f"{name}_low", f"{name}_high"
                row |= dict(zip(keys, map(float, values), strict=True))
            rows.append(row)
    return rows


def draw(axes, task, setting, name, color, seeds=None, **style):
    """Draw a curve with its interval, of these seeds or of all."""
    steps = next(iter(task.curves[setting].values()))["step"]
    middle, low, high = interval(iqm, task.curve(setting, name, seeds), resamples=1000)
    axes.plot(steps, middle, color=color, label=str(setting), **style)
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(axis="x", nbins=4)


def draw_all(axes, task, settings, name):
    """Draw a curve for each threshold, colored by its order among all of the task, and the one of always."""
    thresholds = sorted({setting.value for setting in task.runs if setting.mode == "kl"})
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(thresholds)))
    for setting in settings:
        draw(axes, task, setting, name, colors[thresholds.index(setting.value)])
    for setting in task.always():
        draw(axes, task, setting, name, BLACK, linestyle="--", linewidth=1)


def points(axes, places, task, settings, column, color, **style):
    """Draw a value and its interval for each setting, at these places."""
    values = np.array([interval(iqm, task.column(setting, column)) for setting in settings]).T
    axes.plot(places, values[0], color=color, markersize=4, **style)
    axes.vlines(places, values[1], values[2], color=color, linewidth=1)


def subplots(rows, columns, width, height, **options):
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def logarithmic(axis):
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(EngFormatter(sep=""))


def finish(figure, task, title, caption, xlabel=None, legend=None):
    figure.suptitle(f"{task.title}: {title}\n{caption}", fontsize=9)
    if xlabel:
        figure.supxlabel(xlabel, fontsize=9)
    if legend:
        figure.legend(*legend.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def learning_curves(task):
    """Return against steps, a panel for each threshold, with always and a fixed interval of as many pulls behind it."""
    settings = [key for variant in task.variants() if variant != PLAIN for key in task.settings("kl", variant)]
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
            if task.shared(other, *shown):  # what has run so far may have no seed in common
                shown.append(other)
        seeds = task.shared(*shown)
        numbers.add(len(seeds))
        for key in (*shown[1:], setting):
            color = BLUE if key == setting else "#888888" if key == ALWAYS else ORANGE
            draw(axes, task, key, "return", color, seeds, linewidth=1.4 if key == setting else 1)
        axes.set_title(str(setting), fontsize=7.5, color=BLUE, loc="left")
        if fair in shown:
            axes.set_title(str(fair), fontsize=7.5, color=ORANGE, loc="right")
        axes.text(0.98, 0.03, number_of(len(seeds)), transform=axes.transAxes, fontsize=7, ha="right")
    figure.supylabel("return", fontsize=9)
    size = len(task.curve(settings[0], "return")[0])
    caption = task.caption(settings, ", the same for all in a panel", numbers)
    caption += f"\nEach point is the mean of the logged returns in 1/{size} of the steps"
    title = "learning curves\nBlue: by divergence; gray: always; orange, if any: an interval with about as many pulls"
    return finish(figure, task, title, caption, "environment steps")


def synchronization(task):
    """Pulls and bytes so far against steps."""
    settings = task.settings("kl", task.variants()[0])
    figure, ((left, right),) = subplots(1, 2, 8, 3.4)
    draw_all(left, task, settings, "pulls")
    draw_all(right, task, settings, "bytes")
    left.set(yscale="log", ylabel="pulls per worker so far")
    right.set(yscale="log", ylabel="bytes of weights so far, all workers")
    logarithmic(left.yaxis)
    logarithmic(right.yaxis)
    return finish(figure, task, "synchronization", task.caption(settings), "environment steps", legend=left)


def objectives(task):
    """Final return and pulls at each threshold, with the decoupled objective and the plain one."""
    settings = task.settings("kl")
    kinds = {
        name: [key for key in settings if key.decoupled == (name == "decoupled")] for name in ("decoupled", "plain")
    }
    if not all(kinds.values()):
        return None
    thresholds = sorted({setting.value for setting in settings})
    figure, ((left, right),) = subplots(1, 2, 8, 3.4)
    for axes, column, label in ((left, "mean_return_100", RETURN), (right, "pulls_per_worker", "pulls per worker")):
        for (name, which), shift, color, marker in zip(kinds.items(), (-0.15, 0.15), (BLUE, ORANGE), "os", strict=True):
            places = [thresholds.index(setting.value) + shift for setting in which]
            points(axes, places, task, which, column, color, marker=marker, linestyle="none", label=name)
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
    """Final return against pulls, for divergence and for fixed intervals; and both at matched pulls.

    Thresholds that are never reached, as with the plain objective, are left out: nobody pulls then but once.
    """
    fixed = task.settings("interval")
    if not fixed:
        return None
    families = [(fixed, ORANGE, "s", "fixed interval", (3, -11, "left"))]
    styles = itertools.cycle([(BLUE, "o", (-2, 6, "right")), (GREEN, "^", (0, 22, "center"))])
    for variant, (color, marker, where) in zip(task.variants(), styles, strict=False):
        reached = [key for key in task.settings("kl", variant) if task.column(key, "pulls_per_worker").max() > 1]
        if reached:
            families.append((reached, color, marker, "by divergence" + variant.replace(", ", ",\n"), where))
    settings = sum((family[0] for family in families), [])
    colors = {str(key): family[1] for family in families for key in family[0]}
    figure, grid = subplots(2, 2, 9, 8.5, width_ratios=[3, 2], sharex="col")
    rows = [row for row in claims(task) if row["matched"] and not row["held_out"] and row["seeds"] >= ENOUGH]
    names = ("return", RETURN), ("training", "mean return of all of training")
    for (left, right), (name, label) in zip(grid, names, strict=True):
        frontier_of(left, task, families, COLUMNS[name])
        left.set_ylabel(label)
        differences(right, rows, name, colors)
        right.set_title(label, fontsize=9)
    pulls = [task.column(setting, "pulls_per_worker").mean() for setting in settings]
    grid[0, 0].set_xlim(min(pulls) / 1.8, max(pulls) * 1.4)
    sent, pulls = (task.column(fixed[0], name).sum() for name in ("sync_bytes", "pulls_per_worker"))
    above = grid[0, 0].secondary_xaxis("top", functions=(lambda x: x * sent / pulls, lambda x: x * pulls / sent))
    above.set_xlabel("bytes of weights, all workers")
    logarithmic(above.xaxis)
    logarithmic(grid[1, 0].xaxis)
    grid[1, 0].set_xlabel("pulls per worker (mean)")
    grid[1, 1].set_xlabel("paired difference, divergence minus interval\n(in brackets their pulls)")
    caption = task.caption(settings, "\nBeside points their threshold or interval (orange 1: always)")
    return finish(figure, task, "divergence or a fixed interval?", caption, legend=grid[0, 0])


def frontier_of(axes, task, families, column):
    """Draw a column against pulls, for families (settings, color, marker, name, where to write each one's number)."""
    axes.set_xscale("log")
    for family, color, marker, name, (right_by, up_by, side) in families:
        pulls = [task.column(setting, "pulls_per_worker").mean() for setting in family]
        points(axes, pulls, task, family, column, color, marker=marker, label=name)
        for setting, x in zip(family, pulls, strict=True):
            spot, text = (x, iqm(task.column(setting, column))), {"color": color, "fontsize": 7, "ha": side}
            text["path_effects"] = [withStroke(linewidth=2, foreground="white")]
            axes.annotate(f"{setting.value:g}", spot, (right_by, up_by), textcoords="offset points", **text)
    axes.margins(y=0.2)


def differences(axes, rows, name, colors):
    """Draw a column's difference between each threshold and the fixed interval of as many pulls."""
    for place, row in enumerate(rows):
        color = colors[row["setting"]]
        axes.plot(row[f"{name}_difference"], place, "o", color=color, markersize=4)
        axes.hlines(place, row[f"{name}_low"], row[f"{name}_high"], color=color, linewidth=1)
    label = "{setting} ({pulls:.3g})\n{against} ({pulls_against:.3g}), {number}"
    axes.set_yticks(range(len(rows)), [label.format(**row, number=number_of(row["seeds"])) for row in rows], fontsize=7)
    axes.margins(y=0.1)
    axes.axvline(0, color=BLACK, linewidth=0.8)


def lag(task):
    """KL and policy lag against steps, and below the same with the plain objective or a tighter bound on the lag."""
    kinds = [task.settings("kl", variant) for variant in task.variants()]
    figure, grid = subplots(len(kinds), 2, 8, 1 + 2.6 * len(kinds), sharex=True)
    for (left, right), settings in zip(grid, kinds, strict=True):
        draw_all(left, task, settings, "kl")
        draw_all(right, task, settings, "lag")
        left.set_title(
            settings[0].variant.removeprefix(", ") or "decoupled" * (task.algorithm == "PPO"), fontsize=9, loc="left"
        )
        left.set_yscale("symlog", linthresh=1e-3)  # it may be 0
        left.set(ylabel="KL before a pull, nats")
        right.set(ylabel="policy lag, versions")
        right.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for below in grid[1:, 0]:
        below.sharey(grid[0, 0])
    grid[0, 0].set_ylim(bottom=0)  # now that all is drawn, as it fixes the top, too
    title = "KL after each update, whether a pull followed or not, and how old the policies are that act"
    return finish(figure, task, title, task.caption(sum(kinds, [])), "environment steps")


def slow_network(path):
    """Return against seconds with workers behind slow links: a panel for each rate, a line for each seed."""
    runs = {}  # {Mbit/s: {rule: {seed: [(seconds, return)]}}}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            seeds = runs.setdefault(float(row["mbits"]), {}).setdefault(row["rule"], {})
            seeds.setdefault(row["seed"], []).append((float(row["seconds"]), float(row["return"])))
    figure, (panels,) = subplots(1, len(runs), 8, 3.6, sharey=True)
    for axes, (mbits, rules) in zip(panels, sorted(runs.items()), strict=True):
        for rule, seeds in sorted(rules.items()):
            color, reached = BLACK if rule == str(ALWAYS) else BLUE, []
            for curve in seeds.values():
                axes.plot(*np.array(curve).T, color=color, linewidth=0.8)
                reached.append(next((seconds for seconds, value in curve if value >= SOLVED), np.inf))
            middle = np.median(reached)
            when = f"{middle:.0f} s" if np.isfinite(middle) else "not reached"
            axes.plot([], color=color, label=f"{rule}, {number_of(len(seeds))}: {when}")
        axes.set(title=f"{mbits:g} Mbit/s", xlabel="seconds of training", xscale="log")
        logarithmic(axes.xaxis)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=8)
    panels[0].set_ylabel(RETURN)
    title = "PPO on CartPole-v1, hidden layers of 512, workers behind a slow link: 200,000 steps or 500 seconds\n"
    figure.suptitle(f"{title}Every line is a seed. Below, the median of when they reached {SOLVED}", fontsize=9)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Draw the figures from the tables of figures.collect.")
    parser.add_argument("--results", type=Path, default="figures/results", help="where the tables are")
    parser.add_argument("--output", type=Path, default="figures", help="where the figures go")
    args = parser.parse_args()
    slow, runs = (args.results / name for name in ("slow_network.csv", "runs.csv"))
    if not slow.exists() and not runs.exists():
        sys.exit(f"error: neither {slow} nor {runs} is there: run python -m figures.collect, see figures/README.md")
    if slow.exists():
        slow_network(slow).savefig(args.output / "slow_network.png", dpi=150, metadata={"Software": None})
        print(args.output / "slow_network.png")
    rows = []
    for task in load(args.results) if runs.exists() else ():
        for figure_of in (learning_curves, synchronization, objectives, frontier, lag):
            if task.variants() and (figure := figure_of(task)):
                path = args.output / f"{task.name}_{figure_of.__name__}.png"
                figure.savefig(path, dpi=150, metadata={"Software": None})  # not Matplotlib's version
                print(path)
        rows += claims(task)
    if not rows:
        return
    with open(args.results / "claims.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in row.values()] for row in rows)
    lines = [CLAIM.format(**row, which=str(row["seeds"]) + ", held out" * row["held_out"]) for row in rows]
    (args.results / "claims.md").write_text(HEADER + "".join(lines).replace(" (nan to nan)", ""))
    print(args.results / "claims.csv", args.results / "claims.md", sep="\n")


if __name__ == "__main__":
    main()
