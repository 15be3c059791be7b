"""Workers that are forked from one process, the fork server."""

import contextlib
import errno
import json
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from clusterenv_runtime import ClusterEnv, StartupError, WorkerDiedError
from clusterenv_runtime.launchers import fork_server
from clusterenv_runtime.launchers.local import import_path

from .envs import CountingEnv, RenderingEnv
from .machine import do_without
from .patience import assert_ended, wait_until
from .scripts import ROOT


def server_of(pid):
    """Return the pid of the process from which a worker was forked."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class TellingEnv(CountingEnv):
    """Describes its worker's process."""

    def rendered_by(self):
        return sys.modules["renders"].BY

    def path_of(self, module):
        return sys.modules[module].__file__

    def tell(self):
        return {
            "pid": os.getpid(),
            "group": os.getpgid(0),
            "name": Path("/proc/self/comm").read_text().strip(),
            "threads": os.environ["OMP_NUM_THREADS"],
            "told": ascii(os.environ.get("TOLD")),
            "numpy": float(np.random.random()),
            "python": random.random(),
            "path": sys.path,
            "modules": [name for name in ("torch", "wave") if name in sys.modules],
        }


def test_workers_are_forked_from_one_process_and_resemble_spawned_workers(monkeypatch, tmp_path):
    monkeypatch.setenv("TOLD", "later \udcff")  # the fork server may have started before
    with ClusterEnv([TellingEnv] * 3, 3) as envs:
        told = envs.call("tell")
        pids = [each["pid"] for each in told]
        (server,) = {server_of(pid) for pid in pids}
        assert server != os.getpid()
        assert [each["group"] for each in told] == pids
        assert all(re.fullmatch("worker-[0-9a-f]{8}", each["name"]) for each in told)
        assert len({each["name"] for each in told}) == 3
        assert {each["threads"] for each in told} == {os.environ.get("OMP_NUM_THREADS", "1")}
        assert {each["told"] for each in told} == {ascii("later \udcff")}
        for generator in ("numpy", "python"):  # each draws its own numbers
            assert len({each[generator] for each in told}) == 3
        assert all("torch" in each["modules"] for each in told)  # because this process has it
    monkeypatch.delenv("TOLD")
    with ClusterEnv([TellingEnv], 1) as envs:
        (told,) = envs.call("tell")
        assert told["told"] == "None"
        assert server_of(told["pid"]) == server  # it also serves the next `ClusterEnv`
    monkeypatch.syspath_prepend(tmp_path)
    with ClusterEnv([TellingEnv], 1) as envs:
        assert envs.call("tell")[0]["path"] == import_path()


@pytest.mark.long
def test_a_module_to_preload_is_found_on_the_current_path(monkeypatch, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "preloaded_here.py").touch()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / name)
            with ClusterEnv([TellingEnv], 1, worker_preload="preloaded_here") as envs:
                (path,) = envs.call("path_of", "preloaded_here")
        assert path == str(tmp_path / name / "preloaded_here.py")


