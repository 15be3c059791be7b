# PPO on Atari, with each frame once: CleanRL's ppo_atari.py, changed where distribution requires it
# /// script
# requires-python = ">=3.11"
# dependencies = ["clusterenv-runtime[scripts,atari]"]
# tool.uv.sources.clusterenv-runtime = { path = "..", editable = true }
# ///
import os
import random
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_runtime.extras import atari
from clusterenv_utils import CudaGraph, Run, ScriptArgs, check, evaluate, parse

FRAME_STACK = 4


@dataclass
class Args(ScriptArgs):  # with the flags of all scripts, for example seed and num_workers
    exp_name: str = os.path.basename(__file__)[: -len(".py")]

    # Algorithm specific arguments
    env_id: str = "ALE/Pong-v5"
    """the id of the environment"""
    total_timesteps: int = 10000000
    """total timesteps of the experiments"""
    learning_rate: float = 2.5e-4
    """the learning rate of the optimizer"""
    envs_per_worker: int = 4
    """the number of parallel game environments on each worker"""
    num_steps: int = 128
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
    clip_coef: float = 0.1
    """the surrogate clipping coefficient"""
    clip_vloss: bool = True
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
    decoupled: bool = True
    """clip against the policy at the start of the update, not against the policy that acted"""
    clip_rho: float = 2.0
    """with `--decoupled`: the maximum of the importance weights proximal / behavior policy"""
    overlap: bool = False
    """collect the next rollout while learning from this one, with a policy one update older"""
    bfloat16: bool = False
    """compute the learner's shared layers in bfloat16, for processors that have it in hardware;
    weights stay in float32
    """
    compile: bool = False
    """compile networks and loss: after up to half a minute, updates take 0.5 to 0.8 of the time"""


def make_env(env_id, idx, capture_video, run_name, **kwargs):
    def thunk():
        record = capture_video and idx == 0
        env = gym.make(env_id, frameskip=1, render_mode="rgb_array" if record else None, **kwargs)
        env = gym.wrappers.RecordVideo(env, f"videos/{run_name}") if record else env
        # Record the statistics of whole games, with rewards that are not clipped.
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
        env = atari.EpisodicLife(env)
        env = atari.FireReset(env) if "FIRE" in env.unwrapped.get_action_meanings() else env
        env = gym.wrappers.TransformReward(env, np.sign)
        return gym.wrappers.FrameStackObservation(env, FRAME_STACK)

    return thunk


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class PixelPolicy(CategoricalPolicy):
    """The policy that travels to the workers. It gets frames as they are, in uint8."""

    float_observations = False

    def __init__(self, network, actor):
        super().__init__(actor)
        self.network = network

    def forward(self, x):
        return self.actor(self.network(x / 255.0))


class Agent(nn.Module):
    def __init__(self, envs, bfloat16=False):
        super().__init__()
        self.bfloat16 = bfloat16
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(FRAME_STACK, 32, 8, stride=4)), nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
        )  # fmt: skip
        self.actor = layer_init(nn.Linear(512, envs.single_action_space.n), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def get_hidden(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bfloat16):
            return self.network(x / 255.0).float()

    def get_value(self, x):
        return self.critic(self.get_hidden(x))

    def get_action_and_value(self, x, action=None):
        hidden = self.get_hidden(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


def make_policy(args, envs):
    """Return the agent that learns, and the policy that acts, which travels to the workers."""
    agent = Agent(envs, args.bfloat16)
    return agent, PixelPolicy(agent.network, agent.actor)


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


def update(optimizer, agent, args, loss_fn, mb):
    """Take a gradient step on a minibatch by `loss_fn` (`ppo_loss`). Return the scalars to log."""
    loss, losses = loss_fn(agent, args, mb)
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
    spec = gym.registry.get(args.env_id)
    is_game = spec is None or "ale_py" in str(spec.entry_point)
    check(is_game, f"--env-id must be an Atari game, such as ALE/Pong-v5, not {args.env_id}")
    writer = run.begin()

    # TRY NOT TO MODIFY: seeding
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.torch_threads is not None:
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
        envs = ClusterEnv(env_fns, frame_stack=FRAME_STACK, **run.options())
        space = envs.single_action_space
        check(isinstance(space, gym.spaces.Discrete), f"actions must be discrete, not {space}")
        shape = envs.single_observation_space.shape
        stacks = shape == (FRAME_STACK, 84, 84)
        check(stacks, f"observations must be stacks of frames, as of Atari, not {shape}")
    run.keep("envs", envs)
    agent, policy = make_policy(args, envs)
    run.keep("agent", agent.to(device))
    adam = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    optimizer = run.keep("optimizer", adam)
    loss_fn, look = ppo_loss, agent.get_action_and_value
    if args.compile:
        look = torch.compile(look, dynamic=False)
        loss_fn = torch.compile(ppo_loss, dynamic=False)
    # On a GPU, the Python code of `update` and `ppo_loss` runs only a few times. Then the GPU
    # repeats what it did, and a print, a counter or an `if` in it has no effect any more. Use
    # `functools.partial` in place of `CudaGraph` for these.
    update_once = CudaGraph(update, optimizer, agent, args, loss_fn)
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
            # (num_steps, num_envs, ...) stacks, which gather frames when indexed
            obs = rollout.observations.to(device)
            next_obs = torch.as_tensor(rollout.next_observations, device=device)  # (num_envs, ...)
            actions = torch.as_tensor(rollout.actions).to(device)  # (num_steps, num_envs)
            logprobs = torch.Tensor(rollout.logprobs).to(device)
            rewards = rollout.rewards.astype(np.float32)

            # flatten the batch
            b_obs = obs.reshape((-1,) + envs.single_observation_space.shape)
            b_logprobs = logprobs.reshape(-1)
            b_actions = actions.reshape((-1,) + envs.single_action_space.shape)
            # One pass over the whole batch, for the values and the current policy's log-probs
            with torch.no_grad():
                looks = []
                for start in range(0, args.batch_size, args.minibatch_size):
                    end = start + args.minibatch_size
                    looks += [look(b_obs[start:end], b_actions[start:end])]
                _, logprob_parts, _, value_parts = zip(*looks, strict=True)
                proximal = torch.cat(logprob_parts)
                values = torch.cat([*value_parts, agent.get_value(next_obs)])
                values = values.view(-1, envs.num_envs)
                final_obs = torch.as_tensor(rollout.final_observations, device=device)
                final_values = agent.get_value(final_obs).flatten()
            values, final_values = values.cpu().numpy(), final_values.cpu().numpy()
            advantages, returns = compute_gae(
                rewards, values, final_values, rollout.terminations, rollout.truncations,
                args.gamma, args.gae_lambda,
            )  # fmt: skip
            b_advantages = torch.from_numpy(advantages).to(device).reshape(-1)
            b_returns = torch.from_numpy(returns).to(device).reshape(-1)
            b_values = torch.from_numpy(values[:-1]).to(device).reshape(-1)
            b_weights = torch.ones_like(b_logprobs)
            if args.decoupled:
                # A worker's policy may be many updates old. Clipping against that policy would tie
                # the learner to it: they never diverge, no worker pulls, training stalls. So clip
                # against the policy at the start of this update (proximal) and weight by proximal /
                # behavior: plain PPO if it acted itself. https://arxiv.org/abs/2110.00641
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
