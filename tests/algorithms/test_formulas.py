"""Parts of the scripts' computations, each checked against definitions and closed forms."""

import importlib
import inspect
from copy import deepcopy
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from clusterenv_runtime.arrays import Frames
from clusterenv_runtime.rollout import Rollout
from clusterenv_utils import FrameReplayBuffer
from scripts.ppo_continuous_clusterenv import Moments, Normalize, discount, scale_rewards

from .toys import spaces_of

KINDS = "multilearner", "continuous", "lstm", "atari", "minatar"
PPO = ["ppo_clusterenv", *(f"scripts.ppo_{kind}_clusterenv" for kind in KINDS)]
DQN = ["dqn_clusterenv", "scripts.dqn_atari_clusterenv"]


def kind_of(name):
    """Return the kind of `toys` that a script trains on."""
    return {"continuous": "box", "minatar": "minatar", "atari": "atari"}.get(
        name.split("_")[1], "vector"
    )


SHARED = {  # functions and classes, and the scripts that have the same
    "layer_init": PPO,
    "compute_gae": PPO,
    "compute_vtrace": [PPO[0], PPO[2]],
    "ppo_loss": [PPO[0], PPO[2], *PPO[4:]],
    "compute_td_target": DQN,
    "linear_schedule": DQN,
    "ReplayBuffer": [DQN[0], "scripts.sac_clusterenv"],
}


@pytest.mark.parametrize("name", SHARED)
def test_what_scripts_share_is_the_same(name):
    """So `test_training` tests all of these by a few scripts."""
    modules = map(importlib.import_module, SHARED[name])
    assert len({inspect.getsource(getattr(module, name)) for module in modules}) == 1


# Continuous PPO's normalization.


def test_discounted_returns_begin_with_their_episode_and_go_on_in_the_next_rollout():
    rewards, dones = np.ones((3, 2)), np.array([[False, False], [True, False], [False, False]])
    starts = np.zeros(2, bool)
    returns, last = discount(rewards, starts, dones, 0.5, np.array([0.0, 4.0]))
    np.testing.assert_allclose(returns, [[1, 3], [1.5, 2.5], [1, 2.25]])
    np.testing.assert_allclose(last, [1, 2.25])
    _, last = discount(rewards, starts, ~dones, 0.5, last)
    np.testing.assert_allclose(last, [0, 0])


def test_rewards_are_scaled_by_the_deviation_of_returns_and_clipped():
    scaled = scale_rewards(np.array([1.0, -4.0, 23.0, -23.0]), 4.0)
    np.testing.assert_allclose(scaled, [0.5, -2, 10, -10])
    # This is the case before any returns differ.
    assert scale_rewards(np.array([1.0]), 0.0) == 10


def test_moments_are_those_of_all_values():
    rng, moments, seen = np.random.default_rng(3), Moments((2,)), []
    for number in range(1, 6):
        seen.append(1000 + rng.normal(size=(7 * number, 2)).astype(np.float32))
        moments.update(seen[-1])
    everything = np.concatenate(seen).astype(np.float64)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-9)
    assert moments.count == len(everything)


def test_observations_are_normalized_and_clipped():
    normalize = Normalize(2)
    x = torch.tensor([[3.0, -50.0]])
    assert normalize(x).tolist() == [[3, -10]] and normalize(-x).tolist() == [[-3, 10]]
    normalize.load(SimpleNamespace(mean=np.array([1.0, 2.0]), var=np.array([4.0, 100.0])))
    torch.testing.assert_close(normalize(x), torch.tensor([[1.0, -5.2]]))
    # The statistics of observations that have never changed.
    normalize.load(SimpleNamespace(mean=np.array([3.0, 0.0]), var=np.zeros(2)))
    assert normalize(x).tolist() == [[0, -10]]


# Atari's frames.


@pytest.mark.parametrize("name", ["scripts.ppo_atari_clusterenv", "scripts.dqn_atari_clusterenv"])
def test_an_observation_is_the_last_four_frames_the_newest_last(name):
    script = importlib.import_module(name)
    env = script.make_env("tests.algorithms.toys:Corridor-atari-v0", 0, False, "")()
    observation, _ = env.reset(seed=100_000)  # at the beginning of the corridor

    def places(stack):
        """Return which of the five columns are bright in each frame. Check that frames are black
        and white.
        """
        columns = np.stack([stack[:, 42, 8 + 17 * place] for place in range(5)], 1)
        assert set(np.unique(columns)) <= {0, 255}
        return [list(np.flatnonzero(frame)) for frame in columns]

    assert observation.shape == (4, 84, 84) and observation.dtype == np.uint8
    assert places(observation) == [[0]] * 4
    # A walk to the next place, which happens in the last of the game's four frames.
    after, reward, *_ = env.step(1)
    # A frame is the maximum of the last two.
    assert places(after) == [[0], [0], [0], [0, 1]] and reward == 0
    for place in (2, 3, 4, 5):
        after, reward, terminated, _, _ = env.step(1)
        assert (reward, terminated) == (place >= 3, place == 5)
    assert places(after)[:3] == [[1, 2], [2, 3], [3, 4]]
    env.close()