def test_a_preloaded_module_sees_the_variables_of_its_own_cluster_env(monkeypatch, tmp_path):
    (tmp_path / "renders.py").write_text("import os\nBY = os.environ.get('RENDERS_BY')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for by in ("one", "other"):
        monkeypatch.setenv("RENDERS_BY", by)
        with ClusterEnv([TellingEnv], 1, worker_preload="renders") as envs:
            assert envs.call("rendered_by") == (by,)


def test_timeouts_may_be_infinite():
    forever = {"startup_timeout": math.inf, "worker_timeout": math.inf, "close_timeout": math.inf}
    # With a module to preload, another process is started that forks.
    with ClusterEnv([CountingEnv], 1, worker_preload="calendar", **forever) as envs:
        assert envs.reset()[0].tolist() == [[0]]


def test_the_process_that_forks_has_one_thread_one_socket_and_no_keys():
    with ClusterEnv([TellingEnv] * 2, 2, bind_address="127.0.0.1") as envs:
        server = Path(f"/proc/{server_of(envs.call('tell')[0]['pid'])}")
        assert len(list((server / "task").iterdir())) == 1
        files = [os.readlink(file) for file in (server / "fd").iterdir()]
        assert sum(file.startswith("socket:") for file in files) == 1
        assert not any("clusterenv-" in file for file in files)


def test_spawned_workers_are_children_of_the_head():
    with ClusterEnv([TellingEnv] * 2, 2, worker_start="spawn") as envs:
        assert {server_of(each["pid"]) for each in envs.call("tell")} == {os.getpid()}


def test_modules_are_imported_once_before_workers_are_forked():
    with ClusterEnv([TellingEnv], 1, worker_preload="colorsys wave") as envs:
        assert "wave" in envs.call("tell")[0]["modules"]
    with ClusterEnv([TellingEnv], 1) as envs:
        assert "wave" not in envs.call("tell")[0]["modules"]


def test_a_module_that_cannot_be_preloaded_is_one_line():
    text = "worker_preload: cannot import nonesuch: ModuleNotFoundError: No module named 'nonesuch'"
    with pytest.raises(StartupError, match=f"^{text}$"):
        ClusterEnv([CountingEnv], 1, worker_preload="nonesuch")


@pytest.mark.parametrize(
    "options", [{"worker_start": "spawn"}, {"worker_prefix": "nice -n 0"}, {"launcher": "external"}]
)
def test_preloading_is_for_workers_that_are_forked(options):
    with pytest.raises(ValueError, match="^worker_preload is for forked workers"):
        ClusterEnv([CountingEnv], 1, worker_preload="wave", **options)


@pytest.mark.long
def test_workers_outlive_the_process_that_they_were_forked_from(workers, caplog):
    with ClusterEnv([TellingEnv] * 2, 2) as envs:
        envs.reset()
        for _ in range(2):
            before = [each["pid"] for each in envs.call("tell")]
            server = server_of(before[1])
            os.kill(server, signal.SIGKILL)
            assert_ended([server])
            assert [each["pid"] for each in envs.call("tell")] == before
            os.kill(before[1], signal.SIGKILL)
            wait_until(lambda: envs.step([0, 0])[3][1])
            pid = envs.call("tell")[1]["pid"]
            assert pid not in before and server_of(pid) not in (server, os.getpid())
        reasons = [restart["reason"] for restart in envs.restarts]
        assert len(reasons) == 2 and all("died" in reason for reason in reasons)
    assert [each.message for each in caplog.records if "that forks" in each.message] == [
        "the process that forks workers was lost"
    ] * 2
    assert not workers()


def test_a_fork_that_the_system_refuses_ends_the_run_with_one_line(tmp_path, monkeypatch):
    code = """
    import errno, os
    fork, times = os.fork, 0
    def refuse():
        global times
        times += 1
        if times > 2:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()
    os.fork = refuse
    """
    (tmp_path / "no_forks.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    text = r"a worker cannot be forked: \[Errno 11\] no more processes"
    with ClusterEnv([TellingEnv] * 2, 2, worker_preload="no_forks") as envs:
        envs.reset()
        os.kill(envs.call("tell")[1]["pid"], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=f"; no replacement can be started: {text}$"):
            wait_until(lambda: envs.step([0, 0])[3][1])
    with pytest.raises(StartupError, match=f"^{text}$"):
        ClusterEnv([TellingEnv], 1, worker_preload="no_forks")


def test_a_replacement_starts_even_if_the_next_fork_server_cannot(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with ClusterEnv([TellingEnv] * 2, 2) as envs:
        envs.reset()
        pid = envs.call("tell")[1]["pid"]
        monkeypatch.setattr(fork_server.socket, "socketpair", refuse)
        os.kill(server_of(pid), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: envs.step([0, 0])[3][1])
        assert server_of(envs.call("tell")[1]["pid"]) == os.getpid()


class OddEnv(CountingEnv):
    """Starts threads and processes, and draws, in its constructor, in `reset` and in `render`."""

    def __init__(self):
        super().__init__()
        self.begin()

    def begin(self):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout
        os.environ["SDL_VIDEODRIVER"] = "dummy"
        env = gym.make("CartPole-v1", render_mode="rgb_array")
        env.reset()
        self.shape = env.render().shape
        env.close()
        assert torch.ones(300, 300).matmul(torch.ones(300, 300)).sum() == 300**3

    def reset(self, **kwargs):
        self.begin()
        return super().reset(**kwargs)

    def render(self):
        self.begin()
        return self.shape


def test_environments_start_threads_and_processes_and_draw():
    with ClusterEnv([OddEnv] * 2, 2) as envs:
        envs.reset(seed=1)
        assert envs.render() == ((400, 600, 3),) * 2


class OpenGLEnv(RenderingEnv):
    """Draws with OpenGL."""

    def render(self):
        size = {"width": 64, "height": 48}
        with contextlib.closing(
            gym.make("InvertedPendulum-v5", render_mode="rgb_array", **size)
        ) as env:
            env.reset(seed=1)
            return env.render()


@pytest.mark.long
@pytest.mark.parametrize("preload", ["", "mujoco gymnasium.envs.mujoco"])
def test_environments_make_opengl_contexts(monkeypatch, preload):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    code = "import mujoco; mujoco.GLContext(64, 48).make_current()"
    if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode:
        do_without("MuJoCo cannot draw by EGL here: apt-get install libegl1 libgl1-mesa-dri")
    with ClusterEnv([OpenGLEnv] * 2, 2, worker_preload=preload) as envs:
        envs.reset()
        one, other = envs.render()
        assert one.shape == (48, 64, 3) and one.std() > 0
        assert np.array_equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        "{}",
        "{} <&-",
        "{} >&-",
        "{} 2>&-",
        "{} <&- >&- 2>&-",
        "nohup {}",
        "env -i PYTHONPATH=$PYTHONPATH setsid {}",  # much as cron and systemd start it
    ],
)
def test_a_head_that_is_started_without_a_terminal_forks_workers(tmp_path, command):
    code = f"""
    import json, os
    from clusterenv_runtime import ClusterEnv
    from tests.test_forking import TellingEnv, server_of
    with ClusterEnv([TellingEnv] * 2, 2) as envs:
        envs.reset()
        envs.step([0, 0])
        pids = [each["pid"] for each in envs.call("tell")]
        told = [os.getpid(), *map(server_of, pids)]
        with open({str(tmp_path / "told")!r}, "w") as file:
            json.dump(told, file)
    """
    path = tmp_path / "head.py"
    path.write_text(textwrap.dedent(code))
    command = command.format(f"{sys.executable} {path}")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, shell=True, env=env, check=True)
    head, *servers = json.loads((tmp_path / "told").read_text())
    assert servers[0] == servers[1] != head


def test_a_thread_of_the_head_changes_nothing(caplog):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with caplog.at_level(logging.WARNING), ClusterEnv([partial(CountingEnv)] * 2, 2) as envs:
            envs.reset()
            envs.step([0, 0])
        assert not caplog.records
    finally:
        stop.set()
        thread.join()
