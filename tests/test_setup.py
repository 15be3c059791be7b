"""What workers take over from the head's process, how environments travel, and their spaces."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, ExternalLauncher, setup

from .envs import CountingEnv
from .nets import linear
from .patience import PATIENCE, kill
from .scripts import ROOT


def test_an_object_that_cannot_be_pickled_is_one_line():
    text = "be sent to workers: TypeError: cannot pickle 'generator' object$"
    with pytest.raises(TypeError, match=text):
        setup.dumps(number for number in ())


# A script that changes whatever can be changed in its process. It prints the facts about itself,
# about its two workers, and about the workers' replacements.
SCRIPT = """
import dataclasses, json, multiprocessing, os, pathlib, pickle, signal, subprocess, sys, typing
import numpy as np
import gymnasium as gym
from clusterenv_runtime import ClusterEnv
import simlib

@dataclasses.dataclass
class State:
    number: int = 0

def double(state):
    return State(2 * state.number)

def facts():
    child = subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines()
    variables = dict(line.split("=", 1) for line in child if "=" in line)
    for name in "CLUSTERENV_WORKER", "OMP_NUM_THREADS", "_":
        variables.pop(name, None)
    return json.loads(json.dumps({
        "path": [str(path) for path in sys.path if isinstance(path, str)],
        "directory": os.getcwd(),
        "argv": sys.argv,
        "flags": [getattr(sys.flags, name) for name in dir(sys.flags) if name[0].islower()
                  and not callable(getattr(sys.flags, name))],
        "xoptions": sys._xoptions,
        "warnings": sys.warnoptions,
        "key": bytes(multiprocessing.current_process().authkey).hex(),
        "method": multiprocessing.get_start_method(allow_none=True),
        "cores": sorted(os.sched_getaffinity(0)),
        "variables": variables,
        "simlib": simlib.WHO,
        "file": sys.modules["__main__"].__file__,
        "hints": str(typing.get_type_hints(State)),
    }))

class Env(gym.Env):
    observation_space = gym.spaces.Box(-99, 99, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, shared):
        self.shared = shared

    def tell(self):
        state = pickle.loads(pickle.dumps(State(3)))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            state = pool.apply(double, (state,))
        order = " ".join(set("red green blue ball key box door wall lava goal".split()))
        return {**facts(), "shared": self.shared["level"], "state": state.number, "order": order}

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}

if __name__ == "__main__":
    sys.path.insert(1, pathlib.Path("/tmp"))
    sys.path.insert(1, "relative")
    CORES = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(CORES)})
    os.environ["TOLD"] = "yes"
    os.environ.pop("GONE")
    shared = multiprocessing.Manager().dict(level=7)
    head = facts()
    envs = ClusterEnv([lambda: Env(shared)] * 2, 2, worker_start=sys.argv[1])
    envs.reset()
    told = list(envs.call("tell"))
    # A replacement resembles the first process, whatever the head is like now.
    pids = [worker.process.pid for worker in envs._pool.workers]
    os.chdir("/")
    os.environ["TOLD"] = "no"
    sys.argv.append("more")
    sys.path.insert(0, "/nowhere")
    os.sched_setaffinity(0, CORES)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while len(envs.restarts) < 2:
        envs.step([0, 0])
    told += envs.call("tell")
    envs.close()
    print(json.dumps([head, *told]))
