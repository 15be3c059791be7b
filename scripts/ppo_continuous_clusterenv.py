# PPO with continuous actions: CleanRL's ppo_continuous_action.py, changed for distribution
# /// script
# requires-python = ">=3.11"
# dependencies = ["clusterenv-runtime[scripts]"]
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
from gymnasium.wrappers.utils import RunningMeanStd
from torch.distributions import Normal

from clusterenv_runtime import ClusterEnv, GaussianPolicy, Rollout
from clusterenv_utils import CudaGraph, Run, ScriptArgs, check, evaluate, parse

# The defaults are tuned for HalfCheetah-v5, and apply to every --env-id. These are CleanRL's:
CLEANRL = "--learning-rate 3e-4 --num-workers 1 --num-envs 1 --num-steps 2048 --num-minibatches 32"


@dataclass
class Args(ScriptArgs):  # with the flags of all scripts, for example seed and num_workers
    exp_name: str = os.path.basename(__file__)[: -len(".py")]

    # Algorithm specific arguments
    env_id: str = "HalfCheetah-v5"
    """the id of the environment; the other defaults are tuned for this one"""
    total_timesteps: int = 1000000
    """total timesteps of the experiments"""
    learning_rate: float = 2e-3
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
    update_epochs: int = 10
    """the K epochs to update the policy"""
    norm_adv: bool = True
    """toggles advantages normalization"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = True
    """toggles whether or not to use a clipped loss for the value function, as per the paper"""
    ent_coef: float = 0.0
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value function"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    target_kl: float | None = None
    """the target KL divergence threshold"""
    hidden_size: int = 64
    """the width of the two hidden layers in the actor and in the critic"""

    # Distribution specific arguments
    torch_threads: int = 1
    """the number of torch threads in the learner. More gain nothing for networks this small, and
    stall runs that share the machine
    """
    decoupled: bool = True
    """clip against the policy at the start of the update, not against the policy that acted"""
    clip_rho: float = 2.0
    """with `--decoupled`: the maximum of the importance weights proximal / behavior policy"""
    vtrace: bool = False
    """with `--decoupled`: compute advantages and value targets by V-trace, which corrects them for
    the older policies that acted
    """
    overlap: bool = True
    """without `--stream`: collect the next rollout while learning from this one, with a policy that
    is one update older
    """
    stream: bool = False
    """learn from the first chunks that are ready, from any workers; no worker waits for another"""
    outstanding: int = 1
    """with `--stream`: chunks each worker may be ahead of the learner; the more, the older"""
    deterministic: bool = False
    """with `--stream`: take chunks in a fixed order, one outstanding per worker, so that two runs
    with the same seed are identical to the last bit
    """
    compile: bool = False
    """compile networks and loss: after up to half a minute, updates take 0.5 to 0.8 of the time"""


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


class Moments(RunningMeanStd):
    """The mean and variance, in float64, of all values passed to `update`."""

    def __init__(self, shape=()):
        super().__init__(epsilon=0, shape=shape)

    def update(self, x):
        super().update(np.asarray(x, np.float64))

    def state_dict(self):
        return {"mean": torch.tensor(self.mean), "var": torch.tensor(self.var), "count": self.count}

    def load_state_dict(self, state):
        self.mean, self.var = state["mean"].numpy(), state["var"].numpy()
        self.count = state["count"]


class Normalize(nn.Module):
    """The first layer of both networks, which normalizes observations.

    Its buffers travel with the weights, so a worker's buffers belong to the version that it holds.
    """

    def __init__(self, num_inputs):
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_inputs))
        self.register_buffer("scale", torch.ones(num_inputs))

    def load(self, moments):
        self.mean.copy_(torch.from_numpy(moments.mean))
        self.scale.copy_(torch.from_numpy(1 / np.sqrt(moments.var + 1e-8)))

    def forward(self, x):
        return ((x - self.mean) * self.scale).clamp(-10, 10)


class NormalizeReward:
    """Divides rewards by the standard deviation of discounted returns.

    Checkpoints hold the moments of the discounted returns. The discounted returns themselves begin
    again with each episode, and in a resumed run.
    """

    def __init__(self, num_envs, gamma):
        self.moments = Moments()
        self.gamma = gamma
        self.discounted_return = np.zeros(num_envs)

    def __call__(self, rollout):
        """Return a rollout's scaled and clipped rewards, ``(num_steps, num_envs)`` in float32.

        If several chunks of one worker are side by side, each continues the one before it.
        """
        dones = rollout.terminations | rollout.truncations
        discounted_returns = np.empty_like(rollout.rewards)
        left = np.arange(len(rollout.rows))
        while len(left):
            rows, firsts = np.unique(rollout.rows[left], return_index=True)
            columns = left[firsts]
            discounted_returns[:, columns], self.discounted_return[rows] = discount(
                rollout.rewards[:, columns], rollout.starts[columns], dones[:, columns],
                self.gamma, self.discounted_return[rows],
            )  # fmt: skip
            left = np.delete(left, firsts)
        self.moments.update(discounted_returns.reshape(-1))
        return scale_rewards(rollout.rewards, self.moments.var).astype(np.float32)

    def state_dict(self):
        return self.moments.state_dict()

    def load_state_dict(self, state):
        self.moments.load_state_dict(state)


def discount(rewards, starts, dones, gamma, discounted_return):
    """Return the discounted return of each episode up to each step, and the last ones.

    The first result is `(num_steps, num_envs)`, like `rewards` and `dones`. The second result,
    `(num_envs,)`, is the `discounted_return` of the next call. `starts`, `(num_envs,)`, says which
    environments begin with a new episode.
    """
    discounted_returns = np.zeros_like(rewards)
    discounted_return = np.where(starts, 0, discounted_return)
    for t in range(len(rewards)):
        discounted_returns[t] = gamma * discounted_return + rewards[t]
        discounted_return = discounted_returns[t] * (1 - dones[t])
    return discounted_returns, discounted_return


def scale_rewards(rewards, return_var):
    """Return rewards divided by the standard deviation of discounted returns, and clipped.

    This is what CleanRL does with Gymnasium's wrappers.
    """
    return np.clip(rewards / np.sqrt(return_var + 1e-8), -10, 10)


class Agent(nn.Module):
    def __init__(self, envs, hidden_size):
        super().__init__()
        num_inputs = np.array(envs.single_observation_space.shape).prod()
        num_actions = np.prod(envs.single_action_space.shape)
        self.normalize = Normalize(num_inputs)
        self.critic = nn.Sequential(
            self.normalize,
            layer_init(nn.Linear(num_inputs, hidden_size)), nn.Tanh(),
            layer_init(nn.Linear(hidden_size, hidden_size)), nn.Tanh(),
            layer_init(nn.Linear(hidden_size, 1), std=1.0),
        )  # fmt: skip
        self.actor_mean = nn.Sequential(
            self.normalize,
            layer_init(nn.Linear(num_inputs, hidden_size)), nn.Tanh(),
            layer_init(nn.Linear(hidden_size, hidden_size)), nn.Tanh(),
            layer_init(nn.Linear(hidden_size, num_actions), std=0.01),
        )  # fmt: skip
        self.actor_logstd = nn.Parameter(torch.zeros(1, num_actions))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        action_mean = self.actor_mean(x)
        action_logstd = self.actor_logstd.expand_as(action_mean)
        probs = Normal(action_mean, torch.exp(action_logstd))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


def make_policy(args, envs):
    """Return the agent that learns, and the policy that acts, which travels to the workers.

    The environments get actions clipped to their space. The learner gets them as they were drawn.
    """
    agent = Agent(envs, args.hidden_size)
    policy = GaussianPolicy(agent.actor_mean, agent.actor_logstd, envs.single_action_space)
    return agent, policy


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


def compute_vtrace(ratios, rewards, values, final_values, terminations, truncations, gamma, lam):
    """Return advantages and value targets by V-trace, https://arxiv.org/abs/1802.01561.

    `ratios`, `(num_steps, num_envs)`, are the actions' probabilities under the learner's policy
    divided by those under the policy that acted. Rho and c are both truncated at 1. The other
    arguments are those of `compute_gae`, which returns the same if all ratios are 1.
    """
    traces, dones = np.minimum(ratios, 1), terminations | truncations
    delta, _ = compute_gae(rewards, values, final_values, terminations, truncations, gamma, 0)
    advantages, correction = np.zeros_like(delta), 0
    for t in reversed(range(len(delta))):
        advantages[t] = delta[t] + gamma * lam * (1 - dones[t]) * correction
        correction = traces[t] * advantages[t]
    return advantages, values[:-1] + traces * advantages


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
    run = Run(parse(Args), fixed=("env_id", "num_steps", "hidden_size"))
    args = run.args  # with --resume, the checkpoint's flags, except for flags given now
    args.batch_size = int(args.num_envs * args.num_steps)
    args.minibatch_size = int(args.batch_size // args.num_minibatches)
    args.num_iterations = args.total_timesteps // args.batch_size
    whole = args.batch_size % args.num_minibatches == 0
    check(whole, f"--num-minibatches must divide the batch of {args.batch_size} samples")
    several = args.minibatch_size > 1 or not args.norm_adv
    check(several, "--num-minibatches leaves one sample in each: use fewer, or --no-norm-adv")
    alike = args.num_envs % args.num_workers == 0
    check(alike or not args.stream, "--stream needs as many environments on each worker")
    check(args.decoupled or not args.vtrace, "--vtrace needs --decoupled, which gives the ratios")
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
        continuous = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
        vectors = continuous and len(space.shape) == 1
        check(vectors, f"actions must be continuous vectors, not {space}")
        shape = envs.single_observation_space.shape or ()
        check(len(shape) == 1, f"observations must be vectors, not {shape}")
    run.keep("envs", envs)
    agent, policy = make_policy(args, envs)
    run.keep("agent", agent.to(device))
    obs_moments = run.keep("obs_moments", Moments(envs.single_observation_space.shape))
    # Rewards are divided by the standard deviation of each episode's discounted return so far.
    normalize_reward = run.keep("return_moments", NormalizeReward(envs.num_envs, args.gamma))
    adam = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    optimizer = run.keep("optimizer", adam)
    loss_fn, get_value, actor_mean = ppo_loss, agent.get_value, agent.actor_mean
    if args.compile:
        options = {"cpp.use_decompose_tanh": True}  # a tanh that is several times as fast on CPUs
        get_value = torch.compile(get_value, dynamic=False, options=options)
        actor_mean = torch.compile(actor_mean, dynamic=False, options=options)
        loss_fn = torch.compile(ppo_loss, dynamic=False, options=options)
    # On a GPU, the Python code of `update` and `ppo_loss` runs only a few times. Then the GPU
    # repeats what it did, and a print, a counter or an `if` in it has no effect any more. Use
    # `functools.partial` in place of `CudaGraph` for these.
    update_once = CudaGraph(update, optimizer, agent, args, loss_fn)
    envs.publish(policy)  # the workers load it before they reset the environments
    envs.reset(seed=args.seed + run.global_step)

    with run.training(envs, agent, policy):
        chunks = run.chunks(envs)
        for iteration in run.iterations(args.num_iterations, args.batch_size):
            # Annealing the rate if instructed to do so.
            frac = 1.0 - (iteration - 1.0) / args.num_iterations if args.anneal_lr else 1.0
            lrnow = frac * args.learning_rate
            optimizer.param_groups[0]["lr"] = lrnow
            # The workers act and step. Those whose policy has diverged pull this one first. With
            # --overlap they began an iteration ago, and now they begin the next rollout.
            collect_start = time.monotonic()
            if args.stream:  # as many chunks as workers; a fast worker may send several
                envs.publish(policy)
                rollout = Rollout.concatenate([next(chunks) for _ in range(args.num_workers)])
            else:
                overlap = args.overlap and iteration < args.num_iterations
                rollout = envs.rollout(policy, args.num_steps, overlap=overlap)
            learn_start = time.monotonic()
            run.add_episodes(rollout)  # this ends the run if an observation is not finite
            run.global_step += args.batch_size
            obs = torch.Tensor(rollout.observations).to(device)  # (num_steps, num_envs, ...)
            next_obs = torch.Tensor(rollout.next_observations).to(device)  # (num_envs, ...)
            actions = torch.Tensor(rollout.actions).to(device)  # (num_steps, num_envs, ...)
            logprobs = torch.Tensor(rollout.logprobs).to(device)
            rewards = normalize_reward(rollout)

            with torch.no_grad():  # values of all observations, including those that ended episodes
                values = get_value(torch.cat([obs, next_obs[None]]).flatten(0, 1))
                values = values.view(-1, envs.num_envs)
                final_obs = torch.Tensor(rollout.final_observations).to(device)
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
                    probs = Normal(actor_mean(b_obs), agent.actor_logstd.exp())
                    proximal = probs.log_prob(b_actions).sum(1)
                    b_weights = (proximal - b_logprobs).exp().clamp(max=args.clip_rho)
                    b_logprobs = proximal
            if args.vtrace:
                advantages, returns = compute_vtrace(
                    b_weights.view(rewards.shape).cpu().numpy(), rewards, values, final_values,
                    rollout.terminations, rollout.truncations, args.gamma, args.gae_lambda,
                )  # fmt: skip
                b_advantages = torch.from_numpy(advantages).to(device).reshape(-1)
                b_returns = torch.from_numpy(returns).to(device).reshape(-1)

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

            # This version is judged as it acted. The next also normalizes by these observations.
            obs_moments.update(rollout.observations.reshape(-1, *obs_moments.mean.shape))
            agent.normalize.load(obs_moments)

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
