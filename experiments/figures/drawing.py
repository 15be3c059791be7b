"""The parts of the figures: curves and points with their intervals, axes, captions."""

import matplotlib
import numpy as np
from adjustText import adjust_text
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from tools import plot
from tools.plot import interval, iqm

BLUE, ORANGE, GREEN, PURPLE, SKY, _, BLACK = plot.COLORS
RETURN = "return of the last 100 episodes"  # an axis label
matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def number_of(seeds):
    return f"{seeds} seed" + "s" * (seeds != 1)


def draw(axes, task, setting, name, color, seeds=None, **style):
    """Draw a curve with its interval, over the given seeds or over all of them."""
    steps = next(iter(task.curves[setting].values()))["step"]
    band = interval(iqm, task.curve(setting, name, seeds), resamples=1000)
    plot.draw(axes, steps, band, color, str(setting), **style)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(axis="x", nbins=4)


def draw_all(axes, task, settings, name):
    """Draw the curves of always and of the thresholds, each colored by its rank in the task."""
    thresholds = sorted({setting.value for setting in task.runs if setting.mode == "kl"})
    colors = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(thresholds)))
    for setting in settings:
        draw(axes, task, setting, name, colors[thresholds.index(setting.value)])
    for setting in task.always():
        draw(axes, task, setting, name, BLACK, linestyle="--", linewidth=1)


def points(axes, places, task, settings, column, color, **style):
    """Draw a value and its interval for each setting, at the given places."""
    values = np.array([interval(iqm, task.column(setting, column)) for setting in settings]).T
    axes.plot(places, values[0], color=color, markersize=4, **style)
    axes.vlines(places, values[1], values[2], color=color, linewidth=1)


def subplots(rows, columns, width, height, **options):
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def logarithmic(axis):
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(EngFormatter(sep=""))


def spread(figure, *groups):
    """Move the texts of each group, so that they cover neither each other nor a point."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # so that later drawing moves nothing
    for texts in groups:
        axes = texts[0].axes
        marks = np.concatenate([line.get_xydata() for line in axes.lines])
        arrow = {"arrowstyle": "-", "linewidth": 0.5}
        adjust_text(
            texts,
            *marks.T,
            ax=axes,
            expand=(1.3, 1.7),
            force_static=(0.3, 0.5),
            iter_lim=1000,
            arrowprops=arrow,
        )


def finish(figure, task, title, caption, xlabel=None, legend=None):
    figure.suptitle(f"{task.title}: {title}\n{caption}", fontsize=9)
    if xlabel:
        figure.supxlabel(xlabel, fontsize=9)
    if legend:
        figure.legend(
            *legend.get_legend_handles_labels(), loc="outside right center", frameon=False
        )
    return figure
