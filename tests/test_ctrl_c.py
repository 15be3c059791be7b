"""Ctrl-C in a user's own loop closes a `ClusterEnv` whose call it ends halfway."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from gymnasium.error import ClosedEnvironmentError, NoAsyncCallError

from clusterenv_runtime import CategoricalPolicy, ClusterEnv

from .envs import CountingEnv
from .nets import linear
from .patience import HOUR, PATIENCE, at_most
from .scripts import ROOT


def test_ctrl_c_in_a_wait_closes_the_environments(pipe, workers):
    with ClusterEnv([CountingEnv, CountingEnv], 2) as envs:
        envs.reset()
        envs.set_attr("delay", HOUR)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with at_most(), pytest.raises(KeyboardInterrupt):
            envs.step([0, 0])
        assert not workers()
        for call in envs.reset, lambda: envs.step([0, 0]), lambda: envs.call("pid"), envs.recv:
            with pytest.raises(ClosedEnvironmentError, match="after a call to `close"):
                call()
        envs.close()


CALLS = {
    "reset": lambda envs, policy: envs.reset(),
    "step": lambda envs, policy: envs.step([0, 0]),
    "publish": lambda envs, policy: envs.publish(
        CategoricalPolicy(torch.nn.Sequential(linear(1, 2)))
    ),
    "rollout": lambda envs, policy: envs.rollout(policy, 2),
    "overlap": lambda envs, policy: envs.rollout(policy, 2, overlap=True),
    "send": lambda envs, policy: envs.send(2),
    "recv": lambda envs, policy: (envs.send(2), envs.recv(), envs.recv()),
    "call": lambda envs, policy: envs.call("spec"),
    "set_attr": lambda envs, policy: envs.set_attr("delay", 0),
    "evaluate": lambda envs, policy: envs.evaluate(policy, 2),
}


@pytest.mark.long
# A generator's end ignores the exception of a Ctrl-C.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_wherever_it_comes_closes_the_environments_or_harms_nothing(call, workers):
    """Ctrl-C is pressed at every third of the package's functions that the call runs."""
    policy = CategoricalPolicy(linear(1, 2))
    after, is_over, closed, others = 0, False, 0, workers()
    envs = ready(policy)
    while not is_over:
        press = PressAfter(after)
        try:
            sys.setprofile(press)
            CALLS[call](envs, policy)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        is_over, after = not press.has_pressed, after + 3
        try:
            check(envs, policy)
        except ClosedEnvironmentError:
            assert press.has_pressed and workers() == others
            closed += 1
            envs.close()
            envs = ready(policy)
    envs.close()
    assert after > 20 and closed


def ready(policy):
    envs = ClusterEnv([CountingEnv] * 2, 2)
    envs.reset()
    envs.rollout(policy, 2)
    return envs


def check(envs, policy):
    """Check that the workers are in step with each other, and that all calls work."""
    if envs._pool.to_reset:  # a step was given up
        envs.reset()
    try:
        while True:
            envs.recv()
    except NoAsyncCallError:
        pass
    envs.evaluate(policy, 2) if not envs._evaluation else envs.evaluate_wait()
    envs.rollout(policy, 2)  # this may be the overlapped rollout
    rollout = envs.rollout(policy, 3)
    assert rollout.rewards.shape == (3, 2)
    assert (rollout.rewards[:, 0] == rollout.rewards[:, 1]).all()
    observations, *_ = envs.step([0, 0])
    assert observations[0] == observations[1] and envs.restarts == []


class PressAfter:
    """A profiler that presses Ctrl-C after ``number`` calls of the package's functions."""

    def __init__(self, number):
        self.left, self.has_pressed = number, False

    def __call__(self, frame, event, _):
        if event == "call" and "clusterenv_runtime" in frame.f_code.co_filename:
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                self.has_pressed = True
                signal.raise_signal(signal.SIGINT)


PRESSED = """
import os, random, signal, threading, time
from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from tests.conftest import worker_commands
from tests.envs import CountingEnv
from tests.nets import linear

def press():
    time.sleep(0.1 * random.random())
    while not is_over.is_set():  # one may be lost, while libzmq's memory is freed
        os.kill(os.getpid(), signal.SIGINT)
        is_over.wait(10)

policy = CategoricalPolicy(linear(1, 2))
for number in range(20):
    is_over = threading.Event()
    try:
        with ClusterEnv([CountingEnv] * 4, 2) as envs:
            envs.reset()
            threading.Thread(target=press, daemon=True).start()
            while True:
                envs.rollout(policy, 4)
    except KeyboardInterrupt:
        is_over.set()
    print(len(worker_commands()), end=" ")
"""


@pytest.mark.long
def test_ctrl_c_amid_rollouts_leaves_no_worker():
    command, env = [sys.executable, "-c", PRESSED], {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=env, text=True, capture_output=True, timeout=PATIENCE)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0 " * 20, "")
