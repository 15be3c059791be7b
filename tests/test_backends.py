"""Environments that one function makes as one `VectorEnv`: their rollouts match those of
Gymnasium's environments, in every autoreset mode.
"""

import os
import re
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import RecordEpisodeStatistics, TransformReward

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_runtime.extras.envpool import EnvPoolVectorEnv

from . import scripts
from .envs import CountingEnv, RandomEnv, assert_same
from .nets import MixedNet, linear

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
VECTORIZED = "tests.vectorized:VectorCartPole-v0"  # an environment that has a vector version
FIELDS = "starts observations actions logprobs rewards terminations truncations final_observations "
FIELDS += "next_observations policy_versions episodic_returns episodic_lengths"


@pytest.fixture(params=["sync", "envpool"])
def backend(request):
    if request.param == "envpool":
        pytest.importorskip("envpool", reason="EnvPool is not installed: pip install envpool")
    return request.param


def make_by(backend, env_id, num_envs, **kwargs):
    """Make environments that step together: Gymnasium's in a `SyncVectorEnv`, or EnvPool's."""
    if backend == "envpool":
        return EnvPoolVectorEnv(env_id, num_envs, **kwargs)
    return gym.make_vec(
        env_id, num_envs, "sync", vector_kwargs={"autoreset_mode": "SameStep"}, **kwargs
    )


def rollouts(env_fns, policy, num_steps, times, **kwargs):
    with ClusterEnv(env_fns, 2, **kwargs) as envs:
        envs.reset(seed=3)
        return [envs.rollout(policy, num_steps) for _ in range(times)]


def following(rollout):
    """Return the observation after each step, ``(num_steps, num_envs, ...)``."""
    led_to = np.concatenate([rollout.observations[1:], rollout.next_observations[None]])
    led_to[rollout.terminations | rollout.truncations] = rollout.final_observations
    return led_to


def moved(observations, actions):
    """Return the next observations by CartPole's equations of motion, from Barto, Sutton and
    Anderson (1983).
    """
    x, speed, angle, spin = np.moveaxis(observations.astype(np.float64), -1, 0)
    push = np.where(actions == 1, 10.0, -10.0)
    pulled = (push + 0.05 * spin**2 * np.sin(angle)) / 1.1
    turning = (9.8 * np.sin(angle) - np.cos(angle) * pulled) / (
        0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
    )
    moving = pulled - 0.05 * turning * np.cos(angle) / 1.1
    return np.stack(
        [x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * spin, spin + 0.02 * turning], -1
    )


def test_every_step_follows_the_equations_of_cartpole(backend):
    policy, limit = CategoricalPolicy(linear(4, 2)), 25
    make = partial(make_by, backend, "CartPole-v1", max_episode_steps=limit)
    found = rollouts(make, policy, 50, times=4, num_envs=7, weights="float32")
    for rollout in found:
        observations, actions, led_to = rollout.observations, rollout.actions, following(rollout)
        np.testing.assert_allclose(led_to, moved(observations, actions), atol=1e-5)
        assert (rollout.rewards == 1).all()
        fallen = (np.abs(led_to[..., 0]) > 2.4) | (np.abs(led_to[..., 2]) > np.deg2rad(12))
        # In the step that reaches the time limit, EnvPool does not report whether the episode would
        # have terminated, too.
        if backend == "envpool":
            fallen &= ~rollout.truncations
        np.testing.assert_array_equal(fallen, rollout.terminations)
        begun = (rollout.terminations | rollout.truncations)[:-1]
        assert (np.abs(observations[1:][begun]) <= 0.05).all()
        with torch.no_grad():
            distribution = policy.distribution(policy(torch.as_tensor(observations)))
        expected = distribution.log_prob(torch.as_tensor(actions))
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-5)
    lengths = np.concatenate([rollout.episodic_lengths for rollout in found])
    truncated = sum(rollout.truncations.sum() for rollout in found)
    assert lengths.max() == limit
    assert 5 < truncated <= (lengths == limit).sum() < len(lengths) - 5
    np.testing.assert_array_equal(
        np.concatenate([rollout.episodic_returns for rollout in found]), lengths
    )


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_equal_those_of_environments_that_step_one_by_one(mode):
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3))
    thunks = [partial(RandomEnv, space)] * 5
    policy = CategoricalPolicy(MixedNet(3, 3))

    def make(num_envs):
        return SyncVectorEnv(thunks[:num_envs], autoreset_mode=mode)

    pairs = zip(
        rollouts(thunks, policy, 9, 3), rollouts(make, policy, 9, 3, num_envs=5), strict=True
    )
    for one, other in pairs:
        for name in FIELDS.split():
            assert_same(getattr(other, name), getattr(one, name), name)


