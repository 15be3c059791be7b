"""Interruption, checkpoints, and runs that go on from one.

How often something is killed at a random moment, RESUME_TIMES says: ``RESUME_TIMES=20 pytest tests/test_resume.py``.
"""

import os
import pickle
import random
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.error import AlreadyPendingCallError

from clusterenv_runtime import CategoricalPolicy, CheckpointError, ClusterEnv, Interrupted
from clusterenv_runtime.checkpoint import load_checkpoint, rng_state, save_checkpoint, set_rng_state

from .envs import BlockingEnv, CountingEnv, assert_same
from .nets import linear
from .scripts import environment

TIMES = int(os.environ.get("RESUME_TIMES", 2))

# Interruption.


def actions(envs):
    return envs.action_space.sample()


@pytest.mark.parametrize("method", ["step", "rollout", "recv"])
def test_a_wait_for_a_long_step_is_interrupted_at_once(tmp_path, method):
    os.mkfifo(tmp_path / "pipe")
    policy = CategoricalPolicy(linear(1, 2))
    interrupted_at = []

    def interrupt():
        with open(tmp_path / "pipe") as pipe:  # which the environment writes to as it begins its step of a minute
            pipe.readline()
        interrupted_at.append(time.monotonic())
        envs.interrupt()

    with ClusterEnv([partial(BlockingEnv, str(tmp_path / "pipe")), CountingEnv], 2) as envs:
        envs.reset()
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(Interrupted):
            if method == "step":
                envs.step(actions(envs))
            elif method == "rollout":
                envs.rollout(policy, 3)
            else:
                envs.publish(policy)
                envs.send(3)
                envs.recv(0)
        assert time.monotonic() - interrupted_at[0] < 1
        thread.join()
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
    with ClusterEnv([CountingEnv] * 4, 2, sync_mode="always") as envs:
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
    with ClusterEnv([CountingEnv] * 4, 2, sync_mode="always") as envs:
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


def checkpoints(directory):
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
    assert len(checkpoints(tmp_path)) == 2


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
    older, newer = checkpoints(tmp_path)
    data = newer.read_bytes()
    assert damage(data) != data
    newer.write_bytes(damage(data))
    assert_same_state(load_checkpoint(tmp_path), state(1))
    assert [record.getMessage() for record in caplog.records] == [
        f"skipped the checkpoint {newer}: it is not as it was written"
    ]
    # What follows the older one supersedes the damaged one, and leaves two that are good.
    save_checkpoint(tmp_path, state(3), 2)
    assert checkpoints(tmp_path)[0] == older and not newer.exists()
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
    for path in checkpoints(tmp_path)[:2]:
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"^all 2 checkpoints in {tmp_path} are damaged$"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("item", [np.float64(1), np.zeros(2), {1}, os])
def test_what_could_not_be_loaded_is_not_saved(tmp_path, item):
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\]"):
        save_checkpoint(tmp_path, {"a": [1, item]}, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_not_unpickled_freely(tmp_path, monkeypatch):
    monkeypatch.setattr("clusterenv_runtime.checkpoint._check", lambda *_: None)
    save_checkpoint(tmp_path, {"a": partial(os.mkdir, tmp_path / "owned")}, 1)
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_a_save_that_fails_leaves_nothing_but_the_one_before(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, state(1), 1)
    before = list(tmp_path.iterdir())

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, state(2), 2)
    assert list(tmp_path.iterdir()) == before


SAVER = """
import sys, torch
from clusterenv_runtime.checkpoint import load_checkpoint, save_checkpoint
step = load_checkpoint(sys.argv[1])["step"]
while True:
    step += 1
    save_checkpoint(sys.argv[1], {"step": step, "tensor": torch.full((2**22,), step)}, step)
    print(step, flush=True)
"""


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_before_whole(tmp_path, caplog):
    save_checkpoint(tmp_path, {"step": 0}, 0)
    moment, unfinished, last = random.Random(0), 0, 0
    for _ in range(TIMES + 1):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True
        )
        last = int(process.stdout.readline())
        for _ in range(moment.randrange(3)):
            last = int(process.stdout.readline())
        # In the middle of the next one: some bytes of it are there, but not all of its 32 MiB.
        size = moment.randrange(1, 2**25)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                if os.stat(tmp_path / "checkpoint.tmp").st_size >= size:
                    break
            except FileNotFoundError:
                continue
        process.kill()
        process.wait()
        rest = process.stdout.read().split()
        last = int(rest[-1]) if rest else last
        unfinished += (tmp_path / "checkpoint.tmp").exists()
        loaded = load_checkpoint(tmp_path)
        assert loaded["step"] in (last, last + 1)  # renamed, perhaps, but not yet told
        assert torch.equal(loaded["tensor"], torch.full((2**22,), loaded["step"]))
        assert len(checkpoints(tmp_path)) in (2, 3)
    assert unfinished and not caplog.records


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
