"""The offline sweep: W&B's configurations, once each, whatever is killed; and a table and a plot of
the results.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats as st
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from experiments.sweeps import configurations
from experiments.sweeps.distributions import DISTRIBUTIONS

from .patience import PATIENCE
from .scripts import ROOT, alive, children_of, environment

pytestmark = pytest.mark.long

# A program whose return is ten times x. It fails at x = 13, and at x = 99 it waits for a file `go`,
# but not for ever.
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
summary = {"eval_return_mean": 10 * x, "seed": int(flags.get("seed", 1)), "args": {}}
json.dump(summary, open("runs/one/summary.json", "w"))
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a sweep of PROGRAM, from YAML or with these keys, into the working
    directory.
    """
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
    # as W&B's own engine (PyPI's sweeps 0.3.0) lists it: by name, last name fastest, q_uniform
    # without its maximum
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
    # Not NumPy's, whose names would reach the flags.
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


# Those of github.com/wandb/sweeps, src/sweeps/config/schema.json; the package wandb itself has no
# list.
WANDB_HAS = """beta categorical categorical_w_probabilities constant int_uniform inv_log_uniform
inv_log_uniform_values log_normal log_uniform log_uniform_values normal q_beta q_log_normal
q_log_uniform q_log_uniform_values q_normal q_uniform uniform"""


def test_there_is_every_distribution_that_wandb_has():
    assert sorted(DISTRIBUTIONS) == WANDB_HAS.split()


def test_discrete_distributions(write):
    counts = np.unique_counts(draw(write, {"min": 3, "max": 6})).counts  # both ends belong to it
    assert len(counts) == 4 and st.chisquare(counts).pvalue > 0.01
    counts = np.unique_counts(draw(write, {"values": ["a", "b", "c"]})).counts
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
    # They are not both integers: uniform.
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
    assert lists[0] == lists[1] != lists[2] and f"x={five[3]['x']}" in lists[0].splitlines()[3]


