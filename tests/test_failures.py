"""What breaks, breaks clearly and soon, and leaves nothing behind."""

import asyncio
import gc
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import zmq

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, EnvError, LocalLauncher, StartupError, WorkerDiedError
from clusterenv_runtime.codec import MAX_FRAME
from clusterenv_runtime.protocol import PROTOCOL_VERSION, decode_answer

from .envs import BlockingEnv, CountingEnv, CustomError, FailingEnv, LeavingEnv, MuteError, RandomEnv, assert_same
from .nets import linear
from .patience import HOUR, PATIENCE, assert_ended, at_most, with_more_time
from .scripts import children_of

ROOT = Path(__file__).resolve().parent.parent
PATIENT = {"worker_timeout": HOUR, "startup_timeout": HOUR}  # for a machine that has other things to do
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's logger announces each error


@pytest.fixture(autouse=True)
def temporary_directory(monkeypatch, tmp_path_factory):
    """Where sockets are put during a test; nothing may remain there."""
    tmp_path_factory.getbasetemp()  # made now, it is elsewhere
    with tempfile.TemporaryDirectory(prefix="test-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)
        assert os.listdir(directory) == []


class Pipe:
    """A named pipe on which environments tell their pids, and so where they are."""

    def __init__(self, path):
        self.path = str(path)
        os.mkfifo(path)
        # For reading and writing, so that it neither blocks here nor ends when an environment closes it.
        self._file = os.fdopen(os.open(path, os.O_RDWR), "r")

    def pids(self, number):
        """Wait until ``number`` environments have told their pid."""
        return [int(self._file.readline()) for _ in range(number)]


@pytest.fixture
def pipe(tmp_path):
    return Pipe(tmp_path / "pipe")


# Workers that die. Their end is noticed by itself, not by the silence of their link, which takes an hour here.


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    assert_ended([pid])


def died(worker, pid, rows, how="killed by SIGKILL"):
    return re.compile(rf"worker {worker} \(.*, pid {pid}, environments {rows}.*\) died: {how}")


def test_a_worker_killed_while_idle(workers):
    envs = ClusterEnv([CountingEnv] * 4, 2, on_worker_loss="raise", worker_timeout=HOUR)
    envs.reset()
    *_, pid = envs.call("pid")
    kill(pid)
    with at_most(), pytest.raises(WorkerDiedError, match=died(1, pid, "2 to 3")):
        envs.step([0] * 4)
    with at_most(), pytest.raises(WorkerDiedError, match=rf"worker 1 .*{pid}.* is gone"):
        envs.reset()
    with at_most():
        envs.close(timeout=HOUR)
    assert not workers()


def test_a_worker_killed_while_it_steps(workers, pipe):
    env_fns = [CountingEnv, CountingEnv, partial(BlockingEnv, pipe.path)]
    envs = ClusterEnv(env_fns, 3, on_worker_loss="raise", worker_timeout=HOUR)
    envs.reset()
    envs.step_async([0] * 3)
    (pid,) = pipe.pids(1)
    kill(pid)
    with at_most(), pytest.raises(WorkerDiedError, match=died(2, pid, "2 to 2")):
        envs.step_wait()
    with at_most():
        envs.close(timeout=HOUR)
    assert not workers()


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
        with at_most(), pytest.raises(WorkerDiedError, match=died(0, first, "0 to 0", how="exit code 3")):
            envs.call("leave_if", first, code=3)


def test_a_worker_killed_while_it_builds_its_environments(workers):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDiedError, match=died(1, "[0-9]+", "1 to 1")):
        ClusterEnv([CountingEnv, die], 2)
    assert not workers()


# What environments start, and where it goes.


def test_what_has_left_a_killed_workers_group_ends_with_it(workers):
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
            os.kill(process, 0)  # those of the replacement live
    assert_ended(started)
    assert not workers()


def test_a_worker_that_has_left_its_group_is_killed(workers):
    launcher = LocalLauncher()
    with ClusterEnv([LeavingEnv], 1, launcher=launcher, worker_timeout=HOUR) as envs:
        (pid,) = envs.call("leave")
        assert os.getpgid(pid) != pid
        launcher.kill(0)
        assert_ended([pid])
    assert not workers()


