"""The offline sweep as an array of jobs, submitted as a user submits it, on a real Slurm."""

import csv
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from . import lab

ROOT = Path(__file__).resolve().parents[2]
TINY = {"env_id": "CartPole-v1", "envs_per_worker": 2, "num_steps": 16, "num_minibatches": 2, "eval_episodes": 2}


@pytest.fixture
def submit(slurm, tmp_path):
    """A function that submits the array file from the repository's root, with a tiny sweep of the real script."""
    values = {"kl_threshold": {"values": [0.001, 0.1]}, **{name: {"value": value} for name, value in TINY.items()}}
    values["total_timesteps"] = {"value": 320}
    sweep = {"program": "ppo_clusterenv.py", "method": "grid", "parameters": values}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    python = str(Path(sys.executable).parent)
    env = {**slurm.env, "PATH": f"{python}{os.pathsep}{slurm.env['PATH']}"}

    def submit(*options):
        where = f"--output={tmp_path}/%A_%a.out"
        script = [
            *options,
            "slurm/sweep_offline.sbatch",
            str(tmp_path / "sweep.yaml"),
            "--output",
            str(tmp_path / "out"),
        ]
        return slurm.submit(where, *script, cwd=ROOT, env={**env, "SBATCH_OUTPUT": f"{tmp_path}/%A_%a.out"})

    return submit


def test_submitted_alone_it_submits_the_array_and_the_collection(slurm, submit, tmp_path):
    first = submit("--cpus-per-task=2", "--time=7", "--partition=urgent")
    slurm.wait(first)
    (log,) = tmp_path.glob(f"{first}_*.out")
    array, count, results = re.findall(r"\d+", log.read_text())
    assert count == "2"
    (collection,) = slurm.jobs(results)
    assert collection["Dependency"].startswith(f"afterany:{array}") and collection["TimeLimit"] == "00:07:00"
    tasks = slurm.wait(array, seconds=100)
    assert sorted(task["ArrayTaskId"] for task in tasks) == ["0", "1"]
    assert {(task["CPUs/Task"], task["Partition"], task["TimeLimit"]) for task in tasks} == {
        ("2", "urgent", "00:07:00")
    }
    slurm.wait(results)
    with open(tmp_path / "out" / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["index"], row["kl_threshold"], row["global_step"]) for row in rows] == [
        ("0", "0.001", "320"),
        ("1", "0.1", "320"),
    ]
    assert (tmp_path / "out" / "results.png").exists()
    again = submit("--array=0-1")  # there is nothing left to run
    slurm.wait(again)
    assert all("has finished" in log.read_text() for log in tmp_path.glob(f"{again}_*.out"))
    assert len(list((tmp_path / "out").glob("*/attempt-*"))) == 2


def test_a_requeued_task_runs_its_configuration_again(slurm, submit, tmp_path):
    task = submit("--array=1")
    slurm.wait(task, "RUNNING")
    lab.wait_for("the attempt", 60, lambda: list((tmp_path / "out").glob("*/attempt-*")))
    slurm.run("scontrol", "requeue", f"{task}_1")
    (part,) = slurm.wait(task, seconds=100)
    assert part["Restarts"] == "1"
    (result,) = (tmp_path / "out").glob("*/result.json")
    assert len(list(result.parent.glob("attempt-*"))) == 2


def test_without_a_sweep_it_says_what_it_expects(slurm, tmp_path):
    job = slurm.submit(f"--output={tmp_path}/log", str(ROOT / "slurm" / "sweep_offline.sbatch"))
    slurm.wait(job, "FAILED")
    assert (tmp_path / "log").read_text().startswith("error: expected the sweep's file: sbatch")
