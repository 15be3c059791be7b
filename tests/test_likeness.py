"""Worker processes that resemble the head's process at the time when the `ClusterEnv` was made."""

import functools
import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime.envs import large

from .envs import CountingEnv
from .patience import kill, wait_until
from .scripts import ROOT

# A script that changes whatever can be changed in its process. It prints the facts about itself,
# about its two workers, and about the workers' replacements.
SCRIPT = """
import dataclasses, json, locale, multiprocessing, os, pathlib, pickle, resource, signal, subprocess
import sys, typing, warnings
import numpy as np
import gymnasium as gym
from clusterenv_runtime import ClusterEnv
import simlib

@dataclasses.dataclass
class State:
    number: int = 0

class Alarm(UserWarning):
    pass

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
        "warnings": sorted(map(repr, warnings.filters)),
        "key": bytes(multiprocessing.current_process().authkey).hex(),
        "method": multiprocessing.get_start_method(allow_none=True),
        "umask": pathlib.Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0],
        "niceness": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE,
                   resource.RLIMIT_CORE, resource.RLIMIT_STACK, resource.RLIMIT_AS)],
        "locale": locale.setlocale(locale.LC_ALL),
        "variables": variables,
        "recursion": sys.getrecursionlimit(),
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
    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["TOLD"] = "yes"
    os.environ.pop("GONE")
    locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
    warnings.filterwarnings("ignore", "a text", Alarm)
    sys.setrecursionlimit(1234)
    shared = multiprocessing.Manager().dict(level=7)
    head = facts()
    envs = ClusterEnv([lambda: Env(shared)] * 2, 2, worker_start=sys.argv[1])
    envs.reset()
    told = list(envs.call("tell"))
    # A replacement resembles the first process, whatever the head is like now.
    pids = [envs._head.pool.workers[i].process.pid for i in (0, 1)]
    os.chdir("/")
    os.umask(0o077)
    os.environ["TOLD"] = "no"
    sys.argv.append("more")
    sys.path.insert(0, "/nowhere")
    sys.setrecursionlimit(2345)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, 1024))
    warnings.simplefilter("error", Alarm)
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
        ("fork", ["-X", "utf8", "-W", "ignore::ImportWarning"]),
        pytest.param("spawn", ["-O", "-X", "faulthandler"], marks=pytest.mark.long),
    ],
)
def test_workers_and_replacements_resemble_the_head_as_it_was_at_the_start(tmp_path, how, flags):
    head, *told = start(tmp_path, flags, [how, "--level", "3"])
    directory = str(tmp_path / "here")
    assert head["simlib"] == "beside" and head["directory"] == directory
    head["path"] = [os.path.join(directory, path) for path in head["path"]]
    head |= {"shared": 7, "state": 6}
    orders = {each.pop("order") for each in told}
    assert len(orders) == 1
    for name in head:
        for each in told:
            assert each[name] == head[name], name


def test_warnings_are_errors_on_workers_if_they_are_at_the_head(tmp_path):
    start(tmp_path, ["-W", "error"], ["fork"])


LATER = """
import gymnasium as gym
gym.register("Again-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=5)
gym.register("MountainCar-v0", "gymnasium.envs.classic_control:MountainCarEnv")
"""


def made(env_id, module=None):
    """Import a module that registers environments, if one is given, and make an environment."""
    if module is not None:
        importlib.import_module(module)
    return gym.make(env_id)


def own(row):
    """Register an environment for a row, and make it."""
    entry = "gymnasium.envs.classic_control:CartPoleEnv"
    gym.register("Own-v0", entry, max_episode_steps=2 + row)
    return gym.make("Own-v0")


@pytest.fixture
def registry(monkeypatch):
    """Return Gymnasium's registry, and restore it after the test."""
    before = dict(gym.registry)
    monkeypatch.setattr("gymnasium.logger.min_level", gym.logger.ERROR)
    yield gym.registry
    gym.registry.clear()
    gym.registry.update(before)


def ends(env_fns, kind=ClusterEnv):
    """Return for each of ten steps which environments' episodes it truncates."""
    envs = kind(env_fns)
    envs.reset(seed=1)
    ends = [envs.step(np.ones(len(env_fns), int))[3].tolist() for _ in range(10)]
    envs.close()
    return ends


@pytest.mark.parametrize("module", [pytest.param(None, marks=pytest.mark.long), "later"])
def test_the_heads_registrations_take_precedence_over_later_imports(
    tmp_path, monkeypatch, registry, module
):
    (tmp_path / "later.py").write_text(LATER)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("later")
    entry = "gymnasium.envs.classic_control:MountainCarEnv"
    wrapper = gym.wrappers.TransformReward.wrapper_spec(func=lambda reward: 7 * reward)
    for env_id, steps in (("MountainCarLong-v0", 9), ("MountainCar-v0", 7), ("Again-v0", 3)):
        gym.register(
            env_id,
            entry,
            reward_threshold=-1.0,
            nondeterministic=True,
            max_episode_steps=steps,
            order_enforce=False,
            disable_env_checker=True,
            additional_wrappers=(wrapper,),
            kwargs={"goal_velocity": 0.01},
        )
        env_fns = [lambda env_id=env_id: made(env_id, module)] * 2
        assert ends(env_fns).index([True, True]) == steps - 1
        with ClusterEnv(env_fns) as envs:
            envs.reset()
            assert envs.step([1, 1])[1].tolist() == [-7, -7]
            assert envs.get_attr("goal_velocity") == (0.01, 0.01)


def test_an_environment_that_registers_itself_takes_precedence(registry):
    own(9)
    env_fns = [lambda row=row: own(row) for row in range(4)]
    assert ends(env_fns) == ends(env_fns, gym.vector.SyncVectorEnv)


def test_a_replacement_that_runs_changed_code_is_logged(tmp_path, monkeypatch, caplog):
    module = tmp_path / "edited.py"
    module.write_text("from tests.envs import CountingEnv as Env\n")
    monkeypatch.syspath_prepend(tmp_path)
    env = importlib.import_module("edited").Env
    with ClusterEnv([env] * 2, 2) as envs:
        envs.reset()
        for number in range(2):
            os.kill(envs._head.pool.workers[0].process.pid, signal.SIGKILL)
            while len(envs.restarts) == number:
                envs.step([0, 0])
            if number == 0:
                module.write_text("# edited\n" + module.read_text())
    first, second = [record.message for record in caplog.records if "died" in record.message]
    assert "changed" not in first
    assert second.endswith(f"; it runs code that was changed since the others started: {module}")


@pytest.mark.parametrize("address", [None, pytest.param("127.0.0.1", marks=pytest.mark.long)])
def test_a_removed_directory_is_made_again_for_replacements(address, caplog):
    with ClusterEnv([CountingEnv] * 2, 2, bind_address=address) as envs:
        envs.reset()
        directory = envs._head.pool._messenger.transport.directory
        shutil.rmtree(directory)
        os.kill(envs._head.pool.workers[0].process.pid, signal.SIGKILL)
        wait_until(lambda: envs.step([0, 0])[3][0])
        assert [restart["worker"] for restart in envs.restarts] == [0]
        assert os.stat(directory).st_mode & 0o777 == 0o700
    assert not os.path.exists(directory)
    assert any("was removed" in record.message for record in caplog.records)


def test_workers_of_a_head_with_closed_outputs_write_to_dev_null(tmp_path):
    code = """
    import os
    import numpy as np
    from clusterenv_runtime import ClusterEnv
    from tests.envs import CountingEnv
    class Env(CountingEnv):
        def tell(self):
            print("talks", flush=True)
            return os.readlink("/proc/self/fd/1")
    for how in "fork", "spawn":
        with ClusterEnv([Env], 1, worker_start=how) as envs:
            envs.reset()
            envs.step([0])
            with open("told", "a") as file:
                print(*envs.call("tell"), file=file)
    """
    (tmp_path / "head.py").write_text(textwrap.dedent(code))
    command = f"{sys.executable} head.py <&- >&- 2>&-"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, shell=True, cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "told").read_text().split() == [os.devnull] * 2


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
        held = [array for worker in envs._head.pool.workers for array in worker.arrays]
        assert len(held) == 2 and held[0] is held[1] and held[0].end == data.nbytes
        assert all(len(worker.setup) < 2**20 for worker in envs._head.pool.workers)
        data[0] = 99  # too late for the workers
        assert envs.call("change") == (
            7,
            8,
            7,
            0,
        )  # a worker's rows share it, as in `SyncVectorEnv`
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in workers()]
        # A prefix may put a worker where it cannot open the head's memory.
        assert ["memfd:clusterenv" in each for each in maps] == ["worker_prefix" not in options] * 2
        kill(envs._head.pool.workers[1].process.pid)
        assert envs.call("change") == (9, 10, 7, 0)


def test_each_environment_has_its_own_large_array_if_its_pickle_makes_it():
    class Fresh:
        def __init__(self, number):
            self.number = number

        def __reduce__(self):
            return np.copy, (np.full(large.LARGE, self.number, np.uint8),)

    class HoldingEnv(CountingEnv):
        def __init__(self, held):
            super().__init__()
            self.held = int(held[0])

    env_fns = [functools.partial(HoldingEnv, Fresh(number)) for number in range(6)]
    with ClusterEnv(env_fns, 6) as envs:
        assert envs.get_attr("held") == tuple(range(6))


def test_large_arrays_are_in_a_temporary_file_where_there_is_no_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    data, copies = [np.arange(2**18 + odd) for odd in (1, 2)], []
    of_all = large.LargeArrays()
    for each in data:
        assert not of_all.collector(copies)(pickle.PickleBuffer(each))
    opened = large.open_shared(large.places(copies))
    opened[0][:8] = bytes(range(8))  # private to this mapping
    for buffers in large.contents(copies), large.open_shared(large.places(copies)):
        for each, buffer in zip(data, buffers, strict=True):
            assert np.array_equal(np.frombuffer(buffer, each.dtype), each)
