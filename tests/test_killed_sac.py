"""A run of SAC that is killed and resumed with other workers."""

import random
import signal
import subprocess
import sys
import time

import pytest

from clusterenv_utils.checkpoint import load_checkpoint

from . import scripts

SCRIPT = "scripts/sac_clusterenv.py"
ENV_ID = ["--env-id", "tests.algorithms.toys:Corridor-box-v0"]
FLAGS = (
    "--num-workers 2 --num-envs 4 --num-steps 5 --learning-starts 20 --batch-size 8 --utd 0.5 "
    "--sync-check-frequency 10 --kl-threshold 1e-4 --policy-lr 0.01 --eval-episodes 2"
)


def gradient_steps_of(folder):
    """Return the gradient steps of the newest checkpoint, or 0 if there is none."""
    saved = any(folder.glob("checkpoint-*.pt")) and load_checkpoint(folder)
    return saved["parts"]["count"]["gradient_steps"] if saved else 0


@pytest.mark.long
def test_kill_at_random_moments_and_resume_with_other_workers(tmp_path):
    total, moment, folder = 8000, random.Random(1), tmp_path / "runs" / "x"
    flags = [*ENV_ID, *FLAGS.split(), "--total-timesteps", str(total), "--buffer-size", "8000"]
    flags += ["--checkpoint-interval", "0.1", "--run-name", "x"]
    for workers in "4", "1", "2":
        before = gradient_steps_of(folder)
        process = subprocess.Popen(
            [sys.executable, str(scripts.ROOT / SCRIPT), *flags], cwd=tmp_path,
            env=scripts.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while gradient_steps_of(folder) == before:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(moment.random() / 4)
        process.kill()
        assert (process.communicate()[1], process.returncode) == ("", -signal.SIGKILL)
        step = load_checkpoint(folder)["global_step"]
        assert before < gradient_steps_of(folder) == (step - 20) // 2 < (total - 20) // 2
        flags = [*ENV_ID, "--resume", "runs/x", "--num-workers", workers]
    _, summary = scripts.train(SCRIPT, tmp_path, *flags)
    # A chunk of one of two workers has ten steps, and the last chunk need not be whole.
    assert total - 10 < summary["global_step"] <= total
    assert summary["gradient_steps"] == (summary["global_step"] - 20) // 2
