"""The tables of experiments/figures/collect.py: for each task, its settings' runs and curves."""

import csv
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.plot import ENOUGH

from .collect import SETTINGS

PLAIN, ROUNDED = ", plain", ", differences"  # variants of settings


class Setting(NamedTuple):
    """The rule by which a worker pulls.

    The mode is `kl`, above a threshold, or `interval`, after every ``value`` versions.
    """

    mode: str
    value: float
    decoupled: bool = True
    bound: float = np.inf  # bound on the lag, in versions: a worker further behind also pulls
    weights: str = "float32"  # a pull moves all weights ("float32"), or a rounded "difference"

    def __str__(self):
        if self == ALWAYS:
            return "always"
        return (
            f"KL > {self.value:g}" if self.mode == "kl" else f"every {self.value:g}"
        ) + self.variant

    @property
    def variant(self):
        bound = f", lag ≤ {self.bound:g}" if self.bound < np.inf else ""
        return PLAIN * (not self.decoupled) + bound + ROUNDED * (self.weights != "float32")


ALWAYS = Setting("interval", 1)


class Task:
    """The runs of one script in one environment, with each setting's rows and curves by seed."""

    def __init__(self, program, env_id):
        self.algorithm = Path(program).name.partition("_")[0].upper()
        self.title = f"{self.algorithm}, {env_id}"
        self.name = f"{self.algorithm}_{env_id}".lower().replace("-", "_").replace("/", "_")
        self.flags = None  # the flags that all runs share: all but the setting's and the seed
        self.runs = {}  # {setting: {seed: row}}
        self.curves = {}  # {setting: {seed: {name: array}}}

    def variants(self):
        """Return what distinguishes the `kl` settings, besides their threshold.

        Float32, decoupled, and loose bounds come first.
        """
        keys = [key for key in self.runs if key.mode == "kl"]
        keys = sorted(
            (key.weights != "float32", not key.decoupled, -key.bound, key.variant) for key in keys
        )
        return list(dict.fromkeys(variant for *_, variant in keys))

    def settings(self, mode, variant=None):
        """Return all settings of a mode, or those of one variant."""
        return sorted(
            key for key in self.runs if key.mode == mode and variant in (None, key.variant)
        )

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
        numbers = sorted(
            numbers or {len(self.runs[setting]) for setting in [*settings, *self.always()]}
        )
        if numbers == [1]:
            return f"1 seed{more}"
        count = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        few = f" (of fewer than {ENOUGH} no interval)" * (numbers[0] < ENOUGH)
        return f"Interquartile mean and 95% bootstrap interval over {count} seeds{few}{more}"


def load(results):
    """Read the tables. Return the tasks, sorted by name."""
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
        setting = Setting(
            mode, value, decoupled, float(row["max_policy_lag"] or "inf"), row["weights"]
        )
        task = tasks.setdefault(
            (row["program"], row["env_id"]), Task(row["program"], row["env_id"])
        )
        words = shlex.split(row["command"])
        flags = {
            word for word in words if word.removeprefix("--").partition("=")[0] not in SETTINGS
        }
        task.flags = task.flags or flags
        if flags != task.flags:
            sys.exit(
                f"error: {results / 'runs.csv'} has runs of {task.title} that cannot be "
                f"compared, because they differ in "
                f"more than when workers pull and what: {', '.join(sorted(flags ^ task.flags))}"
            )
        texts = columns[row["run"]]
        curves = {
            name: np.array([float(text or "nan") for text in texts[name]])
            for name in texts.keys() - {"run"}
        }
        row["training_return"] = str(np.nanmean(curves["return"]))
        if int(row["seed"]) in task.runs.setdefault(setting, {}):
            sys.exit(
                f"error: {results / 'runs.csv'} has two runs of {task.title}, {setting}, seed "
                f"{row['seed']}"
            )
        task.runs[setting][int(row["seed"])] = row
        task.curves.setdefault(setting, {})[int(row["seed"])] = curves
    return sorted(tasks.values(), key=lambda task: task.name)
