"""Failures are reported clearly and soon, and leave nothing behind."""

import os
import re
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
    WorkerDiedError,
)
from clusterenv_runtime.messages import read_hello

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


def test_a_launcher_serves_one_cluster():
    launcher = LocalLauncher()
    with ClusterEnv([CountingEnv], 1, launcher=launcher) as envs:
        with pytest.raises(
            ValueError, match="a LocalLauncher starts the workers of one ClusterEnv: make another"
        ):
            ClusterEnv([CountingEnv], 1, launcher=launcher)
        envs.reset()
        envs.step([0])  # its worker is still there
