"""Environments that raise: the learner gets the exception, and can continue after a reset."""

import asyncio
import json
import re
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, EnvError, Interrupted

from .envs import CountingEnv, CustomError, FailingEnv, NumberedError, RandomEnv, assert_same
from .nets import linear
from .patience import HOUR, at_most

pytestmark = [
    pytest.mark.usefixtures("temporary_directory"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's logger announces each error
]


ERRORS = {
    "one text": ValueError("on purpose"),
    "a percent sign": ValueError("100% wrong: %s"),
    "key": KeyError("missing"),
    "a number": IndexError(3),
    "nothing": ZeroDivisionError(),
    "two arguments": OSError(2, "No such file"),
    "a file's name": OSError(28, "No space left", "log.txt"),
    "five arguments": UnicodeDecodeError("ascii", b"x", 0, 1, "takes five arguments"),
    "a library's": json.JSONDecodeError("no value", "{", 1),
    "the user's": CustomError("only tests know it"),
    "the user's, with attributes": NumberedError("of a step", np.float32(0.5)),
    "of Gymnasium": gym.error.ResetNeeded("first reset"),
}
PLACES = [
    *((where, row, "one text") for where in ("constructor", "reset", "step") for row in (1, 4)),
    *(("step", 3, name) for name in list(ERRORS)[1:]),
]


def run_until_it_raises(where, error, row):
    env_fns = [CountingEnv] * 5
    env_fns[row] = partial(FailingEnv, where, error)
    with ClusterEnv(env_fns, 2, worker_timeout=HOUR, startup_timeout=HOUR) as envs:
        envs.reset()
        envs.step([0] * 5)


def assert_tells_all(text, row):
    worker, rows = [(0, "0 to 2"), (1, "3 to 4")][row > 2]
    assert re.match(
        rf"environment {row} on worker {worker} \(.*, pid \d+.*, environments {rows}\) raised ",
        text,
    )
    assert "Traceback (most recent call last)" in text
    # The line in the environment. The traceback of an exception group has a | before it.
    assert re.search(r"in _fail_in\n[ |]+raise self.error", text)


@pytest.mark.parametrize("where, row, name", PLACES)
def test_an_exception_in_an_environment_is_raised_in_the_head(workers, where, row, name):
    error = ERRORS[name]
    with at_most(), pytest.raises(type(error)) as caught:
        run_until_it_raises(where, error, row)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
    assert getattr(caught.value, "errno", None) == getattr(error, "errno", None)
    assert type(caught.value.__cause__) is EnvError
    assert_tells_all(str(caught.value.__cause__), row)
    assert not workers()


@pytest.mark.parametrize(
    "error, text",
    [
        (SystemExit(7), "builtins.SystemExit: 7"),
        (
            StopIteration("enough"),
            "builtins.StopIteration: enough",
        ),  # this exception would end a loop in the user's code
        (KeyboardInterrupt("window closed"), "builtins.KeyboardInterrupt: window closed"),
        (GeneratorExit(), "builtins.GeneratorExit: "),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError: "),
        (
            ExceptionGroup("of \udc80", [ValueError("x")]),
            "builtins.ExceptionGroup: of \udc80 (1 sub-exception)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("where", ["constructor", "step"])
def test_an_exception_that_cannot_be_recreated_is_an_env_error(workers, where, error, text):
    with at_most(), pytest.raises(EnvError) as caught:
        run_until_it_raises(where, error, 3)
    assert text in str(caught.value)
    assert_tells_all(str(caught.value), 3)
    assert not workers()


def test_an_exception_class_that_only_workers_have_is_raised_as_its_nearest_base(
    tmp_path, monkeypatch
):
    (tmp_path / "simlib.py").write_text("class Unstable(ArithmeticError): pass")
    monkeypatch.syspath_prepend(tmp_path)

    class Env(CountingEnv):
        def step(self, action):
            import simlib

            raise simlib.Unstable("at 7 m/s")

    with ClusterEnv([Env], worker_timeout=HOUR) as envs:
        envs.reset()
        with pytest.raises(ArithmeticError, match="^at 7 m/s$") as caught:
            envs.step([0])
    assert type(caught.value) is ArithmeticError
    assert "raised simlib.Unstable: at 7 m/s" in str(caught.value.__cause__)


class OnceEnv(RandomEnv):
    """Raises once, in its third step or reset."""

    def __init__(self, where):
        super().__init__(gym.spaces.Box(-1, 1, (2,)), end=0.0 if where == "step" else 0.5)
        self.where, self.counts = where, {"step": 0, "reset": 0}

    def _count(self, place):
        self.counts[place] += 1
        if place == self.where and self.counts[place] == 3:
            raise ValueError(f"in its {place}")

    def reset(self, *, seed=None, options=None):
        self._count("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._count("step")
        return super().step(action)


@pytest.mark.parametrize(
    "mode", [gym.vector.AutoresetMode.NEXT_STEP, gym.vector.AutoresetMode.SAME_STEP]
)
@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_reset_after_an_exception_continues_as_in_sync_vector_env(tmp_path, where, mode):
    env_fns = [partial(OnceEnv, each) for each in ("nowhere", where, "nowhere", "nowhere")]
    sync = gym.vector.SyncVectorEnv(env_fns, autoreset_mode=mode)
    with ClusterEnv(
        env_fns, 2, autoreset_mode=mode, log_dir=str(tmp_path), worker_timeout=HOUR
    ) as envs:
        for each in (envs, sync):
            each.reset(seed=1)
            with pytest.raises(ValueError, match=f"in its {where}") as caught:
                for _ in range(100):
                    each.step([0] * 4)
            if each is envs:
                assert str(tmp_path / "worker-") in str(caught.value.__cause__)
        for method, arguments in (("step", [[0] * 4]), ("rollout", [None, 2]), ("send", [2])):
            with pytest.raises(gym.error.ResetNeeded):
                getattr(envs, method)(*arguments)
        with pytest.raises(gym.error.ResetNeeded):
            envs.reset(options={"reset_mask": np.ones(4, bool)})
        assert_same(*(each.reset(seed=2) for each in (envs, sync)))
        for _ in range(20):
            assert_same(*(each.step([0] * 4) for each in (envs, sync)))
        assert not envs.restarts


def test_a_reset_continues_after_an_exception_in_a_rollout():
    with ClusterEnv(
        [CountingEnv, partial(FailingEnv, "step", ValueError("x"))], 2, worker_timeout=HOUR
    ) as envs:
        policy = CategoricalPolicy(linear(1, 2))
        pids = envs.call("pid")
        for _ in range(2):
            envs.reset(seed=1)
            with pytest.raises(ValueError, match="^x$"):
                envs.rollout(policy, 3)
            with pytest.raises(gym.error.ResetNeeded):
                envs.rollout(policy, 3)
        envs.set_attr("where", "nowhere")
        envs.reset(seed=1)
        assert envs.rollout(policy, 3).rewards.tolist() == [[1, 1], [2, 2], [3, 3]]
        assert envs.call("pid") == pids and not envs.restarts


def test_an_exception_in_a_stream_gives_up_the_outstanding_chunks():
    with ClusterEnv(
        [CountingEnv, partial(FailingEnv, "step", ValueError("x"))], 2, worker_timeout=HOUR
    ) as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="^x$"):
            for _ in range(2):
                envs.send(3)
            while True:
                envs.recv()
        with pytest.raises(gym.error.ResetNeeded):
            envs.recv()
        envs.set_attr("where", "nowhere")
        envs.reset(seed=1)
        envs.send(3)
        chunks = dict(envs.recv() for _ in range(2))
        assert chunks.keys() == {0, 1} and all(
            chunk.rewards.ravel().tolist() == [1, 2, 3] for chunk in chunks.values()
        )


def test_an_error_in_the_policy_is_not_blamed_on_an_environment():
    class Fewer(CategoricalPolicy):
        """Gives too few actions once the environments have made two steps."""

        def to_env(self, actions):
            return actions[:1] if self.late else actions

        def act(self, params, noise):
            self.late = bool((params[..., 0] > 10).any())
            return super().act(params, noise)

    net = torch.nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        net.weight[:] = torch.tensor([[6.0], [0.0]])  # more than 10 where the count is 2
    with ClusterEnv([CountingEnv] * 3, 1, worker_timeout=HOUR) as envs:
        envs.reset(seed=1)
        policy = Fewer(net)
        with pytest.raises(ValueError, match="shorter|longer") as caught:
            envs.rollout(policy, 5)
        assert re.match("worker 0 ", str(caught.value.__cause__))


def test_an_exception_after_an_interrupt_is_not_lost(tmp_path):
    """An exception that comes too late for its own call is raised by the next call."""
    gate = tmp_path / "gate"
    with ClusterEnv(
        [CountingEnv, partial(FailingEnv, "step", ValueError("late"), gate=str(gate))], 2
    ) as envs:
        envs.reset()
        envs.interrupt()
        with pytest.raises(Interrupted):
            envs.step([0, 0])
        gate.touch()
        with at_most(), pytest.raises(ValueError, match="^late$") as caught:
            envs.reset()
        assert "environment 1 on worker 1" in str(caught.value.__cause__)
