"""The figures as arrays of jobs, submitted as a user submits them, on a real Slurm cluster."""

import csv
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from ..scripts import PPO, TINY
from .test_sweep_array import ROOT

pytestmark = pytest.mark.long


def test_arrays_of_all_sweeps_and_then_the_tables_and_figures(slurm, tmp_path):
    for name in ("slurm", "clusterenv_runtime", "clusterenv_utils", "tools", "ppo_clusterenv.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    figures = tmp_path / "experiments" / "figures"
    recipes, results = figures / "recipes", figures / "results" / "main"
    for folder in (recipes / "main", results):
        folder.mkdir(parents=True)
    for name in ("sweeps", "machine.py"):
        (tmp_path / "experiments" / name).symlink_to(ROOT / "experiments" / name)
    for path in (ROOT / "experiments" / "figures").glob("*.py"):
        shutil.copy(path, figures)
    command = ["${interpreter}", "${program}", *TINY[PPO], "--total-timesteps", "128", "${args}"]
    modes = {"kl": {"sync_mode": {"value": "kl"}}, "interval": {"sync_mode": {"value": "interval"}}}
    modes["interval"]["sync_interval"] = {"value": 1}
    for mode, parameters in modes.items():
        sweep = {"program": "ppo_clusterenv.py", "method": "grid", "command": command}
        sweep["parameters"] = {
            **parameters,
            "kl_threshold": {"value": 0.1},
            "seed": {"values": [1, 2]},
        }
        (recipes / "main" / f"{mode}.yaml").write_text(yaml.safe_dump(sweep))
    env = {**slurm.env, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{slurm.env['PATH']}"}
    options = ["--partition=urgent", "--cpus-per-task=1", "--output=log-%j"]
    first = slurm.submit(*options, "slurm/figures.sbatch", cwd=tmp_path, env=env)
    slurm.wait(first)
    said = (tmp_path / f"log-{first}").read_text()
    arrays, (drawing,) = (
        re.findall(r"array (\d+) runs the 2 configurations of", said),
        re.findall(r"job (\d+)", said),
    )
    assert len(arrays) == 2
    for job in (*arrays, drawing):
        assert {task["Partition"] for task in slurm.wait(job)} == {"urgent"}
    with open(results / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["experiment"], row["seed"], row["global_step"]) for row in rows] == [
        (mode, seed, "128") for mode in ("interval", "kl") for seed in "12"
    ]
    assert (results / "ppo_cartpole_v1_frontier.png").exists()
