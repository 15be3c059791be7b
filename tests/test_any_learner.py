"""Learners of other libraries learn the same with workers as without, to the last bit."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import nn
from torch.nn import functional as F

from clusterenv_runtime import ClusterEnv

from .envs import CountingEnv, assert_same
from .patience import HOUR, kill

pytestmark = pytest.mark.long


def cartpole():
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))


def pendulum():
    return gym.wrappers.RecordEpisodeStatistics(gym.make("Pendulum-v1", max_episode_steps=15))


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


def on_policy(envs, continuous=False):
    """Train an actor and a critic on rollouts of all environments, as CleanRL's ppo.py and
    ppo_continuous_action.py do. Return their weights and the episodes' returns.
    """
    inputs = envs.single_observation_space.shape[0]
    outputs = envs.single_action_space.shape[0] if continuous else envs.single_action_space.n
    actor, critic = network(inputs, outputs), network(inputs, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 1e-2)
    observations, _ = envs.reset(seed=1)
    episodes = []
    for _ in range(4):
        losses = []
        for _ in range(16):
            out = actor(torch.Tensor(observations))
            kind = (
                torch.distributions.Normal(out, 1.0)
                if continuous
                else torch.distributions.Categorical(logits=out)
            )
            actions = kind.sample()
            values = critic(torch.Tensor(observations))[:, 0]
            observations, rewards, terminations, truncations, infos = envs.step(actions.numpy())
            if "episode" in infos:
                episodes.append(infos["episode"]["r"])
            logprobs = kind.log_prob(actions).sum(1) if continuous else kind.log_prob(actions)
            with torch.no_grad():
                after = critic(torch.Tensor(observations))[:, 0] * torch.Tensor(1.0 - terminations)
            advantages = torch.Tensor(rewards) + 0.99 * after - values
            losses.append(advantages.pow(2).mean() - (logprobs * advantages.detach()).mean())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [*actor.parameters(), *critic.parameters()], episodes


def off_policy(envs, continuous=False):
    """Train a critic, and an actor, on a replay buffer, as CleanRL's dqn.py, c51.py and
    sac_continuous_action.py do. Return their weights and the episodes' returns.
    """
    inputs, random = envs.single_observation_space.shape[0], np.random.default_rng(1)
    width = envs.single_action_space.shape[0] if continuous else 0
    critic = network(inputs + width, 1 if continuous else envs.single_action_space.n)
    actor = network(inputs, max(width, 1))
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (critic, actor)]
    replay, episodes = [], []
    envs.action_space.seed(1)
    observations, _ = envs.reset(seed=1)
    for step in range(150):
        if step < 30 or random.random() < 0.1:
            actions = envs.action_space.sample()
        elif continuous:
            actions = actor(torch.Tensor(observations)).detach().tanh().numpy()
        else:
            actions = critic(torch.Tensor(observations)).argmax(1).numpy()
        following, rewards, terminations, truncations, infos = envs.step(actions)
        if "episode" in infos:
            episodes.append(infos["episode"]["r"])
        replay += zip(observations, actions, rewards, following, terminations, strict=True)
        observations = following
        if step < 30:
            continue
        batch = [replay[i] for i in random.integers(len(replay), size=16)]
        before, taken, reward, after, ended = (
            torch.as_tensor(np.array(each)) for each in zip(*batch, strict=True)
        )
        with torch.no_grad():
            if continuous:
                next_value = critic(torch.cat([after, actor(after).tanh()], 1))[:, 0]
            else:
                next_value = critic(after).max(1).values
            target = (reward + 0.99 * next_value * ~ended).float()
        value = (
            critic(torch.cat([before, taken], 1))[:, 0]
            if continuous
            else critic(before)[range(16), taken]
        )
        optimizers[0].zero_grad()
        F.mse_loss(value, target).backward()
        optimizers[0].step()
        if continuous:
            optimizers[1].zero_grad()
            (-critic(torch.cat([before, actor(before).tanh()], 1)).mean()).backward()
            optimizers[1].step()
    return [*critic.parameters(), *actor.parameters()], episodes


@pytest.mark.parametrize("learn", [on_policy, off_policy])
@pytest.mark.parametrize(
    "make, continuous", [(cartpole, False), (pendulum, True)], ids=["discrete", "continuous"]
)
def test_a_learner_with_only_its_constructor_changed_learns_the_same(learn, make, continuous):
    learned = []
    for constructor in (SyncVectorEnv, lambda env_fns: ClusterEnv(env_fns, 2, worker_timeout=HOUR)):
        torch.manual_seed(1)
        envs = constructor([make] * 3)
        weights, episodes = learn(envs, continuous)
        envs.close()
        assert len(episodes) >= 3
        learned.append(([weight.detach().numpy() for weight in weights], episodes))
    assert_same(learned[1], learned[0])


# Stable-Baselines3.


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


# TorchRL.


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_torchrl_gets_the_same_steps(mode):
    envs = pytest.importorskip("torchrl.envs")
    collected = []
    for constructor in (SyncVectorEnv, partial(ClusterEnv, num_workers=2, worker_timeout=HOUR)):
        wrapped = envs.GymWrapper(
            constructor([partial(gym.make, "CartPole-v1")] * 3, autoreset_mode=mode)
        )
        torch.manual_seed(1)
        wrapped.set_seed(1)
        steps = wrapped.rollout(60, break_when_any_done=False)
        wrapped.close()
        assert steps["next", "done"].sum() > 3
        names = (
            "observation",
            "action",
            ("next", "reward"),
            ("next", "observation"),
            ("next", "terminated"),
        )
        collected.append([steps[name].numpy() for name in names])
    assert_same(collected[1], collected[0])
