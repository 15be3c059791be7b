"""Failures are reported clearly and soon, and leave nothing behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import zmq

from clusterenv_runtime import (
    CategoricalPolicy,
    ClusterEnv,
    LocalLauncher,
    StartupError,
    WorkerDiedError,
)
from clusterenv_runtime.messages import PROTOCOL_VERSION, read_hello

from .envs import BlockingEnv, CountingEnv, LeavingEnv
from .machine import process_namespace
from .nets import linear
from .patience import HOUR, PATIENCE, assert_ended, at_most, kill
from .scripts import ROOT, children_of

pytestmark = [
    pytest.mark.usefixtures("temporary_directory"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's logger announces each error
]


# Workers that die. The head notices that their processes have ended. A silent link would count as
# lost only after an hour here.


def died(worker, pid, rows, how="killed by SIGKILL"):
    return re.compile(rf"worker {worker} \(.*, pid {pid}, environments {rows}.*\) died: {how}")


def test_a_worker_killed_in_a_rollout(workers, pipe, tmp_path):
    arguments = {"log_dir": str(tmp_path), "on_worker_loss": "raise", "worker_timeout": HOUR}
    envs = ClusterEnv([CountingEnv, partial(BlockingEnv, pipe.path)], 2, **arguments)
    envs.reset()
    _, pid = envs.call("pid")
    thread = threading.Thread(target=lambda: kill(*pipe.pids(1)))
    thread.start()
    with at_most(), pytest.raises(WorkerDiedError, match=died(1, pid, "1 to 1")) as caught:
        envs.rollout(CategoricalPolicy(linear(1, 2)), 5)
    thread.join()
    assert str(tmp_path / "worker-1.log") in str(caught.value)
    with at_most():
        envs.close(timeout=HOUR)
    assert not workers()


def test_a_worker_that_exits():
    with ClusterEnv([CountingEnv] * 2, 2, on_worker_loss="raise", worker_timeout=HOUR) as envs:
        first, _ = envs.call("pid")
        with (
            at_most(),
            pytest.raises(WorkerDiedError, match=died(0, first, "0 to 0", how="exit code 3")),
        ):
            envs.call("leave_if", first, code=3)


def test_a_worker_killed_while_it_builds_its_environments(workers):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDiedError, match=died(1, "[0-9]+", "1 to 1")):
        ClusterEnv([CountingEnv, die], 2)
    assert not workers()


# Processes that environments start.


def test_processes_that_have_left_a_killed_workers_group_end_with_it(workers):
    with ClusterEnv([LeavingEnv] * 2, 2, worker_timeout=HOUR) as envs:
        envs.reset()
        *_, pid = envs.call("pid")
        _, started = envs.get_attr("started")
        kill(pid)
        with at_most():
            envs.step([0, 0])
        assert len(envs.restarts) == 1
        assert_ended(started)
        _, started = envs.get_attr("started")
        for process in started:
            os.kill(process, 0)  # the replacement's processes live
    assert_ended(started)
    assert not workers()


def test_a_worker_that_has_left_the_group_of_its_prefix_ends_with_it(workers):
    launcher = LocalLauncher(prefix="sh -c '\"$@\"; exit $?' sh")
    with ClusterEnv([LeavingEnv], 1, launcher=launcher, worker_timeout=HOUR) as envs:
        envs.reset()
        (shell,), (pid,) = workers(), envs.call("leave")
        assert os.getsid(pid) == pid
        kill(shell)
        while not envs.restarts:  # the worker answers until the head notices
            envs.step([0])
        assert_ended([pid])
    assert not workers()


# Workers that somebody else ends.


def test_ctrl_c_at_a_workers_own_terminal_is_no_error_of_its_environment(workers, pipe, tmp_path):
    class ClosingEnv(BlockingEnv):
        def close(self):
            (tmp_path / "closed").touch()

    envs = ClusterEnv(
        [partial(ClosingEnv, pipe.path)], 1, on_worker_loss="raise", worker_timeout=HOUR
    )
    envs.reset()
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(envs.step, [0])
        (pid,) = pipe.pids(1)
        os.kill(pid, signal.SIGINT)
        with at_most(), pytest.raises(WorkerDiedError, match=died(0, pid, "0 to 0", "exit code 0")):
            step.result()
    assert (tmp_path / "closed").exists()
    envs.close()
    assert not workers()


def test_the_first_process_of_a_container_ends_when_it_is_terminated(tmp_path):
    container = process_namespace()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as head:
        head.bind(f"ipc://{tmp_path}/head")
        arguments = f"--connect ipc://{tmp_path}/head --index 0 --startup-timeout {HOUR}".split()
        command = [*container, sys.executable, "-m", "clusterenv_runtime.worker", *arguments]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
        try:
            assert head.poll(PATIENCE * 1000)  # it has said hello
            identity = b"p"
            while identity.startswith(b"p"):  # its second connection
                identity, *heard = head.recv_multipart()
            assert read_hello(heard).pid == 1
            (worker,) = children_of(process.pid)
            os.kill(worker, signal.SIGTERM)
            assert process.wait(PATIENCE) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()


# Workers that do not start.


@pytest.fixture
def instead_of_python(monkeypatch, tmp_path):
    """Return a function that makes workers run a shell script instead, with the same arguments."""

    def replace(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\nuntil [ $1 = -c ]; do shift; done; shift 2\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


def test_workers_that_say_nothing(instead_of_python, monkeypatch):
    instead_of_python(f"exec sleep {HOUR}")
    start, started = subprocess.Popen, []

    def start_and_note(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_and_note)
    text = (
        r"worker 0 \(.*environments 0 to 1\), worker 1 \(.*environments 2 to 2\) did not come up "
        r".* within 0\.5 s"
    )
    # Sooner than with the default timeout, a minute.
    with at_most(45), pytest.raises(StartupError, match=text):
        ClusterEnv([CountingEnv] * 3, 2, startup_timeout=0.5, worker_start="spawn")
    assert len(started) == 2 and all(process.returncode is not None for process in started)


def test_a_launcher_serves_one_cluster():
    launcher = LocalLauncher()
    with ClusterEnv([CountingEnv], 1, launcher=launcher) as envs:
        with pytest.raises(
            ValueError, match="a LocalLauncher starts the workers of one ClusterEnv: make another"
        ):
            ClusterEnv([CountingEnv], 1, launcher=launcher)
        envs.reset()
        envs.step([0])  # its worker is still there


@pytest.mark.parametrize(
    "patch, text",
    [
        (
            "PROTOCOL_VERSION = 99",
            rf"worker [01] .* speaks protocol 99, the head {PROTOCOL_VERSION}: install the same",
        ),
        (
            "shared_versions = lambda: {'numpy': '0.1'}",
            r"worker [01] .* runs numpy 0\.1 \(head: .*\): install the same",
        ),
    ],
)
def test_workers_that_do_not_match(workers, instead_of_python, patch, text):
    imports = (
        "from clusterenv_runtime import messages; from clusterenv_runtime.worker.__main__ import "
        "main"
    )
    code = f"{imports}; messages.{patch}; main()"
    instead_of_python(f'exec {sys.executable} -c "{code}" "$@"')
    with at_most(), pytest.raises(StartupError, match=text):
        ClusterEnv([CountingEnv] * 2, 2, startup_timeout=HOUR, worker_start="spawn")
    assert not workers()


# Events that are not failures.


def test_a_log_that_cannot_be_opened_again_ends_the_run_with_one_line(tmp_path, workers):
    with ClusterEnv([CountingEnv], 1, log_dir=tmp_path / "logs") as envs:
        envs.reset()
        shutil.rmtree(tmp_path / "logs")
        kill(next(iter(workers())))
        text = r"killed by SIGKILL; no replacement can be started: \[Errno 2\] No such file .*log'$"
        with pytest.raises(WorkerDiedError, match=text):
            envs.step([0])
