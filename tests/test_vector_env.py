"""ClusterEnv as a VectorEnv: it must equal Gymnasium's SyncVectorEnv step for step, and refuse
misuse as clearly.
"""

import dataclasses
import enum
import warnings
from collections import OrderedDict
from copy import deepcopy
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import (
    ClosedEnvironmentError,
    ResetNeeded,
)
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterenv_runtime import ClusterEnv, Interrupted

from .envs import BufferEnv, CountingEnv, RandomEnv, UnsendableEnv, Words, assert_same, registered

IMAGE = spaces.Box(0, 255, (3, 4), np.uint8)
SPACES = {
    "float32": spaces.Box(-1, 1, (2, 3)),
    "float64, no shape": spaces.Box(-np.inf, np.inf, (), np.float64),
    "float16": spaces.Box(-1, 1, (2,), np.float16),
    "uint8": IMAGE,
    "int64": spaces.Box(-(2**40), 2**40, (2,), np.int64),
    "no elements": spaces.Box(0, 1, (0, 2)),
    "Discrete": spaces.Discrete(5, start=-2),
    "MultiDiscrete": spaces.MultiDiscrete([[3, 5], [2, 4]], start=[[1, 0], [-7, 2]]),
    "MultiBinary": spaces.MultiBinary([2, 3]),
    "Tuple": spaces.Tuple((spaces.Discrete(4), spaces.Box(0, 1, (2,)))),
    "Dict": spaces.Dict(
        image=IMAGE,
        more=spaces.Dict(position=spaces.Box(0, 1, (2,)), bits=spaces.MultiBinary(3)),
        id=spaces.Discrete(9),
    ),
    "Text": spaces.Text(6, min_length=0),
    "Graph": spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(4)),
    "Graph without edges": spaces.Graph(spaces.Discrete(4), None),
    "Sequence": spaces.Sequence(spaces.Dict(x=spaces.Box(0, 1, (2,)), n=spaces.Discrete(3))),
    "stacked Sequence": spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    "OneOf": spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2,)), spaces.Text(3)]),
    "custom": Words(),
}
SPACES["all in a Dict"] = spaces.Dict({key: deepcopy(space) for key, space in SPACES.items()})
SPACES["all in a Tuple"] = spaces.Tuple([deepcopy(space) for space in SPACES.values()])
ATTRIBUTES = "observation_space single_observation_space action_space single_action_space"
ATTRIBUTES += " metadata render_mode spec"


def both(env_fns, num_workers=2, **kwargs):
    return ClusterEnv(env_fns, num_workers, **kwargs), SyncVectorEnv(env_fns, **kwargs)


def assert_equal_run(envs, sync, seed=0, num_steps=20):
    """Reset and step both in the same way, in their autoreset mode, and compare the results."""
    assert_same(envs.reset(seed=seed), sync.reset(seed=seed))
    envs.action_space.seed(0)
    for step in range(num_steps):
        actions = envs.action_space.sample()
        result = envs.step(actions)
        assert_same(result, sync.step(actions), f"step {step}")
        ended = result[2] | result[3]
        if envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED and ended.any():
            masked = [
                env.reset(options={"reset_mask": ended.copy(), "level": 3}) for env in (envs, sync)
            ]
            assert_same(*masked, f"reset after step {step}")


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_equals_sync_vector_env_in_every_space(space):
    envs, sync = both([partial(RandomEnv, space, deepcopy(space))] * 3, autoreset_mode="SameStep")
    with envs:
        for name in ATTRIBUTES.split():
            assert getattr(envs, name) == getattr(sync, name)
        assert_equal_run(envs, sync, num_steps=10)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_equals_sync_vector_env_in_every_autoreset_mode(mode, num_workers):
    envs, sync = both(
        [partial(RandomEnv, SPACES["all in a Dict"])] * 5, num_workers, autoreset_mode=mode
    )
    with envs:
        assert_equal_run(envs, sync, seed=5, num_steps=10)
        # Without a seed the environments go on with their own randomness.
        assert_same(envs.reset(), sync.reset())
        assert_same(envs.np_random_seed, sync.np_random_seed)


@pytest.fixture(scope="module", params=AutoresetMode)
def pair(request):
    """Return five environments on three workers, and the same environments in this process."""
    envs, sync = both(
        [partial(RandomEnv, spaces.Box(-1, 1, (2,)))] * 5, 3, autoreset_mode=request.param
    )
    yield envs, sync
    envs.close()


