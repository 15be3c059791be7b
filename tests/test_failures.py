"""What breaks, breaks clearly and soon, and leaves nothing behind."""

import contextlib
import gc
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import msgspec
import numpy as np
import pytest
import zmq
from gymnasium.error import ResetNeeded

from clusterenv_runtime import ClusterEnv, ClusterEnvError, EnvError, StartupError, WorkerDiedError
from clusterenv_runtime.protocol import PROTOCOL_VERSION, Error, Hello, Pull, Reply, frames

from .envs import BlockingEnv, CountingEnv, CustomError, FailingEnv, StubbornEnv

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def temporary_directory(monkeypatch, tmp_path):
    """Where sockets are put during the test; nothing of it may remain."""
    directory = tmp_path / "t"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert not list(directory.iterdir())


@contextlib.contextmanager
def at_most(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


class Pipe:
    """A named pipe on which environments tell their pids, and so where they are."""

    def __init__(self, path):
        self.path = str(path)
        os.mkfifo(path)
        # For reading and writing, so that it neither blocks here nor ends when an environment closes it.
        self._file = os.fdopen(os.open(path, os.O_RDWR), buffering=1)

    def pids(self, number):
        """Wait until ``number`` environments have told their pid."""
        return [int(self._file.readline()) for _ in range(number)]


@pytest.fixture
def pipe(tmp_path):
    return Pipe(tmp_path / "pipe")


def assert_ended(pids, seconds):
    """Wait until processes, ours or not, have ended."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, *_ = select.select([process], [], [], max(deadline - time.monotonic(), 0))
        os.close(process)
        assert ended, f"process {pid} still runs"


# Workers that die.


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    assert_ended([pid], 5)


def died(worker, pid, rows, how="killed by SIGKILL"):
    return re.compile(rf"worker {worker} \(.*, pid {pid}, environments {rows}.*\) died: {how}")


def test_a_worker_killed_while_idle(workers):
    envs = ClusterEnv([CountingEnv] * 4, 2)
    envs.reset()
    *_, pid = envs.call("pid")
    kill(pid)
    with at_most(5), pytest.raises(WorkerDiedError, match=died(1, pid, "2 to 3")):
        envs.step([0] * 4)
    with at_most(1), pytest.raises(WorkerDiedError, match=rf"worker 1 .*{pid}.* is gone"):
        envs.reset()
    with at_most(3):
        envs.close()
    assert not workers()


def test_a_worker_killed_while_it_steps(workers, pipe):
    envs = ClusterEnv([CountingEnv, CountingEnv, partial(BlockingEnv, pipe.path)], 3)
    envs.reset()
    envs.step_async([0] * 3)
    (pid,) = pipe.pids(1)
    kill(pid)
    with at_most(5), pytest.raises(WorkerDiedError, match=died(2, pid, "2 to 2")):
        envs.step_wait()
    with at_most(3):
        envs.close()
    assert not workers()


def test_a_worker_that_ends_itself_in_a_rollout(workers, tmp_path):
    from clusterenv_runtime import CategoricalPolicy

    from .nets import linear

    envs = ClusterEnv([CountingEnv, partial(CountingEnv, suicide=3)], 2, log_dir=str(tmp_path / "logs"))
    envs.reset()
    _, pid = envs.call("pid")
    with at_most(30), pytest.raises(WorkerDiedError, match=died(1, pid, "1 to 1")) as caught:
        envs.rollout(CategoricalPolicy(linear(1, 2)), 5)
    assert str(tmp_path / "logs" / "worker-1.log") in str(caught.value)
    with at_most(5):
        envs.close()
    assert not workers()


def test_a_worker_that_exits(workers):
    with ClusterEnv([CountingEnv] * 2, 2) as envs:
        _, pid = envs.call("pid")
        with at_most(5), pytest.raises(WorkerDiedError, match=r"worker \d .* died: exit code 3"):
            envs.call("leave", 3)


def test_a_worker_killed_while_it_builds_its_environments(workers, pipe):
    pid = 0

    def first_then_die():
        nonlocal pid
        if pid:
            return CountingEnv()
        pid = 1
        return CountingEnv()

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    with at_most(10), pytest.raises(WorkerDiedError, match="worker 1 .* died: killed by SIGKILL"):
        ClusterEnv([first_then_die, die], 2)
    assert not workers()


# Environments that raise.


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("logs"))


def failing(where, error, row=3):
    env_fns = [CountingEnv] * 5
    env_fns[row] = partial(FailingEnv, where, error)
    return env_fns


@contextlib.contextmanager
def raising_envs(where, error, log_dir, row):
    """ClusterEnv whose environment ``row`` raises, run until it does."""
    with ClusterEnv(failing(where, error, row), 2, log_dir=log_dir) as envs:
        envs.reset()
        envs.step([0] * 5)
    yield


ERRORS = {
    "one text": ValueError("something is 100% wrong: %s %d"),
    "key": KeyError("missing"),
    "no text": ZeroDivisionError(),
    "two arguments": OSError(2, "No such file"),
    "of Gymnasium": ResetNeeded("first reset"),
    "assertion": AssertionError("a == b"),
    "stop": StopIteration("enough"),
}


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_the_exception_is_raised_here(workers, log_dir, where, error):
    if where != "step" and error is not ERRORS["one text"] and error is not ERRORS["key"]:
        pytest.skip("one place is enough")
