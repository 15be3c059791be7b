"""The offline sweep: it runs W&B's configurations once each and several at a time, whatever is
killed, shows its progress, and makes a table and a plot of the results.
"""

import contextlib
import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.stats as st
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from experiments.sweeps import capacity, configurations, metrics
from experiments.sweeps.distributions import DISTRIBUTIONS
from experiments.sweeps.execution import STOP_S
from experiments.sweeps.progress import Progress

from .patience import PATIENCE, assert_ended, wait_until
from .scripts import ROOT, alive, children_of, environment, scalars

pytestmark = pytest.mark.long

# A program whose return is ten times x, and None at x = 0. It fails at x = 13, and at x = 99 it
# waits for a file `go`, for at most an hour.
PROGRAM = """
import json, os, sys, time
flags = dict(word.lstrip("-").split("=") for word in sys.argv[1:])
x, start = float(flags["x"]), time.time()
print("x is", x, "in", os.environ["WANDB_MODE"], "mode", flush=True)
while x == 99 and time.time() < start + 3600 and not os.path.exists("../../../../go"):
    time.sleep(0.02)
if x == 13:
    sys.exit("out of luck")
os.makedirs("runs/one")
summary = {"eval_return_mean": 10 * x or None, "seed": int(flags.get("seed", 1)), "args": {}}
json.dump(summary, open("runs/one/summary.json", "w"))
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a sweep of PROGRAM into the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)

    def write(parameters, **keys):
        keys = {"program": "train.py", "method": "grid", "parameters": parameters, **keys}
        keys = {key: value for key, value in keys.items() if value is not None}
        Path("sweep.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
        return "sweep.yaml"

    return write


def command(*arguments, **options):
    options = {"env": environment(), "capture_output": True, "text": True, **options}
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "sweeps" / "run.py"), *arguments], **options
    )


def load(path, seed=1):
    found = configurations.configurations(configurations.load(path), seed)
    return [configurations.nest(flat) for flat in found]


def test_a_grid_is_every_combination_in_wandbs_order(write):
    # In the order of W&B's own engine (sweeps 0.3.0 on PyPI): by name, the last name fastest, and
    # q_uniform without its maximum.
    nested = {"parameters": {"z": {"values": [1, 2]}, "a": {"min": 1, "max": 2}}}
    steps = {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.5}
    found = load(
        write({"seed": {"values": [1, 2]}, "env_id": {"value": "X"}, "b": nested, "n": steps})
    )
    assert found == [
        {"seed": seed, "env_id": "X", "b": {"a": a, "z": z}, "n": n}
        for a in (1, 2)
        for z in (1, 2)
        for n in (0.0, 0.5)
        for seed in (1, 2)
    ]
    assert command("sweep.yaml", "--count").stdout == "16\n"


def test_a_run_cap_takes_the_first_of_a_grid(write):
    values = {"x": {"values": [3, 1, 2]}}
    assert load(write(values, run_cap=2)) == [{"x": 3}, {"x": 1}]
    assert len(load(write(values, run_cap=10))) == 3


UNIFORM = {"min": 2.0, "max": 5.0}
VALUES = {"min": 0.01, "max": 10.0}
NORMAL = {"mu": 1.0, "sigma": 0.5}
CONTINUOUS = {
    "uniform": (UNIFORM, st.uniform(2, 3)),
    "normal": (NORMAL, st.norm(1, 0.5)),
    "beta": ({"a": 2, "b": 5}, st.beta(2, 5)),
    "log_normal": (NORMAL, st.lognorm(0.5, scale=np.e)),
    "log_uniform": ({"min": -3, "max": 1}, st.loguniform(np.exp(-3), np.e)),
    "log_uniform_values": (VALUES, st.loguniform(0.01, 10)),
    "inv_log_uniform": ({"min": -3, "max": 1}, st.loguniform(np.exp(-1), np.exp(3))),
    "inv_log_uniform_values": (VALUES, st.loguniform(0.01, 10)),
}


def draw(write, keys, number=1000):
    values = [flat["x"] for flat in load(write({"x": keys}, method="random", run_cap=number))]
    # Not NumPy's types, whose names would reach the flags.
    assert {type(value) for value in values} <= {
        int,
        float,
        str,
        bool,
    }
    return values


@pytest.mark.parametrize("distribution", CONTINUOUS)
def test_continuous_distributions_are_scipys(distribution, write):
    keys, expected = CONTINUOUS[distribution]
    assert (
        st.kstest(draw(write, {"distribution": distribution, **keys}), expected.cdf).pvalue > 0.01
    )


@pytest.mark.parametrize(
    "distribution", [name[2:] for name in DISTRIBUTIONS if name.startswith("q_")]
)
@pytest.mark.parametrize("q", [0.25, 1, 2])
def test_quantized_distributions_are_rounded_to_multiples_of_q(distribution, q, write):
    keys = {"distribution": distribution, **CONTINUOUS[distribution][0]}
    exact = np.array(draw(write, keys, 200))
    rounded = draw(write, {**keys, "distribution": f"q_{distribution}", "q": q}, 200)
    assert rounded == (np.round(exact / q) * q).tolist()
    assert {type(value) for value in rounded} == {type(q)}


# The distributions of src/sweeps/config/schema.json in github.com/wandb/sweeps. The package wandb
# itself has no list.
WANDB_HAS = """beta categorical categorical_w_probabilities constant int_uniform inv_log_uniform
inv_log_uniform_values log_normal log_uniform log_uniform_values normal q_beta q_log_normal
q_log_uniform q_log_uniform_values q_normal q_uniform uniform"""


def test_there_is_every_distribution_that_wandb_has():
    assert sorted(DISTRIBUTIONS) == WANDB_HAS.split()


def test_discrete_distributions(write):
    counts = np.unique(draw(write, {"min": 3, "max": 6}), return_counts=True)[
        1
    ]  # both ends are included
    assert len(counts) == 4 and st.chisquare(counts).pvalue > 0.01
    counts = np.unique(draw(write, {"values": ["a", "b", "c"]}), return_counts=True)[1]
    assert len(counts) == 3 and st.chisquare(counts).pvalue > 0.01
    weighted = {"values": [1, 2.5, True], "probabilities": [0.1, 0.6, 0.3]}
    found = draw(write, weighted)
    assert draw(write, {"distribution": "categorical_w_probabilities", **weighted}) == found
    counts = [
        sum(value is wanted or value == wanted == 2.5 for value in found)
        for wanted in (1, 2.5, True)
    ]
    assert st.chisquare(counts, [100, 600, 300]).pvalue > 0.01
    assert set(draw(write, {"value": "same"}, 5)) == {"same"}
    # The limits are not both integers, so the distribution is uniform.
    assert {type(value) for value in draw(write, {"min": 0, "max": 1.5}, 5)} == {float}


def test_a_random_configuration_depends_on_seed_and_index_alone(write):
    x, y = {"min": 0.0, "max": 1.0}, {"distribution": "normal"}
    five = load(write({"x": x, "y": y}, method="random", run_cap=5))
    assert load(write({"x": x, "y": y}, method="random", run_cap=50))[:5] == five
    assert [flat["x"] for flat in load(write({"x": x}, method="random", run_cap=5))] == [
        flat["x"] for flat in five
    ]
    assert len({flat["x"] for flat in five}) == 5
    assert not {flat["x"] for flat in five} & {flat["x"] for flat in load("sweep.yaml", seed=2)}
    lists = [command("sweep.yaml", "--list", "--seed", str(seed)).stdout for seed in (1, 1, 2)]
    assert lists[0] == lists[1] != lists[2]
    assert lists[0].splitlines()[3].endswith(f" x={five[3]['x']:.6g}")


X = {"x": {"values": [1, 2]}}
REFUSED = {
    "key early_terminate is not supported; supported: program, method,": (
        X,
        {"early_terminate": {"type": "hyperband"}},
    ),
    "key controller is not supported": (X, {"controller": {"type": "local"}}),
    "method best is not supported; supported: grid, random, bayes": (X, {"method": "best"}),
    "method bayes needs run_cap": (X, {"method": "bayes"}),
    "train.py has no metric return; the metrics of all scripts: eval_return_mean, eval": (
        X,
        {"metric": {"name": "return"}},
    ),
    "metric must have a name": (X, {"metric": {"name": ["eval_return_mean"]}}),
    "train.py has no metric losses/value_loss": (X, {"metric": {"name": "losses/value_loss"}}),
    "metric eval/return_mean needs evaluations, and eval_episodes is 0": (
        {**X, "eval_episodes": {"values": [0, 5]}},
        {"metric": {"name": "eval/return_mean"}},
    ),
    "key metric.target is not supported; supported: name, goal": (
        X,
        {"metric": {"name": "a", "target": 1}},
    ),
    "goal must be minimize or maximize": (X, {"metric": {"name": "a", "goal": "max"}}),
    "key program is missing": (X, {"program": None}),
    "no program other.py in ": (X, {"program": "other.py"}),
    "method random needs run_cap": (X, {"method": "random"}),
    "run_cap must be an integer > 0, got 0": (X, {"run_cap": 0}),
    "macro ${args_dict} is not supported; supported, each as a word: ${env},": (
        X,
        {"command": ["${args_dict}"]},
    ),
    "macro x=${program} is not supported": (X, {"command": ["x=${program}"]}),
    "command must be a list of words": (X, {"command": "python ${program}"}),
    "parameters must be names with values": ([1], {}),
    "parameter x: distribution cauchy is not supported; supported: constant,": (
        {"x": {"distribution": "cauchy"}},
        {},
    ),
    "parameter x: uniform has no key q; it has: min, max": (
        {"x": {"min": 0.0, "max": 1, "q": 1}},
        {},
    ),
    "parameter x: uniform needs max": ({"x": {"min": 1.0}}, {}),
    "parameter x: expected value, values or a distribution, got 3": ({"x": 3}, {}),
    "parameter x: values must be a list, not 3": ({"x": {"values": 3}}, {}),
    "parameter x: min must be a number, got '1e-3'; YAML takes 1e-3 for a word": (
        {"x": {"min": "1e-3", "max": 1}},
        {},
    ),
    "parameter x: min must be > 0, got 0": (
        {"x": {"distribution": "log_uniform_values", "min": 0, "max": 1}},
        {},
    ),
    "parameter x: min 2 must be less than max 1": ({"x": {"min": 2, "max": 1}}, {}),
    "parameter x: min and max of int_uniform must": (
        {"x": {"distribution": "int_uniform", "min": 0.5, "max": 2}},
        {},
    ),
    "parameter x: probabilities must be one for each": (
        {"x": {"values": [1, 2], "probabilities": [0.5, 0.4]}},
        {},
    ),
    "parameter x: sigma must be > 0": ({"x": {"distribution": "normal", "sigma": -1}}, {}),
    "parameter x: probabilities must be one for each of": (
        {"x": {"values": [1], "probabilities": 3}},
        {},
    ),
    "parameter x: categorical cannot draw from this": (
        {"x": {"values": [1, 2], "probabilities": [-1, 2]}},
        {},
    ),
    "parameter x: uniform cannot draw from this": ({"x": {"min": 1, "max": float("inf")}}, {}),
    "; limits themselves: log_uniform_values": (
        {"x": {"distribution": "log_uniform", "min": 1, "max": 1000}},
        {},
    ),
    "parameter x: q must be > 0": ({"x": {"distribution": "q_normal", "q": 0}}, {}),
    "parameter a.x: method grid cannot use this; a grid takes": (
        {"a": {"parameters": {"x": {"min": 0.5, "max": 1}}}},
        {},
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_unsupported_keys_and_values_are_refused_by_name(says, write):
    parameters, keys = REFUSED[says]
    with pytest.raises(SystemExit) as refusal:
        load(write(parameters, **keys))
    assert (
        str(refusal.value).startswith("error: ")
        and says in str(refusal.value)
        and "\n" not in str(refusal.value)
    )


def test_mistakes_on_the_command_line_are_a_one_line_error(write):
    write(X)
    Path("broken.yaml").write_text("a: [1\nb: 2")
    cases = {
        "cannot read none.yaml: [Errno 2]": ["none.yaml"],
        "cannot read broken.yaml: while parsing": ["broken.yaml"],
        "--index must be from 0 to 1, got 2": ["sweep.yaml", "--index", "2"],
        "--jobs must be at least 1, got 0": ["sweep.yaml", "--jobs", "0"],
        "--jobs is for all configurations: give it alone": ["sweep.yaml", "--jobs=2", "--list"],
        "not allowed with argument": ["sweep.yaml", "--index", "1", "--count"],
        "no configuration of runs/sweep has finished": ["sweep.yaml", "--results"],
    }
    for says, arguments in cases.items():
        result = command(*arguments)
        assert result.returncode == 1 and result.stdout == ""
        assert (
            says in result.stderr
            and result.stderr.startswith("error: ")
            and result.stderr.count("\n") == 1
        )


def test_macros_are_spelled_as_wandb_spells_them(write):
    parameters = {
        "lr": 0.001,
        "n": 3,
        "on": True,
        "off": False,
        "none": None,
        "b": {"c": [1, "x"]},
        "word": "False",
    }
    macros = configurations.fill_macros(configurations.load(write(X)), parameters)
    theirs = create_sweep_command_args(
        {"args": {name: {"value": value} for name, value in parameters.items()}}
    )
    for name in ("args", "args_no_hyphens", "args_no_boolean_flags", "args_json"):
        assert macros[f"${{{name}}}"] == theirs[name]
    assert macros["${env}"] == ["/usr/bin/env"] and macros["${interpreter}"] == [sys.executable]
    assert macros["${program}"] == [str(Path("train.py").resolve())]


def results():
    with open("runs/sweep/results.csv") as file:
        return list(csv.DictReader(file))


def test_all_run_once_and_their_results_are_collected(write):
    path = write(
        {"x": {"values": [3, 1, 2]}, "seed": {"values": [1, 2]}},
        metric={"name": "eval/return_mean"},
    )
    result = command(path, "--jobs", "2")
    assert (result.returncode, result.stderr) == (0, "")
    # W&B's default is to minimize.
    assert "6 of 6 have finished; best eval/return_mean 10: x=1 seed=1" in result.stdout
    rows = results()
    assert [(row["index"], row["x"], row["seed"]) for row in rows[:3]] == [
        ("0", "3", "1"),
        ("1", "1", "1"),
        ("2", "2", "1"),
    ]
    assert [float(row["eval_return_mean"]) for row in rows] == [30, 10, 20, 30, 10, 20]
    assert Path(rows[0]["directory"], "log.txt").read_text() == "x is 3.0 in offline mode\n"
    assert Path("runs/sweep/results.png").read_bytes().startswith(b"\x89PNG")
    attempts = sorted(Path("runs/sweep").glob("*/attempt-*"))
    again = command(path, "--jobs", "1").stdout.splitlines()
    assert again[0] == "6 configurations; 6 of them have finished before"
    assert again[1].startswith("6 of 6 have finished") and len(again) == 3
    # A larger grid runs only the new configurations.
    assert command(write({"x": {"values": [2, 3, 7]}, "seed": {"values": [1, 2]}})).returncode == 0
    assert len(attempts) == 6 and len(list(Path("runs/sweep").glob("*/attempt-*"))) == 8
    assert [float(row["eval_return_mean"]) for row in results()] == [20, 30, 70, 20, 30, 70]


def test_failed_configurations_are_named_and_run_again(write):
    path = write({"x": {"values": [1, 13, 2]}})
    for attempts in (1, 2):
        result = command(path)
        assert result.returncode == 1
        assert result.stderr.startswith(
            "error: configuration 1 ended with status 1: out of luck; see runs/sweep/"
        )
        assert "2 of 3 have finished" in result.stdout
        assert len(list(Path("runs/sweep").glob("*/attempt-*"))) <= 2 + attempts
    log = Path(result.stderr.split("see ")[1].strip())
    assert log.read_text().endswith("out of luck\n")
    assert [row["x"] for row in results()] == ["1", "2"]
    assert (
        command(path, "--index", "1").returncode == 1
        and command(path, "--index", "2").returncode == 0
    )
    assert [line.split()[1] for line in command(path, "--list").stdout.splitlines()] == [
        "finished",
        "open",
        "finished",
    ]


def test_a_configuration_that_a_random_sweep_draws_twice_is_run_and_collected_once(write):
    path = write({"x": {"values": [1, 2]}}, method="random", run_cap=8)
    drawn = [flat["x"] for flat in load(path)]
    second = drawn.index(drawn[0], 1)
    result = command(path, "--index", str(second))  # a task of an array, beside the task of index 0
    assert (result.returncode, result.stdout) == (
        0,
        f"configuration {second} is the same as 0, which runs it: x={drawn[0]}\n",
    )
    result = command(path)
    assert result.returncode == 0 and "2 of 2 have finished" in result.stdout
    assert len(list(Path("runs/sweep").glob("*/attempt-*"))) == 2
    assert sorted(row["x"] for row in results()) == ["1", "2"]


def test_a_sweep_ends_at_the_first_run_that_lacks_the_metric(write):
    path = write({"x": {"values": [1, 2, 3]}}, metric={"name": "luck"})
    Path("train.py").write_text(f"{PROGRAM}\nluck=7")
    result = command(path, "--jobs", "1")
    assert result.returncode == 1 and len(list(Path("runs/sweep").glob("*/attempt-*"))) == 1
    assert "has no metric luck; its summary has: eval_return_mean, seed" in result.stderr
    # Its result is kept for another metric.
    path = write({"x": {"values": [1, 2, 3]}}, metric={"name": "seed"})
    assert "1 of them have finished before" in command(path, "--jobs", "1").stdout


@pytest.mark.parametrize("word", ["None", "float('nan')"])
def test_a_return_that_is_not_a_number_is_left_out_and_reported(word, write):
    path = write({"x": {"values": [0, 1]}}, metric={"name": "eval_return_mean"})
    Path("train.py").write_text(PROGRAM.replace("or None", f"or {word}"))
    result = command(path)
    assert result.returncode == 0
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("left out"))
    assert line.endswith("has no number as eval_return_mean")
    assert re.match(r"2 configurations; \d+ at once: a run takes 3 cores, ", result.stdout)
    assert "2 of 2 have finished; best eval_return_mean 10: x=1" in result.stdout
    assert [row["eval_return_mean"] for row in results()] == [{"None": ""}.get(word, "nan"), "10.0"]


# A program that ends once two copies of it run, and fails if there are more.
PAIRS = """
import json, os, pathlib, time
here, start = pathlib.Path("../../../.."), time.time()
mine = here / f"in-{os.getpid()}"
mine.touch()
while not (here / "two").exists() and time.time() < start + 3600:
    if len(list(here.glob("in-*"))) == 2:
        (here / "two").touch()
    time.sleep(0.02)