X = {"x": {"values": [1, 2]}}
REFUSED = {
    "key early_terminate is not supported; supported: program, method,": (
        X,
        {"early_terminate": {"type": "hyperband"}},
    ),
    "key controller is not supported": (X, {"controller": {"type": "local"}}),
    "method bayes is not supported; supported: grid, random": (X, {"method": "bayes"}),
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
def test_what_is_not_supported_is_refused_by_name(says, write):
    parameters, keys = REFUSED[says]
    with pytest.raises(SystemExit) as refusal:
        load(write(parameters, **keys))
    assert (
        str(refusal.value).startswith("error: ")
        and says in str(refusal.value)
        and "\n" not in str(refusal.value)
    )


def test_mistakes_on_the_command_line_are_one_line(write):
    write(X)
    Path("broken.yaml").write_text("a: [1\nb: 2")
    cases = {
        "cannot read none.yaml: [Errno 2]": ["none.yaml"],
        "cannot read broken.yaml: while parsing": ["broken.yaml"],
        "--index must be from 0 to 1, got 2": ["sweep.yaml", "--index", "2"],
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
        metric={"name": "eval_return_mean"},
    )
    result = command(path)
    assert result.returncode == 0, result.stderr
    # W&B's default is to minimize.
    assert "6 of 6 have finished; best eval_return_mean 10: x=1 seed=1" in result.stdout
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
    assert command(path).stdout.count("has finished") == 6
    # a larger grid runs only what is new
    assert command(write({"x": {"values": [2, 3, 7]}, "seed": {"values": [1, 2]}})).returncode == 0
    assert len(attempts) == 6 and len(list(Path("runs/sweep").glob("*/attempt-*"))) == 8
    assert [float(row["eval_return_mean"]) for row in results()] == [20, 30, 70, 20, 30, 70]


def test_the_failed_are_named_and_run_again(write):
    path = write({"x": {"values": [1, 13, 2]}})
    for attempts in (1, 2):
        result = command(path)
        assert result.returncode == 1
        assert result.stderr.startswith(
            "error: configuration 1 ended with status 1; see runs/sweep/"
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


def test_what_a_random_sweep_draws_twice_is_run_and_collected_once(write):
    path = write({"x": {"values": [1, 2]}}, method="random", run_cap=8)
    drawn = [flat["x"] for flat in load(path)]
    second = drawn.index(drawn[0], 1)
    result = command(path, "--index", str(second))  # a task of an array, besides that of index 0
    assert (result.returncode, result.stdout) == (
        0,
        f"configuration {second} is the same as 0, which runs it: x={drawn[0]}\n",
    )
    result = command(path)
    assert result.returncode == 0 and "2 of 2 have finished" in result.stdout
    assert len(list(Path("runs/sweep").glob("*/attempt-*"))) == 2
    assert sorted(row["x"] for row in results()) == ["1", "2"]


def test_a_metric_that_runs_do_not_have_is_named(write):
    result = command(write({"x": {"value": 1}}, metric={"name": "eval/return_mean"}))
    assert result.returncode == 1
    assert (
        "has no metric eval/return_mean; its summary has: eval_return_mean, seed" in result.stderr
    )


def start_and_await_99(path):
    """Start a sweep; return its process and its run's pid once the run waits."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "experiments" / "sweeps" / "run.py"), path],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not any("x is 99" in log.read_text() for log in Path("runs").glob("sweep/*/*/log.txt")):
        time.sleep(0.01)
    (run,) = children_of(process.pid)
    return process, run


@pytest.mark.parametrize("victim", ["sweep", "run"])
def test_a_killed_sweep_goes_on_where_it_was(victim, write):
    path = write({"x": {"values": [1, 99, 2]}})
    process, run = start_and_await_99(path)
    if victim == "sweep":
        process.kill()
    os.kill(run, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    while alive(run):  # it is as good as dead
        time.sleep(0.01)
    assert victim == "sweep" or "configuration 1 ended with status -9" in errors
    finished = [line.split()[1] for line in command(path, "--list").stdout.splitlines()]
    assert finished == ["finished", "open", "open" if victim == "sweep" else "finished"]
    Path("go").touch()
    assert command(path).returncode == 0
    assert [float(row["eval_return_mean"]) for row in results()] == [10, 990, 20]
    assert sorted(
        Counter(path.parent for path in Path("runs/sweep").glob("*/attempt-*")).values()
    ) == [1, 1, 2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_sweep_that_is_asked_to_stop_stops_its_run_first(number, write):
    process, run = start_and_await_99(write({"x": {"values": [1, 99, 2]}}))
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143 and not alive(run)
    assert errors == "error: interrupted; what has finished is kept, start again to go on\n"
    assert [line.split()[1] for line in command("sweep.yaml", "--list").stdout.splitlines()] == [
        "finished",
        "open",
        "open",
    ]


def test_a_result_that_was_cut_off_is_no_result(write):
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


def test_the_real_script_is_swept(tmp_path):
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
    (summary,) = Path(row["directory"]).glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["args"].items() >= flags.items()


def test_the_projects_own_sweeps_load(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load("experiments/sweeps/sweep.yaml") == [
        {"kl_threshold": kl, "seed": seed} for kl in (0, 0.01, 0.05) for seed in (1, 2, 3)
    ]
    with pytest.raises(SystemExit, match="method bayes is not supported"):
        load("experiments/sweeps/sweep_bayes.yaml")


def test_job_files_are_bash():
    for path in (*(ROOT / "slurm").glob("*.sbatch"), *(ROOT / "slurm").glob("*.sh")):
        subprocess.run(["bash", "-n", path], check=True)


# A program that saves and waits for a file `go`; when told to stop, it exits with 75. The first
# one that is resumed finishes.
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
    """Start a sweep of STOPS; return its process and its attempt once the attempt has saved."""
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


def test_a_configuration_goes_on_with_the_last_attempt_that_has_saved_and_runs_no_more(write):
    path = write({"x": {"value": 1}})
    Path("train.py").write_text(STOPS)
    first, saved = start(path)
    # Of the same configuration, at the same time: an attempt of its own.
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
