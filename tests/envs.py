"""Environments for tests. This module does not import torch, because workers without a policy
import it.
"""

import contextlib
import os
import subprocess
import sys
import time
import zlib

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .patience import HOUR, wait_until


class Words(gym.Space):
    """A space that Gymnasium does not know: tuples of a word and a number."""

    def __init__(self):
        super().__init__()

    def sample(self, mask=None, probability=None):
        return ("".join(self.np_random.choice(list("abc"), 3)), int(self.np_random.integers(2**62)))

    def contains(self, x):
        return isinstance(x, tuple) and len(x) == 2

    def __eq__(self, other):
        return type(other) is type(self)


def checksum(action):
    """Return a number that identifies an action by its type, dtype and value."""
    is_array = isinstance(action, np.ndarray)
    text = str(action.dtype) if is_array else repr(action)
    raw = action.tobytes() if is_array else b""
    return zlib.crc32(type(action).__name__.encode() + raw + text.encode())


class RandomEnv(gym.Env):
    """Random observations, both kinds of episode ends, and infos of every type.

    The reward identifies the action that arrived.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}

    def __init__(
        self, observation_space, action_space=None, end=0.2, render_mode="rgb_array", delay=0.0
    ):
        # Not a copy, so that ClusterEnv and SyncVectorEnv get the same space.
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(3) if action_space is None else action_space
        self.end, self.render_mode, self.frames, self.delay = end, render_mode, 0, delay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observation(), {"options": repr(options), **self._info()}

    def step(self, action):
        time.sleep(self.delay)
        reward = checksum(action) + self.np_random.normal()
        terminated, truncated = self.np_random.random(2) < self.end
        return self._observation(), reward, bool(terminated), bool(truncated), self._info()

    def render(self):
        self.frames += 1
        return np.full((2, 2, 3), self.frames, np.uint8)

    def _observation(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def _info(self):
        random = self.np_random
        info = {
            "int": int(random.integers(100)),
            "float": random.random(),
            "bool": bool(random.integers(2)),
            "float32": np.float32(random.random()),
            "int8": np.int8(random.integers(100)),
            "bool_": np.bool_(random.integers(2)),
            "array": random.normal(size=(2, 3)).astype(np.float16),
            "zero-d": np.array(random.integers(9), np.uint16),
            "empty": np.empty((0, 2)),
            "string": str(random.integers(100)),
            "bytes": random.bytes(3),
            "None": None,
            "list": [1, (2.5, "x"), {"y": np.arange(random.integers(3))}],
            "words": np.array(["a", "bcd"]),
            "nested": {
                "deeper": {"int": int(random.integers(100)), "None": None},
                "array": random.random(2),
            },
        }
        return {key: value for key, value in info.items() if random.random() < 0.6}


class CountingEnv(gym.Env):
    """Observes the number of steps since the reset, which is also the reward, and truncates after
    ``length`` steps.

    If a path ``gate`` is given, each step waits until that file exists.
    """

    observation_space = spaces.Box(0, np.inf, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length=5, delay=0.0, gate=None):
        self.length, self.delay, self.gate, self.count = length, delay, gate, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.wait()
        self.count += 1
        observation = np.full(1, self.count, np.float32)
        return observation, float(self.count), False, self.count >= self.length, {}

    def wait(self):
        time.sleep(self.delay)
        if self.gate is not None:
            wait_until(lambda: os.path.exists(self.gate))

    def pid(self):
        return os.getpid()

    def imported(self, module):
        return module in sys.modules

    def echo(self, *args, **kwargs):
        return args, kwargs

    def fail(self, error):
        raise error

    def leave_if(self, pid, code):
        if os.getpid() == pid:
            os._exit(code)


class BufferEnv(CountingEnv):
    """Returns the same observation array, and the same array in its infos, every time."""

    def __init__(self, length=3):
        super().__init__(length)
        self.observation, self.array = np.zeros(1, np.float32), np.zeros(2)

    def reset(self, *, seed=None, options=None):
        return self._in_place(super().reset(seed=seed, options=options))

    def step(self, action):
        return self._in_place(super().step(action))

    def _in_place(self, result):
        observation, *rest, _ = result
        self.observation[:] = observation
        self.array[:] = observation
        return self.observation, *rest, {"array": self.array, "nested": {"array": self.array}}


class EchoEnv(gym.Env):
    """Observes its last action."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {}

    def step(self, action):
        return action, 0.0, False, False, {}


