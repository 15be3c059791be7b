"""Sweeps: each configuration runs once, several at a time and in several processes, whatever is
killed, and the results are in a table.
"""

import csv
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from experiments.sweeps.sweep import load

from .patience import PATIENCE, assert_ended, wait_until
from .scripts import ROOT, alive, children_of, environment

pytestmark = pytest.mark.long

# A program whose return is ten times x, and None at x = 0. It fails at x = 13, and at x = 99 it
# waits for a file `go`, for at most an hour.
PROGRAM = """
import json, os, sys, time
flags = dict(word.lstrip("-").split("=") for word in sys.argv[1:])
x, start = float(flags["x"]), time.time()
print("x is", x, "in", os.environ["WANDB_MODE"], "mode", flush=True)
while x == 99 and time.time() < start + 3600 and not os.path.exists("../../../go"):
    time.sleep(0.02)
if x == 13:
    sys.exit("error: out of luck")
os.makedirs("runs/one")
summary = {"eval_return_mean": 10 * x or None, "seed": int(flags.get("seed", 1)), "args": {}}
json.dump(summary, open("runs/one/summary.json", "w"))
"""
# A program that saves and waits for a file `go`. When it is told to stop, it exits with 75. When it
# is resumed, it finishes.
STOPS = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if sys.argv[-2] != "--resume":
    os.makedirs("runs/one")
    open("runs/one/checkpoint-1.pt", "w").close()
    print("saved", flush=True)
    while not os.path.exists("../../../go"):
        time.sleep(0.02)
    sys.exit(1)
json.dump({"eval_return_mean": 1.0}, open(sys.argv[-1] + "/summary.json", "w"))
"""
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
X = {"x": {"values": [1, 2]}}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a sweep of a program into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(parameters, text=PROGRAM, **keys):
        Path("train.py").write_text(text)
        keys = {"program": "train.py", "method": "grid", "parameters": parameters, **keys}
        Path("sweep.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
        return Path("sweep.yaml")

    return write


def start(*flags):
    command = [
        sys.executable,
        str(ROOT / "experiments" / "sweeps" / "run.py"),
        "sweep.yaml",
        *flags,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True)


def end_of(process):
    """Return a sweep's exit code, output and errors."""
    output, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, output, errors


def sweep(*flags):
    return end_of(start(*flags))


def logs():
    return {path.parent: path.read_text() for path in Path("runs").glob("sweep/*/log.txt")}


def start_and_await(text, number=1):
    """Start a sweep of ``number`` runs at once. Return its process and its runs' pids once each
    run's log has ``text``.
    """
    process = start("--jobs", str(number))
    wait_until(lambda: sum(text in log for log in logs().values()) == number)
    return process, children_of(process.pid)


def results():
    with open("runs/sweep/results.csv") as file:
        return list(csv.DictReader(file))


def returns():
    return [float(row["eval_return_mean"]) for row in results()]


def test_a_grid_is_every_combination_in_wandbs_order(write):
    # In the order of W&B's own engine (sweeps 0.3.0 on PyPI): by name, the last name fastest.
    parameters = {"seed": {"values": [1, 2]}, "env_id": {"value": "X"}, "b": {"values": [4, 3]}}
    found = load(write(parameters)).grid()
    assert found == [{"seed": s, "env_id": "X", "b": b} for b in (4, 3) for s in (1, 2)]
    assert load(write(parameters, run_cap=3)).grid() == found[:3]


def test_arguments_are_spelled_as_wandb_spells_them(write):
    parameters = {"list": [1, "x"], "lr": 0.001, "n": 3, "none": None, "off": False, "on": True}
    command = ["${env}", "${interpreter}", "${program}", "--track", "${args}"]
    keys = {name: {"value": value} for name, value in parameters.items()}
    sweep = load(write(keys, command=command))
    theirs = create_sweep_command_args({"args": keys})["args"]
    words = sweep.words(*sweep.grid(), "python", "train.py")
    assert words == ["python", "train.py", "--track", *theirs]


