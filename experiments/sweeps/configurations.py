"""The configurations of a sweep file: read, checked, and listed in W&B's order."""

import itertools
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import yaml

from .checks import check
from .distributions import DISTRIBUTIONS, check_parameter
from .metrics import check_metric

KEYS = ("program", "method", "metric", "parameters", "command", "run_cap")
IGNORED = ("name", "description", "project", "entity")  # these say how W&B shows a sweep
COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]


def flatten(parameters, path=()):
    """Turn nested parameters into {(outer name, inner name): (distribution, keys)}."""
    flat = {}
    check(
        isinstance(parameters, dict) and parameters,
        f"parameters must be names with values, not {parameters!r}",
    )
    for name, keys in parameters.items():
        here = (*path, str(name))
        inner = isinstance(keys, dict) and set(keys) == {"parameters"}
        flat.update(
            flatten(keys["parameters"], here)
            if inner
            else {here: check_parameter(".".join(here), keys)}
        )
    return flat


def nest(flat):
    parameters = {}
    for path, value in flat.items():
        inner = parameters
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return parameters


def load(path):
    """Read and check a whole sweep file, so that no task of an array fails later because of it."""
    try:
        sweep = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        check(False, f"cannot read {path}: {' '.join(str(error).split())}")
    check(isinstance(sweep, dict), f"{path} must hold the keys of a sweep: {', '.join(KEYS)}")
    for key in sweep:
        supported = f"supported: {', '.join(KEYS)}; the rest needs W&B, see slurm/sweep.sbatch"
        check(key in KEYS + IGNORED, f"{path}: key {key} is not supported; {supported}")
    for key in ("program", "method", "parameters"):
        check(key in sweep, f"{path}: key {key} is missing")
    method, program, cap = sweep["method"], sweep["program"], sweep.get("run_cap")
    check(
        method in ("grid", "random", "bayes"),
        f"{path}: method {method} is not supported; supported: grid, random, bayes",
    )
    check(
        method != "bayes" or find_spec("optuna"),
        f"{path}: method bayes needs Optuna, and it is not installed: pip install optuna",
    )
    check(
        Path(str(program)).is_file(),
        f"{path}: no program {program} in {Path.cwd()}; start from the directory that has it",
    )
    check(
        cap is not None or method == "grid",
        f"{path}: method {method} needs run_cap, the number of configurations",
    )
    check(
        cap is None or type(cap) is int and cap > 0,
        f"{path}: run_cap must be an integer > 0, got {cap!r}",
    )
    metric = sweep.setdefault("metric", {"name": "eval_return_mean", "goal": "maximize"})
    check(
        isinstance(metric, dict) and isinstance(metric.get("name"), str),
        f"{path}: metric must have a name, and may have a goal",
    )
    for key in metric:
        check(
            key in ("name", "goal"),
            f"{path}: key metric.{key} is not supported; supported: name, goal",
        )
    goal = metric.setdefault("goal", "minimize")
    check(
        goal in ("minimize", "maximize"), f"{path}: goal must be minimize or maximize, got {goal}"
    )
    sweep["flat"] = flatten(sweep["parameters"])
    for where, (kind, keys) in sweep["flat"].items():
        fine = kind in ("constant", "categorical", "int_uniform", "q_uniform") and not keys.get(
            "probabilities"
        )
        wanted = "a grid takes value, values without probabilities, int_uniform and q_uniform"
        check(
            method != "grid" or fine,
            f"parameter {'.'.join(where)}: method grid cannot use this; {wanted}",
        )
    command, macros = sweep.setdefault("command", COMMAND), fill_macros(sweep, {})
    check(
        isinstance(command, list) and command,
        f"{path}: command must be a list of words, got {command!r}",
    )
    for word in map(str, command):
        fine = word in macros or "${" not in word
        check(
            fine,
            f"{path}: macro {word} is not supported; supported, each as a word: "
            f"{', '.join(macros)}",
        )
    check_metric(path, sweep)
    return sweep


def grid(distribution, keys):
    """Return the values of a parameter as W&B lists them: q_uniform without its maximum."""
    if distribution == "int_uniform":
        return range(keys["min"], keys["max"] + 1)
    if distribution == "q_uniform":
        return np.arange(keys["min"], keys["max"], keys["q"]).tolist()
    return keys["values"] if distribution == "categorical" else [keys["value"]]


def configurations(sweep, seed):
    """Return the parameters of each configuration.

    A random configuration depends only on the seed and its index.
    """
    flat, cap = sweep["flat"], sweep.get("run_cap")
    check(sweep["method"] != "bayes", "method bayes has no list: it draws from results")
    if sweep["method"] == "grid":
        names = sorted(flat)  # W&B's order: by name, the last varies fastest
        rows = itertools.product(*(grid(*flat[name]) for name in names))
        found = [dict(zip(names, row, strict=True)) for row in itertools.islice(rows, cap)]
        return [{name: row[name] for name in flat} for row in found]

    def draw(index, name, kind, keys):
        return DISTRIBUTIONS[kind][1](
            np.random.default_rng([seed, index, *".".join(name).encode()]), **keys
        )

    return [
        {name: draw(i, name, *parameter) for name, parameter in flat.items()} for i in range(cap)
    ]


class Listed:
    """The configurations of a grid or a random sweep, all known from the start.

    Attributes:
        number: The number of configurations.
    """

    def __init__(self, sweep, seed):
        self._flats = configurations(sweep, seed)
        self.number = len(self._flats)

    def known(self):
        """Return the configurations by their indices."""
        return dict(enumerate(self._flats))

    def take(self, index):
        return self._flats[index]


def fill_macros(sweep, parameters):
    """Return the words that replace each macro of `command`, as W&B does."""
    words = [f"{name}={value}" for name, value in parameters.items()]
    named = [(f"--{name}", value) for name, value in parameters.items() if value is not False]
    switches = [flag if value is True else f"{flag}={value}" for flag, value in named]
    return {
        "${env}": ["/usr/bin/env"],
        "${interpreter}": [sys.executable],
        "${program}": [str(Path(sweep["program"]).resolve())],
        "${args}": [f"--{word}" for word in words],
        "${args_no_hyphens}": words,
        "${args_no_boolean_flags}": switches,
        "${args_json}": [json.dumps(parameters, default=str)],
    }


def label(sweep, flat):
    """Return a configuration's varying parameters in one line, with six digits of each number."""
    varied = [path for path in flat if sweep["flat"][path][0] != "constant"]
    texts = {
        path: f"{flat[path]:.6g}" if isinstance(flat[path], float) else flat[path]
        for path in varied
    }
    return " ".join(f"{'.'.join(path)}={text}" for path, text in texts.items())
