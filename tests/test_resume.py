"""Interruption, checkpoints, and runs that go on from one.

How often something is killed at a random moment, RESUME_TIMES says: ``RESUME_TIMES=20 pytest tests/test_resume.py``,
with ``TEST_SECONDS=9000``, as that may take longer than a test may.
"""

import errno
import fcntl
import importlib
import json
import math
import os
import pickle
import random
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from gymnasium.error import AlreadyPendingCallError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dqn_clusterenv
import ppo_clusterenv
from clusterenv_runtime import CategoricalPolicy, CheckpointError, ClusterEnv, Interrupted
from clusterenv_runtime.errors import RunLockedError
from clusterenv_runtime.script import Run, arguments, logs, parse
from clusterenv_runtime.script.checkpoint import (
    load_checkpoint,
    rng_state,
    save_checkpoint,
    save_model,
    set_rng_state,
)
from clusterenv_runtime.script.lock import lock
from clusterenv_runtime.script.signals import TOLD, Signals

from . import scripts
from . import test_dqn_clusterenv as dqn
from . import test_ppo_clusterenv as ppo
from .envs import BlockingEnv, CountingEnv, assert_same
from .nets import linear
from .patience import HOUR, assert_ended, at_most, wait_until
from .scripts import environment

TIMES = int(os.environ.get("RESUME_TIMES", 1))

# Interruption.


def actions(envs):
    return envs.action_space.sample()


@pytest.mark.parametrize("method", ["step", "rollout", "recv"])
def test_a_wait_for_a_long_step_is_interrupted_at_once(tmp_path, monkeypatch, method):
    os.mkfifo(tmp_path / "pipe")
    policy = CategoricalPolicy(linear(1, 2))
    poll, polls, later = zmq.Poller.poll, [], []  # milliseconds of each; how many had begun when it was interrupted

    def noting(self, timeout=None, *args):
        polls.append(timeout)
        return poll(self, timeout, *args)

    def interrupt():
        with open(tmp_path / "pipe") as pipe:  # which the environment writes to as it begins its step of an hour
            pipe.readline()
        envs.interrupt()
        later.append(len(polls))

    env_fns = [partial(BlockingEnv, str(tmp_path / "pipe")), CountingEnv]
    with ClusterEnv(env_fns, 2, worker_timeout=HOUR) as envs:
        envs.reset()
        monkeypatch.setattr(zmq.Poller, "poll", noting)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with at_most(), pytest.raises(Interrupted):
            if method == "step":
                envs.step(actions(envs))
            elif method == "rollout":
                envs.rollout(policy, 3)
            else:
                envs.publish(policy)
                envs.send(3)
                envs.recv(0)
        thread.join()
        # The wait that was under way, of 0.3 s at most, was the last, or one that began at the same time.
        assert polls and max(polls) <= 300 and len(polls) <= later[0] + 1
        envs.close(terminate=True)


def test_an_interruption_while_nothing_is_awaited_is_of_the_next_wait_and_of_no_other():
    with ClusterEnv([CountingEnv] * 2, 2) as envs:
        envs.reset()
        envs.interrupt()
        with pytest.raises(Interrupted):
            envs.step(actions(envs))
        # What was given up has been done all the same.
        assert envs.step(actions(envs))[0].tolist() == [[2], [2]]


def test_a_chunk_that_is_there_outlasts_an_interruption():
    with ClusterEnv([CountingEnv] * 2, 2) as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset()
        envs.send(3)
        envs.recv(0)
        envs.interrupt()
        with pytest.raises(Interrupted):
            envs.recv(1)
        assert envs.recv(1)[1].rewards.tolist() == [[1], [2], [3]]


# The state of a ClusterEnv.


def test_workers_go_on_with_the_random_numbers_of_the_state_and_the_counters_count_on():
    policy = CategoricalPolicy(linear(1, 2))
    with ClusterEnv([CountingEnv] * 4, 2, sync_mode="always", weights="float32") as envs:
        envs.reset(seed=1)
        for _ in range(2):
            envs.rollout(policy, 5)
        state = envs.state_dict()
        expected = envs.rollout(policy, 5).actions
        after = envs.state_dict()
        assert envs.rollout(policy, 5).actions.tolist() != expected.tolist()
    generators = [torch.frombuffer(bytearray(item), dtype=torch.uint8) for item in state["generators"]]
    assert len(generators) == 2 and not torch.equal(*generators)
    for generator in generators:
        torch.Generator().set_state(generator)
    assert (state["policy_version"], state["pulls"]) == (2, [2, 2]) and min(state["waiting_seconds"]) > 0
    with ClusterEnv([CountingEnv] * 4, 2, sync_mode="always", weights="float32") as envs:
        envs.publish(policy)  # of no account
        envs.load_state_dict(state)
        assert_same(envs.state_dict(), state)
        envs.reset(seed=2)
        assert envs.rollout(policy, 5).actions.tolist() == expected.tolist()
        assert envs.policy_version == 3 and envs.pulls.tolist() == [3, 3]
        assert envs.sync_bytes == after["sync_bytes"] == state["sync_bytes"] * 3 // 2
        assert envs.state_dict()["generators"] == after["generators"]
        assert envs.rollout(policy, 5).actions.tolist() != expected.tolist()  # restored once, not each time


