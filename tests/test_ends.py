"""Heads that end and clusters that are closed leave nothing behind."""

import gc
import os
import signal
import subprocess
import sys
import time
from functools import partial

import gymnasium as gym
import pytest

from clusterenv_runtime import ClusterEnv, Interrupted, LocalLauncher

from .envs import BlockingEnv, CountingEnv
from .patience import HOUR, PATIENCE, assert_ended, at_most, wait_until
from .scripts import ROOT

pytestmark = [
    pytest.mark.usefixtures("temporary_directory"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's logger announces each error
]


# Heads that end. Their workers notice that the link has ended. A silent link would count as lost
# only after an hour here.

SCRIPT = """
import os, signal, sys
from contextlib import suppress
from functools import partial
from clusterenv_runtime import ClusterEnv, Interrupted
from tests.envs import BlockingEnv
env_fns = [partial(BlockingEnv, sys.argv[1])] * 2
envs = ClusterEnv(env_fns, 2, worker_timeout=3600, close_timeout=1)
envs.reset()
"""


@pytest.fixture
def start_head(pipe, temporary_directory, tmp_path):
    """Return a function that runs a script in its own process, with the errors that it prints in
    ``tmp_path / "output"``.
    """

    def start(code):
        with open(tmp_path / "output", "w") as output:
            return subprocess.Popen(
                [sys.executable, "-c", code, pipe.path],
                env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary_directory)},
                stdin=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )

    return start


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name
)
def test_no_worker_survives_a_head_that_is_stopped(
    start_head, pipe, temporary_directory, tmp_path, number
):
    head = start_head(SCRIPT + "envs.step([0, 0])")
    pids = pipe.pids(2)  # both are in a step that takes an hour
    if number == signal.SIGINT:
        os.killpg(head.pid, number)  # as a terminal does
    else:
        head.send_signal(number)
    assert_ended([head.pid, *pids])
    assert head.wait() == -number
    if number == signal.SIGINT:
        errors = (tmp_path / "output").read_text()
        assert errors.count("Traceback") == 1 and errors.endswith("\nKeyboardInterrupt\n")
    assert list(temporary_directory.iterdir()) == []  # also if the head was killed without warning


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_no_worker_survives_a_head_that_is_killed_before_it_has_said_anything(
    start_head, pipe, temporary_directory, how
):
    # The head is killed once it has ordered its first worker, or started the worker's process.
    code = """
import os, signal, socket, subprocess, sys
from clusterenv_runtime import ClusterEnv
from tests.envs import CountingEnv
start, send = subprocess.Popen, socket.send_fds
def start_and_tell(*args, **kwargs):
    process = start(*args, **kwargs)
    with open(sys.argv[1], "w") as pipe:
        pipe.write(f"{process.pid}\\n")
    if how == "spawn":
        os.kill(os.getpid(), signal.SIGKILL)
    return process
def send_and_die(*args):
    send(*args)
    os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen, socket.send_fds = start_and_tell, send_and_die
ClusterEnv([CountingEnv] * 2, 2, startup_timeout=3600, worker_start=how)
"""
    head = start_head(f"how = {how!r}\n{code}")
    (pid,) = pipe.pids(1)
    head.wait(PATIENCE)
    assert_ended([pid])
    wait_until(lambda: not list(temporary_directory.iterdir()))  # removed by a worker


def test_no_worker_survives_a_head_that_is_killed_although_its_fork_lives_on(
    start_head, pipe, temporary_directory
):
    code = """
import os, signal, sys, time
from clusterenv_runtime import ClusterEnv
from tests.conftest import worker_commands
from tests.envs import CountingEnv
envs = ClusterEnv([CountingEnv], 1, worker_timeout=3600)
with open(sys.argv[1], "w") as pipe:
    pipe.writelines(f"{pid}\\n" for pid in worker_commands())
if (child := os.fork()) == 0:
    time.sleep(3600)
with open(sys.argv[1], "w") as pipe:
    pipe.write(f"{child}\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""
    head = start_head(code)
    pids, (child,) = pipe.pids(1), pipe.pids(1)
    head.wait(PATIENCE)
    assert_ended(pids)
    os.kill(child, signal.SIGKILL)
    assert list(temporary_directory.iterdir()) == []


def test_nothing_that_an_environment_has_started_survives_a_head_that_is_killed(start_head, pipe):
    code = """
import os, signal, sys
from clusterenv_runtime import ClusterEnv
from tests.envs import LeavingEnv
envs = ClusterEnv([LeavingEnv], 1, worker_timeout=3600)
envs.reset()
with open(sys.argv[1], "w") as pipe:
    pipe.writelines(f"{pid}\\n" for pid in [*envs.call("pid"), *envs.get_attr("started")[0]])
os.kill(os.getpid(), signal.SIGKILL)
"""
    head = start_head(code)
    pids = pipe.pids(3)
    head.wait(PATIENCE)
    assert_ended(pids)


STEPPING = """
envs.interrupt()
with suppress(Interrupted):
    envs.step([0, 0])
"""
REPLACED = """
for _ in range(2):
    pid = envs.call("pid")[0]
    os.kill(pid, signal.SIGKILL)
    while envs.call("pid")[0] == pid:
        pass
