"""Run a Weights & Biases sweep file without Weights & Biases: here, or as an array of Slurm jobs.

    python slurm/sweep.py slurm/sweep.yaml              # all configurations, one after the other, then the results
    python slurm/sweep.py slurm/sweep.yaml --index 3    # only configuration 3: what a task of a job array runs
    python slurm/sweep.py slurm/sweep.yaml --count      # how many there are, for sbatch --array=0-...
    python slurm/sweep.py slurm/sweep.yaml --list       # what they are, and which have finished
    python slurm/sweep.py slurm/sweep.yaml --results    # results.csv and results.png of those that have finished

A configuration's directory is named after what is run in it, so it is found again when the grid grows. Once it holds
`result.json` the configuration has finished and is skipped; every attempt to run it has a subdirectory with its log.
The next one goes on with the last that has a checkpoint. Told to stop (SIGTERM, SIGUSR1), this stops its run, and exits
with 75 if there is a checkpoint to go on from, else with 143.
"""

import argparse
import contextlib
import csv
import fcntl
import hashlib
import itertools
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import yaml
from matplotlib.figure import Figure

KEYS = ("program", "method", "metric", "parameters", "command", "run_cap")
IGNORED = ("name", "description", "project", "entity")  # they say how W&B shows a sweep
COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]
RANGE, NORMAL, BETA = {"min": None, "max": None}, {"mu": 0.0, "sigma": 1.0}, {"a": 1.0, "b": 1.0}
# The keys of each distribution with their defaults (None: must be given), and how to draw from it.
DISTRIBUTIONS = {
    "constant": ({"value": None}, lambda rng, value: value),
    "categorical": (
        {"values": None, "probabilities": ()},
        lambda rng, values, probabilities: values[rng.choice(len(values), p=probabilities or None)],
    ),
    "int_uniform": (RANGE, lambda rng, min, max: int(rng.integers(min, max, endpoint=True))),
    "uniform": (RANGE, lambda rng, min, max: rng.uniform(min, max)),
    "normal": (NORMAL, lambda rng, mu, sigma: rng.normal(mu, sigma)),
    "beta": (BETA, lambda rng, a, b: rng.beta(a, b)),
    "log_normal": (NORMAL, lambda rng, mu, sigma: rng.lognormal(mu, sigma)),
    "log_uniform": (RANGE, lambda rng, min, max: math.exp(rng.uniform(min, max))),  # min and max are exponents of e
    "inv_log_uniform": (RANGE, lambda rng, min, max: math.exp(-rng.uniform(min, max))),
    "log_uniform_values": (RANGE, lambda rng, min, max: math.exp(rng.uniform(math.log(min), math.log(max)))),
    "inv_log_uniform_values": (RANGE, lambda rng, min, max: math.exp(-rng.uniform(-math.log(max), -math.log(min)))),
}


def quantized(draw):
    return lambda rng, q, **keys: round(draw(rng, **keys) / q) * q


weighted = ({"values": None, "probabilities": None}, DISTRIBUTIONS["categorical"][1])
DISTRIBUTIONS["categorical_w_probabilities"] = weighted
for name in ("uniform", "normal", "beta", "log_normal", "log_uniform", "log_uniform_values"):
    keys, draw = DISTRIBUTIONS[name]
    DISTRIBUTIONS[f"q_{name}"] = ({**keys, "q": 1}, quantized(draw))


def check(fine, message):
    if not fine:
        sys.exit(f"error: {message}")


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_parameter(name, keys):
    """Check the description of one parameter; return its distribution and all keys of that."""

    def need(fine, message):
        check(fine, f"parameter {name}: {message}")

    need(isinstance(keys, dict), f"expected value, values or a distribution, got {keys!r}")
    keys = dict(keys)
    whole = type(keys.get("min")) is type(keys.get("max")) is int
    kinds = {"value": "constant", "values": "categorical", "min": "int_uniform" if whole else "uniform"}
    kind = str(keys.pop("distribution", next((kinds[key] for key in kinds if key in keys), "uniform")))
    need(kind in DISTRIBUTIONS, f"distribution {kind} is not supported; supported: {', '.join(DISTRIBUTIONS)}")
    allowed, draw = DISTRIBUTIONS[kind]
    for key in keys:
        need(key in allowed, f"{kind} has no key {key}; it has: {', '.join(allowed)}")
    for key, default in allowed.items():
        need(key in keys or default is not None, f"{kind} needs {key}")
    keys = {**allowed, **keys}
    if kind.startswith("categorical"):
        values, odds = keys["values"], keys["probabilities"]
        need(isinstance(values, list) and values, f"values must be a list, not {values!r}")
        fine = isinstance(odds, list) and len(odds) == len(values) and all(map(is_number, odds))
        wanted = f"probabilities must be one for each of the {len(values)} values and sum to 1"
        need(odds == () or fine and math.isclose(sum(odds), 1), wanted)
    elif kind != "constant":
        for key, value in keys.items():
            hint = "; YAML takes 1e-3 for a word, write 1.0e-3" if isinstance(value, str) else ""
            need(is_number(value), f"{key} must be a number, got {value!r}{hint}")
            positive = key in ("q", "a", "b", "sigma") or key == "min" and kind.endswith("values")
            need(value > 0 or not positive, f"{key} must be > 0, got {value}")
        low, high = keys.get("min", 0), keys.get("max", 1)
        need(low < high, f"min {low} must be less than max {high}")
        need(whole or kind != "int_uniform", "min and max of int_uniform must be integers")
        fine = not kind.endswith("log_uniform") or max(abs(low), abs(high)) < 700
        need(fine, f"min and max of {kind} are exponents of e, at most 700; limits themselves: {kind}_values")
    try:
        draw(np.random.default_rng(0), **keys)
    except (ValueError, OverflowError) as error:
        need(False, f"{kind} cannot draw from this: {error}")
    return kind, keys