RANDOM = {"method": "random", "run_cap": 2}
REFUSED = {
    "unknown field `early_terminate`": (X, {"early_terminate": {"type": "hyperband"}}),
    "'best' - at `$.method`": (X, {"method": "best"}),
    "method bayes needs run_cap": (X, {"method": "bayes"}),
    "unknown field `target` - at `$.metric`": (X, {"metric": {"name": "a", "target": 1}}),
    "no program other.py in /": (X, {"program": "other.py"}),
    "parameter x: method grid takes value or values, got {'min': 1, ": (
        {"x": {"min": 1, "max": 2}},
        {},
    ),
    "parameter x: The `choices` must contain": ({"x": {"values": []}}, {}),
    "uniform or log_uniform_values, got {'distribution': 'normal'": (
        {"x": {"distribution": "normal", "min": 1, "max": 2}},
        RANDOM,
    ),
    "parameter x: expected value, values, or": ({"x": {"min": 1}}, RANDOM),
    "got {'min': '1e-3', 'max': 1}": ({"x": {"min": "1e-3", "max": 1}}, RANDOM),
    "parameter x: `low <= high` must hold": ({"x": {"min": 2, "max": 1}}, RANDOM),
}


TEXTS = {"while parsing a flow sequence": "a: [1\nb: 2", "got `array`": "- program"}


@pytest.mark.parametrize("says", [*REFUSED, *TEXTS])
def test_a_mistake_in_the_file_is_one_line(says, write):
    parameters, keys = REFUSED.get(says, (X, {}))
    path = write(parameters, **keys)
    if says in TEXTS:
        path.write_text(TEXTS[says])
    with pytest.raises(SystemExit) as refusal:
        load(path)
    assert str(refusal.value).startswith("error: sweep.yaml: ")
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_all_run_once_and_their_results_are_collected(write):
    metric = {"name": "eval_return_mean"}  # W&B's default is to minimize
    write({"x": {"values": [3, 1, 2]}, "seed": {"values": [1, 2]}}, metric=metric)
    assert sweep("--count") == (0, "6\n", "")
    code, output, errors = sweep("--jobs", "2")
    assert (code, errors) == (0, "")
    last = "6 of 6 done; best eval_return_mean 10: {'x': 1, 'seed': 1}"
    assert output.splitlines()[-1] == f"{last}; 0 failed"
    assert sorted(returns()) == [10, 10, 20, 20, 30, 30]
    row = next(row for row in results() if (row["x"], row["seed"]) == ("3", "2"))
    assert row["eval_return_mean"] == "30.0" and Path(row["run"], "summary.json").exists()
    assert Path(row["run"], "../../log.txt").read_text() == "x is 3.0 in offline mode\n"
    assert sweep() == (0, f"{last}; 0 failed\n", "") and sweep("--count") == (0, "0\n", "")
    shutil.rmtree(Path(row["run"]).parents[1])
    assert sweep("--count") == (0, "1\n", "")
    # A larger grid runs only the new configurations, and the one that is gone.
    write({"x": {"values": [2, 3, 7]}, "seed": {"values": [1, 2]}})
    assert sweep("--one")[0] == sweep()[0] == 0
    assert len(logs()) == 8 and all(log.count("x is") == 1 for log in logs().values())
    assert sorted(returns()) == [20, 20, 30, 30, 70, 70]


def test_failed_configurations_are_named_and_run_again(write):
    write({"x": {"values": [1, 13, 2]}})
    for attempts in (1, 2):
        code, output, errors = sweep()
        assert code == 1
        assert errors.startswith("error: {'x': 13} ended with status 1: out of luck; see ")
        log = Path(errors.split("see ")[1].strip()).read_text()
        assert log.count("out of luck") == attempts
        assert output.endswith("2 of 3 done; best eval_return_mean 20: {'x': 2}; 1 failed\n")
    assert sorted(returns()) == [10, 20] and sweep("--count")[1] == "1\n"


