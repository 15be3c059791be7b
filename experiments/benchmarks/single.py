"""PPO in a single process, in CleanRL's style: step all environments, learn from the batch, repeat.

    python -m experiments.benchmarks.single LunarLander-v3 25 sync
    python -m experiments.benchmarks.single HalfCheetah-v5 25 sync      # or continuous actions

Trains for the given number of iterations on Gymnasium's SyncVectorEnv (`sync`) or AsyncVectorEnv
(`async`). Prints the environment steps and seconds after the first iteration. `throughput` runs
this module, and `peers` runs its loop on EnvPool.
"""

import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from . import work


def make_env(env_id):
    return lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))


def mlp(num_inputs, num_outputs):
    sizes = [num_inputs, *work.HIDDEN]
    layers = [
        layer
        for i, o in zip(sizes, sizes[1:], strict=False)
        for layer in (nn.Linear(i, o), nn.Tanh())
    ]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_outputs))


def distribution_for(space):
    """Return the actor's number of outputs, their distribution, and its parameters.

    The distribution is a function of the outputs.
    """
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n), lambda logits: Categorical(logits=logits), []
    logstd = nn.Parameter(torch.zeros(space.shape))
    return space.shape[0], lambda mean: Independent(Normal(mean, logstd.exp()), 1), [logstd]


def train(envs, next_obs, iterations):
    """Train on environments that were just reset.

    Return the environment steps and the seconds after the first iteration.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    num_inputs, space = envs.single_observation_space.shape[0], envs.single_action_space
    num_outputs, distribution, more = distribution_for(space)
    actor, critic = mlp(num_inputs, num_outputs), mlp(num_inputs, 1)
    parameters = [*actor.parameters(), *critic.parameters(), *more]
    optimizer = torch.optim.Adam(parameters, lr=work.LEARNING_RATE, eps=1e-5)
    shape = work.NUM_STEPS, envs.num_envs
    obs, actions = torch.zeros(*shape, num_inputs), torch.zeros(*shape, *space.shape)
    logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))
    next_obs, next_done = torch.Tensor(next_obs), torch.zeros(envs.num_envs)
    for iteration in range(iterations):
        if iteration == 1:
            start = time.perf_counter()
        for step in range(work.NUM_STEPS):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                policy = distribution(actor(next_obs))
                action = policy.sample()
                actions[step], logprobs[step] = action, policy.log_prob(action)
                values[step] = critic(next_obs).flatten()
            next_obs, reward, terminations, truncations, _ = envs.step(action.numpy())
            rewards[step] = torch.as_tensor(reward)
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(terminations | truncations)
        with torch.no_grad():
            next_value, next_alive, advantage = critic(next_obs).flatten(), 1 - next_done, 0
            advantages = torch.zeros(shape)
            for step in reversed(range(work.NUM_STEPS)):
                delta = rewards[step] + work.GAMMA * next_value * next_alive - values[step]
                advantage = delta + work.GAMMA * work.GAE_LAMBDA * next_alive * advantage
                advantages[step], next_value, next_alive = advantage, values[step], 1 - dones[step]
        b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(0, 1), logprobs.flatten()
        b_advantages, b_returns = advantages.flatten(), (advantages + values).flatten()
        b_inds = np.arange(work.NUM_STEPS * envs.num_envs)
        for _ in range(work.UPDATE_EPOCHS):
            np.random.shuffle(b_inds)
            for mb_inds in b_inds.reshape(work.NUM_MINIBATCHES, -1):
                policy = distribution(actor(b_obs[mb_inds]))
                ratio = (policy.log_prob(b_actions[mb_inds]) - b_logprobs[mb_inds]).exp()
                adv = b_advantages[mb_inds]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                clipped = ratio.clamp(1 - work.CLIP_COEF, 1 + work.CLIP_COEF)
                pg_loss = -torch.min(adv * ratio, adv * clipped).mean()
                v_loss = (
                    0.5 * (critic(b_obs[mb_inds]).flatten() - b_returns[mb_inds]).square().mean()
                )
                loss = pg_loss - work.ENT_COEF * policy.entropy().mean() + work.VF_COEF * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, work.MAX_GRAD_NORM)
                optimizer.step()
    return (iterations - 1) * work.NUM_STEPS * envs.num_envs, time.perf_counter() - start


if __name__ == "__main__":
    env_id, iterations, (vector,) = work.arguments()
    vector_env = {"sync": gym.vector.SyncVectorEnv, "async": gym.vector.AsyncVectorEnv}[vector]
    envs = vector_env([make_env(env_id)] * work.NUM_ENVS)
    work.report(*train(envs, envs.reset(seed=1)[0], iterations))
    envs.close()
