# PPO on MinAtar, five games of 10x10 pixels: learning like Atari's, in a minute on two cores
# /// script
# requires-python = ">=3.11"
# dependencies = ["clusterenv-runtime[scripts,minatar]"]
# tool.uv.sources.clusterenv-runtime = { path = "..", editable = true }
# ///
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_utils import CudaGraph, Run, ScriptArgs, check, evaluate, parse

with suppress(ModuleNotFoundError):  # without minatar, Gymnasium reports what is missing
    import minatar.gym

    minatar.gym.register_envs()

# The defaults are tuned for MinAtar/Breakout-v1, and apply to every --env-id. These are CleanRL's:
CLEANRL = "--learning-rate 2.5e-4 --num-envs 8 --num-steps 128 --clip-coef 0.1 --clip-vloss"


@dataclass
class Args(ScriptArgs):  # with the flags of all scripts, for example seed and num_workers
    exp_name: str = os.path.basename(__file__)[: -len(".py")]

    # Algorithm specific arguments
    env_id: str = "MinAtar/Breakout-v1"
    """the id of the environment; the other defaults are tuned for this one"""
    total_timesteps: int = 1000000
    """total timesteps of the experiments"""
    learning_rate: float = 1e-3
    """the learning rate of the optimizer"""
    envs_per_worker: int = 16
    """the number of parallel game environments on each worker"""
    num_steps: int = 64
    """the number of steps to run in each environment per policy rollout"""
    anneal_lr: bool = True
    """toggle learning rate annealing for policy and value networks"""
    gamma: float = 0.99
    """the discount factor gamma"""
    gae_lambda: float = 0.95
    """the lambda for the general advantage estimation"""
    num_minibatches: int = 4
    """the number of mini-batches"""
    update_epochs: int = 4
    """the K epochs to update the policy"""
    norm_adv: bool = True
    """toggles advantages normalization"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = False
    """toggles whether or not to use a clipped loss for the value function, as per the paper"""
    ent_coef: float = 0.01
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value function"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    target_kl: float | None = None
    """the target KL divergence threshold"""

    # Distribution specific arguments
    torch_threads: int = 1
    """the number of torch threads in the learner. More gain nothing for networks this small, and
    stall runs that share the machine
    """
    decoupled: bool = True
    """clip against the policy at the start of the update, not against the policy that acted"""
    clip_rho: float = 2.0
    """with `--decoupled`: the maximum of the importance weights proximal / behavior policy"""
    overlap: bool = False
    """collect the next rollout while learning from this one, with a policy one update older"""


def make_env(env_id, idx, capture_video, run_name, **kwargs):
    def thunk():
        if capture_video and idx == 0:
            env = gym.make(env_id, render_mode="rgb_array", **kwargs)
            env = gym.wrappers.RecordVideo(env, f"videos/{run_name}")
        else:
            env = gym.make(env_id, **kwargs)
        return env

    return thunk


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class ChannelsFirst(nn.Module):
    """Puts the channels of MinAtar's pixels first, ``(batch, channels, height, width)``."""

    def forward(self, x):
        return x.permute(0, 3, 1, 2).float()


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        height, width, channels = envs.single_observation_space.shape
        self.network = nn.Sequential(
            ChannelsFirst(),
            layer_init(nn.Conv2d(channels, 16, 3)), nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(16 * (height - 2) * (width - 2), 128)), nn.ReLU(),
        )  # fmt: skip
        self.actor = layer_init(nn.Linear(128, envs.single_action_space.n), std=0.01)
        self.critic = layer_init(nn.Linear(128, 1), std=1)

    def get_value(self, x):
        return self.critic(self.network(x))

    def get_action_and_value(self, x, action=None):
        hidden = self.network(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


def make_policy(args, envs):
    """Return the agent that learns, and the policy that acts, which travels to the workers."""
    agent = Agent(envs)
    return agent, CategoricalPolicy(nn.Sequential(agent.network, agent.actor))


def compute_gae(rewards, values, final_values, terminations, truncations, gamma, gae_lambda):
    """Return advantages and returns, `(num_steps, num_envs)`, https://arxiv.org/abs/1506.02438.

    `values` are `(num_steps + 1, num_envs)`, the last ones of the observations after the rollout.
    `final_values` are `(ends,)`, of the observations that ended episodes, in the order of
    `(terminations | truncations).nonzero()`. The other arrays are `(num_steps, num_envs)`.
    """
    dones = terminations | truncations
    # bootstrap value if not terminated; from the final observation where an episode is truncated
    values, nextvalues = values[:-1], values[1:].copy()
    nextvalues[dones] = final_values
    nextvalues[terminations] = 0
    delta = rewards + gamma * nextvalues - values
    nonterminal = (1 - dones).astype(delta.dtype)
    advantages, lastgaelam = np.zeros_like(delta), 0
    for t in reversed(range(len(delta))):
        advantages[t] = lastgaelam = delta[t] + gamma * gae_lambda * nonterminal[t] * lastgaelam
    return advantages, advantages + values


def ppo_loss(agent, args, mb):
    """Return the loss of a minibatch, and the scalars to log, by name.

    Its `obs` and `actions` are `(minibatch_size, ...)`, its other tensors `(minibatch_size,)`.
    `weights` multiply the policy's loss.
    """
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb["obs"], mb["actions"])
    logratio = newlogprob - mb["logprobs"]
    ratio = logratio.exp()
    with torch.no_grad():
        # calculate approx_kl http://joschu.net/blog/kl-approx.html
        old_approx_kl = (-logratio).mean()
        approx_kl = ((ratio - 1) - logratio).mean()
        clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
    advantages = mb["advantages"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    # Policy loss
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = (mb["weights"] * torch.max(pg_loss1, pg_loss2)).mean()

    # Value loss
    newvalue = newvalue.view(-1)
    v_loss = (newvalue - mb["returns"]) ** 2
    if args.clip_vloss:
        v_change = torch.clamp(newvalue - mb["values"], -args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (mb["values"] + v_change - mb["returns"]) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy_loss = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef
    return loss, {
        "value_loss": v_loss.detach(), "policy_loss": pg_loss.detach(),
        "entropy": entropy_loss.detach(), "old_approx_kl": old_approx_kl, "approx_kl": approx_kl,
        "clipfrac": clipfrac,
    }  # fmt: skip


def update(optimizer, agent, args, mb):
    """Take a gradient step on a minibatch. Return the scalars to log."""
    loss, losses = ppo_loss(agent, args, mb)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return losses


if __name__ == "__main__":
    run = Run(parse(Args), fixed=("env_id", "num_steps"))
    args = run.args  # with --resume, the checkpoint's flags, except for flags given now
    args.batch_size = int(args.num_envs * args.num_steps)
    args.minibatch_size = int(args.batch_size // args.num_minibatches)
    args.num_iterations = args.total_timesteps // args.batch_size
    whole = args.batch_size % args.num_minibatches == 0
    check(whole, f"--num-minibatches must divide the batch of {args.batch_size} samples")
    several = args.minibatch_size > 1 or not args.norm_adv
    check(several, "--num-minibatches leaves one sample in each: use fewer, or --no-norm-adv")
    writer = run.begin()
    if args.env_id != Args.env_id and not args.resume:
        print(f"the defaults are tuned for {Args.env_id}; CleanRL's are {CLEANRL}")

    # TRY NOT TO MODIFY: seeding
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.set_num_threads(args.torch_threads)
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TensorFloat-32
    # Validation would wait for the GPU.
    torch.distributions.Distribution.set_default_validate_args(False)

    # env setup
    env_fns = [
        make_env(args.env_id, i, args.capture_video, run.video_name, **args.make_kwargs)
        for i in range(args.num_envs)
    ]
    with run.setup():  # a mistake in a flag ends the run here, with one line
        envs = ClusterEnv(env_fns, **run.options())
        space = envs.single_action_space
        discrete = isinstance(space, gym.spaces.Discrete) and space.start == 0
        check(discrete, f"actions must be discrete, from 0, not {space}")
        space = envs.single_observation_space
        pixels = len(space.shape or ()) == 3 and space.dtype == bool
        check(pixels, f"observations must be pixels of MinAtar, booleans, not {space}")
    run.keep("envs", envs)
    agent, policy = make_policy(args, envs)
    run.keep("agent", agent.to(device))
    adam = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    optimizer = run.keep("optimizer", adam)
    # On a GPU, the Python code of `update` and `ppo_loss` runs only a few times. Then the GPU
    # repeats what it did, and a print, a counter or an `if` in it has no effect any more. Use
    # `functools.partial` in place of `CudaGraph` for these.
    update_once = CudaGraph(update, optimizer, agent, args)
    envs.publish(policy)  # the workers load it before they reset the environments
    envs.reset(seed=args.seed + run.global_step)

    with run.training(envs, agent, policy):
        for iteration in run.iterations(args.num_iterations, args.batch_size):
            # Annealing the rate if instructed to do so.
            frac = 1.0 - (iteration - 1.0) / args.num_iterations if args.anneal_lr else 1.0
            lrnow = frac * args.learning_rate
            optimizer.param_groups[0]["lr"] = lrnow
            # The workers act and step. Those whose policy has diverged pull this one first. With
            # --overlap they began an iteration ago, and now they begin the next rollout.
            collect_start = time.monotonic()
            overlap = args.overlap and iteration < args.num_iterations
            rollout = envs.rollout(policy, args.num_steps, overlap=overlap)
            learn_start = time.monotonic()
            run.add_episodes(rollout)  # this ends the run if an observation is not finite
            run.global_step += args.batch_size
            obs = torch.as_tensor(rollout.observations).to(device)  # (num_steps, num_envs, ...)
            next_obs = torch.as_tensor(rollout.next_observations).to(device)  # (num_envs, ...)
            actions = torch.as_tensor(rollout.actions).to(device)  # (num_steps, num_envs)
            logprobs = torch.Tensor(rollout.logprobs).to(device)
            rewards = rollout.rewards.astype(np.float32)

            with torch.no_grad():  # values of all observations, including those that ended episodes
                values = agent.get_value(torch.cat([obs, next_obs[None]]).flatten(0, 1))
                values = values.view(-1, envs.num_envs)
                final_obs = torch.as_tensor(rollout.final_observations).to(device)
                final_values = agent.get_value(final_obs).flatten()
            values, final_values = values.cpu().numpy(), final_values.cpu().numpy()
            advantages, returns = compute_gae(
                rewards, values, final_values, rollout.terminations, rollout.truncations,
                args.gamma, args.gae_lambda,
            )  # fmt: skip
            # flatten the batch
            b_obs = obs.reshape((-1,) + envs.single_observation_space.shape)
            b_logprobs = logprobs.reshape(-1)
            b_actions = actions.reshape((-1,) + envs.single_action_space.shape)
            b_advantages = torch.from_numpy(advantages).to(device).reshape(-1)
            b_returns = torch.from_numpy(returns).to(device).reshape(-1)
            b_values = torch.from_numpy(values[:-1]).to(device).reshape(-1)
            b_weights = torch.ones_like(b_logprobs)
            if args.decoupled:
                # A worker's policy may be many updates old. Clipping against that policy would tie
                # the learner to it: they never diverge, no worker pulls, training stalls. So clip
                # against the policy at the start of this update (proximal) and weight by proximal /
                # behavior: plain PPO if it acted itself. https://arxiv.org/abs/2110.00641
                with torch.no_grad():
                    _, proximal, _, _ = agent.get_action_and_value(b_obs, b_actions)
                    b_weights = (proximal - b_logprobs).exp().clamp(max=args.clip_rho)
                    b_logprobs = proximal

            # Optimizing the policy and value network
            batch = {
                "obs": b_obs, "actions": b_actions, "logprobs": b_logprobs,
                "advantages": b_advantages, "returns": b_returns, "values": b_values,
                "weights": b_weights,
            }  # fmt: skip
            clipfracs = []
            for _ in range(args.update_epochs):
                b_inds = torch.randperm(args.batch_size, device=device)
                for mb_inds in b_inds.split(args.minibatch_size):
                    losses = update_once({name: part[mb_inds] for name, part in batch.items()})
                    clipfracs += [losses["clipfrac"].clone()]  # a CUDA graph overwrites its tensors
                if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                    break

            var_y = np.var(returns)
            explained_var = np.nan if var_y == 0 else 1 - np.var(returns - values[:-1]) / var_y
            # TRY NOT TO MODIFY: record rewards for plotting purposes
            run.report(rollout, versions=iteration)
            losses = {**losses, "clipfrac": torch.stack(clipfracs).mean()}
            run.log("losses", losses)
            writer.add_scalar("losses/explained_variance", explained_var, run.global_step)
            writer.add_scalar("charts/learning_rate", lrnow, run.global_step)
            collected, learned = learn_start - collect_start, time.monotonic() - learn_start
            run.log("time", {"collect": collected, "learn": learned})

        run.finish(evaluate(args, envs, policy), updates=run.global_step // args.batch_size)