@settings(max_examples=20, deadline=None)
@given(
    masks=st.lists(
        st.lists(st.booleans(), min_size=5, max_size=5).filter(any), min_size=1, max_size=3
    ),
    seed=st.none() | st.integers(0, 99),
)
def test_equals_sync_vector_env_with_any_reset_mask(pair, masks, seed):
    assert_same(*(env.reset(seed=1) for env in pair))
    for mask in masks:
        options = {"reset_mask": np.array(mask), "level": 1}
        assert_same(*(env.reset(seed=seed, options=dict(options)) for env in pair))
        if pair[0].metadata["autoreset_mode"] != AutoresetMode.DISABLED:
            assert_same(*(env.step(np.arange(5) % 3) for env in pair))


def test_calls_and_attributes_equal_sync_vector_env(pair):
    assert_same(*(env.reset(seed=7) for env in pair))
    assert_same(*(env.get_attr("end") for env in pair))
    assert_same(*(env.call("render") for env in pair))
    assert_same(*(env.render() for env in pair))
    assert_same(*(env.np_random_seed for env in pair))
    assert_same(*(deepcopy(env.np_random) for env in pair))
    before = deepcopy(pair[0].np_random)
    for generator in pair[0].np_random:
        generator.random()
    assert_same(pair[0].np_random, before)  # they are copies
    for values in (0.4, [0.1, 0.2, 0.3, 0.4, 0.5], (0.5, 0.4, 0.3, 0.2, 0.1), 0.2):
        for env in pair:
            env.set_attr("end", values)
        assert_same(*(env.get_attr("end") for env in pair))
    assert pair[0].get_attr("end") == (0.2,) * 5
    for env in pair:
        with pytest.raises(ValueError, match="Got `4` values for 5 environments"):
            env.set_attr("end", [0.1] * 4)


@pytest.fixture(scope="module")
def counting():
    """Return three counting environments on two workers. Call ``counting.reset()`` first."""
    with ClusterEnv([CountingEnv] * 3, 2) as envs:
        yield envs


@pytest.mark.parametrize("actions", [[], [0, 0], np.zeros(4, int), np.zeros((2, 3), int)])
def test_wrong_number_of_actions(counting, actions):
    with pytest.raises(
        ValueError, match=f"Expected 3 actions, one for each environment, got {len(actions)}"
    ):
        counting.step(actions)


@pytest.mark.parametrize(
    "mask, error",
    [
        ([True] * 3, TypeError),
        (np.ones(2, bool), ValueError),
        (np.ones(3, int), TypeError),
        (np.zeros(3, bool), ValueError),
    ],
)
def test_wrong_reset_masks(counting, mask, error):
    for envs in (counting, SyncVectorEnv([CountingEnv] * 3)):
        with pytest.raises(error, match=r"`options\['reset_mask'\]` must"):
            envs.reset(options={"reset_mask": mask})


def test_a_worker_that_only_steps_never_imports_torch():
    # A forked worker has the modules that the head has.
    with ClusterEnv([CountingEnv] * 3, 2, worker_start="spawn") as envs:
        envs.reset()
        envs.step([0, 0, 0])
        assert envs.call("imported", "torch") == (False,) * 3
        assert envs.call("imported", "zmq") == (True,) * 3


def test_an_unsendable_result_of_a_call_is_a_type_error_and_no_harm(counting):
    counting.reset()
    counting.set_attr("thing", object())
    with pytest.raises(
        TypeError, match="a builtins.object cannot be sent to the head, only arrays"
    ):
        counting.get_attr("thing")
    assert counting.step([0, 0, 0])[0].ravel().tolist() == [1, 1, 1]


def test_an_error_in_a_call_is_raised_and_no_harm(counting):
    counting.reset()
    with pytest.raises(ZeroDivisionError, match="^on purpose$"):
        counting.call("fail", ZeroDivisionError("on purpose"))
    with pytest.raises(AttributeError, match="no_such_thing"):
        counting.get_attr("no_such_thing")
    with pytest.raises(TypeError, match="name must be string"):
        counting.get_attr(3)
    assert counting.step([0, 0, 0])[0].ravel().tolist() == [1, 1, 1]


