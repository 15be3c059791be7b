"""Directories whose names are not UTF-8, and an output that cannot encode a run's name."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .scripts import PPO, ROOT, TINY, environment

pytestmark = pytest.mark.long

ODD = os.fsdecode(b"not-utf8-\xff")

# The environments' class is in a module beside the program, so workers must look there.
PROGRAM = """
import sys
import torch
from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from beside import BesideEnv

def main():
    address = sys.argv[1] or None
    with ClusterEnv([BesideEnv] * 2, 2, bind_address=address) as envs:
        envs.reset()
        policy = CategoricalPolicy(torch.nn.Linear(1, 2))
        print(envs.rollout(policy, 3).rewards.tolist())

if __name__ == "__main__":
    main()
"""
BESIDE = """
from tests.envs import CountingEnv

class BesideEnv(CountingEnv):
    pass
"""


@pytest.fixture
def odd():
    # A short path, because a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent, ODD)
        directory.mkdir()
        yield directory


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_temporary_files_and_modules_may_be_in_a_directory_of_any_name(odd, address):
    (odd / "program.py").write_text(PROGRAM)
    (odd / "beside.py").write_text(BESIDE)
    command = [sys.executable, odd / "program.py", address]
    variables = environment(PYTHONPATH=str(ROOT), TMPDIR=str(odd))
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert result.stdout == "[[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]\n", result.stderr


def test_a_run_whose_name_stdout_cannot_encode_still_writes_its_summary(tmp_path):
    flags = [*TINY[PPO], "--run-name", "größe"]
    command = [sys.executable, str(ROOT / PPO), *flags]
    variables = environment(PYTHONIOENCODING="ascii")
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.splitlines()[-1].endswith("see runs/größe".encode())
    summary = json.loads((tmp_path / "runs" / "größe" / "summary.json").read_text())
    assert summary["global_step"] == 320
