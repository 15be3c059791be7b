"""Objects to which a script's environments refer, on their workers."""

import functools
import subprocess
import sys
import textwrap
import threading

import pytest

from clusterenv_runtime import ClusterEnv

from .envs import CountingEnv
from .scripts import ROOT

# Each environment pickles the function again, as `multiprocessing` does.
SCRIPT = """
import functools, pickle
from clusterenv_runtime import ClusterEnv
from tests.envs import CountingEnv

@functools.cache
def fibonacci(n):
    "docstring"
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

class Env(CountingEnv):
    @functools.lru_cache(maxsize=3, typed=True)
    def level(self):
        return pickle.loads(pickle.dumps(fibonacci))(20)

    def tell(self):
        return self.level(), fibonacci.__doc__, fibonacci.cache_info().misses

if __name__ == "__main__":
    fibonacci(30)
    with ClusterEnv([Env] * 2) as envs:
        print(envs.call("tell"))
"""


def test_cached_functions_of_a_script_travel(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, tmp_path / "script.py"]
    run = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "((6765, 'docstring', 21), (6765, 'docstring', 21))", run.stderr


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


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Condition])
def test_locks_are_new_ones_that_the_environments_of_a_worker_share(make):
    lock = make()

    class Locked(CountingEnv):
        @functools.cached_property  # has a lock itself before Python 3.12
        def takes_it(self):
            return lock.acquire(blocking=False)

    with lock, ClusterEnv([Locked] * 3, 2) as envs:
        is_taken_once = make is threading.Lock  # the other locks are reentrant
        assert envs.get_attr("takes_it") == (True, not is_taken_once, True)


def test_an_object_that_cannot_be_copied_to_a_worker_is_a_clear_error():
    generator = (number for number in ())

    class Generating(CountingEnv):
        def close(self):
            generator.close()

    text = "an object that cannot be copied to its worker: TypeError: cannot pickle 'generator'"
    with pytest.raises(TypeError, match=text):
        ClusterEnv([Generating] * 2)