def test_a_state_of_other_workers_or_amid_a_rollout_is_refused():
    with ClusterEnv([CountingEnv] * 2, 2) as envs, ClusterEnv([CountingEnv], 1) as other:
        with pytest.raises(ValueError, match="the state is of 1 workers, these are 2"):
            envs.load_state_dict(other.state_dict())
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset()
        envs.send(3)
        with pytest.raises(AlreadyPendingCallError):
            envs.load_state_dict(envs.state_dict())


# Checkpoints.


def state(number):
    return {"tensor": torch.full((10000,), number), "nested": [(number, 2.5, None, True), {"bytes": b"\0\xff", 1: "x"}]}


def saved_in(directory):
    return sorted(path for path in directory.iterdir() if path.name.startswith("checkpoint-"))


def assert_same_state(actual, expected):
    """Equal to the last bit, tensors included."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.numpy()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value

    assert_same(plain(actual), plain(expected))


def test_the_last_two_checkpoints_are_kept_and_the_newest_is_loaded(tmp_path):
    (tmp_path / "checkpoint.tmp").write_bytes(b"of a process that was killed")
    for step in range(9, 13):
        save_checkpoint(tmp_path, state(step), step)
    assert [path.name.split("-")[1] for path in tmp_path.iterdir()] in (
        ["000000000011", "000000000012"],
        ["000000000012", "000000000011"],
    )
    assert_same_state(load_checkpoint(tmp_path), state(12))
    save_checkpoint(tmp_path, state(0), 12)  # the same step again
    assert_same_state(load_checkpoint(tmp_path), state(0))
    assert len(saved_in(tmp_path)) == 2


def cut_short(data):
    return data[:-1]


def with_a_hole(data):
    return data[:20000] + bytes(4096) + data[24096:]


def with_a_flipped_bit(data):
    return data[:30000] + bytes([data[30000] ^ 4]) + data[30001:]


def empty(data):
    return b""


def foreign(data):
    return pickle.dumps({"not": "a checkpoint"})


@pytest.mark.parametrize("damage", [cut_short, with_a_hole, with_a_flipped_bit, empty, foreign])
def test_a_damaged_checkpoint_is_named_and_the_one_before_loaded(tmp_path, caplog, damage):
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step), step)
    older, newer = saved_in(tmp_path)
    data = newer.read_bytes()
    assert damage(data) != data
    newer.write_bytes(damage(data))
    assert_same_state(load_checkpoint(tmp_path), state(1))
    assert [record.getMessage() for record in caplog.records] == [
        f"skipped the checkpoint {newer}: it is not as it was written"
    ]
    # What follows the older one supersedes the damaged one, and leaves two that are good.
    save_checkpoint(tmp_path, state(3), 2)
    assert saved_in(tmp_path)[0] == older and not newer.exists()
    assert_same_state(load_checkpoint(tmp_path), state(3))


def test_what_cannot_be_loaded_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=f"^there is no run {tmp_path}/nothing$"):
        load_checkpoint(tmp_path / "nothing")
    (tmp_path / "checkpoint-1.pt").write_bytes(b"not by us")
    (tmp_path / "checkpoint.tmp").write_bytes(b"of a process that was killed")
    with pytest.raises(CheckpointError, match=f"^there is no checkpoint in {tmp_path}$"):
        load_checkpoint(tmp_path)
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step), step)
    for path in saved_in(tmp_path)[:2]:
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"^all 2 checkpoints in {tmp_path} are damaged$"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("item", [np.float64(1), np.zeros(2), {1}, os, b""])
def test_what_could_not_be_loaded_is_not_saved(tmp_path, item):
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\]"):
        save_checkpoint(tmp_path, {"a": [1, item]}, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_not_unpickled_freely(tmp_path, monkeypatch):
    monkeypatch.setattr("clusterenv_runtime.script.checkpoint._check", lambda *_: None)
    save_checkpoint(tmp_path, {"a": partial(os.mkdir, tmp_path / "owned")}, 1)
    with pytest.raises(CheckpointError, match="are damaged"):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("other", ["a pipe", "a link that never ends"])
def test_what_is_no_file_is_no_checkpoint(tmp_path, other):
    path = tmp_path / f"checkpoint-1-{'0' * 64}.pt"
    os.mkfifo(path) if other == "a pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="all 1 checkpoints in .* are damaged"):
        load_checkpoint(tmp_path)


def test_no_link_is_written_through(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"precious")
    for name in ("checkpoint.tmp", "model.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    save_checkpoint(tmp_path, state(1), 1)
    save_model(f"{tmp_path}/model", {"a": torch.zeros(1)})
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    assert not (tmp_path / "model").is_symlink() and len(saved_in(tmp_path)) == 1


def test_a_save_that_fails_leaves_nothing_but_the_one_before(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, state(1), 1)
    before = list(tmp_path.iterdir())

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, state(2), 2)
    assert list(tmp_path.iterdir()) == before


@contextmanager
def no_room():
    """Let this process write no more than 1000 bytes to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_says_so_and_leaves_nothing_but_the_one_before(tmp_path):
    save_checkpoint(tmp_path, state(1), 1)
    before = list(tmp_path.iterdir())
    with no_room(), pytest.raises(OSError, match="too large"):
        save_checkpoint(tmp_path, state(2), 2)
    assert list(tmp_path.iterdir()) == before