def test_an_interrupted_step_is_given_up(tmp_path):
    gate = tmp_path / "gate"
    with ClusterEnv([partial(CountingEnv, gate=str(gate))] * 2, 2) as envs:
        envs.reset()
        envs.interrupt()
        with pytest.raises(Interrupted):
            envs.step([0, 0])
        # The late response to that step may have an episode's end that nobody has seen.
        with pytest.raises(ResetNeeded, match="because one has raised, or a step was given up"):
            envs.step([0, 0])
        envs.interrupt()
        with pytest.raises(Interrupted):
            envs.reset()
        gate.touch()
        assert envs.reset()[0].ravel().tolist() == [0, 0]
        assert envs.step([0, 0])[0].ravel().tolist() == [1, 1]


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("space", ["float32", "Dict", "Tuple"])
def test_copy_means_what_it_means_in_gymnasium(copy, space):
    envs, sync = both([partial(RandomEnv, SPACES[space])] * 3, copy=copy)
    with envs:
        for env in (envs, sync):
            first = env.reset(seed=1)[0]
            kept = deepcopy(first)
            second = env.step([0, 1, 2])[0]
            if copy:
                assert_same(first, kept)
            else:
                assert_same(first, second)  # the very same arrays, with new contents
        assert_equal_run(envs, sync)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_an_environment_that_reuses_its_arrays(mode):
    envs, sync = both([partial(BufferEnv, length=2 + i) for i in range(3)], autoreset_mode=mode)
    with envs:
        assert_same(envs.reset(), sync.reset())
        final_observations = []
        for step in range(9):
            result, expected = envs.step([0, 0, 0]), sync.step([0, 0, 0])
            # SyncVectorEnv keeps the array itself, which then shows the reset's observation. Here
            # the final observation is unchanged.
            final_observations += [
                array.item() for array in result[-1].pop("final_obs", []) if array is not None
            ]
            expected[-1].pop("final_obs", None)
            assert_same(result, expected, f"step {step}")
            ended = result[2] | result[3]
            if mode == AutoresetMode.DISABLED and ended.any():
                assert_same(
                    *(env.reset(options={"reset_mask": ended.copy()}) for env in (envs, sync))
                )
        if mode == AutoresetMode.SAME_STEP:
            assert final_observations == [2, 3, 2, 4, 2, 3, 2, 4, 3]


SMALL, LARGE = spaces.Box(0, 1, (2,)), spaces.Box(0, 2, (2,))


@pytest.mark.parametrize("row", [1, 2, 3])
@pytest.mark.parametrize("other", [(LARGE,), (SMALL, spaces.Discrete(4))])
def test_spaces_that_do_not_match(workers, other, row):
    env_fns = [partial(RandomEnv, SMALL)] * 4
    env_fns[row] = partial(RandomEnv, *other)
    before = workers()
    for make in (partial(ClusterEnv, num_workers=2), SyncVectorEnv):
        with pytest.raises(RuntimeError, match="space"):
            make(env_fns)
    assert workers() == before


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [
        ("env_fns", [], ValueError, "env_fns must hold at least one function, got none"),
        ("num_workers", 0, ValueError, "num_workers is 0: Expected `int` >= 1"),
        (
            "launcher",
            "slurp",
            ValueError,
            "one of 'external', 'local', 'ray', 'slurm', got 'slurp'",
        ),
        ("worker_timeuot", 3, TypeError, "'worker_timeuot': did you mean 'worker_timeout'?"),
        ("min_workers", 1, TypeError, "ClusterEnv has no option 'min_workers'"),
        ("autoreset_mode", "Never", ValueError, "'Never' is not a valid AutoresetMode"),
        ("observation_mode", "different", ValueError, "observation_mode must be 'same', got 'diff"),
        ("sync_mode", "often", ValueError, "Invalid enum value 'often', one of"),
        ("sync_interval", 3, ValueError, "goes with sync_mode 'interval', and is 3 with 'kl'"),
        ("max_policy_lag", -1, ValueError, "max_policy_lag is -1: Expected `int` >= 0"),
        ("max_worker_restarts", -1, ValueError, "max_worker_restarts is -1: Expected `int` >= 0"),
        ("on_worker_loss", "cry", ValueError, "Invalid enum value 'cry', one of"),
    ],
)
def test_wrong_arguments(workers, name, value, error, says):
    before = workers()
    with pytest.raises(error, match=says):
        ClusterEnv(**{"env_fns": [CountingEnv], name: value})
    assert workers() == before


