"""Evaluations of a policy on the workers."""

import multiprocessing
import os
import signal
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions import Distribution

from clusterenv_runtime import CategoricalPolicy, ClusterEnv

from .envs import CountingEnv, assert_same
from .nets import linear
from .test_episodes import game_of_lives, limit_outside

FIELDS = "observations actions logprobs rewards terminations truncations next_observations"


class Seeded(gym.Env):
    """The seed determines how long the episodes are. The reward is the action's number."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(2, 30))
        self.steps = 0
        return self.np_random.normal(size=1).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = self.np_random.normal(size=1).astype(np.float32)
        return observation, float(action), False, self.steps == self.length, {}


def made(num_workers=2, num_envs=4, **options):
    return ClusterEnv([Seeded] * num_envs, num_workers, **options)


def expected(policy, episodes, seed):
    """Return the returns of a policy's most likely actions in one environment, seeded once."""
    env, returns = Seeded(), []
    for number in range(episodes):
        observation, _ = env.reset(seed=None if number else seed)
        total, truncated = 0, False
        while not truncated:
            with torch.no_grad():
                action = policy(torch.as_tensor(observation)[None]).argmax().item()
            observation, reward, _, truncated, _ = env.step(action)
            total += reward
        returns.append(total)
    return returns


def test_each_environment_has_its_seed_and_its_first_episodes_count():
    policy = CategoricalPolicy(linear(1, 2))
    with made() as envs:
        found = envs.evaluate(policy, 30, seed=50, deterministic=True)
    shares = [expected(policy, share, 50 + row) for row, share in enumerate([7, 8, 7, 8])]
    assert found.returns.tolist() == sum(shares, [])
    assert found.ended.all()


def test_an_evaluation_is_the_same_on_any_number_of_workers():
    policy = CategoricalPolicy(linear(1, 2))
    results = []
    for num_workers in 1, 2, 5:
        with made(num_workers, 6) as envs:
            results.append(envs.evaluate(policy, 20))
    for found in results[1:]:
        assert_same(found, results[0])
    assert len(set(results[0].returns)) > 2


@pytest.mark.parametrize(("episodes", "num_envs"), [(20, 64), (20, 7), (3, 3), (1, 5)])
def test_shares_differ_by_one_and_are_spread(episodes, num_envs):
    """Each environment's episodes are as long as its row says."""
    lengths = range(1, num_envs + 1)
    with ClusterEnv([partial(CountingEnv, length) for length in lengths], 2) as envs:
        found = envs.evaluate(CategoricalPolicy(linear(1, 2)), episodes)
    shares = np.bincount(found.lengths, minlength=num_envs + 1)[1:]
    assert shares.sum() == episodes and np.ptp(shares) <= 1
    even = episodes * np.arange(1, num_envs + 1) / num_envs
    assert np.abs(np.cumsum(shares) - even).max() < 1


def test_training_continues_undisturbed_after_an_evaluation():
    """Workers that evaluated nothing continue where they were. Versions, pulls and noise are the
    same as without an evaluation.
    """
    policy, other = CategoricalPolicy(linear(1, 2)), CategoricalPolicy(nn.Linear(1, 2))
    rollouts = {}
    for evaluates in False, True:
        torch.manual_seed(1)
        with made(2, 4) as envs:
            envs.reset(seed=1)
            found = [envs.rollout(policy, 9)]
            if evaluates:  # on the second worker
                envs.evaluate(other, 1)
                envs.evaluate(policy, 1, deterministic=True)
            found += [envs.rollout(policy, 9), envs.rollout(policy, 9)]
            rollouts[evaluates] = found, envs.state_dict()
    (before, state), (after, other_state) = rollouts.values()
    del state["waiting_seconds"], other_state["waiting_seconds"]
    assert state == other_state
    for one, two in zip(before, after, strict=True):
        for name in FIELDS.split():
            here, there = getattr(one, name), getattr(two, name)
            rows = [0, 1]
            axis = 0 if name == "next_observations" else 1
            assert_same(here.take(rows, axis), there.take(rows, axis), name)
    assert after[1].starts[[2, 3]].all()
    assert not np.array_equal(before[1].observations[:, 2], after[1].observations[:, 2])


def test_training_does_not_repeat_itself_after_evaluations():
    """All evaluations have the same seeds, but the training after each of them differs."""
    policy = CategoricalPolicy(linear(1, 2))
    with made(1, 2) as envs:
        envs.reset(seed=1)
        seen = []
        for _ in range(3):
            envs.evaluate(policy, 2)
            seen.append(envs.rollout(policy, 9).observations)
    assert len({array.tobytes() for array in seen}) == 3


def test_outstanding_rollouts_come_after_an_evaluation():
    policy = CategoricalPolicy(linear(1, 2))
    with made() as envs:
        envs.reset(seed=1)
        envs.publish(policy)
        envs.send(5)
        before = envs.evaluate(policy, 6)
        parts = [envs.recv()[1] for _ in range(2)]
        assert all(part.rewards.shape == (5, 2) for part in parts)
        first = envs.rollout(policy, 5, overlap=True)
        assert_same(envs.evaluate(policy, 6), before)
        second = envs.rollout(policy, 5)
        assert first.rewards.shape == second.rewards.shape == (5, 4)