def test_a_model_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "x.cleanrl_model"
    save_model(path, state(1))
    with no_room(), pytest.raises(OSError, match="too large"):
        save_model(path, state(2))
    assert_same_state(torch.load(path), state(1))
    assert list(tmp_path.iterdir()) == [path]


SAVER = """
import sys, torch
from clusterenv_runtime.script.checkpoint import load_checkpoint, save_checkpoint
step = load_checkpoint(sys.argv[1])["step"]
while True:
    step += 1
    save_checkpoint(sys.argv[1], {"step": step, "tensor": torch.full((2**22,), step)}, step)
    print(step, flush=True)
"""


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_before_whole(tmp_path, caplog):
    save_checkpoint(tmp_path, {"step": 0}, 0)
    moment, times, unfinished, last = random.Random(0), 0, 0, 0
    while times < TIMES + 1 or not unfinished:  # this process, too, may be late: then once more
        times += 1
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True
        )
        last = int(process.stdout.readline())
        for _ in range(moment.randrange(3)):
            last = int(process.stdout.readline())
        # In the middle of the next one: some bytes of it are there, but not all of its 32 MiB.
        size = moment.randrange(1, 2**25)
        while process.poll() is None:
            with suppress(FileNotFoundError):
                if os.stat(tmp_path / "checkpoint.tmp").st_size >= size:
                    break
        process.kill()
        process.wait()
        rest = process.stdout.read().split()
        last = int(rest[-1]) if rest else last
        unfinished += (tmp_path / "checkpoint.tmp").exists()
        loaded = load_checkpoint(tmp_path)
        assert loaded["step"] in (last, last + 1)  # renamed, perhaps, but not yet told
        assert torch.equal(loaded["tensor"], torch.full((2**22,), loaded["step"]))
        assert len(saved_in(tmp_path)) in (2, 3)
    assert not caplog.records


def test_random_numbers_go_on_where_they_were():
    def draw():
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.rand(3).tolist(),
            np.random.randn(),
            torch.rand(3).tolist(),
        )

    random.gauss(0, 1), np.random.randn()  # each keeps a second one
    before = rng_state()
    expected = draw()
    assert draw() != expected
    set_rng_state(before)
    assert draw() == expected


# Signals.


class Envs:
    """What a run asks of a `ClusterEnv` that has nothing to do."""

    closed, interruptions = False, 0

    def interrupt(self):
        self.interruptions += 1

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


NUMBERS = *TOLD, signal.SIGINT


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


CODES = pytest.mark.parametrize(
    ("number", "code"), [*((number, 75) for number in TOLD), (signal.SIGINT, 130)], ids=lambda value: str(value)
)


@CODES
def test_a_signal_interrupts_then_all_is_saved_and_a_schedulers_next_is_ignored(signals, capsys, number, code):
    envs, saves = Envs(), []
    with pytest.raises(SystemExit) as exit, signals.saving(envs, lambda: saves.append(1), "--resume runs/x"):
        signal.raise_signal(number)
        assert envs.interruptions == 1 and not saves
        raise Interrupted
    assert exit.value.code == code and saves == [1]
    assert capsys.readouterr().err == "interrupted; to go on: --resume runs/x\n"
    left = [signal.getsignal(each) for each in NUMBERS]
    assert left == [*[signal.SIG_IGN] * len(TOLD), signal.default_int_handler]


@CODES
def test_a_signal_before_the_training_or_after_it_ends_the_process_where_it_is(signals, capsys, number, code):
    with signals.saving(Envs(), None, "--resume runs/x"):
        pass
    with pytest.raises(SystemExit) as exit:
        signal.raise_signal(number)
        pytest.fail("it was not heeded")
    assert (exit.value.code, capsys.readouterr().err) == (code, "interrupted\n")