def test_seeds(backend):
    def made(num_workers):
        return ClusterEnv(partial(make_by, backend, "CartPole-v1"), num_workers, num_envs=4)

    def begin(envs):
        return (
            envs.reset(seed=1)[0],
            envs.reset()[0],
            envs.rollout(CategoricalPolicy(linear(4, 2)), 30),
        )

    with made(2) as envs:
        # The unseeded observations and the seeded ones.
        assert len({*envs.reset()[0][:, 0], *envs.reset(seed=1)[0][:, 0]}) == 8
        first, again, rollout = begin(envs)
        assert (first != envs.reset(seed=2)[0]).any()
    with made(2) as envs:
        *observations, second = begin(envs)
    np.testing.assert_array_equal(observations, (first, again))
    for name in FIELDS.split():
        assert_same(getattr(second, name), getattr(rollout, name), name)
    assert len({*first[:, 0], *again[:, 0]}) == 8
    with made(1) as envs:  # each environment's seed is the seed plus its row
        np.testing.assert_array_equal(first, envs.reset(seed=1)[0])


def test_killed_worker_is_replaced(backend, workers):
    policy = CategoricalPolicy(linear(4, 2))
    with ClusterEnv(partial(make_by, backend, "CartPole-v1"), 2, num_envs=4) as envs:
        envs.reset(seed=1)
        envs.rollout(policy, 20)
        os.kill(next(iter(workers())), signal.SIGKILL)
        for _ in range(2):
            rollout = envs.rollout(policy, 20)
            np.testing.assert_allclose(
                following(rollout), moved(rollout.observations, rollout.actions), atol=1e-5
            )
        assert len(envs.restarts) == 1


