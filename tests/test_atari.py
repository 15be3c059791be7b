"""The environments of the Atari scripts: lives, whole games, and frames."""

import numpy as np
import pytest
import torch
from torch import nn

from clusterenv_runtime import CategoricalPolicy, ClusterEnv

script = pytest.importorskip("scripts.ppo_atari_clusterenv", reason="pip install ale-py")


def play():
    """Play two games of Breakout at random. Return the results of each step."""
    env = script.make_env("ALE/Breakout-v5", 0, False, "")()
    rng, steps, games = np.random.default_rng(1), [], 0
    env.reset(seed=1)
    while games < 2:
        _, reward, terminated, truncated, info = env.step(rng.integers(4))
        steps.append((reward, terminated, info["lives"], info.get("episode")))
        games += "episode" in info
        if terminated or truncated:
            env.reset()
    env.close()
    return steps


def test_an_episode_is_one_life_and_the_statistics_cover_whole_games():
    steps = play()
    assert [lives for _, terminated, lives, _ in steps if terminated] == [4, 3, 2, 1, 0] * 2
    assert {reward for reward, *_ in steps} == {0, 1}
    ends = [number for number, step in enumerate(steps) if step[3] is not None]
    games = [steps[: ends[0] + 1], steps[ends[0] + 1 :]]
    clipped = [sum(reward for reward, *_ in game) for game in games]
    assert sum(clipped) > 0 and all(
        game[-1][3]["r"] >= sum_ for game, sum_ in zip(games, clipped, strict=True)
    )


class Same(CategoricalPolicy):
    """Takes all actions with equal probability, or only the first."""

    float_observations = False

    def __init__(self, num_actions, only_first=False):
        super().__init__(nn.Linear(1, 1))
        logits = torch.zeros(num_actions)
        logits[0] = 1000 * only_first
        self.register_buffer("logits", logits)

    def forward(self, observations):
        return self.logits.expand(len(observations), -1)


def evaluated(env_id, policy):
    with ClusterEnv([script.make_env(env_id, 1, False, "")] * 2, 1) as envs:
        return envs.evaluate(policy, 3)


def test_a_policy_that_never_fires_is_evaluated_over_all_lives():
    assert evaluated("ALE/Breakout-v5", Same(4, only_first=True)).ended.all()


def test_a_seed_begins_a_new_game():
    env, seen = script.make_env("ALE/Breakout-v5", 0, False, "", repeat_action_probability=0)(), []
    for _ in range(2):
        observation, info = env.reset(seed=3)
        seen.append(observation)
        while info["lives"] == 5:
            *_, info = env.step(0)
    env.close()
    assert np.array_equal(*seen)