def test_a_worker_that_has_left_the_group_of_its_prefix_ends_with_it(workers):
    launcher = LocalLauncher(prefix="sh -c '\"$@\"; exit $?' sh")
    with ClusterEnv([LeavingEnv], 1, launcher=launcher, worker_timeout=HOUR) as envs:
        envs.reset()
        (shell,), (pid,) = workers(), envs.call("leave")
        assert os.getsid(pid) == pid
        kill(shell)
        while not envs.restarts:  # until that is noticed the worker answers
            envs.step([0])
        assert_ended([pid])
    assert not workers()


# Workers that are told to end by somebody else.


def test_ctrl_c_at_a_workers_own_terminal_is_no_error_of_its_environment(workers, pipe, tmp_path):
    class ClosingEnv(BlockingEnv):
        def close(self):
            (tmp_path / "closed").touch()

    envs = ClusterEnv([partial(ClosingEnv, pipe.path)], 1, on_worker_loss="raise", worker_timeout=HOUR)
    envs.reset()
    envs.step_async([0])
    (pid,) = pipe.pids(1)
    os.kill(pid, signal.SIGINT)
    with at_most(), pytest.raises(WorkerDiedError, match=died(0, pid, "0 to 0", "exit code 0")):
        envs.step_wait()
    assert (tmp_path / "closed").exists()
    envs.close()
    assert not workers()


def test_the_first_process_of_a_container_ends_when_it_is_terminated(tmp_path):
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("this may not make process namespaces")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as head:
        head.bind(f"ipc://{tmp_path}/head")
        arguments = ["--connect", f"ipc://{tmp_path}/head", "--index", "0", "--startup-timeout", str(HOUR)]
        command = [*container, sys.executable, "-m", "clusterenv_runtime.worker", *arguments]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
        try:
            assert head.poll(PATIENCE * 1000)  # it has said hello
            assert decode_answer(head.recv_multipart()[1])[1].pid == 1
            (worker,) = children_of(process.pid)
            os.kill(worker, signal.SIGTERM)
            assert process.wait(PATIENCE) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()


# Processes that stand by.


def standbys(launcher):
    return [process.pid for process in launcher._standbys]


@pytest.mark.parametrize("prefix", ["", "nice -n 1", "sh -c '\"$@\"; exit $?' sh"])
def test_a_process_that_stands_by_takes_the_place_of_a_lost_worker(workers, tmp_path, prefix):
    launcher = LocalLauncher(tmp_path, prefix)
    with ClusterEnv([CountingEnv] * 2, 2, launcher=launcher, standby_workers=1, **PATIENT) as envs:
        envs.reset()
        (standby,) = standbys(launcher)
        assert "torch" in workers()[standby]  # which this process has imported, and so does that
        kill(envs.call("pid")[1])
        with at_most():
            envs.step([0, 0])
        assert [restart["worker"] for restart in envs.restarts] == [1]
        _, pid = envs.call("pid")
        assert os.getpgid(pid) == standby
        log = str(tmp_path / "worker-1.log")
        assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)] == [os.devnull, log, log]
        (another,) = standbys(launcher)
        assert another != standby and another in workers()
    assert not workers()


def test_where_those_that_stand_by_have_died_too_another_process_is_started(workers):
    launcher = LocalLauncher()
    with ClusterEnv([CountingEnv], 1, launcher=launcher, standby_workers=2, **PATIENT) as envs:
        envs.reset()
        dead = standbys(launcher)
        for pid in (*dead, *envs.call("pid")):
            kill(pid)
        with at_most():
            envs.step([0])
        assert len(envs.restarts) == 1 and len(standbys(launcher)) == 2 and not set(standbys(launcher)) & {*dead}
        assert len(workers()) == 3
    assert not workers()


def test_no_process_that_stands_by_survives_a_head_that_is_killed(start_head, pipe, temporary_directory):
    code = """
import os, signal, sys
from clusterenv_runtime import ClusterEnv
from tests.conftest import worker_commands
from tests.envs import CountingEnv
envs = ClusterEnv([CountingEnv], 1, standby_workers=1, worker_timeout=3600)
with open(sys.argv[1], "w") as pipe:
    pipe.writelines(f"{pid}\\n" for pid in worker_commands())
os.kill(os.getpid(), signal.SIGKILL)
"""
    head = start_head(code)
    pids = pipe.pids(2)
    head.wait(PATIENCE)
    assert_ended(pids)
    assert list(temporary_directory.iterdir()) == []


