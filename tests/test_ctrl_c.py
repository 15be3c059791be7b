"""Ctrl-C in a user's own loop ends a call where nothing is half done, and the next calls work."""

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gymnasium.error import NoAsyncCallError

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, WorkerDiedError
from clusterenv_runtime.head.interrupts import interruptible
from clusterenv_runtime.head.supervisor import LOOK_S
from clusterenv_runtime.wire.protocol import Call

from .envs import CountingEnv
from .nets import linear
from .patience import PATIENCE
from .scripts import ROOT
from .simulated import Simulation, opens

# The pool with simulated workers.


class Caller:
    """Makes calls during which Ctrl-C only interrupts the pool, as a `ClusterEnv`'s calls do."""

    def __init__(self, simulation):
        self._pool = simulation.pool

    @interruptible
    def hold(self, call):
        return call()


@pytest.mark.parametrize("during", ["exchange", "open", "look"])
def test_ctrl_c_amid_a_wait_loses_nothing(monkeypatch, during):
    times = []

    def pressing(function):
        def pressed(*args):
            if not times:
                times.append(signal.raise_signal(signal.SIGINT))
            return function(*args)

        return pressed

    simulation = Simulation(2, opener=pressing(opens) if during == "open" else opens)
    simulation.launcher.of[1].cut_off = True
    seqs = [simulation.pool.ask(worker, Call("name")) for worker in simulation.workers]
    whose = {"exchange": simulation.network, "look": simulation.supervisor}.get(during)
    if whose is not None:
        monkeypatch.setattr(whose, during, pressing(getattr(whose, during)))
    with pytest.raises(KeyboardInterrupt):
        Caller(simulation).hold(lambda: simulation.pool.wait_until(lambda: False, seqs))
    assert [request.response.value for request in simulation.pool.gather(seqs, timeout=9)] == [0, 1]


def test_a_request_that_ctrl_c_interrupts_is_given_up():
    simulation = Simulation(1)
    simulation.launcher.of[0].stopped = True

    def press():
        signal.raise_signal(signal.SIGINT)
        return simulation.call(0)

    with pytest.raises(KeyboardInterrupt):
        Caller(simulation).hold(press)
    simulation.launcher.of[0].die()
    simulation.pool.gather([simulation.pool.ask(simulation.workers[0], Call("next"))])
    heard = simulation.launcher.of[0].heard  # the requests that the replacement got
    assert [request.name for request in heard if isinstance(request, Call)] == ["next"]


def test_a_step_that_ctrl_c_interrupts_at_its_end_needs_a_reset():
    class Stepping(Caller):
        @interruptible
        def step(self):
            signal.raise_signal(signal.SIGINT)

    simulation = Simulation(2)
    with pytest.raises(KeyboardInterrupt):
        Caller(simulation).hold(lambda: signal.raise_signal(signal.SIGINT))
    assert simulation.pool.failures.to_reset == set()
    with pytest.raises(KeyboardInterrupt):
        Stepping(simulation).step()
    assert simulation.pool.failures.to_reset == {0, 1}


