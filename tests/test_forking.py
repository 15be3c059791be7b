"""Workers that are forked from one process, the fork server."""

import math
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime.launchers.local import import_path

from .envs import CountingEnv


def server_of(pid):
    """Return the pid of the process from which a worker was forked."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class TellingEnv(CountingEnv):
    """Describes its worker's process."""

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


@pytest.mark.parametrize(
    "options", [{"worker_start": "spawn"}, {"worker_prefix": "nice -n 0"}, {"launcher": "external"}]
)
def test_preloading_is_for_workers_that_are_forked(options):
    with pytest.raises(ValueError, match="^worker_preload is for forked workers"):
        ClusterEnv([CountingEnv], 1, worker_preload="wave", **options)


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
