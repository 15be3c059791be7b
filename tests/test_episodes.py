"""Which episodes are counted, and with which return and length."""

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit, TransformReward

from clusterenv_runtime import CategoricalPolicy, ClusterEnv

from .envs import CountingEnv
from .nets import linear

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


class Said(CountingEnv):
    """Has its own info under the key of Gymnasium's episode statistics."""

    episodes = 0

    def reset(self, **kwargs):
        self.episodes += 1
        return super().reset(**kwargs)[0], {"episode": self.episodes}

    def step(self, action):
        return *super().step(action)[:4], {"episode": self.episodes}


class Lives(gym.Wrapper):
    """Ends an episode every second step and continues the game, like the lives of Atari games."""

    def __init__(self, env):
        super().__init__(env)
        self.steps, self.is_over = 0, True

    def step(self, action):
        *results, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        self.is_over = terminated or truncated
        return *results, terminated or self.steps % 2 == 0, truncated, info

    def reset(self, *, seed=None, options=None):
        if self.is_over or seed is not None:
            return self.env.reset(seed=seed, options=options)
        observation, _, terminated, truncated, info = self.env.step(0)
        if terminated or truncated:  # the game ends in the step that should begin a life
            return self.env.reset()
        return observation, info


class NoInfos(gym.Wrapper):
    def step(self, action):
        return *self.env.step(action)[:4], {}


class Endless(gym.Wrapper):
    """Resets the wrapped environment by itself, and ends an episode every fifth step."""

    def reset(self, **kwargs):
        self.steps = 0
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, _, truncated, _ = self.env.step(action)
        if truncated:
            observation, _ = self.env.reset()
        self.steps += 1
        return observation, reward, False, self.steps == 5, {}


def tenfold(env):
    return TransformReward(env, lambda reward: 10 * reward)


def limit_outside():
    return TimeLimit(RecordEpisodeStatistics(CountingEnv(1000)), 3)


def game_of_lives():
    """Return a game of six steps with rewards 1 to 6: two in each of two lives, and one in each
    reset.
    """
    return tenfold(Lives(RecordEpisodeStatistics(CountingEnv(6))))


def episodes_of(env_fns, num_steps=14, **kwargs):
    """Return the returns and lengths of the first environment's first two episodes."""
    with ClusterEnv(env_fns, 1, **kwargs) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(CategoricalPolicy(linear(1, 2)), num_steps)
    return rollout.episodic_returns[:2].tolist(), rollout.episodic_lengths[:2].tolist()


KINDS = {
    "an info of the same name": (lambda: Said(4), [10, 10], [4, 4]),
    "a limit outside of the statistics": (limit_outside, [6, 6], [3, 3]),
    "lives": (game_of_lives, [21, 21], [6, 6]),
    "lives, and infos that are dropped": (lambda: NoInfos(game_of_lives()), [21, 21], [6, 6]),
    "rewards that are changed outside": (
        lambda: tenfold(RecordEpisodeStatistics(CountingEnv(3), stats_key="own")), [6, 6], [3, 3],
    ),
    "statistics that keep no episode": (
        lambda: RecordEpisodeStatistics(CountingEnv(3), buffer_length=0), [6, 6], [3, 3],
    ),
    "no statistics": (lambda: tenfold(CountingEnv(3)), [60, 60], [3, 3]),
    "statistics of parts of an episode": (
        lambda: Endless(RecordEpisodeStatistics(CountingEnv(2))), [7, 7], [5, 5],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_are_counted_from_rewards_and_ends_or_by_gymnasiums_wrapper(kind):
    env_fn, returns, lengths = KINDS[kind]
    assert episodes_of([env_fn]) == (returns, lengths)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_episodes_are_counted_alike_where_environments_step_together(kind, mode):
    env_fn, returns, lengths = KINDS[kind]

    def make(num_envs):
        return SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode)

    assert episodes_of(make, num_envs=1) == (returns, lengths)