@pytest.mark.parametrize("name", ["scripts.ppo_atari_clusterenv", "scripts.dqn_atari_clusterenv"])
def test_an_episode_is_a_life_that_begins_by_firing_and_counts_in_the_games_return(name):
    script = importlib.import_module(name)
    env = script.make_env("tests.algorithms.toys:Lives-atari-v0", 0, False, "")()
    env.reset(seed=1)
    for life in (2, 1):
        assert env.unwrapped.lives() == life and env.unwrapped.steps == 1  # it has fired
        steps = [env.step(0) for _ in range(3)]
        assert [reward for _, reward, *_ in steps] == [-1, 1, -1]
        assert [terminated for _, _, terminated, _, _ in steps] == [False, False, True]
        episodes = [info["episode"] for *_, info in steps if "episode" in info]
        if life == 1:
            # Rewards are not clipped.
            assert [episode["r"] for episode in episodes] == [2 * (-0.5 - 0.5 + 5 - 0.5)]
        else:
            assert not episodes
            env.reset()
    env.reset()
    assert env.unwrapped.lives() == 2  # a new game
    env.close()


# Networks before training.


@pytest.mark.parametrize("name", PPO)
def test_layers_begin_orthogonal_with_cleanrls_gains(name):
    script = importlib.import_module(name)
    kind = kind_of(name)
    envs = spaces_of(script.make_env(f"tests.algorithms.toys:Clockwork-{kind}-v0", 0, False, "")())
    agent = script.Agent(envs) if kind in ("minatar", "atari") else script.Agent(envs, 64)
    for key, value in agent.named_parameters():
        if "bias" in key or key == "actor_logstd":
            assert not value.any(), key
            continue
        matrix = value.detach().flatten(1).double()
        matrix = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
        number, outputs = len(matrix), len(value)
        gain = 1.0 if "lstm" in key or outputs == 1 else np.sqrt(2)
        gain = 0.01 if outputs == 2 and "lstm" not in key else gain  # the actor's last layer
        torch.testing.assert_close(
            matrix @ matrix.T, gain**2 * torch.eye(number).double(), atol=1e-5, rtol=1e-4
        )


# The replay buffers.


def chunk_of(first, num_steps, num_envs, shape=()):
    """Return a chunk in which step number n, from ``first`` on, sees n, leads to n + 0.5, and has
    the reward n.

    One in three steps terminates an episode, and one in three truncates it. With stacks, each frame
    holds these numbers.
    """
    numbers = np.arange(first, first + num_steps * num_envs).reshape(num_steps, num_envs)
    kind = numbers % 3
    ends = kind > 0
    led_to = numbers + 0.5

    def observed(values):
        return np.broadcast_to(
            np.reshape(values, (*np.shape(values), *[1] * len(shape))), (*np.shape(values), *shape)
        )

    observations = observed(numbers).astype(np.float32).copy()
    # Where no episode ends, the next step's observation is the one after this step.
    observations[1:][~ends[:-1]] = observed(led_to[:-1][~ends[:-1]])
    return Rollout(
        rows=np.arange(num_envs), starts=np.zeros(num_envs, bool), observations=observations,
        actions=numbers % 5, logprobs=np.zeros(numbers.shape), states=None, extras={}, infos={},
        rewards=numbers.astype(np.float64), terminations=kind == 1, truncations=kind == 2,
        final_observations=observed(led_to[ends]).astype(np.float32),
        next_observations=observed(led_to[-1]).astype(np.float32),
        policy_versions=np.ones(num_envs, np.int64), episodic_returns=np.empty(0),
        episodic_lengths=np.empty(0, np.int64),
    )  # fmt: skip


