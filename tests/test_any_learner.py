"""Stable-Baselines3 learns the same with workers as without, to the last bit."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest

from .envs import CountingEnv, assert_same
from .patience import HOUR, kill

pytestmark = pytest.mark.long


def monitored(make):
    from stable_baselines3.common.monitor import Monitor

    return Monitor(make())


def clusters(env_fns):
    from clusterenv_runtime.extras.sb3 import ClusterVecEnv

    return ClusterVecEnv(env_fns, 2, worker_timeout=HOUR)


def test_the_vec_env_for_stable_baselines3_behaves_like_dummy_vec_env():
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    make = partial(
        monitored, partial(gym.make, "CartPole-v1", max_episode_steps=20, render_mode="rgb_array")
    )
    pair = DummyVecEnv([make] * 3), clusters([make] * 3)
    try:
        random = np.random.default_rng(1)
        for each in pair:
            each.seed(5)
            each.set_options({"low": -0.01, "high": 0.01})
        ended = 0
        for step in range(150):
            if step % 75 == 0:
                assert_same(*(each.reset() for each in pair))
                assert_same(*(each.reset_infos for each in pair))
            actions = random.integers(2, size=3)
            results = [each.step(actions) for each in pair]
            for *_, infos in results:
                for info in infos:
                    ended += "episode" in info
                    info.get("episode", {}).pop("t", None)  # seconds
            assert_same(*results)
            assert_same(*(each.reset_infos for each in pair))
        assert ended > 10
        assert_same(*(each.env_is_wrapped(Monitor, [0, 2]) for each in pair))
        assert_same(*(each.env_is_wrapped(gym.wrappers.RecordVideo) for each in pair))
        for each in pair:
            each.set_attr("level", 7, indices=[1])
        assert_same(*(each.get_attr("level", 1) for each in pair))
        for each in pair:
            each.set_attr("level", 8)
        assert_same(*(each.get_attr("level", -1) for each in pair))
        assert_same(*(each.env_method("get_wrapper_attr", "level", indices=-1) for each in pair))
        assert_same(
            *(each.env_method("has_wrapper_attr", name="level", indices=[2, 0]) for each in pair)
        )
        assert_same(*(list(each.get_images()) for each in pair))
        assert not pair[1].has_attr("nothing")
        pair[1].set_options([{"low": -0.01}, {}, {}])
        with pytest.raises(ValueError, match="all environments are reset with the same options"):
            pair[1].reset()
    finally:
        for each in pair:
            each.close()


def test_attributes_set_by_stable_baselines3_are_also_set_in_a_replacement():
    pytest.importorskip("stable_baselines3")
    envs = clusters([partial(monitored, CountingEnv)] * 3)
    try:
        envs.reset()
        envs.set_attr("level", 7)
        kill(envs.env_method("pid")[0])
        assert envs.step(np.zeros(3, int))[2].tolist() == [True, True, False]
        assert envs.get_attr("level") == [7, 7, 7]
    finally:
        envs.close()


@pytest.mark.parametrize(
    "algorithm, env_id", [("PPO", "CartPole-v1"), ("DQN", "CartPole-v1"), ("SAC", "Pendulum-v1")]
)
def test_stable_baselines3_learns_the_same(algorithm, env_id):
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.vec_env import DummyVecEnv

    settings = (
        {"n_steps": 64} if algorithm == "PPO" else {"learning_starts": 50, "buffer_size": 1000}
    )
    learned = []
    for constructor in (DummyVecEnv, clusters):
        envs = constructor([partial(monitored, partial(gym.make, env_id))] * 3)
        model = getattr(stable_baselines3, algorithm)(
            "MlpPolicy", envs, seed=1, device="cpu", **settings
        )
        model.learn(400)
        envs.close()
        learned.append({key: value.numpy() for key, value in model.policy.state_dict().items()})
    assert_same(learned[1], learned[0])