# Environments that raise.

ERRORS = {
    "one text": ValueError("on purpose"),
    "a percent sign": ValueError("100% wrong: %s"),
    "key": KeyError("missing"),
    "a number": IndexError(3),
    "nothing": ZeroDivisionError(),
    "two arguments": OSError(2, "No such file"),
    "of Gymnasium": gym.error.ResetNeeded("first reset"),
}
PLACES = [
    *((where, row, "one text") for where in ("constructor", "reset", "step") for row in (1, 4)),
    *(("step", 3, name) for name in list(ERRORS)[1:]),
]


def run_until_it_raises(where, error, row):
    env_fns = [CountingEnv] * 5
    env_fns[row] = partial(FailingEnv, where, error)
    with ClusterEnv(env_fns, 2, worker_timeout=HOUR, startup_timeout=HOUR) as envs:
        envs.reset()
        envs.step([0] * 5)


def assert_tells_all(text, row):
    worker, rows = [(0, "0 to 2"), (1, "3 to 4")][row > 2]
    assert re.match(rf"environment {row} on worker {worker} \(.*, pid \d+.*, environments {rows}\) raised ", text)
    assert "Traceback (most recent call last)" in text
    assert re.search(r"in _fail_in\n[ |]+raise self.error", text)  # the line in the environment; | is of a group's


@pytest.mark.parametrize("where, row, name", PLACES)
def test_an_exception_in_an_environment_is_raised_here(workers, where, row, name):
    error = ERRORS[name]
    with at_most(), pytest.raises(type(error)) as caught:
        run_until_it_raises(where, error, row)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert type(caught.value.__cause__) is EnvError
    assert_tells_all(str(caught.value.__cause__), row)
    assert not workers()


