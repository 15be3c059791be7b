"""Computations of the harness that all scripts share: seeds, evaluation, summary and curve."""

import importlib
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from clusterenv_runtime import Frames
from clusterenv_runtime.extras.atari import EpisodicLife
from clusterenv_utils import FrameReplayBuffer, evaluate
from clusterenv_utils.logs import LearningCurve, summary_of
from scripts.ppo_continuous_clusterenv import NormalizeReward


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_evaluation_plays_the_policy_as_the_flags_say(deterministic):
    calls = []

    class Envs:
        num_workers = 2

        def evaluate(self, policy, episodes, *, seed, deterministic):
            calls.append((policy, episodes, seed, deterministic))
            return SimpleNamespace(returns=np.arange(episodes))

    args = SimpleNamespace(seed=7, eval_episodes=3, eval_deterministic=deterministic)
    assert evaluate(args, Envs(), "policy").tolist() == [0, 1, 2]
    assert calls == [("policy", 3, 100_007, deterministic)]
    args.eval_episodes = 0
    assert evaluate(args, Envs(), "policy").tolist() == [] and len(calls) == 1


def test_the_summary_has_mean_and_deviation_of_the_evaluation():
    args = SimpleNamespace(kl_threshold=0.1, seed=1, env_id="x")
    envs = {"pulls": 6, "workers": 2, "sync_bytes": 5, "restarts": []}
    summary = summary_of(args, envs, LearningCurve(), np.array([1.0, 2.0, 6.0]))
    assert summary["eval_return_mean"] == 3 and summary["pulls_per_worker"] == 3
    assert summary["eval_return_std"] == pytest.approx(np.sqrt(14 / 3))


def rollout(starts, rows=(0, 1), rewards=((1.0, 10.0),)):
    none = np.zeros((1, len(rows)), bool)
    return SimpleNamespace(
        rows=np.array(rows), rewards=np.array(rewards), starts=np.array(starts),
        terminations=none, truncations=none,
    )  # fmt: skip


def test_discounted_returns_go_on_in_the_next_chunk_of_a_worker():
    scale = NormalizeReward(3, 0.5)
    scale(rollout([True] * 3, (0, 1, 2), [[1.0, 10.0, 100.0]]))
    # Three chunks of the last row, and one of the first row, which comes from a replacement.
    scale(rollout([False, True, False, False], (2, 0, 2, 2), [[1.0, 2.0, 3.0, 4.0]]))
    scale(rollout([False], (1,), [[0.0]]))
    seen = np.array([1, 10, 100, 51, 2, 28.5, 18.25, 5])
    assert scale.moments.mean == pytest.approx(seen.mean())
    assert scale.moments.var == pytest.approx(seen.var())


def test_discounted_returns_begin_anew_where_an_episode_does():
    scale = NormalizeReward(2, 0.5)
    scale(rollout([True, True]))
    scale(rollout([False, True]))  # the second row's worker was lost
    seen = np.array([1, 10, 1.5, 10])
    assert scale.moments.mean == pytest.approx(seen.mean())
    assert scale.moments.var == pytest.approx(seen.var())


def test_the_curve_has_the_last_hundred_episodes_and_goes_on():
    curve = LearningCurve()
    curve.add_episodes(np.full(20, 1000.0), np.ones(20))
    curve.add_episodes(np.arange(100.0), np.ones(100))
    assert curve.mean_return == 49.5
    curve.add_point(8, 1.5, 3)
    curve.add_episodes(np.array([5.0]), np.array([2]))
    again = LearningCurve()
    again.load_state_dict(curve.state_dict())
    assert again.points == [(8, 49.5, 1.5, 3)] and again.mean_return == curve.mean_return
    scalars = again.add_point(9, 2, 4)
    assert (scalars["charts/episodic_return"], scalars["charts/episodic_length"]) == (5, 2)


@pytest.mark.parametrize("size, num_steps", [(64, 4), (200, 16)])
def test_a_buffer_of_frames_holds_as_many_transitions_as_are_asked(size, num_steps):
    script = importlib.import_module("scripts.dqn_atari_clusterenv")
    space = gym.spaces.Box(0, 255, (4, 1, 1), np.uint8)
    buffer = FrameReplayBuffer(size, script.frames_of(size, num_steps, 2 * num_steps), space)
    # Each environment has a whole stack, and then one frame per step. No episode ends.
    begins = np.array([0, num_steps + 3])
    index = np.arange(num_steps)[:, None, None] + begins[:, None] + np.arange(4)
    frames = np.zeros((2 * (num_steps + 3), 1, 1), np.uint8)
    none = np.zeros((num_steps, 2), bool)
    chunk = SimpleNamespace(
        observations=Frames(frames, index.astype(np.int32)), actions=none.astype(int),
        rewards=none.astype(float), terminations=none, truncations=none,
        final_observations=np.zeros((0, 4, 1, 1), np.uint8),
        next_observations=np.zeros((2, 4, 1, 1), np.uint8),
    )  # fmt: skip
    for _ in range(3 * size // num_steps):
        buffer.add(chunk)
        assert buffer.inserted - buffer.chunks[0][0] >= min(size, buffer.inserted)


def test_a_reset_with_a_seed_begins_another_game():
    seeds = []

    class Game(gym.Env):
        ale = SimpleNamespace(lives=lambda: 2)

        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return 0, {}

        def step(self, action):
            return 0, 0.0, False, False, {}

    env = EpisodicLife(Game())
    env.reset(seed=1)
    env.step(0)
    env.reset()  # continues the game
    env.reset(seed=2)
    assert seeds == [1, 2]