"""


def start(tmp_path, flags, words, **variables):
    """Run the script from a directory other than its own. Return the facts that it prints."""
    for folder, who in (("script", "beside"), ("installed", "installed")):
        (tmp_path / folder / "simlib").mkdir(parents=True)
        (tmp_path / folder / "simlib" / "__init__.py").write_text(f"WHO = {who!r}\n")
    (tmp_path / "script" / "train.py").write_text(SCRIPT)
    here = tmp_path / "here"
    here.mkdir()
    (here / "secrets.py").write_text("raise SystemExit('not the standard library')\n")
    (tmp_path / "installed" / "pathlib.py").write_text("raise SystemExit('a backport')\n")
    site = f"import sys; sys.path += [{str(tmp_path / 'installed')!r}, {str(ROOT)!r}]"
    (tmp_path / "script" / "sitecustomize.py").write_text(site)
    env = {**os.environ, "GONE": "so", **variables}
    env["PYTHONPATH"] = str(tmp_path / "script")
    command = [sys.executable, *flags, str(tmp_path / "script" / "train.py"), *words]
    result = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        ("fork", ["-X", "utf8", "-W", "error"]),
        pytest.param("spawn", ["-O", "-X", "faulthandler"], marks=pytest.mark.long),
    ],
)
def test_workers_and_replacements_resemble_the_head_as_it_was_at_the_start(tmp_path, how, flags):
    head, *told = start(tmp_path, flags, [how, "--level", "3"])
    directory = str(tmp_path / "here")
    assert head["simlib"] == "beside" and head["directory"] == directory
    path = dict.fromkeys(os.path.join(directory, path) for path in head["path"])
    head["path"] = [*filter(os.path.exists, path)]
    head |= {"shared": 7, "state": 6}
    head["variables"].setdefault("PYTHONHASHSEED", "1")
    orders = {each.pop("order") for each in told}
    assert len(orders) == 1
    for name in head:
        for each in told:
            assert each[name] == head[name], name


LATER = """
import gymnasium as gym
gym.register("MountainCar-v0", "gymnasium.envs.classic_control:MountainCarEnv")

def make():
    return gym.make("MountainCar-v0")
"""


def test_the_heads_registrations_take_precedence_over_those_of_the_environments_module(
    tmp_path, monkeypatch
):
    (tmp_path / "later.py").write_text(LATER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("gymnasium.logger.min_level", gym.logger.ERROR)
    monkeypatch.setitem(gym.registry, "MountainCar-v0", gym.spec("MountainCar-v0"))
    later = importlib.import_module("later")
    gym.register("MountainCar-v0", gym.spec("MountainCar-v0").entry_point, max_episode_steps=7)
    with ClusterEnv([later.make] * 2) as envs:
        envs.reset(seed=1)
        ends = [envs.step([1, 1])[3].tolist() for _ in range(7)]
    assert ends == [[False, False]] * 6 + [[True, True]]


class Stored(CountingEnv):
    """Holds an array, which it can change."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def change(self):
        before = float(self.data[0])
        self.data[0] += 1
        return before


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"worker_start": "spawn"}, marks=pytest.mark.long),
        pytest.param({"worker_prefix": "nice -n 0"}, marks=pytest.mark.long),
    ],
)
def test_a_large_array_is_held_once_and_environments_may_change_it(workers, options):
    data = np.full(2**18, 7.0)
    small = np.zeros(3)
    with ClusterEnv([lambda: Stored(data)] * 3 + [lambda: Stored(small)], 2, **options) as envs:
        held = [array for worker in envs._pool.workers for array in worker.arrays]
        assert len(held) == 2 and held[0] is held[1]
        assert all(len(worker.environments) < 2**20 for worker in envs._pool.workers)
        data[0] = 99  # too late for the workers
        # The rows of a worker share it, as in `SyncVectorEnv`.
        assert envs.call("change") == (7, 8, 7, 0)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in workers()]
        # A prefix may put a worker where it cannot open the head's memory.
        assert ["memfd:clusterenv" in each for each in maps] == ["worker_prefix" not in options] * 2
        kill(envs._pool.workers[1].process.pid)
        assert envs.call("change") == (9, 10, 7, 0)


# Debuggers, and programs that embed Python, run a script in a module that lacks some attributes, or
# in none.
BARE = """
import numpy as np
from clusterenv_runtime import ClusterEnv
from tests.envs import CountingEnv

class Env(CountingEnv):
    pass

with ClusterEnv([Env] * 2) as envs:
    envs.reset()
    print("rewards", envs.step(np.zeros(2, int))[1])
"""
RUN = "exec(compile(open('script.py').read(), 'script.py', 'exec'), vars(main))"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "pdb", "-c", "continue", "-c", "quit", "script.py"],
        pytest.param(["-m", "trace", "--trackcalls", "script.py"], marks=pytest.mark.long),
        ["-c", f"import sys; main = sys.modules['__main__']; del main.__spec__; {RUN}"],
        ["-c", f"import sys, types; main = sys.modules.pop('__main__'); {RUN}"],
    ],
    ids=["pdb", "trace", "no __spec__", "no __main__"],
)
def test_a_script_runs_in_whatever_module(tmp_path, arguments):
    (tmp_path / "script.py").write_text(BARE)
    command, env = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    run = subprocess.run(command, cwd=tmp_path, env=env, **pipes)
    assert "rewards [1. 1.]" in run.stdout, run.stderr


