"""The figures' tables and plots, made from small logs in which every value is known."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from experiments.figures import collect, plot
from experiments.machine import here
from experiments.sweeps.sweep import load

from .scripts import ROOT

pytestmark = pytest.mark.long

STEPS = 1000  # steps of each run, logged every 10 steps: twice for each point of a curve


def write_run(directory, parameters):
    """Write the files of a finished run. Its return rises to 10 times its seed, and it pulls in
    each step.
    """
    logs = directory / "runs" / "one"
    writer = SummaryWriter(str(logs))
    for step in range(10, STEPS + 1, 10):
        if step > 300:  # until then, no episode has ended
            writer.add_scalar(
                "charts/episodic_return", 10 * parameters["seed"] * step / STEPS, step
            )
        logged = {"kl": 0.01 * step, "policy_lag": 2, "pulls_per_worker": step, "bytes": 4 * step}
        for tag, value in logged.items():
            writer.add_scalar(f"sync/{tag}", value, step)
    writer.close()
    args = {"env_id": "CartPole-v1", "weights": "float32"}
    args |= dict.fromkeys(("sync_interval", "max_policy_lag", "resume")) | parameters
    pulls = 1000.0 / parameters.get("sync_interval", 10 / 3)
    measured = {"global_step": STEPS, "wall_seconds": 1.5, "pulls_per_worker": pulls}
    measured |= {"sync_bytes": round(4 * pulls), "mean_return_100": 10.0 * parameters["seed"]}
    measured |= {"eval_return_mean": 7.0, "updates": 100}
    summary = {**measured, "worker_restarts": [], "args": {**args, "total_timesteps": STEPS}}
    result = {**summary, **here(), "run": "runs/one"}
    (directory / "result.json").write_text(json.dumps(result))


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """Return the paths of sweeps by divergence and by interval, in which all configurations but one
    have finished, and a function that runs a module's ``main``.
    """
    monkeypatch.chdir(ROOT)
    paths = {f"--{name}": tmp_path / name for name in ("sweeps", "runs", "results")}
    seeds = [1, 2, 3]
    swept = {
        "kl": {"kl_threshold": [0.1, 0.5], "decoupled": [True, False], "seed": seeds},
        "interval": {"sync_interval": [1, 4], "decoupled": [True], "seed": seeds},
    }
    paths["--sweeps"].mkdir()
    for name, values in swept.items():
        file = paths["--sweeps"] / f"{name}.yaml"
        values = {"sync_mode": [name], **values}
        parameters = {key: {"values": each} for key, each in values.items()}
        sweep = {"program": "ppo_clusterenv.py", "method": "grid", "parameters": parameters}
        file.write_text(yaml.safe_dump(sweep))
        sweep = load(file)
        unfinished = {"sync_mode": "kl", "kl_threshold": 0.5, "decoupled": True, "seed": 3}
        for each in sweep.grid():
            if each != unfinished:
                write_run(paths["--runs"] / name / sweep.name_of(each), each)

    def call(module, **options):
        words = [str(word) for pair in {**paths, **options}.items() for word in pair]
        monkeypatch.setattr("sys.argv", ["figures", *words])
        module.main()

    paths["--results"].mkdir()
    return paths, call


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_tables_hold_what_was_logged_and_keep_it_when_runs_are_gone(paths, capsys):
    paths, call = paths
    call(collect)
    runs, curves = (rows_of(paths["--results"] / f"{name}.csv") for name in ("runs", "curves"))
    assert (len(runs), len(curves)) == (17, 17 * collect.POINTS)
    assert "17 of 18 runs" in capsys.readouterr().out
    (run,) = (row for row in runs if (row["sync_interval"], row["seed"]) == ("4", "2"))
    command = "python ppo_clusterenv.py --decoupled=True --seed=2 --sync_interval=4"
    assert set(run["command"].split()) == {*command.split(), "--sync_mode=interval"}
    found = run["experiment"], run["pulls_per_worker"], run["mean_return_100"]
    assert found == ("interval", "250", "20")
    assert "torch" in run["software"] and "cores" in run["machine"]
    curve = [row for row in curves if row["run"] == run["run"]]
    assert [row["step"] for row in curve[:3]] == ["20", "40", "60"]
    # The means of steps 310 and 320, and of 330 and 340.
    assert [row["return"] for row in curve[13:17]] == ["", "", "6.3", "6.7"]
    assert curve[1]["kl"] == "0.35" and curve[1]["pulls"] == "40" and curve[1]["bytes"] == "160"

    before = contents(paths["--results"])
    call(collect)
    assert contents(paths["--results"]) == before
    shutil.rmtree(paths["--runs"] / "kl")
    (paths["--runs"] / "interval" / run["run"] / "result.json").unlink()
    call(collect)
    assert contents(paths["--results"]) == before
    (paths["--sweeps"] / "interval.yaml").unlink()
    call(collect)
    assert {row["experiment"] for row in rows_of(paths["--results"] / "runs.csv")} == {"kl"}
    assert "dropped 6" in capsys.readouterr().out


def test_plots_and_claims_are_correct_and_the_same_bytes_each_time(paths, tmp_path):
    paths, call = paths
    call(collect)
    shutil.copy(paths["--results"] / "runs.csv", tmp_path)
    outputs = tmp_path / "one", tmp_path / "two"
    del paths["--sweeps"], paths["--runs"]
    for output in outputs:
        output.mkdir()
        call(plot, **{"--output": output})
        for name in "claims.csv", "claims.md":
            shutil.copy(paths["--results"] / name, output)
    assert contents(outputs[0]) == contents(outputs[1])
    kinds = "learning_curves", "synchronization", "objectives", "frontier", "lag"
    assert set(contents(outputs[0])) == {
        "claims.csv",
        "claims.md",
        *(f"ppo_cartpole_v1_{kind}.png" for kind in kinds),
    }
    rows = {(row["setting"], row["against"]): row for row in rows_of(outputs[0] / "claims.csv")}
    row = rows["KL > 0.1", "every 4"]  # 300 pulls: close to 250, not to 1000
    found = row["matched"], row["seeds"], row["pulls"], row["pulls_against"]
    assert found == ("True", "3", "300", "250")
    assert rows["KL > 0.1", "always"]["times_fewer_pulls"] == "3.33333"
    # The points of seed 2: each is the mean of two logged values.
    points = [6.3, *(step / 50 - 0.1 for step in range(340, STEPS + 1, 20))]
    assert float(row["training"]) == pytest.approx(np.mean(points), rel=1e-3)
    assert row["training_difference"] == "0"
    half = rows["KL > 0.5", "always"]  # pairs: seeds 1 and 2, with returns 10 and 20
    found = half["seeds"], half["return"], half["return_difference"], half["return_low"]
    assert found == ("2", "15", "0", "nan")
    assert rows["KL > 0.5, plain", "KL > 0.5"]["seeds"] == "2"
    assert ("KL > 0.5", "KL > 0.5, plain") not in rows
    assert {row["held_out"] for row in rows.values()} == {"False"}
    text = (outputs[0] / "claims.md").read_text()
    pulls = "300.0 instead of 1000.0 | 3.3 times fewer"
    assert f"| PPO, CartPole-v1: KL > 0.5 | always | 2 | {pulls} | 15.0: +0.0 | 7.0: +0.0 |" in text


def test_the_plan_runs_nothing_twice_and_compares_settings_that_differ_in_their_rule(monkeypatch):
    monkeypatch.chdir(ROOT)
    seen, seeds, always, others = set(), {}, {}, {}
    recipes = Path("experiments", "figures", "recipes")
    for path in recipes.glob("main/*.yaml"):
        sweep = load(path)
        for each in sweep.grid():
            key = json.dumps([sweep.program, sorted((k, str(value)) for k, value in each.items())])
            assert key not in seen, path
            seen.add(key)
            task = sweep.program, each["env_id"]
            other = {key: each[key] for key in each if key not in collect.SETTINGS}
            assert other == others.setdefault(task, other), path
            seeds.setdefault(task, set()).add(each["seed"])
            if each.get("sync_interval") == 1:
                always.setdefault(task, []).append(each["seed"])
    assert seeds
    for task in seeds:
        assert sorted(always[task]) == sorted(seeds[task]) == list(range(1, 11))