assert len(list(here.glob("in-*"))) < 3
mine.unlink()
os.makedirs("runs/one")
json.dump({"eval_return_mean": 1.0}, open("runs/one/summary.json", "w"))
"""


def test_as_many_run_at_once_as_jobs_says(write):
    path = write({"x": {"values": [1, 2, 3, 4]}})
    Path("train.py").write_text(PAIRS)
    result = command(path, "--jobs", "2")
    assert (result.returncode, result.stderr) == (0, "")


def test_plain_output_shows_the_progress_after_each_run(write):
    lines = command(write({"x": {"values": [2, 13, 3]}}), "--jobs", "1").stdout.splitlines()
    assert lines[0] == "3 configurations; 1 at once: as --jobs says"
    said = [line for line in lines if re.match(r"\d of 3 done", line)]
    said = [re.sub(r"about \d+ s left", "T", line) for line in said]
    assert said == [
        "1 of 3 done; T; best eval_return_mean 20: x=2",
        "1 of 3 done, 1 failed; T; best eval_return_mean 20: x=2",
        "2 of 3 done, 1 failed; best eval_return_mean 30: x=3",
    ]


@pytest.mark.parametrize(
    ("jobs", "running", "waiting", "left"),
    [
        (1, [30], 4, "4 min"),  # 30 s, and 50 s each
        (2, [20, 30], 2, "75 s"),  # 30 + 20 + 2 * 50 on two
        (4, [10, 999], 0, "40 s"),  # until the last run ends
        (2, [999], 0, "0 s"),
        (1, [0], 287, "4.0 h"),
    ],
)
def test_the_time_left_follows_from_the_mean_of_the_finished_runs(
    jobs, running, waiting, left, write
):
    progress = Progress(configurations.load(write(X)), 400, jobs)
    progress.add(Path("before"), {("x",): 1}, 1.0)  # its duration is not known
    assert progress.status(running, waiting) == "1 of 400 done; best eval_return_mean 1: x=1"
    for number, seconds in enumerate((40.0, 60.0)):
        progress.add(Path(str(number)), {("x",): 2}, None, seconds)
    assert progress.status(running, waiting).split("; ")[1] == f"about {left} left"
    assert "left" not in progress.status([], 0)


def test_on_a_terminal_one_line_changes(write):
    path = write({"x": {"values": [2, 99]}})
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "experiments/sweeps/run.py"), path, "--jobs", "1"],
        env=environment(TERM="xterm", COLUMNS="120"), stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = ""
    with contextlib.suppress(OSError):  # the other end has closed
        while text := os.read(ours, 65536).decode():
            shown += text
            if re.search("1 of 2 done, 1 running, the first for 1 s; about", shown):
                Path("go").touch()
    os.close(ours)
    assert process.wait(PATIENCE) == 0
    line = r"\x1b\[2K1 of 2 done, 1 running, the first for 1 s; about \d+ s left; best \S+ 20: x=2"
    assert re.search(line, shown), shown
    assert "2 of 2 have finished" in shown and "\n1 of 2 done" not in shown


def test_runs_are_stopped_when_the_terminal_is_lost(write):
    path = write({"x": {"values": [99]}, "seed": {"values": [1, 2]}})
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= environment(TERM="xterm")
        run = str(ROOT / "experiments/sweeps/run.py")
        os.execv(sys.executable, [sys.executable, run, path, "--jobs", "2"])
    while b"2 running" not in os.read(terminal, 65536):
        pass
    runs = children_of(pid)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert (os.waitstatus_to_exitcode(status), len(runs)) == (143, 2)
    assert not any(map(alive, runs))


@pytest.mark.parametrize(
    ("cores", "gib", "parameters", "words", "expected"),
    [
        (2, 64, {}, [], 1),  # at least one
        (12, 64, {}, [], 4),  # a head and two workers each
        (12, 7, {}, [], 3),  # 2 GiB each
        (12, 64, {"num_workers": {"values": [1, 5]}}, [], 2),
        (12, 64, {"num_workers": {"min": 1, "max": 3}}, [], 3),
        (12, 64, {}, ["--num-workers=11"], 1),
        (12, 64, {}, ["--num-workers", "1"], 6),
        (99, 64, {}, [], 9),  # no more than there are configurations
    ],
)
def test_as_many_run_at_once_as_the_machine_carries(
    cores, gib, parameters, words, expected, write, monkeypatch
):
    sweep = {"x": {"values": [1]}, **parameters}
    method = {"method": "random", "run_cap": 9}
    path = write(sweep, command=["${interpreter}", "${program}", *words, "${args}"], **method)
    monkeypatch.setattr(capacity, "cores_here", lambda: cores)
    monkeypatch.setattr(capacity, "memory_here", lambda: gib * 2**30)
    jobs, why = capacity.jobs_for(configurations.load(path), 9)
    assert jobs == expected
    assert f"of {cores} cores" in why and why.endswith(f"and {gib} GiB")


def test_cores_and_memory_of_a_container_are_those_it_may_use(monkeypatch):
    files = {
        "/sys/fs/cgroup/cpu.max": "150000 100000",
        "/sys/fs/cgroup/memory.max": str(5 * 2**30),
        "/sys/fs/cgroup/memory.current": str(2**30),
        "/proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 8388608 kB",
    }
    monkeypatch.setattr(capacity, "words_of", lambda path: files.get(path, "").split())
    assert (capacity.cores_here(), capacity.memory_here()) == (1, 4 * 2**30)
    for path in list(files)[:3]:
        files[path] = "max 100000"
    assert capacity.cores_here() == len(os.sched_getaffinity(0))
    assert capacity.memory_here() == 8 * 2**30
    del files["/sys/fs/cgroup/memory.max"], files["/sys/fs/cgroup/cpu.max"]
    assert capacity.cores_here() == len(os.sched_getaffinity(0))


def start_and_await(path, text="x is 99", number=1):
    """Start a sweep with ``number`` runs at once. Return its process and its runs' pids once each
    run's log has ``text``.
    """
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "experiments/sweeps/run.py"), path, "--jobs", str(number)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    logs = partial(Path("runs").glob, "sweep/*/*/log.txt")
    wait_until(lambda: sum(text in log.read_text() for log in logs()) == number)
    return process, children_of(process.pid)


@pytest.mark.parametrize("victim", ["sweep", "run"])
def test_a_killed_sweep_goes_on_where_it_was(victim, write):
    path = write({"x": {"values": [1, 99, 2]}})
    process, (run,) = start_and_await(path)
    os.kill(process.pid if victim == "sweep" else run, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert_ended([run])  # also if only the sweep was killed
    assert victim == "sweep" or "configuration 1 ended with status -9: x is 99.0" in errors
    finished = [line.split()[1] for line in command(path, "--list").stdout.splitlines()]
    assert finished == ["finished", "open", "open" if victim == "sweep" else "finished"]
    Path("go").touch()
    assert command(path).returncode == 0
    assert [float(row["eval_return_mean"]) for row in results()] == [10, 990, 20]
    assert sorted(
        Counter(path.parent for path in Path("runs/sweep").glob("*/attempt-*")).values()
    ) == [1, 1, 2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_sweep_that_is_asked_to_stop_stops_its_runs_first(number, write):
    process, runs = start_and_await(
        write({"x": {"value": 99}, "seed": {"values": [1, 2, 3]}}), number=2
    )
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143 and not any(map(alive, runs))
    assert errors.splitlines() == [
        "stopping 2 runs, which may save; a second Ctrl-C ends them now",
        "error: interrupted; finished runs are kept, start again to go on",
    ]
    lines = command("sweep.yaml", "--list").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["open"] * 3
    assert len(list(Path("runs/sweep").glob("*/attempt-*"))) == 2


@pytest.mark.parametrize(("saved", "code"), [("checkpoint-1.pt", 75), ("model.pt", 143)])
def test_a_run_that_a_scheduler_has_told_to_stop_ends_the_sweep(saved, code, write):
    path = write({"x": {"values": [1, 2]}})
    saves = f"os.makedirs('runs/one'); open('runs/one/{saved}', 'w')"
    Path("train.py").write_text(f"import os; {saves}; os._exit(75)")
    result = command(path, "--jobs", "1")
    assert result.returncode == code and "error: interrupted" in result.stderr
    assert len(list(Path("runs/sweep").glob("*/attempt-*"))) == 1


# A program that does not end when it is told to. Neither does the process that it starts.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, __file__, "second", "process"])
print("stubborn", flush=True)
until = time.time() + 3600
while time.time() < until:
    time.sleep(1)
"""