"""


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "end, returncode",
    [
        ("envs.call('tell')", 0),
        ("envs.call('tell'); raise SystemExit(3)", 3),
        ("envs.call('tell'); raise ValueError", 1),
        (
            f"{STEPPING}sys.stdin.read()",
            0,
        ),  # while they step
        (f"{REPLACED}envs.call('tell')", 0),
        (f"{REPLACED}envs.call('tell'); raise ValueError", 1),
    ],
)
def test_no_worker_survives_a_head_that_ends_without_close(
    start_head, pipe, tmp_path, how, end, returncode
):
    quiet = "import logging; logging.disable()\n"  # about replacements
    script = SCRIPT.replace("close_timeout=1", f"close_timeout=1, worker_start={how!r}")
    head = start_head(quiet + script + end)
    pids = pipe.pids(2)
    head.stdin.close()  # the last of the scripts waits for this
    errors = tmp_path / "output"
    assert head.wait(PATIENCE) == returncode, errors.read_text()
    assert_ended(pids, 0)
    lines = errors.read_text().splitlines()
    assert lines[-1:] == ["ValueError"] * ("ValueError" in end)
    assert sum(line.startswith("Traceback") for line in lines) == len(lines[-1:])


@pytest.mark.parametrize(
    "in_the_child", ["pass", "envs.close()", "del envs", "raise ValueError('its own')"]
)
def test_the_end_of_a_forked_child_does_not_end_its_parents_workers(
    temporary_directory, in_the_child
):
    code = f"""
import os, signal, sys
from clusterenv_runtime import ClusterEnv
from tests.envs import CountingEnv
envs = ClusterEnv([CountingEnv] * 2, 2, worker_timeout=3600)
pids = envs.call("pid")
if not (child := os.fork()):
    {in_the_child}
    sys.exit()
os.waitpid(child, 0)
assert envs.call("pid") == pids
os.kill(pids[1], signal.SIGKILL)  # a replacement must find the head's socket
assert envs.call("pid")[0] == pids[0]
envs.close()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 0, result.stderr


def test_a_forked_child_cannot_use_its_parents_workers():
    with ClusterEnv([CountingEnv], 1, worker_timeout=HOUR) as envs:
        if not (child := os.fork()):
            try:
                envs.reset()
            except gym.error.ClosedEnvironmentError as error:
                os._exit(0 if f"belongs to process {os.getppid()}" in str(error) else 2)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        envs.reset()


# Closing.


def test_close_closes_the_environments(workers, tmp_path):
    class ClosingEnv(CountingEnv):
        def close(self):
            (tmp_path / f"closed-{self.count}").touch()

    with ClusterEnv([CountingEnv, ClosingEnv, ClosingEnv], 2) as envs:
        envs.set_attr("count", [0, 1, 2])
        with at_most():
            envs.close(timeout=HOUR)
        assert not workers()
        assert sorted(os.listdir(tmp_path)) == ["closed-1", "closed-2"]
        with at_most():
            envs.close(timeout=HOUR)
    envs.close(terminate=True)


def test_a_cluster_that_its_own_functions_refer_to_is_closed_when_it_is_garbage(workers):
    class Program:
        def make(self):
            return CountingEnv()

        def run(self):
            self.envs = ClusterEnv([self.make] * 2, 2)
            self.envs.reset()

    Program().run()
    with at_most():
        gc.collect()
        assert not workers()


def test_after_an_error_in_close_the_others_are_closed(tmp_path):
    class ClosingEnv(CountingEnv):
        def close(self):
            if self.count:  # set below
                (tmp_path / f"closed-{self.count}").touch()
                raise ValueError("in close")

    with ClusterEnv([ClosingEnv] * 2, 1, log_dir=tmp_path / "logs", close_timeout=PATIENCE) as envs:
        envs.set_attr("count", [1, 2])
    assert sorted(os.listdir(tmp_path)) == ["closed-1", "closed-2", "logs"]
    assert "ValueError: in close" in (tmp_path / "logs" / "worker-0.log").read_text()


@pytest.mark.parametrize("where", ["step", "close"])
@pytest.mark.parametrize(
    "how", [{"timeout": 0.3}, {"terminate": True}, {"timeout": HOUR, "terminate": True}], ids=str
)
def test_close_waits_no_longer_than_it_is_told_to(workers, pipe, monkeypatch, where, how):
    times, given = [], []

    class RecordingLauncher(LocalLauncher):
        def stop(self, timeout):
            # The time that workers get to end by themselves.
            given.append(times[-1] - times[0] + timeout if timeout else 0)
            super().stop(timeout)

    def clock():
        times.append(time.monotonic())
        return times[-1]

    env_fns = [CountingEnv] + [partial(BlockingEnv, pipe.path, where)] * 2
    envs = ClusterEnv(env_fns, 3, launcher=RecordingLauncher(), worker_timeout=HOUR)
    envs.reset()
    if where == "step":
        envs.interrupt()
        with pytest.raises(Interrupted):
            envs.step([0] * 3)
        pipe.pids(2)
    monkeypatch.setattr(envs._pool, "clock", clock)
    with at_most():
        envs.close(**how)
    assert not workers()
    (seconds,) = given
    assert seconds == 0 if "terminate" in how else seconds <= how["timeout"] + 0.01
