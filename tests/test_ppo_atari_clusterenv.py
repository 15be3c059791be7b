"""The Atari script, run as a user runs it, and its environments."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

import scripts.ppo_atari_clusterenv as script
from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_runtime.messages import worker_frames
from clusterenv_runtime.worker.envs import WorkerEnvs
from clusterenv_utils import by_backend
from clusterenv_utils.environments import (
    BackendError,
    check_plain,
    make_vec,
    one_line_for_environments,
)

from . import scripts
from .scripts import scalars
from .test_ppo_clusterenv import METRICS, SUMMARY

SCRIPT = "scripts/ppo_atari_clusterenv.py"
TINY = [
    "--env-id",
    "ALE/Breakout-v5",
    "--envs-per-worker",
    "1",
    "--num-steps",
    "16",
    "--num-minibatches",
    "2",
]
TINY += [
    "--update-epochs",
    "1",
    "--total-timesteps",
    "96",
    "--eval-episodes",
    "1",
    "--no-save-model",
]
EXACT = ["--sync-mode", "always", "--weights", "float32"]


@pytest.fixture(scope="module")
def always(tmp_path_factory):
    return scripts.train(SCRIPT, tmp_path_factory.mktemp("always"), *TINY, *EXACT)


def test_run_leaves_summary_and_logs(always):
    folder, summary = always
    assert set(summary) >= SUMMARY
    assert (summary["global_step"], summary["pulls_per_worker"]) == (96, 3)
    assert folder.name.startswith("ALE-Breakout-v5__ppo_atari_clusterenv__1__")
    assert set(scripts.events_of(folder).Tags()["scalars"]) >= {
        tag for tag in METRICS if "episodic" not in tag
    }


def test_the_learner_recomputes_the_policy_that_acted(always, tmp_path):
    """At lag 0 the proximal policy is the behavior policy."""
    plain, _ = scripts.train(SCRIPT, tmp_path, *TINY, *EXACT, "--no-decoupled")
    losses = [scalars(folder, "losses/policy_loss") for folder in (always[0], plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


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


def evaluated(env_id, backend, policy):
    args = script.Args(env_id=env_id, env_backend=backend)
    make = [script.make_env(env_id, 1, False, "")] * 2
    env_fns = by_backend(args, make, script.make_env, script.OF_ENVPOOL, **script.ENVPOOL)
    with ClusterEnv(env_fns, 1, num_envs=2) as envs:
        return envs.evaluate(policy, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("env_id", "backend"), [("ALE/Seaquest-v5", "gymnasium"), ("Seaquest-v5", "envpool")]
)
def test_evaluations_play_whole_games_with_unclipped_rewards(env_id, backend):
    if backend == "envpool":
        pytest.importorskip("envpool")
    returns, _, ended = evaluated(env_id, backend, Same(18))
    assert (returns > 0).any() and (returns % 20 == 0).all()  # the first targets are worth 20 each
    assert ended.all()


def test_a_policy_that_never_fires_is_evaluated_over_all_lives():
    assert evaluated("ALE/Breakout-v5", "gymnasium", Same(4, only_first=True)).ended.all()


def test_a_seed_begins_a_new_game():
    env, seen = script.make_env("ALE/Breakout-v5", 0, False, "", repeat_action_probability=0)(), []
    for _ in range(2):
        observation, info = env.reset(seed=3)
        seen.append(observation)
        while info["lives"] == 5:
            *_, info = env.step(0)
    env.close()
    assert np.array_equal(*seen)


def test_wrappers_that_envpool_lacks_are_refused():
    pytest.importorskip("envpool")
    check_plain(script.make_env, "Pong-v5", {}, script.OF_ENVPOOL)

    def changed(*arguments, **kwargs):
        return lambda: gym.wrappers.TransformReward(
            script.make_env(*arguments, **kwargs)(), lambda reward: 2 * reward
        )

    with pytest.raises(
        BackendError,
        match=r"without what make_env does \(TransformReward\): use --env-backend gymnasium",
    ):
        check_plain(changed, "Pong-v5", {}, script.OF_ENVPOOL)


class AtRandom:
    """A stand-in for an `Actor`, which acts at random."""

    version = 1

    def __init__(self, num_actions):
        self.rng, self.num_actions = np.random.default_rng(1), num_actions

    def start(self, starts):
        self.actions = []

    def act(self, observations, starts):
        self.actions.append(self.rng.integers(self.num_actions, size=len(starts)))
        return self.actions[-1]

    def finish(self, observations):
        shape = len(self.actions), len(self.actions[0])
        return {
            "actions": np.array(self.actions), "logprobs": np.zeros(shape, np.float32),
            "states": None, "extras": {}, "params": np.zeros((1, 2), np.float32),
        }  # fmt: skip


@pytest.mark.parametrize("game", ["Breakout", "Pong", "Seaquest"])
def test_bytes_of_a_step(game):
    """A step takes a quarter of its stack's bytes."""
    make_env = script.make_env(f"ALE/{game}-v5", 0, False, "")
    envs = WorkerEnvs([make_env] * 2, range(2), AutoresetMode.NEXT_STEP, (), 4)
    envs.reset([1, 2])
    part = envs.collect(AtRandom(envs.describe()["action_space"].n), 128)
    frames = worker_frames(1, part, ())
    envs.close()
    assert sum(map(len, frames)) / 256 < 7400 < 4 * 84 * 84 / 3


def test_with_envpool_an_episode_is_one_life_and_games_are_counted():
    pytest.importorskip("envpool")
    arguments = {"episodic_life": True, "reward_clip": True}
    make = partial(make_vec, "envpool", "Breakout-v5", **arguments)
    envs = WorkerEnvs(make, range(2), AutoresetMode.NEXT_STEP, ("lives",), 4)
    envs.reset([1, 2])
    part = envs.collect(AtRandom(4), 600)
    envs.close()
    ended = part.terminations | part.truncations
    lives = part.infos["lives"]
    for env in range(2):
        found = lives[ended[:, env], env].tolist()
        assert len(found) > 5 and found == ([4, 3, 2, 1, 0] * len(found))[: len(found)]
    assert part.episodes.tolist() == np.flatnonzero(ended & (lives == 0)).tolist()
    assert len(part.final_observations) == ended.sum() > len(part.episodes)
    returns = [part.rewards[:, env].sum() for env in range(2)]
    assert part.episodic_returns.sum() >= 0 and sum(returns) > 0


def test_a_missing_ale_is_a_one_line_error(monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", {})
    says = "Namespace ALE not found. .* Atari's games need ale-py"
    args = script.Args()
    with pytest.raises(SystemExit, match=says), one_line_for_environments(args):
        script.make_env(args.env_id, 0, False, "")()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_an_env_that_is_not_an_atari_game_is_a_one_line_error(tmp_path, monkeypatch, env_id):
    scripts.check_refusal_here(
        monkeypatch,
        SCRIPT,
        tmp_path,
        [*TINY, "--env-id", env_id],
        f"must be an Atari game, such as ALE/Pong-v5, got {env_id}",
    )
