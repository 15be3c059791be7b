"""A time limit for every test, and a check that no test module leaves workers behind."""

import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from clusterenv_runtime.launchers import local

# The time limit of one test with its fixtures. It ends a test that hangs, and is at least ten times
# what the longest test takes on an idle machine.
SECONDS = int(os.environ.get("TEST_SECONDS", 900))
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A worker that needs a class from a test module imports that module, and with it these modules.
# That takes longer than most tests, so the fork server imports them.
local.ACTING += "pytest", "scipy.stats", "tests.scripts"

# Threads of torch that wait for each other would keep busy the cores that other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

FORKS = "clusterenv_runtime.launchers.fork_server"  # in the command of the process that forks

# A shell's background jobs ignore SIGINT, and so do the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    def stop(*_):
        signal.alarm(5)  # raise again, in case the test catches the first error
        raise TimeoutError(f"{item.nodeid} took more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def pytest_collection_modifyitems(items):
    # These tests mostly wait, while other tests compute beside them.
    items.sort(key=lambda item: "tests/slurm/" not in item.nodeid)


def worker_commands():
    """Return the command lines of this process's live workers, by pid, in the order of the pids.

    A forked worker has no command line of its own. It gets that of the process that forked it.
    """
    parents, commands = {}, {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (directory / "stat").read_text().rpartition(")")[2].split()
            command = os.fsdecode((directory / "cmdline").read_bytes()).split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended in between
        if state == "Z":
            continue  # the process has ended, but its parent has not waited for it yet
        parents[int(directory.name)] = int(parent)
        commands[int(directory.name)] = command
    own = {pid for pid, parent in parents.items() if parent == os.getpid()}
    servers = {pid for pid in own if any(FORKS in each for each in commands[pid])}
    workers = {pid for pid in own - servers if "--index" in commands[pid]}
    workers |= {pid for pid, parent in parents.items() if parent in servers}
    return {pid: commands[pid] for pid in sorted(workers)}


@pytest.fixture
def workers():
    """Return a function that returns this process's workers, see `worker_commands`."""
    return worker_commands


class Pipe:
    """A named pipe to which an environment writes its pid when it reaches a certain place."""

    def __init__(self, path):
        self.path = str(path)
        os.mkfifo(path)
        # Open for reading and writing: so opening does not block, and reading does not end when an
        # environment closes the pipe.
        self._file = os.fdopen(os.open(path, os.O_RDWR), "r")

    def pids(self, number):
        """Wait until ``number`` environments have written their pids, and return the pids."""
        return [int(self._file.readline()) for _ in range(number)]


@pytest.fixture
def pipe(tmp_path):
    return Pipe(tmp_path / "pipe")


@pytest.fixture(scope="session")
def empty(tmp_path_factory):
    """Return a directory that every test leaves empty. Scripts that run there, in this process,
    have the same `sys.path`.
    """
    return tmp_path_factory.mktemp("empty")


@pytest.fixture
def temporary_directory(monkeypatch, tmp_path_factory):
    """Set the directory for sockets during a test, and check that it is empty at the end."""
    tmp_path_factory.getbasetemp()  # pytest makes its directory now, and so elsewhere
    with tempfile.TemporaryDirectory(prefix="test-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)
        assert os.listdir(directory) == []


@pytest.fixture(autouse=True)
def own_handlers():
    """Restore the handlers of signals and of the start's log, which scripts in this process set."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    for name in ("clusterenv_runtime.env", "clusterenv_runtime.head.pool.waits"):
        log = logging.getLogger(name)
        log.setLevel(logging.NOTSET)
        log.handlers = []


@pytest.fixture(scope="module", autouse=True)
def no_worker_left_behind():
    yield
    assert worker_commands() == {}
