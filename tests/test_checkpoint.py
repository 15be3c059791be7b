"""Checkpoints are complete or absent, the last two are kept, and forged ones execute no code."""

import io
import os
import pickle
import random
import resource
import stat
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from clusterenv_utils import ScriptArgs
from clusterenv_utils.checkpoint import (
    load_checkpoint,
    rng_state,
    save_checkpoint,
    save_model,
    set_rng_state,
)
from clusterenv_utils.errors import CheckpointError
from clusterenv_utils.trained import load_model

from .envs import assert_same
from .scripts import TIMES, environment


def state(number):
    return {
        "tensor": torch.full((10000,), number),
        "nested": [(number, 2.5, None, True), {"bytes": b"\0\xff", 1: "x"}],
    }


def saved_in(directory):
    return sorted(path for path in directory.iterdir() if path.name.startswith("checkpoint-"))


def assert_same_state(actual, expected):
    """Assert that two states are equal to the last bit, including their tensors."""

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
    assert [path.stem.split("-")[1] for path in tmp_path.iterdir()] in (
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
        f"skipped the checkpoint {newer}: it is damaged, or not a checkpoint (BadZipFile)"
    ]
    # The next checkpoint replaces the damaged one, which leaves two good ones.
    save_checkpoint(tmp_path, state(3), 2)
    assert saved_in(tmp_path) == [older, newer]
    assert_same_state(load_checkpoint(tmp_path), state(3))


def test_a_directory_without_a_good_checkpoint_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=f"^there is no run {tmp_path}/nothing$"):
        load_checkpoint(tmp_path / "nothing")
    (tmp_path / "checkpoint-one.pt").write_bytes(b"not by us")
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
def test_a_value_that_could_not_be_loaded_is_not_saved(tmp_path, item):
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\]"):
        save_checkpoint(tmp_path, {"a": [1, item]}, 1)
    assert list(tmp_path.iterdir()) == []


def foreign_checkpoint(directory, data):
    """Write a checkpoint of these bytes into a directory, and return its path."""
    path = Path(directory, f"checkpoint-{999:012d}.pt")
    path.write_bytes(data)
    return path


def test_a_checkpoint_is_not_unpickled_freely(tmp_path):
    data = io.BytesIO()
    torch.save({"a": partial(os.mkdir, tmp_path / "owned")}, data)
    foreign_checkpoint(tmp_path, data.getvalue())
    with pytest.raises(CheckpointError, match="are damaged"):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_no_link_is_written_through(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"precious")
    for name in ("checkpoint.tmp", "experiment.cleanrl_model.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    save_checkpoint(tmp_path, state(1), 1)
    save_model(tmp_path, {"a": torch.zeros(1)}, ScriptArgs())
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    assert not (tmp_path / "experiment.cleanrl_model").is_symlink() and len(saved_in(tmp_path)) == 1


def test_a_checkpoint_is_on_disk_before_it_gets_its_name_and_then_its_name(tmp_path, monkeypatch):
    synced, descriptors = [], len(os.listdir("/proc/self/fd"))

    def note(descriptor):
        info = os.fstat(descriptor)
        synced.append("a directory" if stat.S_ISDIR(info.st_mode) else info.st_size)
        assert len(saved_in(tmp_path)) == stat.S_ISDIR(info.st_mode)

    monkeypatch.setattr(os, "fsync", note)
    save_checkpoint(tmp_path, state(1), 1)
    (path,) = saved_in(tmp_path)
    assert synced == [path.stat().st_size, "a directory"]
    assert len(os.listdir("/proc/self/fd")) == descriptors


@contextmanager
def no_room():
    """Let this process write no more than 1000 bytes to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_and_leaves_only_the_previous_checkpoint(tmp_path):
    save_checkpoint(tmp_path, state(1), 1)
    before = list(tmp_path.iterdir())
    with no_room(), pytest.raises(OSError, match="too large"):
        save_checkpoint(tmp_path, state(2), 2)
    assert list(tmp_path.iterdir()) == before


def test_a_model_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "experiment.cleanrl_model"
    save_model(tmp_path, state(1), ScriptArgs())
    with no_room(), pytest.raises(OSError, match="too large"):
        save_model(tmp_path, state(2), ScriptArgs())
    assert_same_state(load_model(path)["model"], state(1))
    assert list(tmp_path.iterdir()) == [path]


SAVER = """
import sys, torch
from clusterenv_utils.checkpoint import load_checkpoint, save_checkpoint
step = load_checkpoint(sys.argv[1])["step"]
while True:
    step += 1
    save_checkpoint(sys.argv[1], {"step": step, "tensor": torch.full((2**22,), step)}, step)
    print(step, flush=True)
"""


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_before_whole(tmp_path, caplog):
    save_checkpoint(tmp_path, {"step": 0}, 0)
    moment, times, unfinished, last = random.Random(0), 0, 0, 0
    # If this process is late, the kill may come after the save. Then it tries again.
    while times < TIMES + 1 or not unfinished:
        times += 1
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        last = int(process.stdout.readline())
        for _ in range(moment.randrange(3)):
            last = int(process.stdout.readline())
        # Kill it in the middle of the next save, when only a part of the 32 MiB is written.
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
        assert loaded["step"] in (last, last + 1)  # it may be renamed but not reported yet
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

    random.gauss(0, 1), np.random.randn()  # each generator keeps a second number
    before = rng_state()
    expected = draw()
    assert draw() != expected
    set_rng_state(before)
    assert draw() == expected