def test_a_sweep_ends_at_the_first_run_that_lacks_the_metric(write):
    write({"x": {"values": [1, 2, 3]}}, metric={"name": "luck"})
    code, _, errors = sweep("--jobs", "1")
    assert (code, len(logs())) == (1, 1)
    assert errors.startswith("error: no luck in runs/sweep/")
    assert "; it has eval_return_mean, seed, args, " in errors
    # Its result is kept for another metric.
    write({"x": {"values": [1, 2, 3]}}, metric={"name": "seed"})
    assert sweep()[0] == 0 and all(log.count("x is") == 1 for log in logs().values())


@pytest.mark.parametrize("word", ["None", "float('nan')"])
def test_a_return_that_is_not_a_number_is_in_the_table_and_never_the_best(word, write):
    write({"x": {"values": [0, 1]}}, PROGRAM.replace("or None", f"or {word}"))
    code, output, errors = sweep()
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1] == "2 of 2 done; best eval_return_mean 10: {'x': 1}; 0 failed"
    assert [row["eval_return_mean"] for row in results()] == [{"None": ""}.get(word, "nan"), "10.0"]
    assert sweep("--count")[1] == "0\n"


def test_two_processes_share_the_work(write):
    write({"x": {"values": [1, 2, 3, 4]}})
    both = [start("--jobs", "1"), start("--jobs", "1")]
    begun = [output.count("runs/sweep/") for _, output, _ in map(end_of, both)]
    assert [process.returncode for process in both] == [0, 0] and sum(begun) == len(results()) == 4


@pytest.mark.parametrize("victim", ["sweep", "run"])
def test_a_killed_sweep_goes_on_where_it_was(victim, write):
    write({"x": {"values": [1, 99, 2]}})
    process, (run,) = start_and_await("x is 99")
    os.kill(process.pid if victim == "sweep" else run, signal.SIGKILL)
    code, _, errors = end_of(process)
    assert code == (-9 if victim == "sweep" else 1)
    assert_ended([run])  # also if only the sweep was killed
    assert victim == "sweep" or errors.startswith(
        "error: {'x': 99} ended with status -9: x is 99.0"
    )
    Path("go").touch()
    assert sweep()[0] == 0
    assert sorted(returns()) == [10, 20, 990]
    assert sorted(log.count("x is") for log in logs().values()) == [1, 1, 2]


def test_another_process_takes_over_from_one_that_was_killed(write):
    write({"x": {"value": 99}})
    killed, (run,) = start_and_await("x is 99")
    other = start()
    os.kill(killed.pid, signal.SIGKILL)
    end_of(killed)
    assert_ended([run])
    Path("go").touch()
    assert end_of(other)[0] == 0 and returns() == [990]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_asked_to_stop_stops_its_runs_first(number, write):
    write({"x": {"value": 99}, "seed": {"values": [1, 2, 3]}})
    process, runs = start_and_await("x is 99", number=2)
    process.send_signal(number)
    code, _, errors = end_of(process)
    assert code == 143 and not any(map(alive, runs)) and len(runs) == 2
    assert errors == "stopping 2 runs; a second Ctrl-C ends them now\n"
    assert sweep("--count")[1] == "3\n"


def test_a_ctrl_c_before_all_is_imported_is_one_line(write):
    write(X)
    process = start()
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "msgspec" in maps.read_text())  # which the sweep imports before Optuna
    process.send_signal(signal.SIGINT)
    stopped = "stopping 0 runs; a second Ctrl-C ends them now\n"
    assert end_of(process) == (143, "0 of 2 done; 0 failed\n", stopped)


def test_an_interrupted_configuration_resumes(write):
    write({"x": {"value": 1}}, STOPS)
    process, _ = start_and_await("saved")
    process.send_signal(signal.SIGTERM)
    assert end_of(process)[0] == 75
    assert sweep("--one")[0] == 0 and returns() == [1]
    assert list(logs().values()) == ["saved\n"]  # it did not begin again