class UnsendableEnv(CountingEnv):
    """Has values in its infos that cannot be sent by a worker."""

    secret = object()

    def step(self, action):
        *result, _ = super().step(action)
        nested = {"fine": "x", "secret": self.secret}
        return *result, {"fine": self.count, "secret %": self.secret, "nested": nested}


class CustomError(Exception):
    """An exception that only the tests define."""


class NumberedError(Exception):
    """An exception whose constructor needs more than its text."""

    def __init__(self, text, number):
        super().__init__(text)
        self.number = number

    def __reduce__(self):
        return NumberedError, (*self.args, self.number)


class FailingEnv(CountingEnv):
    """Raises ``error`` in ``where``: "constructor", "reset" or "step"."""

    def __init__(self, where="nowhere", error=None, delay=0.0, gate=None):
        super().__init__(delay=delay, gate=gate)
        self.where, self.error = where, error
        self._fail_in("constructor")

    def reset(self, *, seed=None, options=None):
        self._fail_in("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._fail_in("step")
        return super().step(action)

    def _fail_in(self, place):
        if place == self.where:
            self.wait()
            raise self.error


class LeavingEnv(CountingEnv):
    """Starts a child that leaves the worker's process group, and a daemon without a parent."""

    started = ()

    def reset(self, *, seed=None, options=None):
        if not self.started:
            child = subprocess.Popen(["sleep", str(HOUR)], start_new_session=True)
            daemon = subprocess.run(
                ["sh", "-c", f"setsid sleep {HOUR} > /dev/null & echo $!"], stdout=subprocess.PIPE
            )
            self.started = [child.pid, int(daemon.stdout)]
        return super().reset(seed=seed, options=options)

    def leave(self):
        """Leave the worker's process group. The group's leader joins the head's group instead."""
        os.setpgid(0, os.getpgid(os.getppid())) if os.getpgrp() == os.getpid() else os.setsid()
        return os.getpid()


class BlockingEnv(CountingEnv):
    """Writes its pid to a named pipe and sleeps for an hour, in ``where``: "constructor", "step" or
    "close".
    """

    def __init__(self, pipe, where="step"):
        super().__init__()
        self.pipe, self.where = pipe, where
        self._block_in("constructor")

    def step(self, action):
        self._block_in("step")
        return super().step(action)

    def close(self):
        self._block_in("close")

    def _block_in(self, place):
        if place == self.where:
            self.tell()
            time.sleep(HOUR)

    def tell(self):
        with open(self.pipe, "w") as pipe:
            pipe.write(f"{os.getpid()}\n")


def assert_same(actual, expected, where="result"):
    """Assert that values, types and dtypes are equal to the last bit, at every depth."""
    assert type(actual) is type(expected), f"{where}: {type(actual)}, expected {type(expected)}"
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{where}: {[*actual]}, expected {[*expected]}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {len(actual)}, expected {len(expected)}"
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    elif isinstance(expected, np.ndarray | np.generic):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        if expected.dtype == object:
            assert_same(actual.tolist(), expected.tolist(), where)
        else:
            assert actual.tobytes() == expected.tobytes(), f"{where}: {actual}, expected {expected}"
    elif isinstance(expected, np.random.Generator):
        assert_same(actual.bit_generator.state, expected.bit_generator.state, where)
    else:
        both_nan = expected != expected and actual != actual
        assert actual == expected or both_nan, f"{where}: {actual!r}, expected {expected!r}"


@contextlib.contextmanager
def registered(env_id, entry_point):
    """Register an environment while the body runs."""
    previous = gym.registry.get(env_id)
    gym.register(env_id, entry_point=entry_point)
    try:
        yield
    finally:
        del gym.registry[env_id]
        if previous is not None:
            gym.registry[env_id] = previous
