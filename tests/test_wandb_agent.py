"""W&B's own `wandb sweep` and `wandb agent` run the scripts, with a stand-in for W&B's server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from . import wandb_server
from .scripts import ROOT, environment

pytestmark = pytest.mark.long

WANDB = str(Path(sys.executable).parent / "wandb")
TINY = {
    "env_id": "CartPole-v1",
    "envs_per_worker": 2,
    "num_steps": 16,
    "num_minibatches": 2,
    "eval_episodes": 2,
}
# The numbers in the summaries of all scripts, and their tags in TensorBoard.
TAGS = {
    "eval_return_mean": "eval/return_mean",
    "mean_return_100": "charts/mean_return_100",
    "pulls_per_worker": "sync/pulls_per_worker",
    "sync_bytes": "sync/bytes",
    "sps": "charts/SPS",
}


def wandb(server, directory, *arguments):
    # W&B's interpreter is the first python in this path
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = environment(PATH=path, **server.environment(directory))
    env.pop("WANDB_SILENT")
    result = subprocess.run(
        [WANDB, *arguments], cwd=directory, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize("name", ["sweep", "sweep_bayes"])
def test_wandb_takes_the_projects_sweeps(name, tmp_path):
    with wandb_server.serve() as server:
        result = wandb(
            server, tmp_path, "sweep", str(ROOT / "experiments" / "sweeps" / f"{name}.yaml")
        )
        assert f"wandb agent {wandb_server.SWEEP}" in result.stderr
        assert server.config == yaml.safe_load(
            (ROOT / "experiments" / "sweeps" / f"{name}.yaml").read_text()
        )


def test_an_agent_runs_the_script_and_its_flags_arrive(tmp_path):
    flags = {
        **TINY,
        "total_timesteps": 320,
        "kl_threshold": 0.02,
        "anneal_lr": False,
        "overlap": True,
    }
    config = yaml.safe_load((ROOT / "experiments" / "sweeps" / "sweep.yaml").read_text())
    config |= {"program": str(ROOT / "ppo_clusterenv.py")}
    config |= {"parameters": {name: {"value": value} for name, value in flags.items()}}
    with wandb_server.serve(config) as server:
        # The agent also ends when no configuration is left.
        wandb(server, tmp_path, "agent", "--count", "2", wandb_server.SWEEP)
        assert (server.given, server.agents) == (1, 1)
        assert set(server.operations) == {"Viewer", "SweepWithRuns", "CreateAgent", "Heartbeat"}
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["args"].items() >= {**flags, "track": True}.items()
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = log.read_bytes()  # W&B knows each metric by both of its names
    assert all(name.encode() in logged for pair in TAGS.items() for name in pair)


@pytest.mark.parametrize("arguments", [[], ["experiments/sweeps/sweep.yaml"]])
def test_a_job_of_wandbs_agent_needs_a_sweep_and_not_a_file(arguments):
    command = ["bash", "slurm/sweep.sbatch", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: expected one argument, the sweep: sbatch --array=1-9 slurm/")
    assert line.endswith("ENTITY/PROJECT/SWEEP_ID; wandb sweep FILE prints the last")
