"""Interruptions, and runs that resume from a checkpoint.

RESUME_TIMES sets how often a process is killed at a random moment: ``RESUME_TIMES=20 pytest
tests/test_resume.py``. Set ``TEST_SECONDS=9000``, too, because a test may then exceed its limit.
"""

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import zmq
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Interrupted
from clusterenv_utils.checkpoint import load_checkpoint, lock
from clusterenv_utils.errors import RunLockedError

from . import scripts
from .envs import BlockingEnv, CountingEnv, assert_same
from .nets import linear
from .patience import HOUR, at_most, wait_until
from .scripts import TIMES, environment
from .test_checkpoint import assert_same_state, saved_in

# Interruption.


@pytest.mark.parametrize("method", ["step", "rollout", "recv"])
def test_a_wait_for_a_long_step_is_interrupted_at_once(pipe, monkeypatch, method):
    policy = CategoricalPolicy(linear(1, 2))
    # The milliseconds of each poll, and the number of polls that had begun at the interruption.
    poll, polls, later = zmq.Poller.poll, [], []

    def noting(self, timeout=None, *args):
        if timeout != 0:  # a poll of 0 ms only looks for more messages
            polls.append(timeout)
        return poll(self, timeout, *args)

    def interrupt():
        pipe.pids(1)  # the environment's step of an hour has begun
        wait_until(lambda: polls)  # on a busy machine, the head may not wait yet
        envs.interrupt()
        later.append(len(polls))

    calls = {
        "step": lambda: envs.step([0, 0]),
        "rollout": lambda: envs.rollout(policy, 3),
        "recv": lambda: (envs.publish(policy), envs.send(3), envs.recv(0)),
    }
    with ClusterEnv([partial(BlockingEnv, pipe.path), CountingEnv], worker_timeout=HOUR) as envs:
        envs.reset()
        monkeypatch.setattr(zmq.Poller, "poll", noting)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with at_most(), pytest.raises(Interrupted):
            calls[method]()
        thread.join()
        # The current wait, of at most 0.3 s, was the last, or one that began at the same time.
        assert polls and max(polls) <= 300 and len(polls) <= later[0] + 1
        envs.close(terminate=True)


# The state of a ClusterEnv.


def test_a_loaded_state_continues_the_random_numbers_and_the_counters():
    policy = CategoricalPolicy(linear(1, 2))
    with ClusterEnv([CountingEnv] * 4, 2, sync_mode="always", weights="float32") as envs:
        envs.reset(seed=1)
        for _ in range(2):
            envs.rollout(policy, 5)
        state = envs.state_dict()
        expected = envs.rollout(policy, 5).actions
        after = envs.state_dict()
        assert envs.rollout(policy, 5).actions.tolist() != expected.tolist()
    expected_state = {"policy_version": 2, "pulls": 4, "seed": 1, "rollouts": 2}
    assert state.items() >= expected_state.items() and state["waiting_seconds"] > 0
    with ClusterEnv([CountingEnv] * 4, 2, sync_mode="always", weights="float32") as envs:
        envs.publish(policy)  # without consequence
        envs.load_state_dict(state)
        assert_same(envs.state_dict(), state)
        envs.reset(seed=2)
        assert envs.rollout(policy, 5).actions.tolist() == expected.tolist()
        assert envs.policy_version == 3 and envs.pulls.tolist() == [3, 3]
        assert envs.sync_bytes == after["sync_bytes"] == state["sync_bytes"] * 3 // 2
        assert envs.state_dict()["rollouts"] == after["rollouts"] == 3
        # The random numbers are restored once, not for each rollout.
        assert envs.rollout(policy, 5).actions.tolist() != expected.tolist()


def test_a_state_fits_any_number_of_workers():
    policy = CategoricalPolicy(linear(1, 2))
    with ClusterEnv([CountingEnv] * 4, 3, sync_mode="always") as envs:
        envs.reset(seed=1)
        envs.rollout(policy, 5)
        state, expected = envs.state_dict(), envs.rollout(policy, 5).actions
    for number in (1, 2, 4):
        with ClusterEnv([CountingEnv] * 4, number, sync_mode="always") as envs:
            envs.load_state_dict(state)
            assert envs.pulls.tolist() == [1] * number
            envs.reset(seed=2)
            assert envs.rollout(policy, 5).actions.tolist() == expected.tolist()


# One process at a time.


HOLDER = """
import os, sys, time
from clusterenv_utils.checkpoint import lock
lock(sys.argv[1])
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(3600)
"""


