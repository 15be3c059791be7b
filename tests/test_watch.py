"""The status file that a run writes while it runs, and how `watch` shows it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from clusterenv_runtime.errors import RunLockedError
from clusterenv_utils import watch
from clusterenv_utils.curve import LearningCurve
from clusterenv_utils.directory import holder_of, lock
from clusterenv_utils.status import FILE, RATES, Status, StatusFile, WorkerStatus

from .patience import wait_until
from .scripts import ROOT, environment, lasting, workers_of

WATCH = [sys.executable, "-m", "clusterenv_utils.watch"]


def look(directory, *flags):
    command = [*WATCH, "runs/x", *flags]
    return subprocess.run(
        command, cwd=directory, env=environment(COLUMNS="120"), capture_output=True, text=True
    )


def status_of(directory):
    """Return the status that `--json` prints, or None while it has no results of training."""
    found = json.loads(look(directory, "--json").stdout)
    return found if found["workers"] and found["points"] else None


@pytest.fixture
def run(tmp_path):
    """Start a run in another process, on two workers, that ends once there is a file `go`."""
    flags = "--envs-per-worker 1 --num-steps 32 --num-minibatches 1 --total-timesteps 12800"
    command = [sys.executable, "-m", "ppo_clusterenv", *flags.split(), "--run-name", "x"]
    process = subprocess.Popen(
        [*command, "--eval-episodes", "0", *lasting(tmp_path, 200)],
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


@pytest.mark.long
def test_a_run_is_seen_while_it_runs_and_until_it_has_finished(run, tmp_path):
    wait_until((tmp_path / "runs" / "x" / FILE).exists)
    with subprocess.Popen(
        [*WATCH, "runs/x"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    ) as watching:
        wait_until(lambda: status_of(tmp_path))
        os.kill(workers_of(run.pid)[1], signal.SIGKILL)
        wait_until(lambda: status_of(tmp_path)["workers"][1]["restarts"] == 1)
        first = status_of(tmp_path)
        assert first["state"] == "training" and first["total_timesteps"] == 12800
        assert time.time() - first["time"] < 60 and first["points"][-1][0] <= first["global_step"]
        for worker in first["workers"]:
            assert worker["host"] == socket.gethostname() and 0 <= worker["waiting"] <= 1
            assert worker["lag"] == first["policy_version"] - worker["version"]
        both = sum(worker["sps"] for worker in first["workers"])
        assert both == pytest.approx(first["sps"]) and both > 0
        (tmp_path / "go").touch()
        output, _ = watching.communicate()
    assert watching.returncode == 0
    assert output.splitlines()[-1].endswith("runs/x has finished, at step 12,800")
    assert "step 12,800 of 12,800" in output and socket.gethostname() in output
    last = status_of(tmp_path)
    assert (last["state"], last["global_step"]) == ("finished", 12800)
    assert sum(worker["restarts"] for worker in last["workers"]) == 1


def test_a_run_that_ends_before_it_trains_has_failed(tmp_path):
    begin = "from tests.test_run import Args, Run; Run(Args()).begin(); 1 / 0"
    command = [sys.executable, "-c", begin]
    subprocess.run(command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), check=False)
    status = watch.look(str(tmp_path / "runs/x"))
    assert (status.state, status.reason[:31]) == ("failed", "it ended before training; its o")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_ends_early_is_reported(run, tmp_path, number):
    wait_until((tmp_path / "runs" / "x" / FILE).exists)
    wait_until(lambda: status_of(tmp_path))
    run.send_signal(number)
    run.wait()
    result = look(tmp_path)
    says = result.stdout.splitlines()[-1]
    if number == signal.SIGTERM:
        assert "runs/x was interrupted, at step" in says and result.returncode == 0
    else:
        gone = f"process {run.pid} on {socket.gethostname()} is gone, without a message, at step"
        assert f"runs/x has stopped: {gone}" in says and result.returncode == 1
        assert status_of(tmp_path)["state"] == "gone"


def test_a_lock_has_a_holder_as_long_as_its_process_lives(tmp_path):
    assert holder_of(tmp_path) == ""
    code = f"from clusterenv_utils.directory import lock\nlock({str(tmp_path)!r})\n"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}print(flush=True)\ninput()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
    ) as process:  # fmt: skip
        process.stdout.readline()
        assert holder_of(tmp_path) == f"process {process.pid} on {socket.gethostname()}"
        with pytest.raises(RunLockedError):  # asking neither takes the lock nor releases it
            lock(tmp_path)
        for ended, state in ((time.time() - 60, "starting"), (time.time() + 60, "finished")):
            (tmp_path / FILE).write_bytes(msgspec.json.encode(Status("finished", time=ended)))
            assert watch.look(str(tmp_path)).state == state  # resumed, or recording a video
        process.communicate(b"\n")
    assert holder_of(tmp_path) == ""
    lock(tmp_path)


def status_in(directory):
    return msgspec.json.decode((directory / FILE).read_bytes(), type=Status)


def test_rates_are_those_between_the_last_reports(tmp_path, monkeypatch):
    envs = SimpleNamespace(
        num_workers=2, hosts=["a", "b"], held_versions=np.array([3, 0]), policy_version=5,
        divergence=np.array([0.5, np.inf]), pulls=np.array([2, 1]), restarts=[{"worker": 1}] * 3,
        steps=np.array([0, 0]), waiting_seconds=np.array([7.0, 0.0]),
    )  # fmt: skip
    run = SimpleNamespace(
        directory=SimpleNamespace(path=tmp_path), args=SimpleNamespace(total_timesteps=900),
        logs=SimpleNamespace(curve=LearningCurve()), global_step=0, seconds=9.0, writes=True,
    )  # fmt: skip
    clock = iter(range(0, 1000, 4))
    now = next(clock)
    monkeypatch.setattr("time.monotonic", lambda: now)
    file = StatusFile(run)
    assert status_in(tmp_path).state == "starting"
    file.training(envs).__enter__()
    for word in range(RATES + 5):
        run.global_step = 300 * word
        run.logs.curve.add_point(300 * word, pulls=1, versions=1)
        file.tell()
        assert status_in(tmp_path).global_step == run.global_step
        run.global_step += 1
        file.tell()  # within the same second
        now = next(clock)
        fast = word >= 5  # earlier rates are forgotten
        envs.steps += [100, 200 if fast else 0]
        envs.waiting_seconds += [1.0, 0 if fast else 4.0]
    status = status_in(tmp_path)
    assert (status.global_step, status.sps, status.points[-1]) == (4200, 75, (4200, None))
    assert status.workers == [
        WorkerStatus("a", 3, 2, 0.5, 2, sps=25, waiting=0.25, restarts=0),
        WorkerStatus("b", 0, 5, None, 1, sps=50, waiting=0, restarts=3),
    ]
    (tmp_path / FILE).unlink()
    run.writes = False
    file.write("training")
    assert not (tmp_path / FILE).exists()


def test_the_curve_has_its_values_at_its_steps(tmp_path):
    status = Status("training", total_timesteps=100)
    assert watch.curve(status, 80) == []
    status.points = [(10, None), (20, 0.0), (40, 8.0), (50, 4.0)]
    lines = [line.plain.removeprefix(label) for line, label in zip(
        watch.curve(status, 12), ["8", *" " * 6, "0"], strict=True
    )]  # fmt: skip
    columns = [*zip(*lines, strict=True)][1:]
    heights = [sum(watch.BLOCKS.index(block) for block in column) for column in columns]
    assert heights == [0, 1, 1, 64, 32, 0, 0, 0, 0, 0]  # after half of the steps nothing is known


def test_the_files_content_is_shown_as_text_and_not_obeyed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    worker = WorkerStatus("\033[2J[red]", 3, 2, None, 1, 2.5, 0.25, 7)
    status = Status("failed", "EnvError: \033[1m[bold]", workers=[worker])
    Path(FILE).write_bytes(msgspec.json.encode(status))
    monkeypatch.setattr(sys, "argv", ["watch", "."])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as exit:
        watch.main()
    output = capsys.readouterr().out
    assert exit.value.code == 1 and "\033" not in output
    assert r"has failed: EnvError: \x1b[1m[bold], at step 0" in output
    assert [*[r"0", r"\x1b[2J[red]", r"3", r"2", r"1", r"2", r"25%", r"7"]] in [
        line.split() for line in output.splitlines()
    ]


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        (["runs/y"], None, "there is no run runs/y; existing runs: x$"),
        (["runs/x"], None, f"runs/x has no {FILE}, and no script of ours trains it"),
        (["runs/x"], "", f"runs/x/{FILE} cannot be read: Input data was truncated"),
        (["runs/x", "--json"], '{"state": 1}', f"runs/x/{FILE} cannot be read: Expected `str`"),
    ],
)
def test_each_mistake_is_a_one_line_error(tmp_path, monkeypatch, words, text, says):
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    if text is not None:
        Path("runs/x", FILE).write_text(text)
    monkeypatch.setattr(sys, "argv", ["watch", *words])
    with pytest.raises(SystemExit, match=f"^error: {says}"):
        watch.main()


def test_a_reader_that_closes_the_pipe_is_no_error():
    name = "until_pipe_closes"
    code = f"from clusterenv_utils.output import {name}\nwith {name}(): print(1)"
    ours, theirs = os.pipe()
    os.close(ours)
    ended = subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (0, b"")