def test_a_hangup_that_is_ignored_stays_so(signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Signals()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_signal_during_the_last_update_is_heeded_before_the_evaluation(signals):
    envs, saves = Envs(), []
    with pytest.raises(SystemExit) as exit, signals.saving(envs, lambda: saves.append(1), "--resume runs/x"):
        signals.raise_if_received()
        signal.raise_signal(signal.SIGTERM)
        envs.close()
        signals.raise_if_received()
        pytest.fail("it was not heeded")
    assert exit.value.code == 75 and saves == [1]


def test_a_second_ctrl_c_is_the_usual_one(signals):
    envs = Envs()
    with pytest.raises(KeyboardInterrupt), signals.saving(envs, None, "--resume runs/x"):
        signal.raise_signal(signal.SIGINT)
        assert envs.interruptions == 1
        signal.raise_signal(signal.SIGINT)


def test_a_signal_is_heeded_at_once_when_there_are_no_workers_to_wait_for(signals):
    envs, saves = Envs(), []
    envs.close()

    def save():  # a scheduler may say it twice
        signal.raise_signal(signal.SIGTERM)
        saves.append(1)

    with pytest.raises(SystemExit) as exit, signals.saving(envs, save, "--resume runs/x"):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it was not heeded")
    assert exit.value.code == 75 and saves == [1]


@pytest.mark.parametrize(("interval", "at"), [(0, [0, 8, 16, 24]), (300, [24])])
def test_saves_are_due_when_the_interval_is_over_and_at_the_end(signals, tmp_path, monkeypatch, interval, at):
    monkeypatch.chdir(tmp_path)
    envs, saved_at = Envs(), []
    run = Run(dqn_clusterenv.Args(checkpoint_interval=interval), {})
    monkeypatch.setattr(run, "save", lambda: saved_at.append(run.global_step))
    with run.training(envs, linear()):
        for _ in run.iterations(3, 8):
            assert not envs.closed
            run.global_step += 8
        assert envs.closed
    assert saved_at == at


# A full disk. A limit of the size of files, which may be lifted, stands for it: no file can be written.


def limit(process, size):
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))


@pytest.fixture
def full(tmp_path):
    """A run that has a checkpoint and can write no more, its process; it lasts until there is a file `go`."""
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
    """Read what a run says until it has warned of logs and of two checkpoints; it says nothing else."""
    lines = [process.stderr.readline()]
    while len(lines) < 3 or NO_LOGS not in lines:
        lines.append(process.stderr.readline())
    lines.remove(NO_LOGS)
    assert all(re.fullmatch(NO_CHECKPOINT, line) for line in lines), lines


def test_on_a_full_disk_training_goes_on_and_when_there_is_room_again_all_is_saved(tmp_path, full):
    folder = tmp_path / "runs" / "x"
    await_warnings(full)
    before = load_checkpoint(folder)["global_step"]
    limit(full, resource.RLIM_INFINITY)
    wait_until(lambda: load_checkpoint(folder)["global_step"] > before)
    (tmp_path / "go").touch()
    assert full.wait() == 0
    assert load_checkpoint(folder)["global_step"] == json.loads((folder / "summary.json").read_text())["global_step"]
    assert steps(folder)["charts/SPS"][-1] == 3840
    assert not list(folder.glob("*.tmp")) and all(path.stat().st_size for path in folder.glob("events*"))


def test_a_signal_on_a_full_disk_is_one_line_and_not_the_exit_code_of_what_is_saved(tmp_path, full):
    await_warnings(full)
    full.terminate()
    *_, line = full.communicate()[1].splitlines()
    to_go_on = f"python {scripts.ROOT / ppo.SCRIPT} --env-id={scripts.LASTING_ID} --resume runs/x"
    before = f"to go on from the checkpoint before, if there is one: {to_go_on}"
    assert (line, full.returncode) == (f"error: interrupted, and not saved: File too large; {before}", 1)
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
        Run(ppo_clusterenv.Args(run_name="x"), {})
    assert exit.value.code == "error: cannot write to runs/x: No space left on device"


