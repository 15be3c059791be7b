"""The offline sweep as an array of jobs on a real Slurm cluster, submitted as a user submits it."""

import csv
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from ..patience import PATIENCE
from ..test_sweep import PROGRAM, STOPS
from . import lab

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def submit(slurm, tmp_path):
    """Return a function that submits the array file from a directory that looks like the
    repository's root.
    """
    for name in ("slurm", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    sweep = {"program": "train.py", "method": "grid", "parameters": {"x": {"values": [3, 5]}}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    path = f"{Path(sys.executable).parent}{os.pathsep}{slurm.env['PATH']}"

    def submit(program, *options, file="slurm/sweep_offline.sbatch"):
        (tmp_path / "train.py").write_text(program)
        (tmp_path / "mine.sbatch").write_text(
            (ROOT / "slurm" / "sweep_offline.sbatch")
            .read_text()
            .replace("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --export=NONE")
            .replace("launch=()", f"launch=()\nexport PATH={path}")
        )
        command = [*options, file, "sweep.yaml", "--output", "out"]
        return slurm.submit(*command, cwd=tmp_path, env={**slurm.env, "PATH": path})

    return submit


@pytest.mark.long
def test_the_file_submitted_without_an_array_submits_the_array(slurm, submit, tmp_path):
    (tmp_path / "logs").mkdir()
    options = [
        "--cpus-per-task=2",
        "--time=7",
        "--partition=urgent",
        "--mem=100",
        "--output=logs/mine-%j",
    ]
    first = submit(PROGRAM, *options, file="mine.sbatch")  # it does not export the environment
    slurm.wait(first)
    array, count = re.findall(r"\d+", (tmp_path / "logs" / f"mine-{first}").read_text())
    assert count == "2"
    tasks = slurm.wait(array)
    assert sorted(task["ArrayTaskId"] for task in tasks) == ["1", "2"]
    for job in tasks:
        assert (job["CPUs/Task"], job["Partition"], job["TimeLimit"]) == ("2", "urgent", "00:07:00")
        assert job["MinMemoryNode"] == "100M"
    with open(tmp_path / "out" / "results.csv") as file:
        rows = sorted((row["x"], row["eval_return_mean"]) for row in csv.DictReader(file))
    assert rows == [("3", "30.0"), ("5", "50.0")]
    # One log for each job.
    logs = {f"mine-{first}", f"mine-{array}_1", f"mine-{array}_2"}
    assert {path.name for path in (tmp_path / "logs").iterdir()} == logs
    assert slurm.run("scontrol", "-o", "show", "job").stdout.count(f" WorkDir={tmp_path} ") == 3
    again = submit(PROGRAM, "--array=1-2", "--output=again-%a")  # no task is left to run
    slurm.wait(again)
    assert all("2 of 2 done" in (tmp_path / f"again-{index}").read_text() for index in (1, 2))
    assert {log.read_text().count("x is") for log in (tmp_path / "out").glob("*/log.txt")} == {1}


@pytest.mark.long
def test_only_the_warned_task_is_requeued_and_continues(slurm, submit, tmp_path):
    array = submit(STOPS, "--array=1-2", "--output=%a")

    def saved():
        return [log for log in (tmp_path / "out").glob("*/log.txt") if "saved" in log.read_text()]

    lab.wait_for("both to save", PATIENCE, lambda: len(saved()) == 2)
    # The warned task is the one that shares the array's id.
    (warned,) = (task["ArrayTaskId"] for task in slurm.jobs(array) if task["JobId"] == array)
    slurm.run("scancel", "--batch", "--signal=TERM", f"{array}_{warned}")
    lab.wait_for(
        "it to end", PATIENCE, lambda: slurm.jobs(f"{array}_{warned}")[0]["JobState"] == "COMPLETED"
    )
    restarts = {task["ArrayTaskId"]: task["Restarts"] for task in slurm.jobs(array)}
    assert restarts == {warned: "1", str(3 - int(warned)): "0"}
    assert "requeued; it will go on from its last checkpoint" in (tmp_path / warned).read_text()
    (result,) = (tmp_path / "out").glob("*/result.json")
    assert (result.parent / "log.txt").read_text() == "saved\n"  # it did not begin again
    slurm.run("scancel", array)


def test_without_a_sweep_it_says_what_it_expects(slurm, tmp_path):
    job = slurm.submit(f"--output={tmp_path}/log", str(ROOT / "slurm" / "sweep_offline.sbatch"))
    slurm.wait(job, "FAILED")
    assert (tmp_path / "log").read_text().startswith("error: expected the sweep's file: sbatch")