class OneObject(gym.vector.VectorEnv):
    """Environments in one object, whose ``grade`` is their reward."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    single_observation_space, single_action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)
    grade = 0.0

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def set_attr(self, name, values):
        getattr(self, name)
        setattr(self, name, np.array(values))

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions):
        ends = np.zeros(self.num_envs, bool)
        rewards = np.broadcast_to(self.grade, self.num_envs)
        return np.zeros((self.num_envs, 1), np.float32), rewards, ends, ends, {}


class Graded(CountingEnv):
    """A single environment, whose ``grade`` is its reward."""

    grade = 0.0

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.grade, *rest


def in_a_loop(num_envs):
    return SyncVectorEnv([Graded] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("make", [OneObject, pytest.param(in_a_loop, marks=pytest.mark.long)])
def test_attributes_are_set_in_environments_that_step_together_and_in_replacements(make, workers):
    policy = CategoricalPolicy(linear(1, 2))
    with ClusterEnv(make, 2, num_envs=4) as envs:
        envs.reset(seed=1)
        for grades in (2.5, [1.0, 2.0, 3.0, 4.0]):
            envs.rollout(policy, 3, overlap=True)
            envs.set_attr("grade", grades)
            envs.rollout(policy, 3)
            os.kill(next(iter(workers())), signal.SIGKILL)
            rewards = envs.rollout(policy, 3).rewards
            np.testing.assert_array_equal(rewards, np.broadcast_to(grades, (3, 4)))
        if make is OneObject:
            with pytest.raises(AttributeError, match="weight"):
                envs.set_attr("weight", 1)


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_those_of_the_same_environments_in_this_process(mode):
    make = partial(gym.make, "CartPole-v1", max_episode_steps=15)

    def together(num_envs):
        return SyncVectorEnv([make] * num_envs, autoreset_mode=mode)

    reference = together(3)
    with ClusterEnv(together, 2, num_envs=3) as envs:
        assert AutoresetMode(envs.metadata["autoreset_mode"]) == mode
        assert_same(envs.reset(seed=5)[0], reference.reset(seed=5)[0])
        reference.action_space.seed(1)
        for _ in range(40):
            actions = reference.action_space.sample()
            steps = [each.step(actions)[:4] for each in (envs, reference)]
            assert_same(*steps)
            ended = steps[0][2] | steps[0][3]
            if mode == AutoresetMode.DISABLED and ended.any():
                options = {"reset_mask": ended}
                begun = [each.reset(options=dict(options))[0] for each in (envs, reference)]
                assert_same(*begun)
        assert envs.call("gravity") == reference.call("gravity") == (9.8,) * 3
        rollout = envs.rollout(CategoricalPolicy(linear(4, 2)), 3)
        assert rollout.rewards.shape == (3, 3)
    reference.close()


def test_a_wrong_number_of_environments_is_one_line(workers):
    make, before = partial(make_by, "sync", "CartPole-v1"), workers()
    with pytest.raises(ValueError, match="num_envs"):
        ClusterEnv(make, 2)
    with pytest.raises(ValueError, match="num_envs is 3, but there are 2 env_fns"):
        ClusterEnv([CountingEnv] * 2, 2, num_envs=3)
    with pytest.raises(RuntimeError, match="was asked for 2 environments, and .* has 3"):
        ClusterEnv(lambda num_envs: make(3), 2, num_envs=4)
    assert workers() == before


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_returns_are_those_that_environments_count_themselves(mode, counts):
    def make(num_envs):
        envs = SyncVectorEnv([partial(gym.make, "CartPole-v1")] * num_envs, autoreset_mode=mode)
        envs = RecordEpisodeStatistics(envs) if counts else envs
        return TransformReward(envs, lambda rewards: 10 * rewards)

    with ClusterEnv(make, 1, num_envs=2) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(CategoricalPolicy(linear(4, 2)), 64)
    assert len(rollout.episodic_returns)
    expected = rollout.episodic_lengths * (1 if counts else 10)
    assert rollout.episodic_returns.tolist() == expected.tolist()


class Unstated(OneObject):
    """Environments that do not say what happens at an episode's end."""

    metadata = {}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(gym.make_vec, "CartPole-v1"), "has the autoreset mode 'NextStep'"),
        (partial(gym.make_vec, "Acrobot-v1"), "has the autoreset mode 'NextStep'"),
        (Unstated, "states no autoreset mode"),
    ],
)
def test_environments_whose_steps_may_be_dead_are_refused(make, says, workers):
    before = workers()
    with pytest.raises(ValueError, match=f"{says}.* make it with"):
        ClusterEnv(make, 2, num_envs=4)
    assert workers() == before


@pytest.mark.parametrize("backend", ["vector", "envpool"])
def test_two_lines_of_a_page_put_environments_that_step_together_into_a_script(tmp_path, backend):
    if backend == "envpool":
        pytest.importorskip("envpool", reason="EnvPool is not installed: pip install envpool")
    page = (scripts.ROOT / "docs/training.md").read_text()
    diff = re.search(r"```diff\n(.*?)```", page, re.S)[1]
    script = shutil.copy(scripts.ROOT / "ppo_clusterenv.py", tmp_path)
    subprocess.run(["patch", "-p0"], cwd=tmp_path, input=diff, text=True, check=True)
    text = Path(script).read_text()
    if backend == "vector":
        text = text.replace("from clusterenv_runtime.extras.envpool import EnvPoolVectorEnv\n", "")
        text = text.replace(
            "EnvPoolVectorEnv(args.env_id, number,", "gym.make_vec(args.env_id, number,"
        )
        Path(script).write_text(text)
    env_id = VECTORIZED if backend == "vector" else "CartPole-v1"
    flags = ["--env-id", env_id, "--env-kwargs", "max_episode_steps=7", "--envs-per-worker", "4"]
    flags += ["--total-timesteps", "2048", "--eval-episodes", "3"]
    _, summary = scripts.train(script, tmp_path, *flags)
    # The arguments reach the environments of training and of the evaluation.
    assert (summary["mean_return_100"], summary["eval_return_mean"]) == (7, 7)