class AtWorkers(CountingEnv):
    """An environment that the head must not make."""

    head = os.getpid()
    metadata = {"render_modes": ["ansi"], "render_fps": 7, "simulator": object()}

    def __init__(self, head):
        assert os.getpid() != head, "the head has made an environment"
        super().__init__()
        self.render_mode = "ansi"


def test_the_head_makes_no_environment_but_knows_their_spaces():
    with ClusterEnv([partial(AtWorkers, os.getpid())] * 3, 2) as envs:
        here = SyncVectorEnv([partial(AtWorkers, 0)] * 3)
        names = "single_observation_space observation_space single_action_space action_space"
        for name in (*names.split(), "render_mode", "num_envs"):
            assert getattr(envs, name) == getattr(here, name), name
        # Metadata that cannot be sent stays on the workers.
        kept = {key: value for key, value in here.metadata.items() if key != "simulator"}
        assert envs.metadata == kept
        assert envs.call("action_space") == here.call("action_space")


SIMULATOR = """
import gymnasium as gym
import numpy as np

class Room(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}
    def step(self, action):
        self.steps += 1
        return np.full(3, 0.5, np.float32), 1.0, self.steps == 5, False, {}

gym.register("Room-v0", "simulator_of_workers:Room")
"""


class StartsWith(ExternalLauncher):
    """Starts the workers as a user does, with packages that this process does not have."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.processes = []

    def start_worker(self, index):
        variables = {**os.environ, "PYTHONPATH": str(self.path)}
        command = [sys.executable, *self.arguments(index)]
        self.processes.append(subprocess.Popen(command, env=variables))

    def stop(self, timeout):
        for process in self.processes:
            process.wait(PATIENCE)


def test_the_head_needs_no_package_of_the_environments(tmp_path):
    (tmp_path / "simulator_of_workers.py").write_text(SIMULATOR)
    launcher = StartsWith(tmp_path)
    make = [lambda: gym.make("simulator_of_workers:Room-v0")] * 2
    with contextlib.closing(
        ClusterEnv(make, 2, launcher=launcher, bind_address="127.0.0.1")
    ) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(CategoricalPolicy(linear(3, 3)), 10)
    assert "simulator_of_workers" not in sys.modules
    assert rollout.episodic_returns.tolist() == [5] * 4
    assert envs.single_observation_space == spaces.Box(-1, 1, (3,), np.float32)


MULTIPROCESSING = """
import multiprocessing, os, sys
import torch
from torch.utils.data import DataLoader
from clusterenv_runtime import ClusterEnv
from tests.envs import CountingEnv

def square(x):
    return x * x, "wave" in sys.modules

class Env(CountingEnv):
    def squares(self):  # daemons could not have children
        with multiprocessing.Pool(2) as pool:
            return pool.map(square, range(3))

if __name__ == "__main__":
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload(["wave"])
    with ClusterEnv([Env] * 2, worker_preload="calendar") as envs:
        assert multiprocessing.get_start_method(allow_none=True) == before is None
        multiprocessing.set_start_method("forkserver")
        with multiprocessing.Pool(2) as pool:
            assert pool.map(square, range(3)) == [(0, True), (1, True), (4, True)]
        loader = DataLoader(torch.arange(4.0), num_workers=2)
        assert [batch.item() for batch in loader] == [0, 1, 2, 3]
        assert [number for number, _ in envs.call("squares")[0]] == [0, 1, 4]
        assert multiprocessing.active_children() == []
"""


def test_the_users_own_multiprocessing_is_unchanged(tmp_path):
    (tmp_path / "script.py").write_text(MULTIPROCESSING)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=env, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


SPAWNED = """
import multiprocessing
from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from tests.envs import CountingEnv
from tests.nets import linear

class Env(CountingEnv):
    pass

class Policy(CategoricalPolicy):
    pass

def act():
    with ClusterEnv([Env] * 2) as envs:
        envs.reset(seed=1)
        print(envs.rollout(Policy(linear(1, 2)), 3).rewards.shape)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=act)
    process.start()
    process.join()
"""


def test_classes_of_a_script_travel_from_a_process_that_it_has_spawned(tmp_path):
    (tmp_path / "script.py").write_text(SPAWNED)
    command = [sys.executable, tmp_path / "script.py"]
    run = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "(3, 2)", run.stderr