def test_a_second_ctrl_c_ends_runs_that_do_not_stop(write):
    path = write({"x": {"value": 1}})
    Path("train.py").write_text(STUBBORN)
    process, (run,) = start_and_await(path, "stubborn\nstubborn")
    pids = [run, *children_of(run)]
    assert len(pids) == 2
    process.send_signal(signal.SIGINT)
    (log,) = Path("runs/sweep").glob("*/*/log.txt")
    wait_until(lambda: "told" in log.read_text())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(STOP_S / 2) == 143
    assert_ended(pids)


def test_a_truncated_result_does_not_count(write):
    path = write({"x": {"value": 1}})
    assert command(path).returncode == 0
    (result,) = Path("runs/sweep").glob("*/result.json")
    result.write_text(result.read_text()[:20])
    assert command(path).returncode == 0
    assert json.loads(result.read_text())["summary"]["eval_return_mean"] == 10


def test_results_of_many_settings_and_of_words_are_plotted(write):
    path = write(
        {"x": {"distribution": "log_uniform_values", "min": 0.001, "max": 10.0}},
        method="random",
        run_cap=14,
    )
    assert command(path).returncode == 0
    assert (
        command(
            write({"x": {"value": 1}, "seed": {"values": [1]}, "word": {"values": ["a", True]}})
        ).returncode
        == 0
    )
    assert Path("runs/sweep/results.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_of_the_real_script_has_each_metric_under_its_names(tmp_path):
    flags = {
        "env_id": "CartPole-v1",
        "envs_per_worker": 2,
        "num_steps": 16,
        "num_minibatches": 2,
        "eval_episodes": 2,
    }
    flags |= {"total_timesteps": 320, "anneal_lr": False, "overlap": True}
    keys = {"program": "ppo_clusterenv.py", "method": "grid"}
    parameters = {
        "kl_threshold": {"values": [0.01]},
        **{name: {"value": value} for name, value in flags.items()},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**keys, "parameters": parameters}))
    result = command(str(tmp_path / "tiny.yaml"), "--output", str(tmp_path / "out"), cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "out" / "results.csv") as file:
        (row,) = csv.DictReader(file)
    assert (
        row["kl_threshold"] == "0.01"
        and row["global_step"] == "320"
        and float(row["eval_return_mean"]) > 0
    )
    (path,) = Path(row["directory"]).glob("runs/*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["args"].items() >= flags.items()
    for key, tag in metrics.TAGS.items():
        value = summary[key]
        assert isinstance(value, int | float)
        # The logged SPS is that of the last update, and the summary's is that of the whole run.
        assert tag in (None, "charts/SPS") or scalars(path.parent, tag)[-1] == pytest.approx(value)


def test_the_projects_own_sweeps_load(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load("experiments/sweeps/sweep.yaml") == [
        {"kl_threshold": kl, "seed": seed} for kl in (0, 0.01, 0.05) for seed in (1, 2, 3)
    ]
    assert command("experiments/sweeps/sweep_bayes.yaml", "--count").stdout == "32\n"
    for path in sorted(ROOT.glob("experiments/**/*.yaml")):
        configurations.load(path)


def test_job_files_are_bash():
    for path in (*(ROOT / "slurm").glob("*.sbatch"), *(ROOT / "slurm").glob("*.sh")):
        subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("arguments", [[], ["experiments/sweeps/sweep.yaml"]])
def test_a_job_of_wandbs_agent_needs_a_sweep_and_not_a_file(arguments):
    command = ["bash", "slurm/sweep.sbatch", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: expected one argument, the sweep: sbatch --array=1-9 slurm/")
    assert line.endswith("ENTITY/PROJECT/SWEEP_ID; wandb sweep FILE prints the last")


# A program that saves and waits for a file `go`. When it is told to stop, it exits with 75. When it
# is resumed, it finishes.
STOPS = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if sys.argv[-2] != "--resume":
    os.makedirs("runs/one")
    open("runs/one/checkpoint-1.pt", "w").close()
    print("saved", flush=True)
    while not os.path.exists("../../../../go"):
        time.sleep(0.02)
    sys.exit(1)
json.dump({"eval_return_mean": 1.0}, open(sys.argv[-1] + "/summary.json", "w"))
"""


def start(path):
    """Start a sweep of STOPS. Return its process and its attempt once the attempt has saved."""
    before = set(Path("runs").glob("sweep/*/attempt-*"))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "experiments" / "sweeps" / "run.py"), path, "--index", "0"],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (
        new := {
            log.parent
            for log in Path("runs").glob("sweep/*/*/log.txt")
            if "saved" in log.read_text()
        }
        - before
    ):
        time.sleep(0.01)
    return process, new.pop()


def test_a_configuration_resumes_its_last_saved_attempt_and_starts_no_other(write):
    path = write({"x": {"value": 1}})
    Path("train.py").write_text(STOPS)
    first, saved = start(path)
    # The same configuration, started again at the same time, has its own attempt.
    second, later = start(path)
    assert later != saved
    first.send_signal(signal.SIGUSR1)
    assert "error: interrupted" in first.communicate(timeout=PATIENCE)[1] and first.returncode == 75
    assert command(path, "--index", "0").returncode == 0
    (result,) = Path("runs/sweep").glob("*/result.json")
    assert json.loads(result.read_text())["attempt"] == saved.name
    assert sorted(result.parent.glob("attempt-*")) == sorted([saved, later])
    second.terminate()
    assert second.wait(PATIENCE) == 75 and not (later / "runs/one/summary.json").exists()


def test_the_page_has_the_table_of_metrics():
    page = (ROOT / "docs" / "sweeps.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(?: `(\S+)`)? \| \w", page, re.MULTILINE)
    assert {key: tag or None for key, tag in rows} == metrics.TAGS
