"""The picture of README.md: a loop in CleanRL's style, that loop on EnvPool, and ClusterEnv.

    python -m experiments.benchmarks.peers.four_bars

Draws it from the measurements in `--csv`, and writes it beside them.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

BARS = {  # by system
    "single-sync": ("CleanRL-style loop\nin one process", "#BBBBBB"),
    "envpool": ("the same loop\non EnvPool", "#BBBBBB"),
    "clusterenv-overlap": ("ClusterEnv\nas it is", "#0072B2"),
    "clusterenv-compile": ("ClusterEnv\n--compile", "#0072B2"),
}
UNIT = "single-sync"  # in each panel, lengths are relative to this bar


@dataclass
class Args:
    csv: Path = Path(__file__).resolve().parent.parent / "results" / "peers.csv"
    """file of the measurements"""


def read(path):
    """Return the rates measured so far, {(env_id, system): {round: steps per second}}."""
    rates = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                rate = float(row["steps"]) / float(row["seconds"])
                rates.setdefault((row["env_id"], row["system"]), {})[int(row["round"])] = rate
    return rates


def draw(rates, path):
    """Draw ``rates[env_id, system]``, a rate for each round, a panel for each environment.

    Nothing is drawn unless the four systems were measured on all environments.
    """
    env_ids = [*dict.fromkeys(env_id for env_id, _ in rates)]
    if any((env_id, name) not in rates for env_id in env_ids for name in BARS):
        return
    medians = {key: np.median(mine) for key, mine in rates.items()}
    longest = max(medians[env_id, name] / medians[env_id, UNIT] for env_id in env_ids
                  for name in BARS)  # fmt: skip
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    panels = figure.subplots(1, len(env_ids), sharey=True, squeeze=False)[0]
    for axes, env_id in zip(panels, env_ids, strict=True):
        unit = medians[env_id, UNIT]
        for row, (name, (_, color)) in enumerate(BARS.items()):
            mine, median = rates[env_id, name], medians[env_id, name]
            whiskers = [[median - min(mine)], [max(mine) - median]]
            axes.barh(row, median, 0.7, xerr=whiskers, color=color, ecolor="#444444", capsize=2)
            text = f"{median / 1000:.1f}k"
            text += f", {median / unit:.2f}×" if name != UNIT else ""
            offset = {"xytext": (4, 0), "textcoords": "offset points"}
            axes.annotate(text, (max(mine), row), va="center", fontsize=9, **offset)
        axes.set(xlim=(0, 1.75 * longest * unit), xticks=[], yticks=range(len(BARS)))
        axes.set_yticklabels([label for label, _ in BARS.values()], fontsize=9)
        axes.set_title(env_id, fontsize=10)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.invert_yaxis()  # all axes share it
    figure.supxlabel("environment steps per second of PPO on two cores, training included",
                     fontsize=9)  # fmt: skip
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    args = tyro.cli(Args)
    rates = {key: list(rounds.values()) for key, rounds in read(args.csv).items()}
    draw(rates, args.csv.with_name("four_bars.png"))