def flatten(parameters, path=()):
    """Turn nested parameters into {(outer name, inner name): (distribution, keys)}."""
    flat = {}
    check(isinstance(parameters, dict) and parameters, f"parameters must be names with values, not {parameters!r}")
    for name, keys in parameters.items():
        here = (*path, str(name))
        inner = isinstance(keys, dict) and set(keys) == {"parameters"}
        flat.update(flatten(keys["parameters"], here) if inner else {here: check_parameter(".".join(here), keys)})
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
    """Read a sweep file and check all of it, so that no task of an array fails for a mistake there."""
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
    supported = "supported: grid, random; bayes needs W&B, see slurm/sweep.sbatch"
    check(method in ("grid", "random"), f"{path}: method {method} is not supported; {supported}")
    check(Path(str(program)).is_file(), f"{path}: no program {program} in {Path.cwd()}; start from where it is")
    check(cap is not None or method == "grid", f"{path}: method random needs run_cap, the number of configurations")
    check(cap is None or type(cap) is int and cap > 0, f"{path}: run_cap must be an integer > 0, got {cap!r}")
    metric = sweep.setdefault("metric", {"name": "eval_return_mean", "goal": "maximize"})
    check(isinstance(metric, dict) and "name" in metric, f"{path}: metric must have a name, and may have a goal")
    for key in metric:
        check(key in ("name", "goal"), f"{path}: key metric.{key} is not supported; supported: name, goal")
    goal = metric.setdefault("goal", "minimize")
    check(goal in ("minimize", "maximize"), f"{path}: goal must be minimize or maximize, got {goal}")
    sweep["flat"] = flatten(sweep["parameters"])
    for where, (kind, keys) in sweep["flat"].items():
        fine = kind in ("constant", "categorical", "int_uniform", "q_uniform") and not keys.get("probabilities")
        wanted = "a grid takes value, values without probabilities, int_uniform and q_uniform"
        check(method != "grid" or fine, f"parameter {'.'.join(where)}: method grid cannot use this; {wanted}")
    command, macros = sweep.setdefault("command", COMMAND), fill_macros(sweep, {})
    check(isinstance(command, list) and command, f"{path}: command must be a list of words, got {command!r}")
    for word in map(str, command):
        fine = word in macros or "${" not in word
        check(fine, f"{path}: macro {word} is not supported; supported, each as a word: {', '.join(macros)}")
    return sweep


def grid(distribution, keys):
    """List the values of a parameter as W&B does: q_uniform without its maximum."""
    if distribution == "int_uniform":
        return range(keys["min"], keys["max"] + 1)
    if distribution == "q_uniform":
        return np.arange(keys["min"], keys["max"], keys["q"]).tolist()
    return keys["values"] if distribution == "categorical" else [keys["value"]]


def configurations(sweep, seed):
    """List the parameters of each configuration; those of a random one depend on the seed and its index alone."""
    flat, cap = sweep["flat"], sweep.get("run_cap")
    if sweep["method"] == "grid":
        names = sorted(flat)  # W&B's order: by name, the last varies fastest
        rows = itertools.product(*(grid(*flat[name]) for name in names))
        found = [dict(zip(names, row, strict=True)) for row in itertools.islice(rows, cap)]
        return [{name: row[name] for name in flat} for row in found]

    def draw(index, name, kind, keys):
        return DISTRIBUTIONS[kind][1](np.random.default_rng([seed, index, *".".join(name).encode()]), **keys)

    return [{name: draw(i, name, *parameter) for name, parameter in flat.items()} for i in range(cap)]