class OddInfos(RandomEnv):
    """Has infos whose types differ among the rows, and observations of a class of `collections`."""

    def __init__(self, row):
        super().__init__(spaces.Dict({"x": spaces.Box(-1, 1, (2,))}))
        self.row = row

    def odd(self, observation):
        names = {} if self.row == 1 else {"names": np.array(["x", None], object)}
        some = [0.5, 0, 0.7, True, None, "text", np.float32(0.1), np.ones(2)]
        return OrderedDict(observation), names | {
            "score": some[self.row % 4],
            "any": some[4 + self.row % 2],
            "number": some[6] if self.row else 3,
        }

    def reset(self, **kwargs):
        return self.odd(super().reset(**kwargs)[0])

    def step(self, action):
        observation, *rest, _ = super().step(action)
        observation, infos = self.odd(observation)
        return observation, *rest, infos


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("first", range(4))
def test_infos_of_other_types_in_other_rows_are_merged_as_by_gymnasium(mode, first):
    rows = [(first + number) % 4 for number in range(4)]
    envs, sync = both([partial(OddInfos, row) for row in rows], 3, autoreset_mode=mode)
    with envs:
        assert_equal_run(envs, sync)


def test_infos_that_cannot_be_sent_are_left_out_with_one_warning_for_each_key():
    with ClusterEnv([UnsendableEnv] * 3, 2) as envs:
        envs.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                infos = envs.step([0, 0, 0])[-1]
        assert set(infos) == {"fine", "_fine", "nested", "_nested"}
        assert infos["fine"].tolist() == [3, 3, 3]
        assert set(infos["nested"]) == {"fine", "_fine"}
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == 2
        for key in ("secret %", "secret"):
            text = f"Info {key} (builtins.object) is left out"
            assert any(text in each and "ClusterEnv(allow=" in each for each in texts)


class Gear(enum.IntEnum):
    FIRST = 1


@dataclasses.dataclass
class Point:
    x: float
    gear: Gear


class GearedEnv(CountingEnv):
    """Has values of the user's classes in its infos."""

    def step(self, action):
        info = {"gear": Gear.FIRST, "point": Point(0.5, Gear.FIRST)}
        return *super().step(action)[:-1], info


def test_infos_of_allowed_classes_arrive_as_they_are():
    envs, sync = ClusterEnv([GearedEnv] * 3, 2, allow=(Gear, Point)), SyncVectorEnv([GearedEnv] * 3)
    with envs:
        assert_same(envs.reset(), sync.reset())
        assert_same(envs.step([0] * 3), sync.step([0] * 3))
        assert_same(envs.call("echo", Gear.FIRST), sync.call("echo", Gear.FIRST))
    with ClusterEnv([GearedEnv] * 3, 2, allow=(Point,)) as envs:
        envs.reset()
        with pytest.warns(UserWarning, match=r"Info (gear|point) \(.*Gear\) is left out"):
            assert envs.step([0] * 3)[-1] == {}
        with pytest.raises(
            TypeError, match=r"Gear cannot be sent .* ClusterEnv\(allow=\(Gear,\)\)"
        ):
            envs.call("echo", Gear.FIRST)


@pytest.mark.parametrize(
    "entry_point", [CountingEnv, "tests.envs:CountingEnv", lambda: CountingEnv()]
)
def test_an_environment_registered_here_works_on_workers(entry_point):
    with (
        registered("ClusterTest/Counting-v0", entry_point),
        ClusterEnv([lambda: gym.make("ClusterTest/Counting-v0")] * 2, 2) as envs,
    ):
        envs.reset()
        assert envs.step([0, 0])[0].ravel().tolist() == [1, 1]


def test_after_close_everything_is_an_error():
    envs = ClusterEnv([CountingEnv] * 2, 2)
    envs.reset()
    envs.close()
    assert envs.closed
    envs.close()
    arguments = {
        "step": [[0, 0]],
        "call": ["pid"],
        "get_attr": ["length"],
        "set_attr": ["length", 1],
        "rollout": [0, 1],
    }
    says = r"Trying to operate on `ClusterEnv`, after a call to `close\(\)`"
    for method in ("reset", "render", *arguments):
        with pytest.raises(ClosedEnvironmentError, match=says):
            getattr(envs, method)(*arguments.get(method, []))