def test_a_lock_belongs_to_one_process_and_ends_with_it(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
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
    warning = f"cannot keep other processes from training {tmp_path}: No locks available"
    assert [record.getMessage() for record in caplog.records] == [warning]


# Whole runs.

LONG = ["--checkpoint-interval", "0.1"]
LASTING = ["--env-id", scripts.LASTING_ID]  # flags that name code must be given again
RUNS = {
    "ppo_clusterenv.py": ([*scripts.TINY[scripts.PPO], *LONG], 64),
    "dqn_clusterenv.py": ([*scripts.TINY[scripts.DQN], *LONG], 8),
}


def steps(folder):
    """Return the steps at which each scalar was logged, without the evaluation's scalar, which is
    logged at every end of a run.
    """
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"]) - {"eval/return_mean"}
    return {tag: [event.step for event in events.Scalars(tag)] for tag in tags}


def check_the_whole_run(script, folder, total):
    """Check that a run has each step once, counters that never decrease, and a complete summary.

    Return the summary.
    """
    series = steps(folder)
    for tag, logged in series.items():
        assert logged == sorted(set(logged)), f"{tag}: {logged}"
    iterations = total // RUNS[script][1]
    every = 1 if script == scripts.PPO else max(iterations // 200, 1)
    assert [step // RUNS[script][1] for step in series["charts/SPS"]] == list(
        range(every, iterations + 1, every)
    )
    for tag in ("sync/pulls_per_worker", "sync/bytes"):
        counts = scripts.scalars(folder, tag)
        assert counts == sorted(counts)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["global_step"] == total
    if script == scripts.DQN and summary["args"]["save_replay"]:
        assert summary["gradient_steps"] == scripts.TRAINS[script](summary)
        assert summary["transitions_inserted"] == total
    return summary


def resume(script, directory, folder, *flags):
    result = scripts.run(script, directory, "--resume", f"runs/{folder.name}", *flags)
    assert result.returncode == 0, result.stderr
    return result


def has_begun(directory):
    """Return whether the only run has a checkpoint after some steps."""
    (folder,) = directory.glob("runs/*")
    saved = any(folder.glob("checkpoint-*.pt")) and load_checkpoint(folder)
    return saved and saved["global_step"] > 0


@pytest.mark.long
@pytest.mark.parametrize("script", RUNS)
def test_sigterm_and_resume_to_the_last_bit(tmp_path, script):
    flags, unit = RUNS[script]
    total = (60 if script == scripts.PPO else 600) * unit
    process, workers = scripts.start_and_await_training(
        script, tmp_path, *flags, "--total-timesteps", str(total)
    )
    # DQN learns from the first chunk of any worker; the other worker's may come late.
    while not has_begun(tmp_path):
        assert process.poll() is None
        time.sleep(0.01)
    folder = tmp_path / scripts.check_interruption(process, workers, signal.SIGTERM, 75)
    before = load_checkpoint(folder)
    assert 0 < before["global_step"] < total and before["seconds"] > 0
    (tmp_path / "go").touch()
    (tmp_path / "reset").unlink()
    # With nothing left to do, the loaded state is saved again, and evaluated.
    resume(script, tmp_path, folder, *LASTING, "--total-timesteps", str(before["global_step"]))
    after = load_checkpoint(folder)
    # Neither the time between the runs nor the start counts, which the workers' reset ends.
    saved = max(path.stat().st_mtime for path in saved_in(folder))
    began = (tmp_path / "reset").stat().st_mtime
    assert 0 < after["seconds"] - before["seconds"] < saved - began + 0.1
    versions = [state["parts"]["envs"].pop("policy_version") for state in (before, after)]
    assert versions[1] == versions[0] + 1  # published for the new workers
    for state in (before, after):
        del state["seconds"], state["args"]["total_timesteps"], state["args"]["resume"]
    assert_same_state(after, before)


@pytest.mark.long
@pytest.mark.parametrize("script", RUNS)
def test_kill_at_random_moments_and_resume_to_the_end(tmp_path, script):
    moment = random.Random(1)
    flags, unit = RUNS[script]
    total = (60 if script == scripts.PPO else 300) * unit * TIMES
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
        assert saved["global_step"] < total  # no kill came after the training
        envs = saved["parts"]["envs"]
        counters.append(
            [saved["global_step"], envs["policy_version"], envs["pulls"], envs["sync_bytes"]]
        )
        counters[-1] += [saved["seconds"], saved["parts"].get("count", {}).get("gradient_steps", 0)]
        command = [sys.executable, str(scripts.ROOT / script), *LASTING]
        command += ["--resume", f"runs/{folder.name}"]
    (tmp_path / "go").touch()
    resume(script, tmp_path, folder, *LASTING)
    summary = check_the_whole_run(script, folder, total)
    for earlier, later in zip(counters, counters[1:], strict=False):
        assert all(a <= b for a, b in zip(earlier, later, strict=True))
    assert summary["wall_seconds"] > counters[-1][-2]


@pytest.mark.long
def test_weights_and_biases_without_a_login_is_a_one_line_error(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(), here.mkdir()
    result = scripts.run(
        scripts.PPO, here, "--track", WANDB_MODE="online", HOME=str(home), NETRC=str(home / "netrc")
    )
    scripts.check_refusal(result, "--track: UsageError: No API key")
    assert os.listdir(here) == []