def fill_macros(sweep, parameters):
    """Say what each macro of `command` stands for; the spellings are W&B's."""
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


def directory_of(sweep, flat, output):
    what = json.dumps([sweep["program"], sweep["command"], nest(flat)], sort_keys=True, default=str)
    return output / hashlib.sha256(what.encode()).hexdigest()[:12]


def first_of(sweep, flats, output):
    """Give each configuration's directory its index, the first if a random sweep has drawn it more often."""
    first = {}
    for index, flat in enumerate(flats):
        first.setdefault(directory_of(sweep, flat, output), index)
    return first


def result_of(directory):
    try:
        return json.loads((directory / "result.json").read_text())
    except (OSError, ValueError):
        return None


def replace(path, write):
    """Let `write` write a file and put it in place at once: another process sees all of it or nothing."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    write(temporary)
    temporary.replace(path)


def label(sweep, flat):
    varied = [path for path in flat if sweep["flat"][path][0] != "constant"]
    return " ".join(f"{'.'.join(path)}={flat[path]}" for path in varied)


def checkpoints(directory):
    """List the checkpoints of a configuration, those of the last attempt at the end."""
    return sorted(directory.glob("attempt-*/runs/*/checkpoint-*.pt"))


def open_log(attempt):
    """Open the log of an attempt; None if that is still running, perhaps on another machine: it holds a lock on it."""
    log = open(attempt / "log.txt", "ab")  # noqa: SIM115
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return log.close()
    except OSError:
        pass  # a file system without locks
    return log


def here():
    """Tell what a result depends on besides its parameters: the versions, and the kind of machine, but not whose."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "gymnasium", "pyzmq", "envpool"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    with contextlib.suppress(OSError):  # no git
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        versions |= {"commit": commit} if commit else {}
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):  # only Linux has it
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"versions": versions, "machine": f"{cpu}, {os.cpu_count()} cores"}


def stop(status):
    print("error: interrupted; what has finished is kept, start again to go on", file=sys.stderr)
    sys.exit(status)


def run(sweep, flat, directory):
    """Run one configuration, unless it has finished; tell what went wrong, or None."""
    if result_of(directory):
        return print(f"{directory} has finished: {label(sweep, flat)}")
    macros = fill_macros(sweep, nest(flat))
    command = [part for word in map(str, sweep["command"]) for part in macros.get(word, [word])]
    attempt, log = directory / f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", None
    saved = checkpoints(directory)
    while saved and not log:  # the last of them in which nobody runs
        last = saved.pop().parent
        if log := open_log(last.parents[1]):
            attempt, command = last.parents[1], [*command, "--resume", str(last.relative_to(last.parents[1]))]
    attempt.mkdir(parents=True, exist_ok=True)
    print(f"{attempt}: {label(sweep, flat)}", flush=True)
    with log or open_log(attempt) as log:
        env = {"WANDB_MODE": "offline", **os.environ}  # so that --track, if it is in the command, needs no account
        process = subprocess.Popen(
            command, cwd=attempt, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()  # it saves; and Slurm kills what its job's first process leaves
        status = 75
    if status == 75:
        stop(75 if checkpoints(directory) else 143)
    if status != 0:
        return f"ended with status {status}; see {attempt}/log.txt"
    try:
        (summary,) = attempt.glob("runs/*/summary.json")
        summary = json.loads(summary.read_text())
        result = {"parameters": nest(flat), "summary": summary, "attempt": attempt.name, **here()}
    except ValueError:
        return f"left no readable runs/*/summary.json; see {attempt}/log.txt"
    return replace(directory / "result.json", lambda path: path.write_text(json.dumps(result, indent=2, default=str)))


def iqm(values):
    cut = len(values) // 4
    return np.sort(values)[cut : len(values) - cut].mean()


def plot(rows, metric, output):
    """Plot the metric against each parameter that was swept: every configuration a point."""
    swept = {path for path in rows[0][0] if len({str(flat[path]) for flat, _ in rows}) > 1}
    swept = sorted(swept - {("seed",)} or swept or {next(iter(rows[0][0]))})  # seeds are repetitions, not a setting
    figure = Figure(figsize=(4.5 * len(swept), 4), layout="constrained")
    for axes, path in zip(figure.subplots(1, len(swept), sharey=True, squeeze=False)[0], swept, strict=True):
        numbers = all(is_number(flat[path]) for flat, _ in rows)
        settings = sorted({flat[path] if numbers else str(flat[path]) for flat, _ in rows})
        points = [(flat[path] if numbers else str(flat[path]), result) for flat, result in rows]
        few = len(settings) <= 12  # then evenly spaced, and each with the mean of its middle half
        place = {setting: i if few else setting for i, setting in enumerate(settings)}
        axes.plot([place[x] for x, _ in points], [y for _, y in points], "o", color="#0072B2", alpha=0.6, label="a run")
        if few:
            middle = [iqm([y for x, y in points if x == setting]) for setting in settings]
            axes.plot(range(len(settings)), middle, "_", color="#D55E00", ms=24, mew=3, label="interquartile mean")
            axes.set_xticks(range(len(settings)), [f"{x:.4g}" if numbers else x for x in settings])
            axes.set_xlim(-0.5, len(settings) - 0.5)
        elif settings[0] > 0 and settings[-1] > 20 * settings[0]:
            axes.set_xscale("log")
        axes.set(xlabel=".".join(path), ylabel=metric if path == swept[0] else "")
    axes.legend(frameon=False)
    figure.savefig(output, dpi=150, format="png")


def collect(sweep, flats, output):
    """Write results.csv and results.png of the configurations that have finished, each once."""
    metric, rows, table = sweep["metric"]["name"], [], []
    different = first_of(sweep, flats, output)
    for directory, index in different.items():
        flat = flats[index]
        if not (result := result_of(directory)):
            continue
        scalars = {key: value for key, value in result["summary"].items() if not isinstance(value, dict | list)}
        known = f"its summary has: {', '.join(key for key, value in scalars.items() if is_number(value))}"
        check(is_number(scalars.get(metric)), f"the run in {directory} has no metric {metric}; {known}")
        rows.append((flat, scalars[metric]))
        parameters = {".".join(path): value for path, value in flat.items()}
        attempt = str(directory / result["attempt"])
        table.append({"index": index, **parameters, **{**scalars, **parameters}, "directory": attempt})
    check(rows, f"no configuration of {output} has finished")

    def write(path):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for row in table for key in row))
            writer.writeheader()
            writer.writerows(table)

    replace(output / "results.csv", write)
    replace(output / "results.png", lambda path: plot(rows, metric, path))
    flat, best = (max if sweep["metric"]["goal"] == "maximize" else min)(rows, key=lambda row: row[1])
    print(f"{len(rows)} of {len(different)} have finished; best {metric} {best:.4g}: {label(sweep, flat)}")
    print(f"see {output}/results.csv and results.png")


