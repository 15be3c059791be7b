"""A W&B sweep as an array of jobs on a real Slurm cluster: each task runs the configuration that
the (stand-in) server gives its agent.
"""

import os
import sys
from pathlib import Path

import pytest

from .. import wandb_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_each_task_runs_one_configuration(slurm, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys; open(f'ran-{os.environ[\"SLURM_ARRAY_TASK_ID\"]}', 'x').write(sys.argv[1])"
    )
    config = {"program": "train.py", "method": "grid", "parameters": {"x": {"values": [5, 6]}}}
    with wandb_server.serve(config) as server:
        path = f"{Path(sys.executable).parent}{os.pathsep}{slurm.env['PATH']}"
        env = {**slurm.env, **server.environment(tmp_path), "WANDB_MODE": "offline", "PATH": path}
        script = [str(ROOT / "slurm" / "sweep.sbatch"), wandb_server.SWEEP]
        tasks = slurm.wait(slurm.submit("--array=1-2", *script, cwd=tmp_path, env=env))
        assert len(tasks) == 2 and server.agents == 2
    assert sorted(path.read_text() for path in tmp_path.glob("ran-*")) == ["--x=5", "--x=6"]


def test_without_a_sweep_it_says_what_it_expects(slurm, tmp_path):
    job = slurm.submit(f"--output={tmp_path}/log", str(ROOT / "slurm" / "sweep.sbatch"))
    slurm.wait(job, "FAILED")
    assert (
        (tmp_path / "log").read_text().startswith("error: expected one argument, the sweep: sbatch")
    )
