"""Runs on a full disk. A limit on the size of files stands for it: no file can be written until a
test lifts the limit.
"""

import errno
import resource

import pytest

import ppo_clusterenv
from clusterenv_utils import Run, ScriptError, logs
from clusterenv_utils.checkpoint import load_checkpoint

from . import scripts
from .patience import PATIENCE, wait_until
from .test_checkpoint import saved_in
from .test_resume import LONG, check_the_whole_run

pytestmark = pytest.mark.long


def limit(process, size):
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))


@pytest.fixture
def full(tmp_path):
    """Yield the process of a run that has a checkpoint and cannot write any more.

    It lasts until the file `go` exists.
    """
    flags = [*scripts.TINY[scripts.PPO], *LONG, "--run-name", "x", "--total-timesteps", "3840"]
    process, _ = scripts.start_and_await_training(scripts.PPO, tmp_path, *flags)
    wait_until(lambda: saved_in(tmp_path / "runs" / "x"))
    limit(process, 0)
    yield process
    process.kill()
    process.communicate()


def test_a_full_disk_ends_a_run_with_one_line_and_its_last_checkpoint_remains(tmp_path, full):
    folder = tmp_path / "runs" / "x"
    before = load_checkpoint(folder)["global_step"]
    _, errors = full.communicate(timeout=PATIENCE)
    lines = [line for line in errors.splitlines() if line.startswith(("error: ", "not saved"))]
    assert full.returncode == 1
    assert lines == ["not saved: File too large", "error: cannot write logs: File too large"]
    assert load_checkpoint(folder)["global_step"] >= before > 0
    (tmp_path / "go").touch()
    again = ["--env-id", scripts.LASTING_ID, "--resume", "runs/x"]
    assert scripts.run(scripts.PPO, tmp_path, *again).returncode == 0
    check_the_whole_run(scripts.PPO, folder, 3840)


def test_a_run_that_cannot_begin_its_logs_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs, "SummaryWriter", full)
    with pytest.raises(ScriptError, match="^cannot write to runs/x: No space left on device$"):
        Run(ppo_clusterenv.Args(run_name="x")).begin()