@pytest.mark.parametrize(
    "error, text",
    [
        (CustomError("only tests know it"), "tests.envs.CustomError: only tests know it"),
        (UnicodeDecodeError("ascii", b"x", 0, 1, "takes five arguments"), "UnicodeDecodeError: 'ascii' codec can't"),
        (SystemExit(7), "builtins.SystemExit: 7"),
        (StopIteration("enough"), "builtins.StopIteration: enough"),  # it would end a loop of the user's
        (KeyboardInterrupt("window closed"), "builtins.KeyboardInterrupt: window closed"),
        (GeneratorExit(), "builtins.GeneratorExit: "),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError: "),
        (ExceptionGroup("of \udc80", [ValueError("x")]), "builtins.ExceptionGroup: of \\udc80 (1 sub-exception)"),
        (MuteError(RuntimeError()), "tests.envs.MuteError: <exception str() failed>"),
        (MuteError(SystemExit(4)), "tests.envs.MuteError: <exception str() failed>"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("where", ["constructor", "step"])
def test_an_exception_that_cannot_be_made_here_is_an_env_error(workers, where, error, text):
    with at_most(), pytest.raises(EnvError) as caught:
        run_until_it_raises(where, error, 3)
    assert text in str(caught.value)
    assert_tells_all(str(caught.value), 3)
    assert not workers()


@pytest.mark.parametrize(
    "message, text",
    [
        ("a name \udcff of bytes", r"a name \udcff of bytes"),
        ("x" * MAX_FRAME, "x" * 1000 + "\n[...]\n" + "x" * 1000),
        ("é" * MAX_FRAME, "é" * 1000),
    ],
    ids=["lone surrogate", "too long", "too long, and cut within a character"],
)
def test_an_exception_whose_text_cannot_be_sent_is_raised_here(workers, message, text):
    with at_most(), pytest.raises(ValueError) as caught:
        run_until_it_raises("step", ValueError(message), 3)
    assert type(caught.value) is ValueError and text in str(caught.value)
    assert text in str(caught.value.__cause__) and "in _fail_in\n    raise self.error" in str(caught.value.__cause__)
    assert not workers()


class Unspeakable:
    """A key, or a value, whose text is an error."""

    def __str__(self):
        raise ValueError("unspeakable")


def test_text_that_cannot_be_sent_is_left_out_of_infos_and_else_an_error():
    class TellingEnv(CountingEnv):
        name = "a name \udcff of bytes"

        def step(self, action):
            return *super().step(action)[:-1], {"path": self.name, self.name: 1, Unspeakable(): 2, "fine": 3}

    with ClusterEnv([TellingEnv, TellingEnv], 2, worker_timeout=HOUR) as envs:
        envs.reset()
        with pytest.warns(UserWarning) as caught:
            assert set(envs.step([0, 0])[-1]) == {"fine", "_fine"}
        texts = sorted(str(warning.message) for warning in caught)
        assert [text.partition(" (")[0].rpartition("Info ")[2] for text in texts] == [
            "a Unspeakable", r"a name \udcff of bytes", "path",
        ]  # fmt: skip
        with pytest.raises(TypeError, match="a text with lone surrogates cannot be sent to the head"):
            envs.call("name")


class SlowlyBuilt(CountingEnv):
    """Takes so many seconds to make."""

    def __init__(self, seconds):
        super().__init__()
        time.sleep(seconds)


class OnceEnv(RandomEnv):
    """Raises in its third step or reset, and then never again."""

    def __init__(self, where):
        super().__init__(gym.spaces.Box(-1, 1, (2,)), end=0.0 if where == "step" else 0.5)
        self.where, self.counts = where, {"step": 0, "reset": 0}

    def _count(self, place):
        self.counts[place] += 1
        if place == self.where and self.counts[place] == 3:
            raise ValueError(f"in its {place}")

    def reset(self, *, seed=None, options=None):
        self._count("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._count("step")
        return super().step(action)


@pytest.mark.parametrize("mode", [gym.vector.AutoresetMode.NEXT_STEP, gym.vector.AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("where", ["step", "reset"])
def test_after_an_exception_a_reset_goes_on_as_sync_vector_env_does(tmp_path, where, mode):
    env_fns = [partial(OnceEnv, each) for each in ("nowhere", where, "nowhere", "nowhere")]
    sync = gym.vector.SyncVectorEnv(env_fns, autoreset_mode=mode)
    with ClusterEnv(env_fns, 2, autoreset_mode=mode, log_dir=str(tmp_path), worker_timeout=HOUR) as envs:
        for each in (envs, sync):
            each.reset(seed=1)
            with pytest.raises(ValueError, match=f"in its {where}") as caught:
                for _ in range(100):
                    each.step([0] * 4)
            if each is envs:
                assert str(tmp_path / "worker-") in str(caught.value.__cause__)
        for method, arguments in (("step", [[0] * 4]), ("rollout", [None, 2]), ("send", [2])):
            with pytest.raises(gym.error.ResetNeeded):
                getattr(envs, method)(*arguments)
        with pytest.raises(gym.error.ResetNeeded):
            envs.reset(options={"reset_mask": np.ones(4, bool)})
        assert_same(*(each.reset(seed=2) for each in (envs, sync)))
        for _ in range(20):
            assert_same(*(each.step([0] * 4) for each in (envs, sync)))
        assert not envs.restarts


def test_after_an_exception_in_a_rollout_a_reset_goes_on():
    with ClusterEnv([CountingEnv, partial(FailingEnv, "step", ValueError("x"))], 2, worker_timeout=HOUR) as envs:
        policy = CategoricalPolicy(linear(1, 2))
        pids = envs.call("pid")
        for _ in range(2):
            envs.reset(seed=1)
            with pytest.raises(ValueError, match="^x$"):
                envs.rollout(policy, 3)
            with pytest.raises(gym.error.ResetNeeded):
                envs.rollout(policy, 3)
        envs.set_attr("where", "nowhere")
        envs.reset(seed=1)
        assert envs.rollout(policy, 3).rewards.tolist() == [[1, 1], [2, 2], [3, 3]]
        assert envs.call("pid") == pids and not envs.restarts


def test_after_an_exception_in_a_stream_what_was_sent_is_given_up():
    with ClusterEnv([CountingEnv, partial(FailingEnv, "step", ValueError("x"))], 2, worker_timeout=HOUR) as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="^x$"):
            for _ in range(2):
                envs.send(3)
            while True:
                envs.recv()
        with pytest.raises(gym.error.ResetNeeded):
            envs.recv()
        envs.set_attr("where", "nowhere")
        envs.reset(seed=1)
        envs.send(3)
        chunks = dict(envs.recv() for _ in range(2))
        assert chunks.keys() == {0, 1} and all(chunk.rewards.ravel().tolist() == [1, 2, 3] for chunk in chunks.values())


def test_an_error_of_the_policy_is_not_an_environments():
    class Fewer(CategoricalPolicy):
        """Gives too few actions, once it acts in environments whose second step is over."""

        def to_env(self, actions):
            return actions[:1] if self.late else actions

        def act(self, params, noise):
            self.late = bool((params[..., 0] > 10).any())
            return super().act(params, noise)

    net = torch.nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        net.weight[:] = torch.tensor([[6.0], [0.0]])  # more than 10 where the count is 2
    with ClusterEnv([CountingEnv] * 3, 1, worker_timeout=HOUR) as envs:
        envs.reset(seed=1)
        policy = Fewer(net)
        with pytest.raises(ValueError, match="shorter|longer") as caught:
            envs.rollout(policy, 5)
        assert re.match("the policy or an environment on worker 0 ", str(caught.value.__cause__))


def test_an_exception_after_a_timeout_is_not_lost(tmp_path):
    """The one that comes too late for its own call is raised by the next."""
    gate = tmp_path / "gate"
    with ClusterEnv([CountingEnv, partial(FailingEnv, "step", ValueError("late"), gate=str(gate))], 2) as envs:
        envs.reset()
        envs.step_async([0, 0])
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.01)
        gate.touch()
        with at_most(), pytest.raises(ValueError, match="^late$") as caught:
            envs.step([0, 0])
        assert "environment 1 on worker 1" in str(caught.value.__cause__)


def test_a_constructor_that_raises_here_starts_no_process(workers, monkeypatch):
    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ValueError, match="^here$") as caught:
        ClusterEnv([partial(FailingEnv, "constructor", ValueError("here")), CountingEnv])
    assert caught.value.__cause__ is None
    with pytest.raises(TypeError, match="pickle"):
        lock = threading.Lock()
        ClusterEnv([lambda: CountingEnv(), lambda: lock])
    assert not workers()


# Workers that do not come up.


@pytest.fixture
def instead_of_python(monkeypatch, tmp_path):
    """A function that makes workers run a shell script instead; its arguments are theirs without ``-m MODULE``."""

    def replace(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\nshift 2\n{script}\n")
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
    text = r"worker 0 \(.*environments 0 to 1\), worker 1 \(.*environments 2 to 2\) did not come up .* within 0\.5 s"
    with at_most(45), pytest.raises(StartupError, match=text):  # sooner than with the default, a minute
        ClusterEnv([CountingEnv] * 3, 2, startup_timeout=0.5)
    assert len(started) == 2 and all(process.returncode is not None for process in started)


def test_workers_that_end_at_once(instead_of_python):
    instead_of_python("exit 9")
    with at_most(), pytest.raises(WorkerDiedError, match="worker [01] .* died: exit code 9"):
        ClusterEnv([CountingEnv] * 3, 2, startup_timeout=HOUR)


def test_workers_that_take_too_long_to_build(workers, pipe):
    def check(seconds):  # that the other one needs, too
        text = rf"^worker 1 \(.*1 to 1\) did not come up and build the next of its environments within {seconds} s$"
        with at_most(), pytest.raises(StartupError, match=text):
            ClusterEnv([CountingEnv, partial(BlockingEnv, pipe.path, "constructor")], 2, startup_timeout=seconds)
        assert not workers()

    with_more_time(check, 4, 60)


def test_constructors_that_take_long_are_given_time_one_after_the_other(workers):
    def check(seconds):  # which four of them take longer than, and a busy machine's imports do not
        start = time.monotonic()
        with ClusterEnv([CountingEnv, *[partial(SlowlyBuilt, 0.4 * seconds)] * 4], 1, startup_timeout=seconds) as envs:
            envs.reset()
        assert time.monotonic() - start > 1.6 * seconds

    with_more_time(check, 5, 30)


def test_a_launcher_serves_one_cluster():
    launcher = LocalLauncher()
    with ClusterEnv([CountingEnv], 1, launcher=launcher) as envs:
        with pytest.raises(ValueError, match="a LocalLauncher starts the workers of one ClusterEnv: make another"):
            ClusterEnv([CountingEnv], 1, launcher=launcher)
        envs.reset()
        envs.step([0])  # its worker is still there


@pytest.mark.parametrize(
    "patch, text",
    [
        ("PROTOCOL_VERSION = 99", rf"worker [01] .* speaks protocol 99, the head {PROTOCOL_VERSION}: install the same"),
        (
            "shared_versions = lambda: {'numpy': '0.1'}",
            r"worker [01] .* runs numpy 0\.1 \(head: .*\): install the same",
        ),
    ],
)
def test_workers_that_do_not_match(workers, instead_of_python, patch, text):
    imports = "from clusterenv_runtime import protocol; from clusterenv_runtime.worker.__main__ import main"
    code = f"{imports}; protocol.{patch}; main()"
    instead_of_python(f'exec {sys.executable} -c "{code}" "$@"')
    with at_most(), pytest.raises(StartupError, match=text):
        ClusterEnv([CountingEnv] * 2, 2, startup_timeout=HOUR)
    assert not workers()


def test_a_temporary_directory_that_is_too_deep_for_a_socket(monkeypatch, tmp_path):
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(StartupError, match="longer than 107 bytes: set TMPDIR to a shorter one"):
        ClusterEnv([CountingEnv])
    gc.collect()
    assert os.listdir(directory) == []


# Heads that end. Their workers notice the end of the link, not its silence, which takes an hour here.

SCRIPT = """
import os, signal, sys
from functools import partial
from clusterenv_runtime import ClusterEnv
from tests.envs import BlockingEnv
envs = ClusterEnv([partial(BlockingEnv, sys.argv[1])] * 2, 2, worker_timeout=3600)
envs.reset()
"""


@pytest.fixture
def start_head(pipe, temporary_directory, tmp_path):
    """A function that runs a script in a process of its own; what that writes is in ``tmp_path / "output"``."""

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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_no_worker_survives_a_head_that_is_stopped(start_head, pipe, temporary_directory, tmp_path, number):
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
        assert errors.count("Traceback") == 1 and errors.endswith("KeyboardInterrupt\n")
    assert list(temporary_directory.iterdir()) == []  # also if the head was killed without warning


def test_no_worker_survives_a_head_that_is_killed_before_it_has_said_anything(start_head, pipe, temporary_directory):
    code = """
import os, signal, subprocess, sys
from clusterenv_runtime import ClusterEnv
from tests.envs import CountingEnv
start = subprocess.Popen
def start_one_and_die(*args, **kwargs):
    with open(sys.argv[1], "w") as pipe:
        pipe.write(f"{start(*args, **kwargs).pid}\\n")
    os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen = start_one_and_die
ClusterEnv([CountingEnv] * 2, 2, startup_timeout=3600)
"""
    head = start_head(code)
    (pid,) = pipe.pids(1)
    head.wait(PATIENCE)
    assert_ended([pid])
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


@pytest.mark.parametrize(
    "end, returncode",
    [
        ("envs.call('tell')", 0),
        ("envs.call('tell'); raise SystemExit(3)", 3),
        ("envs.call('tell'); raise ValueError", 1),
        ("envs.step_async([0, 0]); sys.stdin.read()", 0),  # while they step
    ],
)
def test_no_worker_survives_a_head_that_ends_without_close(start_head, pipe, tmp_path, end, returncode):
    head = start_head(SCRIPT + end)
    pids = pipe.pids(2)
    head.stdin.close()  # what the last of the scripts waits for
    assert head.wait(PATIENCE) == returncode, (tmp_path / "output").read_text()
    assert_ended(pids, 0)


def test_no_worker_survives_its_forgotten_cluster():
    envs = ClusterEnv([CountingEnv] * 2, 2)
    pids = envs.call("pid")
    del envs
    gc.collect()
    assert_ended(pids, 0)


@pytest.mark.parametrize("in_the_child", ["pass", "envs.close()", "del envs", "raise ValueError('its own')"])
def test_a_forked_child_that_ends_ends_nothing_of_its_parents(temporary_directory, in_the_child):
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
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr


def test_a_forked_child_cannot_use_its_parents_workers():
    with ClusterEnv([CountingEnv], 1, worker_timeout=HOUR) as envs:
        if not (child := os.fork()):
            try:
                envs.reset()
            except gym.error.ClosedEnvironmentError as error:
                os._exit(0 if f"This is process {os.getppid()}'s" in str(error) else 2)
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


@pytest.mark.parametrize("where", ["step", "close"])
@pytest.mark.parametrize("how", [{"timeout": 0.3}, {"terminate": True}, {"timeout": HOUR, "terminate": True}], ids=str)
def test_close_waits_no_longer_than_it_is_told_to(workers, pipe, monkeypatch, where, how):
    sleep, slept, given = time.sleep, [], []

    class RecordingLauncher(LocalLauncher):
        def stop(self, timeout):
            given.append(sum(slept) + timeout)  # for them to end by themselves
            super().stop(timeout)

    env_fns = [CountingEnv] + [partial(BlockingEnv, pipe.path, where)] * 2
    envs = ClusterEnv(env_fns, 3, launcher=RecordingLauncher(), worker_timeout=HOUR)
    envs.reset()
    if where == "step":
        envs.step_async([0] * 3)
        pipe.pids(2)
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds) or sleep(seconds))
    with at_most():
        envs.close(**how)
    assert not workers()
    (seconds,) = given
    assert seconds == 0 if "terminate" in how else seconds <= how["timeout"] + 0.01


def test_close_kills_what_cannot_be_terminated(workers):
    envs = ClusterEnv([CountingEnv] * 2, 2)
    os.kill(envs.call("pid")[1], signal.SIGSTOP)
    with at_most():
        envs.close(timeout=0.1)
    assert not workers()


# What is not a failure.


def test_slow_is_not_dead():
    with ClusterEnv([CountingEnv, partial(CountingEnv, delay=2)], 2) as envs:
        envs.reset()
        assert envs.step([0, 0])[0].tolist() == [[1], [1]]


def test_a_rollout_that_is_interrupted_does_not_hang_what_comes_after(monkeypatch):
    with ClusterEnv([CountingEnv], 1) as envs:
        envs.reset()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(envs._pool.transport, "exchange", lambda *_: signal.raise_signal(signal.SIGINT))
            envs.rollout(CategoricalPolicy(linear(1, 2)), 3)
        envs.reset_async()
        assert_same(envs.reset_wait(timeout=PATIENCE), (np.zeros((1, 1), np.float32), {}))


class LoudEnv(CountingEnv):
    """Prints more than may be in a file."""

    def step(self, action):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        print("x" * 10_000, flush=True)
        print("y" * 10_000, file=sys.stderr)
        return super().step(action)


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path):
    with ClusterEnv([LoudEnv], 1, log_dir=tmp_path) as envs:
        envs.reset()
        assert [envs.step([0])[1].tolist() for _ in range(3)] == [[1], [2], [3]]
    assert (tmp_path / "worker-0.log").stat().st_size <= 1000


def test_a_log_that_cannot_be_opened_again_ends_nothing(tmp_path, workers, caplog):
    with ClusterEnv([CountingEnv], 1, log_dir=tmp_path / "logs") as envs:
        envs.reset()
        shutil.rmtree(tmp_path / "logs")
        kill(next(iter(workers())))
        assert envs.step([0])[3].tolist() == [True]
    assert "from now on worker 0 has no log: [Errno 2] No such file" in caplog.text


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path):
    (tmp_path / "worker-0.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match=r"cannot start the workers: .*worker-0\.log"):
        ClusterEnv([CountingEnv], 1, log_dir=tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_an_environment_that_ends_its_worker_in_each_step_is_given_up():
    with at_most(), ClusterEnv([DyingEnv], 1, max_worker_restarts=2) as envs:
        envs.reset()
        with pytest.raises(WorkerDiedError, match="and so did 2 before it"):
            for _ in range(20):
                envs.step([0])


class DyingEnv(CountingEnv):
    def step(self, action):
        os._exit(1)
