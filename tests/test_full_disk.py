"""Runs on a full disk. A limit on the size of files stands for it: no file can be written until a
test lifts the limit.
"""

import errno
import json
import re
import resource
import subprocess
import sys

import pytest

import ppo_clusterenv
from clusterenv_utils import Run, logs
from clusterenv_utils.checkpoint import load_checkpoint

from . import scripts
from . import test_ppo_clusterenv as ppo
from .patience import wait_until
from .scripts import environment
from .test_checkpoint import saved_in
from .test_resume import LONG, check_the_whole_run, steps

pytestmark = pytest.mark.long


def limit(process, size):
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))


@pytest.fixture
def full(tmp_path):
    """Yield the process of a run that has a checkpoint and cannot write any more.

    It lasts until the file `go` exists.
    """
    flags = [*ppo.TINY, *LONG, "--run-name", "x", "--total-timesteps", "3840"]
    process, _ = scripts.start_and_await_training(ppo.SCRIPT, tmp_path, *flags)
    wait_until(lambda: saved_in(tmp_path / "runs" / "x"))
    limit(process, 0)
    yield process
    process.kill()
    process.communicate()


NO_LOGS = "no TensorBoard logs in runs/x until the next checkpoint: File too large\n"
NO_CHECKPOINT = r"no checkpoint of runs/x at step \d+: File too large; training goes on\n"


def await_warnings(process):
    """Read a run's errors until it has warned of its logs and of two checkpoints. Check that there
    are no other errors.
    """
    lines = [process.stderr.readline()]
    while len(lines) < 3 or NO_LOGS not in lines:
        lines.append(process.stderr.readline())
    lines.remove(NO_LOGS)
    assert all(re.fullmatch(NO_CHECKPOINT, line) for line in lines), lines


def test_training_continues_on_a_full_disk_and_all_is_saved_once_there_is_room(tmp_path, full):
    folder = tmp_path / "runs" / "x"
    await_warnings(full)
    before = load_checkpoint(folder)["global_step"]
    limit(full, resource.RLIM_INFINITY)
    wait_until(lambda: load_checkpoint(folder)["global_step"] > before)
    (tmp_path / "go").touch()
    assert full.wait() == 0
    assert (
        load_checkpoint(folder)["global_step"]
        == json.loads((folder / "summary.json").read_text())["global_step"]
    )
    assert steps(folder)["charts/SPS"][-1] == 3840
    assert not list(folder.glob("*.tmp")) and all(
        path.stat().st_size for path in folder.glob("events*")
    )


def test_a_signal_on_a_full_disk_is_one_line_and_not_the_exit_code_of_a_saved_run(tmp_path, full):
    await_warnings(full)
    full.terminate()
    *_, line = full.communicate()[1].splitlines()
    to_go_on = f"python {scripts.ROOT / ppo.SCRIPT} --env-id={scripts.LASTING_ID} --resume runs/x"
    before = f"to resume from the previous checkpoint, if there is one: {to_go_on}"
    assert (line, full.returncode) == (
        f"error: interrupted, and not saved: File too large; {before}",
        1,
    )
    assert load_checkpoint(tmp_path / "runs" / "x")["global_step"]


def test_a_run_that_ends_on_a_full_disk_prints_its_results_and_fails_with_one_line(tmp_path, full):
    await_warnings(full)
    (tmp_path / "go").touch()
    output, errors = full.communicate()
    *warnings, error = errors.splitlines(keepends=True)
    assert (error, full.returncode) == ("error: cannot write to runs/x: File too large\n", 1)
    assert all(re.fullmatch(NO_CHECKPOINT, line) for line in warnings), warnings
    assert "in the evaluation" in output.splitlines()[-1]
    assert not (tmp_path / "runs" / "x" / "summary.json").exists()
    assert load_checkpoint(tmp_path / "runs" / "x")["global_step"]


def test_a_run_that_cannot_begin_its_logs_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs, "SummaryWriter", full)
    with pytest.raises(SystemExit) as exit:
        Run(ppo_clusterenv.Args(run_name="x")).begin()
    assert exit.value.code == "error: cannot write to runs/x: No space left on device"


def test_output_that_cannot_be_written_ends_no_run(tmp_path):
    flags = [*ppo.TINY, "--run-name", "x"]
    with open("/dev/full", "w") as file:
        result = subprocess.run(
            [sys.executable, str(scripts.ROOT / ppo.SCRIPT), *flags], cwd=tmp_path,
            env=environment(PYTHONUNBUFFERED="1"), stdout=file, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    # With buffered output, Python itself would report an error at its exit.
    assert (result.stderr, result.returncode) == (
        "",
        0,
    )
    check_the_whole_run(ppo.SCRIPT, tmp_path / "runs" / "x", 320)