def test_a_second_ctrl_c_does_not_wait(monkeypatch):
    simulation, pressed = Simulation(1), []

    def press(*_):
        for _ in range(3):
            pressed.append(signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(simulation.network, "exchange", press)
    with pytest.raises(KeyboardInterrupt):
        Caller(simulation).hold(simulation.pool.exchange)
    assert (len(pressed), simulation.pool.interrupt.error) == (1, None)


def test_ctrl_c_between_calls_raises_at_once():
    simulation = Simulation(1)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert simulation.call(0) == [0]


def test_the_handler_is_set_again_after_a_notebook_resets_it_and_removed_on_close():
    simulation = Simulation(1)
    for _ in range(2):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a notebook does for each cell
        simulation.wait(LOOK_S)
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    simulation.pool.close(timeout=1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_during_close_leaves_nothing_open(monkeypatch, presses):
    simulation = Simulation(1)
    start, exchange, left = simulation.network.now, simulation.network.exchange, [None] * presses

    def pressed(*args):
        if left:
            left.pop()
            signal.raise_signal(signal.SIGINT)
        return exchange(*args)

    monkeypatch.setattr(simulation.network, "exchange", pressed)
    with pytest.raises(KeyboardInterrupt):
        Caller(simulation).hold(lambda: simulation.pool.close(timeout=3600 if presses == 1 else 1))
    assert simulation.network.now - start < 1 and simulation.pool.interrupt.error is None
    assert (
        simulation.network.closed and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def test_ctrl_c_is_raised_before_the_death_of_a_worker_at_the_same_time(monkeypatch):
    simulation = Simulation(2, max_restarts=0)
    simulation.launcher.of[1].die()
    supervisor, describe = simulation.supervisor, simulation.supervisor.describe

    def pressed(worker):
        signal.raise_signal(signal.SIGINT)
        return describe(worker)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(supervisor, "describe", pressed)
        Caller(simulation).hold(lambda: simulation.call(1))
    with pytest.raises(WorkerDiedError, match="died: killed by SIGKILL"):
        simulation.call(1)


def test_the_programs_own_handler_is_kept():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append("here"))
    simulation = Simulation(1)
    signal.raise_signal(signal.SIGINT)
    simulation.pool.close(timeout=1)
    signal.raise_signal(signal.SIGINT)
    assert heard == ["here"] * 2


def test_another_thread_can_wait():  # although it cannot set a handler
    simulation = Simulation(1)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(simulation.call, 0).result() == [0]


# Real workers.


@pytest.mark.long
@pytest.mark.parametrize(
    "call", ["reset", "step", "publish", "rollout", "overlap", "send", "recv", "call"]
)
def test_ctrl_c_ends_a_call_wherever_it_comes_and_the_next_ones_work(call):
    """Ctrl-C is pressed at every third of the package's functions that the call runs."""
    policy = CategoricalPolicy(linear(1, 2))
    calls = {
        "reset": lambda envs: envs.reset(),
        "step": lambda envs: envs.step([0, 0]),
        "publish": lambda envs: envs.publish(CategoricalPolicy(torch.nn.Sequential(linear(1, 2)))),
        "rollout": lambda envs: envs.rollout(policy, 2),
        "overlap": lambda envs: envs.rollout(policy, 2, overlap=True),
        "send": lambda envs: envs.send(2),
        "recv": lambda envs: (envs.send(2), envs.recv(), envs.recv()),
        "call": lambda envs: envs.call("spec"),
    }
    with ClusterEnv([CountingEnv] * 2, 2) as envs:
        envs.reset()
        envs.rollout(policy, 2)
        after, is_over = 0, False
        while not is_over:
            press = PressAfter(after)
            try:
                sys.setprofile(press)
                calls[call](envs)
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            is_over, after = not press.has_pressed, after + 3
            if call == "step":  # the step may have been given up
                envs.reset()
            with contextlib.suppress(NoAsyncCallError):
                while True:
                    envs.recv()
            envs.rollout(policy, 2)  # this may be the overlapped rollout
            assert envs.rollout(policy, 3).rewards.shape == (3, 2)
            assert envs.step([0, 0])[1].shape == (2,)
        assert after > 20 and envs.restarts == []


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
from tests.envs import CountingEnv
from tests.nets import linear

is_waiting, pressed = threading.Event(), 0

def press():
    while is_waiting.wait():
        before = pressed
        time.sleep(0.005 * random.random())
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # lost if it comes while libzmq's memory is freed: press it again
            if pressed == before:
                time.sleep(0.002)

with ClusterEnv([CountingEnv] * 4, 2) as envs:
    policy = CategoricalPolicy(linear(1, 2))
    envs.reset()
    threading.Thread(target=press, daemon=True).start()
    while pressed < 200:
        try:
            is_waiting.set()
            while True:
                envs.rollout(policy, 4)
        except KeyboardInterrupt:
            is_waiting.clear()
            pressed += 1
    print(envs.rollout(policy, 4).rewards.shape, envs.restarts)
"""


@pytest.mark.long
def test_ctrl_c_amid_many_rollouts_loses_no_worker():
    command, env = [sys.executable, "-c", PRESSED], {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=env, text=True, capture_output=True, timeout=PATIENCE)
    assert (run.returncode, run.stdout) == (0, "(4, 4) []\n"), run.stderr
