"""Small runs of all benchmarks, so that no change of the runtime breaks a benchmark unnoticed."""

import subprocess
import sys

import pytest

from . import scripts
from .patience import PATIENCE

SMALL = {
    "collection": "--num-rollouts 1 --rounds 1 --num-steps 8",
    "recovery": "--kills 1 --pause 0.5",
    "rows": "--env-ids CartPole-v1 --workers 2 --num-envs 4 --num-steps 4 --rollouts 2 --seeds 1",
    "scale": "--workers 2 --seconds 0.1 --storms 1 --out .",
    "steps": "--steps 1 --rounds 1 --scripts ppo --no-compile",
    "straggler": "--delay 0.001 --seconds 0.2",
    "transport": "--seconds 0.05 --rounds 1",
}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name, tmp_path):
    command = [sys.executable, "-m", f"experiments.benchmarks.{name}", *SMALL[name].split()]
    result = subprocess.run(
        command, cwd=tmp_path, env=scripts.environment(), capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert result.returncode == 0 and result.stdout, result.stderr