def test_a_loop_that_steps_must_reset_after_an_evaluation():
    with made(1, 2) as envs:
        envs.evaluate(CategoricalPolicy(linear(1, 2)), 2)  # before the first reset
        envs.reset(seed=1)
        envs.step(np.zeros(2, int))
        envs.evaluate(CategoricalPolicy(linear(1, 2)), 1)
        with pytest.raises(ResetNeeded, match="Cannot call `step` after `evaluate` before all"):
            envs.step(np.zeros(2, int))
        envs.reset()
        envs.step(np.zeros(2, int))


def test_a_worker_that_dies_is_replaced_and_plays_again(workers, tmp_path):
    gate = tmp_path / "gate"
    policy = CategoricalPolicy(linear(1, 2))
    with ClusterEnv([partial(CountingEnv, 3, gate=gate)] * 2, 2) as envs:
        pid = next(iter(workers()))

        signal.signal(signal.SIGALRM, lambda *_: (os.kill(pid, signal.SIGKILL), gate.touch()))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        assert envs.evaluate(policy, 4).returns.tolist() == [6] * 4
        assert len(envs.restarts) == 1


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("make", "returns", "lengths"), [(game_of_lives, 21, 6), (limit_outside, 6, 3)]
)
def test_an_evaluation_counts_episodes_like_a_rollout(together, make, returns, lengths):
    env_fns, options = [make] * 2, {}
    if together:
        mode = AutoresetMode.SAME_STEP

        def env_fns(num_envs):
            return SyncVectorEnv([make] * num_envs, autoreset_mode=mode)

        options = {"num_envs": 2}
    with ClusterEnv(env_fns, 1, **options) as envs:
        found = envs.evaluate(CategoricalPolicy(linear(1, 2)), 5)
        assert (found.returns.tolist(), found.lengths.tolist()) == ([returns] * 5, [lengths] * 5)
        envs.reset(seed=1)
        assert envs.rollout(CategoricalPolicy(linear(1, 2)), 7).starts.all()


@pytest.mark.parametrize(
    ("length", "returns"),  # of rewards 1 to 4; the environment plays no other episode then
    [(10**9, [10]), (6, [10]), (4, [10, 10])],
)
def test_an_episode_that_does_not_end_is_left_with_a_warning(length, returns, caplog):
    with ClusterEnv([partial(CountingEnv, length)], 1) as envs:
        found = envs.evaluate(CategoricalPolicy(linear(1, 2)), 2, max_steps=4)
    assert (found.returns.tolist(), found.lengths.tolist()) == (returns, [4] * len(returns))
    text = "1 of 1 episodes of the evaluation had not ended after 4 steps"
    assert found.ended.all() == (length == 4) and (text in caplog.text) == (length > 4)


def test_an_evaluation_runs_in_the_background(tmp_path):
    gate, policy = tmp_path / "gate", CategoricalPolicy(linear(1, 2))
    with ClusterEnv([partial(CountingEnv, 3, gate=gate)] * 2, 1) as envs:
        with pytest.raises(NoAsyncCallError, match="without any prior call to `evaluate_async`"):
            envs.evaluate_wait()
        envs.evaluate_async(policy, 4)
        for _ in range(2):
            with pytest.raises(multiprocessing.TimeoutError, match="^no response in "):
                envs.evaluate_wait(timeout=0)
        for method in (envs.reset, partial(envs.rollout, policy, 2)):
            with pytest.raises(AlreadyPendingCallError, match="during an evaluation: call"):
                method()
        gate.touch()
        assert envs.evaluate_wait().returns.tolist() == [6] * 4
        envs.reset(seed=1)
        assert envs.rollout(policy, 3).rewards[:, 0].tolist() == [1, 2, 3]


def test_closing_does_not_wait_for_the_end_of_an_evaluation(caplog):
    began = time.monotonic()
    with ClusterEnv([partial(CountingEnv, 10**9, delay=0.01)], 1) as envs:
        envs.evaluate_async(CategoricalPolicy(linear(1, 2)), 1)
    assert time.monotonic() - began < 20 and "killed" not in caplog.text


class NoMode(CategoricalPolicy):
    def distribution(self, params):
        class Odd(Distribution):
            has_enumerate_support = False

            def log_prob(self, value):
                return torch.zeros(value.shape)

        return Odd(validate_args=False)

    def kl(self, behavior, params):
        return torch.zeros(len(params))


def test_misuse_is_one_line():
    policy = CategoricalPolicy(linear(1, 2))
    with made(1, 1) as envs:
        for arguments, text in (
            ({"episodes": 0}, "episodes must be at least 1, got 0"),
            ({"episodes": 1, "seed": -1}, "seed must be at least 0, got -1"),
            ({"episodes": 1, "max_steps": 0}, "max_steps must be at least 1, got 0"),
        ):
            with pytest.raises(ValueError, match=text):
                envs.evaluate(policy, **arguments)
        for arguments in {"episodes": 4.0}, {"episodes": 1, "max_steps": 1e4}:
            with pytest.raises(
                TypeError, match="'float' object cannot be interpreted as an integer"
            ):
                envs.evaluate(policy, **arguments)
        with pytest.raises(TypeError, match="expected a Policy"):
            envs.evaluate(linear(1, 2), 1)
        envs.evaluate(NoMode(linear(1, 2)), 1)
        with pytest.raises(NotImplementedError, match="does not implement mode"):
            envs.evaluate(NoMode(linear(1, 2)), 1, deterministic=True)
        envs.reset()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            envs.evaluate(CategoricalPolicy(linear(3, 2)), 1)