def test_a_second_ctrl_c_ends_runs_that_do_not_stop(write):
    write({"x": {"value": 1}}, STUBBORN)
    process, (run,) = start_and_await("stubborn\nstubborn")
    pids = [run, *children_of(run)]
    assert len(pids) == 2
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "told" in "".join(logs().values()))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert end_of(process)[0] == 143
    assert_ended(pids)


def test_random_draws_follow_their_distributions_and_do_not_change(write):
    parameters = {
        "x": {"distribution": "log_uniform_values", "min": 1e-3, "max": 10},
        "seed": {"min": 1, "max": 9},
        "word": {"values": [True, "b"]},
        "u": {"min": 0, "max": 2.5},
    }
    drawn = []
    for cap in (5, 12):
        write(parameters, method="random", run_cap=cap)
        code, output, _ = sweep("--jobs", "4")
        assert code == 0 and f"{cap} of {cap} done; best" in output
        drawn.append({tuple(row[name] for name in parameters) for row in results()})
    assert drawn[0] < drawn[1] and len(drawn[1]) == 12
    x, seed, word, u = zip(*drawn[1], strict=True)
    assert 1e-3 <= min(map(float, x)) < 0.1 < max(map(float, x)) <= 10
    assert set(seed) <= set("123456789") and len(set(seed)) > 3 and set(word) == {"True", "b"}
    assert 0 <= min(map(float, u)) < 1 < 1.5 < max(map(float, u)) <= 2.5


def test_a_configuration_that_is_drawn_twice_runs_once(write):
    write({"x": {"values": [1, 99]}}, method="random", run_cap=8)
    process, _ = start_and_await("x is ", number=2)
    Path("go").touch()
    assert end_of(process)[0] == 0  # what is drawn again while it runs is left for later
    assert "8 of 8 done" in sweep()[1]
    assert sorted(returns()) == [10, 990] and all(log.count("x is") == 1 for log in logs().values())


def test_bayes_comes_closer_to_the_best_than_chance(write):
    program = PROGRAM.replace("10 * x or None", "-abs(x - 7)")
    write({"x": {"min": 0.0, "max": 10.0}}, program, method="bayes", run_cap=30)
    assert sweep("--jobs", "3")[::2] == (0, "")
    distances = [abs(float(row["x"]) - 7) for row in results()]
    assert statistics.median(distances[15:]) < 1.3  # by chance 2.5


def test_a_sweep_of_the_real_script(tmp_path):
    flags = {"env_id": "CartPole-v1", "envs_per_worker": 2, "num_steps": 16, "num_minibatches": 2}
    flags |= {"eval_episodes": 2, "total_timesteps": 320, "anneal_lr": False, "overlap": True}
    parameters = {name: {"value": value} for name, value in flags.items()}
    file = {"program": "ppo_clusterenv.py", "method": "grid"}
    file["parameters"] = {"kl_threshold": {"values": [0.01]}, **parameters}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(file))
    run = [sys.executable, "experiments/sweeps/run.py", f"{tmp_path}/sweep.yaml"]
    subprocess.run([*run, "--output", f"{tmp_path}/out"], cwd=ROOT, check=True)
    with open(tmp_path / "out" / "results.csv") as table:
        (row,) = csv.DictReader(table)
    assert (row["kl_threshold"], row["global_step"]) == ("0.01", "320")
    assert float(row["eval_return_mean"]) > 0
    summary = json.loads(Path(row["run"], "summary.json").read_text())
    assert summary["args"].items() >= flags.items()


def test_all_sweeps_of_this_repository_load(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = {path: load(path) for path in Path("experiments").glob("**/*.yaml")}
    assert found[Path("experiments/sweeps/sweep_bayes.yaml")].run_cap == 32
    assert len(found[Path("experiments/sweeps/sweep.yaml")].grid()) == 9
