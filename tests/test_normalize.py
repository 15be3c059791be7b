"""The normalization of continuous PPO, over whole runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from clusterenv_utils.checkpoint import load_checkpoint
from clusterenv_utils.trained import load_model

from . import scripts
from .patience import PATIENCE, wait_until
from .scripts import ROOT, environment, workers_of

SCRIPT = "scripts/ppo_continuous_clusterenv.py"


def keeping_what_it_saw(directory):
    """Write a copy of the script that also saves each rollout's observations."""
    text = (ROOT / SCRIPT).read_text()
    update = "            obs_moments.update("
    assert text.count(update) == 1
    keep = (
        "            np.savez(f'{run.path}/seen-{run.global_step:09d}', "
        "rollout=rollout.observations)\n"
    )
    (directory / Path(SCRIPT).name).write_text(text.replace(update, keep + update))


def moments_of(folder):
    """Return a run's last checkpoint, and float64 moments of all observations up to it."""
    state = load_checkpoint(folder)
    files = [
        path for path in sorted(folder.glob("seen-*")) if int(path.stem[5:]) <= state["global_step"]
    ]
    seen = np.concatenate([np.load(path)["rollout"].reshape(-1, 3) for path in files]).astype(
        np.float64
    )
    assert len(seen) == state["global_step"]
    return state, seen.mean(0), seen.var(0)


def check_moments(folder):
    state, mean, var = moments_of(folder)
    kept = state["parts"]["obs_moments"]
    assert kept["count"] == state["global_step"]
    np.testing.assert_allclose(kept["mean"].numpy(), mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(kept["var"].numpy(), var, rtol=1e-9, atol=1e-9)
    agent = state["parts"]["agent"]
    np.testing.assert_array_equal(agent["normalize.mean"].numpy(), kept["mean"].float().numpy())
    np.testing.assert_allclose(agent["normalize.scale"].numpy(), 1 / np.sqrt(var + 1e-8), rtol=1e-6)
    model = load_model(folder / "ppo_continuous_clusterenv.cleanrl_model")["model"]
    assert all(torch.equal(model[name], agent[name]) for name in agent)
    return state


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [1, 4])
def test_it_normalizes_by_all_observations_even_after_kills_and_a_resume(tmp_path, num_workers):
    keeping_what_it_saw(tmp_path)
    flags = [
        *scripts.TINY[SCRIPT],
        "--num-workers",
        str(num_workers),
        "--run-name",
        "x",
        "--max-worker-restarts",
        "9",
    ]
    folder, batch = tmp_path / "runs" / "x", 32 * num_workers
    command = [sys.executable, Path(SCRIPT).name]
    process = subprocess.Popen(
        [*command, *flags, "--total-timesteps", str(10**6 * batch)], cwd=tmp_path,
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def rollouts():
        return len(list(folder.glob("seen-*")))

    for seen in (3, 8):
        wait_until(lambda seen=seen: rollouts() >= seen or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        os.kill(max(workers_of(process.pid).values()), signal.SIGKILL)
    wait_until(lambda: rollouts() >= 14)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert "interrupted; to resume" in errors and errors.count("another is started") == 2
    step = check_moments(folder)["global_step"]
    resumed = [*command, "--resume", "runs/x", "--total-timesteps", str(step + 5 * batch)]
    subprocess.run(
        resumed, cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=PATIENCE
    )
    assert check_moments(folder)["global_step"] == step + 5 * batch
    assert json.loads((folder / "summary.json").read_text())["eval_return_mean"] < 0
