"""The launcher of this machine alone, with small programs in the place of workers."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from clusterenv_runtime import StartupError
from clusterenv_runtime.launchers import LocalLauncher, local
from clusterenv_runtime.launchers.fork_server import is_running

from .patience import assert_ended, wait_until
from .scripts import ROOT

# The flag --do says what a worker does.
STAND_IN = """
import os, signal, subprocess, sys, time, threading, tempfile, random
import numpy as np

def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    exec(arguments[arguments.index("--do") + 1], {**globals(), **locals()})
"""


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """Return a function that starts workers which run some code, and returns their launcher."""
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "__main__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(local, "MAIN", "from stand_in.__main__ import main")
    monkeypatch.setattr(local, "ACTING", ())  # these workers do not act
    launchers = []

    def launch(code, number=1, log_dir=tmp_path / "logs", prefix="", **how):
        launcher = LocalLauncher(log_dir, prefix)
        launchers.append(launcher)
        launcher.prepare(number, ["--do", textwrap.dedent(code)], str(tmp_path), **how)
        launcher.start()
        return launcher

    yield launch
    for launcher in launchers:
        launcher.stop(0)


def pid_of(launcher, index=0):
    return launcher._processes[index].pid


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ended(launcher, index=0):
    """Wait until a worker has ended. Return how it ended."""
    wait_until(lambda: launcher.exit(index) is not None)
    return launcher.exit(index)


def text_of(launcher, index=0):
    return Path(launcher.log(index)).read_text()


HOW = pytest.mark.parametrize("fork", [True, False])


@HOW
@pytest.mark.parametrize(
    ("code", "reason", "by_signal"),
    [
        ("pass", "exit code 0", False),
        ("raise KeyError(7)", "exit code 1", False),
        ("os._exit(3)", "exit code 3", False),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV", True),
    ],
)
def test_how_a_worker_ended(launch, fork, code, reason, by_signal):
    exit = ended(launch(code, fork=fork))
    assert (exit.reason, exit.by_signal) == (reason, by_signal)


@HOW
def test_a_worker_has_a_group_a_log_and_the_end_of_any_python(launch, fork, tmp_path):
    code = f"""
    import atexit, weakref
    class Thing: pass
    thing = Thing()
    weakref.finalize(thing, lambda: print("finalized"))
    atexit.register(print, "exit handler")
    threading.Thread(target=lambda: time.sleep(0.2) or print("thread")).start()
    folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})
    print("group", os.getpgid(0) == os.getpid(), "stdin", os.read(0, 1), file=sys.stderr)
    print(folder.name, os.environ["PYTHONHASHSEED"], os.environ["OMP_NUM_THREADS"])
    print("no end of line", end="")
    """
    launcher = launch(code, fork=fork)
    assert ended(launcher).reason == "exit code 0"
    text = text_of(launcher)
    assert "group True stdin b''" in text and text.endswith("no end of line") is False
    for word in ("finalized", "exit handler", "thread", "no end of line", " 1 1"):
        assert word in text
    assert not [name for name in os.listdir(tmp_path) if name.startswith("tmp")]


def test_forked_workers_draw_their_own_numbers_and_are_forked_from_one_process(launch):
    code = """
    import torch
    print(random.random(), np.random.random(), torch.rand(1).item())
    time.sleep(60)
    """
    launcher = launch(code, 3, preload=["torch"])
    wait_until(lambda: all(text_of(launcher, index).count("\n") for index in range(3)))
    numbers = [text_of(launcher, index).split() for index in range(3)]
    assert len({number for each in numbers for number in each}) == 9
    assert len({parent_of(pid_of(launcher, index)) for index in range(3)} - {os.getpid()}) == 1


# Processes of a worker's environment: in its group, and outside with and without an `exec`.
FAMILY = """
def child(*command):
    if os.fork() == 0:
        if command:
            os.execvp(command[0], command)
        print(os.getpid(), flush=True)
        time.sleep(600)