def test_output_that_cannot_be_written_ends_no_run(tmp_path):
    flags = [*ppo.TINY, "--run-name", "x"]
    with open("/dev/full", "w") as file:
        result = subprocess.run(
            [sys.executable, str(scripts.ROOT / ppo.SCRIPT), *flags],
            cwd=tmp_path, env=environment(PYTHONUNBUFFERED="1"), stdout=file, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (result.stderr, result.returncode) == ("", 0)  # buffered, Python itself would tell, at its exit
    check_the_whole_run(ppo.SCRIPT, tmp_path / "runs" / "x", 320)


# The command line.


def refusal(monkeypatch, args, *flags):
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    with pytest.raises(SystemExit) as exit:
        parse(args, fixed=["env_id"])
    assert exit.value.code.startswith("error: ") and "\n" not in exit.value.code
    return exit.value.code


def whole(args, step):
    """What a checkpoint of a run holds at least."""
    return {"args": args, "parts": {}, "rng": {}, "global_step": step, "seconds": 0.5, "wandb_id": None}


@pytest.fixture
def run_x(tmp_path, monkeypatch):
    """A working directory with a run, runs/x, whose flags are not the default ones."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs/x")
    args = vars(ppo_clusterenv.Args(num_workers=3, learning_rate=0.5, anneal_lr=False, max_policy_lag=7))
    save_checkpoint("runs/x", whole(args, 5), 5)


def test_flags_of_the_run_are_defaults_and_the_command_line_overrides_them(run_x, monkeypatch):
    flags = ["--resume", "runs/x", "--learning_rate", "0.25", "--anneal-lr=True", "--no-cuda", "--total-timesteps=9"]
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    args, saved = parse(ppo_clusterenv.Args, fixed=["env_id"])
    changed = {"num_workers": 3, "max_policy_lag": 7, "learning_rate": 0.25, "total_timesteps": 9, "cuda": False}
    assert vars(args) == vars(ppo_clusterenv.Args(**changed, resume="runs/x"))
    assert saved["global_step"] == 5 and args.resumed_name == "x"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--resume runs/y", "there is no run runs/y"),
        ("--resume runs/empty", "there is no checkpoint in runs/empty"),
        ("--resume runs", "--resume must be runs/NAME, of the working directory, got runs"),
        ("--resume elsewhere/x", "--resume must be runs/NAME, of the working directory, got elsewhere/x"),
        ("--resume runs/x --num-workers 2", "--num-workers cannot change on the way: runs/x has 3, got 2"),
        ("--resume runs/x --envs-per-worker 2", "--envs-per-worker cannot change on the way: runs/x has 32, got 2"),
        ("--resume runs/x --env-id Acrobot-v1", "--env-id cannot change on the way: runs/x has LunarLander-v3"),
        ("--resume runs/x --kl-threshold -1", "--kl-threshold must be a number of nats >= 0, got -1.0"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_one_line(run_x, monkeypatch, flags, says):
    os.mkdir("runs/empty")
    assert says in refusal(monkeypatch, ppo_clusterenv.Args, *flags.split())


RUNNING_CODE = [
    ("worker_prefix", "touch owned", "'--worker-prefix=touch owned'"),
    ("env_id", "owned:Env-v0", "--env-id=owned:Env-v0"),
    ("launcher", "added", "--launcher=added"),
    ("key_file", "their.key", "--key-file=their.key"),
    ("allow_insecure", True, "--allow-insecure=True"),
    ("track", True, "--track=True"),
    ("env_kwargs", "xml_file=their.xml", "--env-kwargs=xml_file=their.xml"),
]


@pytest.mark.parametrize(("name", "value", "flag"), RUNNING_CODE)
def test_what_runs_code_is_not_taken_from_a_run_but_accepted_if_it_is_given_again(
    run_x, monkeypatch, name, value, flag
):
    args = ppo_clusterenv.Args(**{name: value})
    save_checkpoint("runs/x", whole(vars(args), 6), 6)
    monkeypatch.setattr(arguments, "_check", lambda _: None)  # there is no such program, launcher and file
    says = refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")
    assert says.startswith(f"error: runs/x has {arguments.spell(name)} {value!r}: what can run someone's code, or")
    monkeypatch.setattr(sys, "argv", ["script.py"])
    again = arguments.resume_command(args, "runs/x", ["python"])
    assert again == f"python script.py {flag} --resume runs/x"
    monkeypatch.setattr(sys, "argv", shlex.split(again)[1:])
    assert getattr(parse(ppo_clusterenv.Args, fixed=["env_id"])[0], name) == value


def test_what_runs_code_is_refused_all_at_once_and_another_value_may_be_given(run_x, monkeypatch):
    args = vars(ppo_clusterenv.Args(worker_prefix="touch owned", env_id="owned:Env-v0"))
    save_checkpoint("runs/x", whole(args, 6), 6)
    says = refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")
    assert "has --worker-prefix 'touch owned' and --env-id 'owned:Env-v0': " in says
    flags = ["--resume", "runs/x", "--worker-prefix", "nice", "--env-id", "owned:Env-v0"]
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    assert parse(ppo_clusterenv.Args)[0].worker_prefix == "nice"


@pytest.mark.parametrize("script", ["ppo_clusterenv", "dqn_clusterenv"])
def test_a_run_from_elsewhere_neither_starts_nor_imports_anything(tmp_path, script):
    args = importlib.import_module(script).Args(worker_prefix="touch started", env_id="owned:Env-v0")
    (tmp_path / "owned.py").write_text("open('imported', 'w').close()")
    os.makedirs(tmp_path / "runs" / "x")
    save_checkpoint(tmp_path / "runs" / "x", whole(vars(args), 0), 0)
    before = set(tmp_path.rglob("*"))
    result = scripts.run(f"{script}.py", tmp_path, "--resume", "runs/x")
    scripts.check_refusal(result, "runs/x has --worker-prefix 'touch started' and --env-id 'owned:Env-v0'")
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "runs" / "x" / "lock"}


def changed(state, path, value):
    *way, last = path.split(".")
    for key in way:
        state = state[key]
    state[last] = value


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("seconds", math.nan, "seconds"),
        ("global_step", -5, "global_step"),
        ("rng", [], "rng"),
        ("args.learning_rate", "x", "learning_rate"),
        ("args.env_id", ["CartPole-v1"], "env_id"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(run_x, monkeypatch, path, value, says):
    state = whole(vars(ppo_clusterenv.Args()), 6)
    changed(state, path, value)
    save_checkpoint("runs/x", state, 6)
    assert says in refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")


def test_a_run_of_the_other_script_or_a_damaged_one_is_one_line(run_x, monkeypatch, caplog):
    assert "--clip-coef" in refusal(monkeypatch, dqn_clusterenv.Args, "--resume", "runs/x")
    (path,) = saved_in(Path("runs/x"))
    path.write_bytes(b"")
    says = refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")
    assert says == "error: all 1 checkpoints in runs/x are damaged" and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--min-workers 3", "--min-workers must be from 1 to --num-workers, 2, got 3"),
        ("--min-workers 0", "--min-workers must be at least 1, got 0"),
        ("--max-worker-restarts -1", "--max-worker-restarts must be at least 0, got -1"),
        ("--worker-timeout 0", "--worker-timeout must be a number of seconds > 0, got 0.0"),
        ("--startup-timeout nan", "--startup-timeout must be a number of seconds > 0, got nan"),
        ("--checkpoint-interval -1", "--checkpoint-interval must be a number of seconds >= 0, got -1.0"),
        ("--port 65536 --interface lo", "--port must be from 0 to 65535, got 65536"),
        ("--port 5000", "--port needs --bind-address or --interface"),
        ("--interface lo --bind-address 127.0.0.1", "give either --bind-address or --interface, not both"),
        ("--interface none0", "got none0"),
        ("--bind-address 0.0.0.0", "--bind-address must be one address, not all of them (0.0.0.0)"),
        ("--bind-address 192.0.2.1", "cannot listen on --bind-address 192.0.2.1, port 0: "),
        ("--bind-address 10.0.0.1 --security none", "use curve, or set --allow-insecure"),
    ],
)
def test_a_flag_of_the_runtime_out_of_range_is_one_line(monkeypatch, flags, says):
    assert says in refusal(monkeypatch, dqn_clusterenv.Args, *flags.split())


def test_a_cluster_env_takes_what_the_flags_say(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = ["--interface", "lo", "--num-workers=1", "--kl-threshold=0.5", "--min-workers=1"]
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    args, saved = parse(dqn_clusterenv.Args)
    assert saved == {} and args.resumed_name is None
    options = args.options()
    assert options["interface"] == "lo" and options["max_policy_lag"] == 40
    with ClusterEnv([CountingEnv], **options) as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset()


# One process at a time.


def test_a_run_that_another_process_trains_is_refused_until_that_is_killed(tmp_path):
    flags = [*ppo.TINY, *LONG, "--run-name", "x", "--total-timesteps", "1920"]
    process, _ = scripts.start_and_await_training(ppo.SCRIPT, tmp_path, *flags)
    wait_until(lambda: saved_in(tmp_path / "runs" / "x"))
    says = f"runs/x is being trained by process {process.pid} on {socket.gethostname()}\n"
    scripts.check_refusal(scripts.run(ppo.SCRIPT, tmp_path, *flags), says)
    again = [*LASTING, "--resume", "runs/x"]
    scripts.check_refusal(scripts.run(ppo.SCRIPT, tmp_path, *again), says)
    assert "clusterenv_runtime.worker" in scripts.run(ppo.SCRIPT, tmp_path, *again, "--dry-run").stdout
    assert process.poll() is None
    process.kill()
    process.communicate()
    (tmp_path / "go").touch()
    resume(ppo.SCRIPT, tmp_path, tmp_path / "runs" / "x", *LASTING)
    check_the_whole_run(ppo.SCRIPT, tmp_path / "runs" / "x", 1920)


HOLDER = """
import os, sys, time
from clusterenv_runtime.script.lock import lock
lock(sys.argv[1])
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(3600)
"""


def test_a_lock_is_its_processes_alone_and_goes_with_it(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    try:
        with pytest.raises(RunLockedError, match=f"is being trained by process {process.pid} on "):
            lock(tmp_path)
        process.kill()
        process.wait()
        lock(tmp_path)
        lock(tmp_path)
        assert scripts.alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_where_files_cannot_be_locked_a_run_warns_and_goes_on(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    lock(tmp_path)
    warning = f"no other process may train {tmp_path}, but that cannot be ensured: No locks available"
    assert [record.getMessage() for record in caplog.records] == [warning]


def test_a_link_in_place_of_the_lock_is_one_line_and_not_followed(run_x, monkeypatch, tmp_path):
    (tmp_path / "precious").write_text("precious")
    os.symlink(tmp_path / "precious", "runs/x/lock")
    says = refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")
    assert says == "error: cannot write to runs/x: Too many levels of symbolic links"
    assert (tmp_path / "precious").read_text() == "precious"


# Whole runs.

LONG = ["--checkpoint-interval", "0.1"]
LASTING = ["--env-id", scripts.LASTING_ID]  # what names code is given again
RUNS = {
    "ppo_clusterenv.py": ([*ppo.TINY, *LONG], 64, ppo.SUMMARY),
    "dqn_clusterenv.py": ([*dqn.TINY, *LONG], 8, dqn.SUMMARY),
}


def steps(folder):
    """The steps at which each scalar was logged, less the evaluation's: there is one at each end of a run."""
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"]) - {"eval/return_mean"}
    return {tag: [event.step for event in events.Scalars(tag)] for tag in tags}


def check_the_whole_run(script, folder, total):
    """It has every step once, counters that never went back, and a complete summary."""
    series = steps(folder)
    for tag, logged in series.items():
        assert logged == sorted(set(logged)), f"{tag}: {logged}"
    iterations = total // RUNS[script][1]
    every = 1 if script == ppo.SCRIPT else max(iterations // 200, 1)
    assert [step // RUNS[script][1] for step in series["charts/SPS"]] == list(range(every, iterations + 1, every))
    for tag in ("sync/pulls_per_worker", "sync/bytes"):
        counts = scripts.scalars(folder, tag)
        assert counts == sorted(counts)
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= RUNS[script][2]
    assert summary["global_step"] == total
    if script == dqn.SCRIPT and summary["args"]["save_replay"]:
        assert summary["gradient_steps"] == (total - 100) // 10
        assert summary["transitions_inserted"] == total
    return summary


def resume(script, directory, folder, *flags):
    result = scripts.run(script, directory, "--resume", f"runs/{folder.name}", *flags)
    assert result.returncode == 0, result.stderr
    return result


def all_have_delivered(directory):
    """Whether the only run's newest checkpoint, if it has one, has heard from every worker."""
    (folder,) = directory.glob("runs/*")
    saved = any(folder.glob("checkpoint-*.pt")) and load_checkpoint(folder)
    return saved and None not in saved["parts"]["envs"]["generators"]


@pytest.mark.parametrize("script", RUNS)
def test_sigterm_and_resume_to_the_last_bit(tmp_path, script):
    flags, unit, _ = RUNS[script]
    total = (60 if script == ppo.SCRIPT else 600) * unit
    process, workers = scripts.start_and_await_training(script, tmp_path, *flags, "--total-timesteps", str(total))
    while not all_have_delivered(tmp_path):  # DQN learns from the first chunk of any worker; the other's may come late
        assert process.poll() is None
        time.sleep(0.01)
    folder = tmp_path / scripts.check_interruption(process, workers, signal.SIGTERM, 75)
    before = load_checkpoint(folder)
    assert 0 < before["global_step"] < total and before["seconds"] > 0
    (tmp_path / "go").touch()
    # With nothing left to do, what is loaded is saved again, and evaluated.
    resume(script, tmp_path, folder, *LASTING, "--total-timesteps", str(before["global_step"]))
    after = load_checkpoint(folder)
    # Not the time in between counts, nor that to start: none before the workers' reset.
    saved = max(path.stat().st_mtime for path in saved_in(folder))
    assert 0 < after["seconds"] - before["seconds"] < saved - (tmp_path / "reset").stat().st_mtime + 0.1
    versions = [state["parts"]["envs"].pop("policy_version") for state in (before, after)]
    assert versions[1] == versions[0] + 1  # published for the new workers
    for state in (before, after):
        del state["seconds"], state["args"]["total_timesteps"], state["args"]["resume"]
    assert_same_state(after, before)
    generators = before["parts"]["envs"]["generators"]
    assert len(generators) == 2 and None not in generators


@pytest.mark.parametrize("shell", ["none", "bash", "nohup"])
def test_a_terminal_that_is_lost_has_a_run_save_and_end_but_not_under_nohup(tmp_path, shell):
    flags = [*ppo.TINY, "--run-name", "x", *scripts.lasting(tmp_path, 80), "--total-timesteps", "1280"]
    command = [sys.executable, str(scripts.ROOT / ppo.SCRIPT), *flags]
    before = {"none": [], "bash": ["bash", "--norc", "-i"], "nohup": ["nohup"]}[shell]
    terminal, theirs = os.openpty()

    def take():  # as ssh gives a shell its terminal
        os.login_tty(theirs)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    process = subprocess.Popen(
        [*before, *([] if shell == "bash" else command)],
        cwd=tmp_path, env=environment(), preexec_fn=take, pass_fds=[theirs],
    )  # fmt: skip
    os.close(theirs)
    if shell == "bash":
        os.write(terminal, shlex.join(command).encode() + b"\n")
    if shell == "nohup":
        output = tmp_path / "nohup.out"
        wait_until(lambda: output.exists() and b" SPS " in output.read_bytes())  # it trains
    else:
        said = b""
        while b" SPS " not in said:
            said += os.read(terminal, 2**16)
    folder = tmp_path / "runs" / "x"
    head = int((folder / "lock").read_text().split()[1])
    workers = scripts.workers_of(head)
    assert len(workers) == 2 and not saved_in(folder)
    os.close(terminal)
    if shell == "nohup":
        (tmp_path / "go").touch()
    assert_ended([head, *workers])
    assert process.wait() == {"none": 75, "bash": -signal.SIGHUP, "nohup": 0}[shell]
    step = load_checkpoint(folder)["global_step"]
    assert step == 1280 if shell == "nohup" else 0 < step < 1280
    assert [path.read_text() for path in (folder / "workers").iterdir()] == ["", ""]  # told by the head to end


@pytest.mark.parametrize("script", RUNS)
def test_kill_at_random_moments_and_resume_to_the_end(tmp_path, script):
    moment = random.Random(1)
    flags, unit, _ = RUNS[script]
    total = (60 if script == ppo.SCRIPT else 300) * unit * TIMES
    flags = [*flags, *scripts.lasting(tmp_path, 320), "--total-timesteps", str(total)]
    command = [sys.executable, str(scripts.ROOT / script), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    counters = []
    for _ in range(TIMES):
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), **pipes)
        before = set(tmp_path.glob("runs/*/checkpoint-*.pt"))
        while not set(tmp_path.glob("runs/*/checkpoint-*.pt")) - before:  # until it trains
            assert process.poll() is None
            time.sleep(0.01)
        with suppress(subprocess.TimeoutExpired):
            process.wait(moment.random() / 4)
        process.kill()
        assert (process.communicate()[1], process.returncode) == ("", -signal.SIGKILL)
        (folder,) = tmp_path.glob("runs/*")
        saved = load_checkpoint(folder)
        assert saved["global_step"] < total  # none of these has come after the training
        envs = saved["parts"]["envs"]
        counters.append([saved["global_step"], envs["policy_version"], *envs["pulls"], envs["sync_bytes"]])
        counters[-1] += [saved["seconds"], saved["parts"].get("count", {}).get("gradient_steps", 0)]
        command = [sys.executable, str(scripts.ROOT / script), *LASTING, "--resume", f"runs/{folder.name}"]
    (tmp_path / "go").touch()
    resume(script, tmp_path, folder, *LASTING)
    summary = check_the_whole_run(script, folder, total)
    for earlier, later in zip(counters, counters[1:], strict=False):
        assert all(a <= b for a, b in zip(earlier, later, strict=True))
    assert summary["wall_seconds"] > counters[-1][-2]


def test_without_its_replay_buffer_a_run_collects_first(tmp_path):
    total, flags = 1600, [*dqn.TINY, "--no-save-replay"]
    process, workers = scripts.start_and_await_training(
        dqn.SCRIPT, tmp_path, *flags, "--learning-starts", "16", "--total-timesteps", str(total)
    )
    folder = tmp_path / scripts.check_interruption(process, workers, signal.SIGUSR1, 75)
    saved = load_checkpoint(folder)
    gradient_steps = saved["parts"]["count"]["gradient_steps"]
    assert saved["parts"]["rb"] == {} and gradient_steps == (saved["global_step"] - 16) // 10
    (tmp_path / "go").touch()
    result = resume(dqn.SCRIPT, tmp_path, folder, *LASTING, "--learning-starts", "100")
    assert "not in checkpoints" in result.stdout
    assert "no replay buffer in the checkpoint: collecting 100 steps before learning" in result.stdout
    summary = check_the_whole_run(dqn.SCRIPT, folder, total)
    left = total - saved["global_step"]
    assert summary["gradient_steps"] == gradient_steps + max(left - 100, 0) // 10
    assert summary["transitions_inserted"] == left


def test_weights_and_biases_get_all_there_is_and_go_on_with_the_same_run(tmp_path):
    folder, _ = ppo.train(tmp_path, "--track", "--capture-video")
    assert list(tmp_path.glob("videos/*/*.mp4"))
    (offline,) = tmp_path.glob("wandb/offline-run-*")
    record = next(offline.glob("*.wandb")).read_bytes()
    for text in (b"envs_per_worker", b"kl_threshold", b"global_step", b"eval_return_mean", b"sync/pulls_per_worker"):
        assert text in record
    resume(ppo.SCRIPT, tmp_path, folder, "--total-timesteps", "640", "--track")
    check_the_whole_run(ppo.SCRIPT, folder, 640)
    runs = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(runs) == 2 and len({path.name.rpartition("-")[2] for path in runs}) == 1


def test_weights_and_biases_without_a_login_is_one_line(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(), here.mkdir()
    result = scripts.run(ppo.SCRIPT, here, "--track", WANDB_MODE="online", HOME=str(home), NETRC=str(home / "netrc"))
    scripts.check_refusal(result, "--track: UsageError: No API key")
    assert os.listdir(here) == []