def in_frames(chunk):
    """Turn a chunk's stacks of four frames into `Frames`, and return the chunk."""
    flat = chunk.observations.reshape(-1, *chunk.observations.shape[3:])
    index = np.arange(len(flat)).reshape(chunk.observations.shape[:3])
    chunk.observations = Frames(flat.astype(np.uint8), index)
    chunk.final_observations = chunk.final_observations.astype(np.uint8)
    chunk.next_observations = chunk.next_observations.astype(np.uint8)
    return chunk


def check_drawn(drawn, inserted, held):
    """Check that all of the last transitions are drawn, that no others are, and that each is
    consistent. Return the observations, the next observations, and the transitions' numbers.
    """
    names = "obs", "actions", "next_obs", "rewards", "dones"
    obs, actions, next_obs, rewards, dones = (drawn[name].double().numpy() for name in names)
    numbers = rewards.astype(int)
    assert set(numbers) == set(range(inserted - held, inserted))
    np.testing.assert_array_equal(actions.reshape(len(numbers)), numbers % 5)
    np.testing.assert_array_equal(dones, numbers % 3 == 1)  # a truncation is not the end
    return obs.reshape(len(numbers), -1)[:, 0], next_obs.reshape(len(numbers), -1)[:, 0], numbers


@pytest.mark.parametrize("size", [24, 25, 30, 31])
def test_the_buffer_holds_the_newest_transitions_whole_and_each_once(size):
    script = importlib.import_module("dqn_clusterenv")
    buffer = script.ReplayBuffer(size)
    torch.manual_seed(1)
    for number in range(12):
        buffer.add(script.make_transitions(chunk_of(8 * number, 4, 2, (1,))))
        inserted = 8 * (number + 1)
        held = min(inserted, size)
        assert buffer.inserted == inserted
        drawn = buffer.sample(100, held, torch.device("cpu"))  # by chance, all of them
        obs, next_obs, numbers = check_drawn(
            {name: column.flatten(0, 1) for name, column in drawn.items()}, inserted, held
        )
        saw = np.array(
            [
                number if number % 8 < 2 or (number - 2) % 3 else number - 2 + 0.5
                for number in numbers
            ]
        )
        np.testing.assert_array_equal(obs, saw)
        np.testing.assert_array_equal(next_obs, numbers + 0.5)
        counts = np.bincount(numbers - (inserted - held))
        assert counts.min() > 0.5 * 100 and counts.max() < 1.6 * 100  # each is equally likely
    shapes = [tuple(each.shape) for each in buffer.sample(3, 7, torch.device("cpu")).values()]
    assert shapes == [(3, 7, 1), (3, 7, 1), (3, 7, 1), (3, 7), (3, 7)]


def test_a_chunk_whose_frames_have_been_written_over_is_drawn_no_more():
    space = gym.spaces.Box(0, 255, (4, 1, 1), np.uint8)
    buffer = FrameReplayBuffer(1000, 150, space)  # room for the frames of three chunks
    torch.manual_seed(1)
    for number in range(12):
        buffer.add(in_frames(chunk_of(8 * number, 4, 2, (4, 1, 1))))
        drawn = buffer.sample(1000, torch.device("cpu"))
        obs, numbers = drawn["obs"], drawn["rewards"].numpy().astype(int)
        oldest = min(numbers)
        assert 8 * (number + 1) - oldest in (8 * min(number + 1, 2), 8 * min(number + 1, 3))
        saw = [number if number % 8 < 2 or (number - 2) % 3 else number - 2 for number in numbers]
        assert obs[:, 0, 0, 0].tolist() == saw


@pytest.mark.parametrize("has_frames", [True, False])
def test_a_checkpoint_holds_the_buffer(has_frames):
    space = gym.spaces.Box(0, 255, (4, 1, 1), np.uint8)
    script = importlib.import_module("dqn_clusterenv")
    chunks = [chunk_of(8 * number, 4, 2, (4, 1, 1)) for number in range(6)]
    prepare = in_frames if has_frames else script.make_transitions
    chunks = [prepare(chunk) for chunk in chunks]
    before, after = (
        FrameReplayBuffer(30, 200, space) if has_frames else script.ReplayBuffer(30)
        for _ in range(2)
    )
    for chunk in chunks[:5]:
        before.add(chunk)
    after.load_state_dict(deepcopy(before.state_dict()))
    drawn = []
    for buffer in (before, after):
        buffer.add(chunks[5])
        torch.manual_seed(4)
        number = (50,) if has_frames else (1, 50)
        drawn.append(buffer.sample(*number, torch.device("cpu")))
    for name, values in drawn[0].items():
        assert torch.equal(values, drawn[1][name])