def main():
    parser = argparse.ArgumentParser(description="Run a W&B sweep file without W&B; without --index, all of it.")
    parser.error = lambda message: check(False, f"{message}; see --help")
    parser.add_argument("file", help="the sweep, in YAML")
    parser.add_argument("--output", type=Path, help="where runs and results go; default runs/{name of the file}")
    parser.add_argument("--seed", type=int, default=1, help="of what method random draws; default 1")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--index", type=int, help="run this configuration only, counted from 0")
    what.add_argument("--count", action="store_true", help="print the number of configurations")
    what.add_argument("--list", action="store_true", help="print all configurations, and which have finished")
    what.add_argument("--results", action="store_true", help="write table and plot of those that have finished")
    args = parser.parse_args()
    check(args.seed >= 0, f"--seed must be at least 0, got {args.seed}")
    sweep = load(args.file)
    flats = configurations(sweep, args.seed)
    output = args.output or Path("runs", Path(args.file).stem)
    if args.count:
        return print(len(flats))
    if args.list:
        for index, flat in enumerate(flats):
            directory = directory_of(sweep, flat, output)
            print(index, "finished" if result_of(directory) else "open", directory, label(sweep, flat))
        return None
    if args.results:
        return collect(sweep, flats, output)
    if args.index is not None:
        check(0 <= args.index < len(flats), f"--index must be from 0 to {len(flats) - 1}, got {args.index}")
    failures, first = [], first_of(sweep, flats, output)
    for index, flat in enumerate(flats):
        directory = directory_of(sweep, flat, output)
        if args.index not in (None, index):
            continue
        if first[directory] != index:
            print(f"configuration {index} is the same as {first[directory]}, which runs it: {label(sweep, flat)}")
        elif failure := run(sweep, flat, directory):
            failures.append(f"configuration {index} {failure}")
            print(f"error: {failures[-1]}", file=sys.stderr, flush=True)
    if args.index is None and len(failures) < len(first):
        collect(sweep, flats, output)
    return sys.exit(1 if failures else 0)


def interrupt(*_):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may tell this process twice
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGUSR1, interrupt)
    try:
        main()
    except KeyboardInterrupt:
        stop(143)
    except OSError as error:
        check(False, error)