print(subprocess.Popen(["sleep", "600"]).pid)
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
sys.stdout.flush()
time.sleep(600)
"""


def family(launcher, index=0):
    wait_until(lambda: text_of(launcher, index).count("\n") == 3)
    return [pid_of(launcher, index), *map(int, text_of(launcher, index).split())]


@HOW
def test_nothing_is_left_of_a_killed_worker(launch, fork):
    launcher = launch(FAMILY, 2, fork=fork)
    families = [family(launcher, index) for index in range(2)]
    assert all(map(is_running, families[0] + families[1]))
    os.kill(families[0][0], signal.SIGKILL)
    assert ended(launcher).reason == "killed by SIGKILL"
    launcher.kill(0)
    wait_until(lambda: launcher.has_ended(0))
    assert_ended(families[0], 5)  # they have no memory any more, but may not have ended
    assert all(map(is_running, families[1]))
    launcher.start_worker(0)
    launcher.stop(0)
    assert_ended([*families[1], pid_of(launcher)], 5)


def test_workers_outlive_the_process_that_they_were_forked_from(launch):
    launcher = launch("time.sleep(600)", 3)
    for lost in range(3):
        os.kill(parent_of(pid_of(launcher, lost)), signal.SIGKILL)
        assert launcher.exit(lost) is None
        os.kill(pid_of(launcher, lost), signal.SIGKILL)
        assert ended(launcher, lost).by_signal
        launcher.start_worker(lost)  # by another such process
        assert parent_of(pid_of(launcher, lost)) != os.getpid()
    launcher.kill(0)
    wait_until(lambda: launcher.has_ended(0))


def test_without_a_process_that_forks_workers_are_started_singly(launch, tmp_path, caplog):
    (tmp_path / "ends.py").write_text("import os; os._exit(0)")
    launcher = launch("time.sleep(600)", preload=["ends"])
    assert parent_of(pid_of(launcher)) == os.getpid()
    assert [record.message for record in caplog.records if "lost" in record.message]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import nonesuch", "cannot import bad: ModuleNotFoundError: No module named 'nonesuch'"),
        ("raise SystemExit(2)", "cannot import bad: SystemExit: 2"),
        ("import threading; threading.Timer(600, id).start()", "bad starts threads, which forked"),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_one_line(launch, tmp_path, code, fault):
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(StartupError, match=f"^worker_preload: {fault}"):
        launch("pass", preload=["bad"])
    (tmp_path / "bad.py").write_text("")
    assert ended(launch("pass", preload=["bad"])).reason == "exit code 0"


def test_a_log_that_cannot_be_opened_ends_the_start(launch, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        launch("pass")


HEAD = """
import os, signal, sys, time
sys.path.insert(0, {path!r})
from clusterenv_runtime.launchers import LocalLauncher, local
local.MAIN = "from stand_in.__main__ import main"
launcher = LocalLauncher({log_dir!r})
launcher.prepare(2, ["--do", {code!r}], "", fork={fork})
{before}
launcher.start()
{after}
"""


@pytest.fixture
def head(launch, tmp_path):
    """Return a function that runs a program that starts two workers."""

    def head(code, before="", after="", fork=True, log_dir=None, how="exec {}", **options):
        text = HEAD.format(
            path=str(tmp_path), log_dir=log_dir, code=code, before=before, after=after, fork=fork
        )
        (tmp_path / "head.py").write_text(text)
        command = how.format(f"{sys.executable} {tmp_path / 'head.py'}")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, shell=True, env=env, cwd=tmp_path, **options)

    return head


@HOW
def test_a_program_that_ends_without_stopping_its_workers_ends_at_once(head, tmp_path, fork):
    code = "time.sleep(1); open(f'{os.getpid()}.closed', 'w')"
    process = head(code, after="sys.exit(5)", fork=fork)
    assert process.wait() == 5
    wait_until(lambda: len(list(tmp_path.glob("*.closed"))) == 2)


def test_a_head_that_ignores_the_ends_of_children(head, tmp_path):
    after = """
    os.kill(launcher._processes[0].pid, signal.SIGKILL)
    while launcher.exit(0) is None: time.sleep(0.01)
    open("reason", "w").write(launcher.exit(0).reason)
    launcher.stop(0)
    """
    before = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    assert head("time.sleep(600)", before, textwrap.dedent(after)).wait() == 0
    assert (tmp_path / "reason").read_text() == "killed by SIGKILL"


@HOW
@pytest.mark.parametrize("how", ["{} <&-", "{} >&-", "{} 2>&-", "{} <&- >&- 2>&-"])
def test_a_head_with_closed_streams(head, tmp_path, how, fork):
    code = """
    print('talks', flush=True)
    open(f"{os.getpid()}.out", "w").write(os.readlink("/proc/self/fd/1"))
    """
    code = textwrap.dedent(code)
    with open(tmp_path / "output", "wb") as output:
        process = head(code, after="launcher.stop(30)", how=how, fork=fork, stdout=output)
        assert process.wait() == 0
    expected = os.devnull if ">&-" in how.split("2")[0] else str(tmp_path / "output")
    assert {each.read_text() for each in tmp_path.glob("*.out")} == {expected}


@HOW
def test_output_that_does_not_block_is_not_lost(head, fork):
    read, write = os.pipe()
    os.set_blocking(write, False)
    code = "print('x' * 199_999)"
    process = head(code, after="launcher.stop(30)", fork=fork, stdout=write)
    os.close(write)
    time.sleep(1)
    with open(read) as file:
        assert len(file.read()) == 400_000
    assert process.wait() == 0
