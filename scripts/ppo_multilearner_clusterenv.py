# PPO with several learners, started by torchrun: ppo_clusterenv.py, changed where they share work
# /// script
# requires-python = ">=3.11"
# dependencies = ["clusterenv-runtime[scripts]"]
# tool.uv.sources.clusterenv-runtime = { path = "..", editable = true }
# ///
import glob
import os
import random
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Interrupted
from clusterenv_utils import Run, ScriptArgs, ScriptError, check, evaluate, parse

# The defaults are tuned for LunarLander-v3, and apply to every --env-id. These are CleanRL's:
CLEANRL = "--learning-rate 2.5e-4 --num-envs 4 --num-minibatches 4 --gamma 0.99 --gae-lambda 0.95"
CLEANRL += " --clip-vloss --reward-scale 1 --total-timesteps 500000"


@dataclass
class Args(ScriptArgs):  # with the flags of all scripts, for example seed and num_workers
    exp_name: str = os.path.basename(__file__)[: -len(".py")]

    # Algorithm specific arguments
    env_id: str = "LunarLander-v3"
    """the id of the environment; the other defaults are tuned for this one"""
    total_timesteps: int = 1500000
    """total timesteps of the experiments"""
    learning_rate: float = 2e-3
    """the learning rate of the optimizer"""
    num_steps: int = 128
    """the number of steps to run in each environment per policy rollout"""
    reward_scale: float = 0.05
    """rewards are multiplied by this before the learner sees them; 1 leaves them as they are"""
    anneal_lr: bool = True
    """toggle learning rate annealing for policy and value networks"""
    gamma: float = 0.995
    """the discount factor gamma"""
    gae_lambda: float = 0.97
    """the lambda for the general advantage estimation"""
    num_minibatches: int = 16
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
    overlap: bool = True
    """collect the next rollout while learning from this one, with a policy one update older"""
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


class Agent(nn.Module):
    def __init__(self, envs, hidden_size):
        super().__init__()
        num_inputs = np.array(envs.single_observation_space.shape).prod()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(num_inputs, hidden_size)), nn.Tanh(),
            layer_init(nn.Linear(hidden_size, hidden_size)), nn.Tanh(),
            layer_init(nn.Linear(hidden_size, 1), std=1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            layer_init(nn.Linear(num_inputs, hidden_size)), nn.Tanh(),
            layer_init(nn.Linear(hidden_size, hidden_size)), nn.Tanh(),
            layer_init(nn.Linear(hidden_size, envs.single_action_space.n), std=0.01),
        )  # fmt: skip

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def make_policy(args, envs):
    """Return the agent that learns, and the policy that acts, which travels to the workers."""
    agent = Agent(envs, args.hidden_size)
    return agent, CategoricalPolicy(agent.actor)


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


def normalize(advantages):
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def ppo_loss(agent, args, mb):
    """Return the loss of a minibatch, and the scalars to log, by name.

    Its `obs` and `actions` are `(minibatch_size, ...)`, its other tensors `(minibatch_size,)`.
    `weights` multiply the policy's loss. With `norm_adv` the advantages are already normalized.
    """
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb["obs"], mb["actions"])
    logratio = newlogprob - mb["logprobs"]
    ratio = logratio.exp()
    with torch.no_grad():
        # calculate approx_kl http://joschu.net/blog/kl-approx.html
        old_approx_kl = (-logratio).mean()
        approx_kl = ((ratio - 1) - logratio).mean()
        clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()

    # Policy loss
    advantages = mb["advantages"]
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


# The learners, which torchrun starts, hold the same weights and draw the same random numbers.
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def communicate(collective, *arguments):
    """Call a function of torch.distributed, which ends the run if another learner is lost."""
    try:
        collective(*arguments)
    except RuntimeError as error:
        says, *_ = str(error).splitlines()
        raise ScriptError(f"learner {rank} has lost the others: {says}") from error


def gather(value):
    """Return all learners' values, in their order. Between updates, where nothing is half done: if
    another learner is lost, the run is saved.
    """
    values = [value] * world_size
    if world_size > 1:
        try:
            communicate(dist.all_gather_object, values, value)
        except ScriptError as error:
            raise Interrupted(str(error)) from None
    return values


def gather_rows(values):
    """Return `(num_steps, num_envs, ...)` of all learners' `(num_steps, own_envs, ...)`, flat."""
    if world_size > 1:
        parts = [torch.empty_like(values) for _ in range(world_size)]
        communicate(dist.all_gather, parts, values.contiguous())
        values = torch.cat(parts, dim=1)
    return values.flatten(0, 1)


def average(values):
    """Return the average of `values` over all learners."""
    if world_size > 1:
        values = values.detach().clone()
        communicate(dist.all_reduce, values)
    return values / world_size


def update(optimizer, agent, args, loss_fn, mb):
    """Take a gradient step on this learner's share of a minibatch by `loss_fn` (`ppo_loss`).
    Return the scalars to log.

    This is not a CUDA graph, because learners wait for each other between `backward` and `step`.
    """
    loss, losses = loss_fn(agent, args, mb)
    optimizer.zero_grad()
    loss.backward()
    if world_size > 1:
        gradients = [param.grad for param in agent.parameters() if param.grad is not None]
        vector_to_parameters(average(parameters_to_vector(gradients)), gradients)
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return losses


if __name__ == "__main__":
    args = parse(Args)
    program = ("python",)
    if world_size > 1:
        program = "torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]
        gpus = torch.cuda.device_count() if args.cuda else 0
        if gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        # NCCL refuses learners that share a GPU.
        shares = int(os.environ["LOCAL_WORLD_SIZE"]) > gpus
        dist.init_process_group("gloo" if shares else "cpu:gloo,cuda:nccl")
        # The run has one name, in torchrun's store, which outlasts --max-restarts.
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        name = args.run_name or name.replace("/", "-").replace(":", "-")
        if args.resume is None:
            args.run_name = store.compare_set("run_name", "", name).decode()
            has_restarted = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0
            if has_restarted and gather(glob.glob(f"runs/{args.run_name}/checkpoint-*.pt"))[0]:
                args.resume = f"runs/{args.run_name}"
    fixed = "env_id", "num_steps", "hidden_size"
    run = Run(args, fixed=fixed, rank=rank, program=program)
    args = run.args  # with --resume, the checkpoint's flags, except for flags given now
    args.batch_size = int(args.num_envs * args.num_steps)
    args.minibatch_size = int(args.batch_size // args.num_minibatches)
    args.num_iterations = args.total_timesteps // args.batch_size
    whole = args.batch_size % args.num_minibatches == 0
    check(whole, f"--num-minibatches must divide the batch of {args.batch_size} samples")
    several = args.minibatch_size > 1 or not args.norm_adv
    check(several, "--num-minibatches leaves one sample in each: use fewer, or --no-norm-adv")
    for name in ("num_envs", "num_workers", "minibatch_size"):
        value = getattr(args, name)
        check(value % world_size == 0, f"cannot divide {name} {value} among {world_size} learners")
    args.eval_interval = args.eval_interval if rank == 0 else None  # the first learner evaluates
    own_envs = args.num_envs // world_size
    rows = range(rank * own_envs, (rank + 1) * own_envs)  # this learner's among all environments
    writer = run.begin()
    if args.env_id != Args.env_id and not args.resume and rank == 0:
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
        for i in rows
    ]
    with run.setup():  # a mistake in a flag ends the run here, with one line
        options = run.options()
        if world_size > 1:  # the workers of all learners pull together
            options["num_workers"] //= world_size
            options["log_dir"] += f"/learner-{rank}"
            together = {"first_row": rows.start, "sum": lambda own: np.sum(gather(own), axis=0)}
            options["learners"] = SimpleNamespace(**together)
        envs = ClusterEnv(env_fns, **options)
        space = envs.single_action_space
        discrete = isinstance(space, gym.spaces.Discrete) and space.start == 0
        check(discrete, f"actions must be discrete, from 0, not {space}")
        shape = envs.single_observation_space.shape or ()
        check(len(shape) == 1, f"observations must be vectors, not {shape}")
    run.keep("envs", envs)
    agent, policy = make_policy(args, envs)
    run.keep("agent", agent.to(device))
    adam = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    optimizer = run.keep("optimizer", adam)
    loss_fn, get_value, actor = ppo_loss, agent.get_value, agent.actor
    if args.compile:
        options = {"cpp.use_decompose_tanh": True}  # a tanh that is several times as fast on CPUs
        get_value = torch.compile(get_value, dynamic=False, options=options)
        actor = torch.compile(actor, dynamic=False, options=options)
        graphs = {"triton.cudagraphs": device.type == "cuda"}
        loss_fn = torch.compile(ppo_loss, dynamic=False, options=options | graphs)
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
            episodes = gather((rollout.episodic_returns, rollout.episodic_lengths))
            returns, lengths = zip(*episodes, strict=True)
            rollout.episodic_returns = np.concatenate(returns)
            rollout.episodic_lengths = np.concatenate(lengths)
            run.add_episodes(rollout)  # this ends the run if an observation is not finite
            run.global_step += args.batch_size
            obs = torch.Tensor(rollout.observations).to(device)  # (num_steps, num_envs, ...)
            next_obs = torch.Tensor(rollout.next_observations).to(device)  # (num_envs, ...)
            actions = torch.as_tensor(rollout.actions).to(device)  # (num_steps, num_envs)
            logprobs = torch.Tensor(rollout.logprobs).to(device)
            rewards = rollout.rewards.astype(np.float32) * args.reward_scale

            with torch.no_grad():  # values of all observations, including those that ended episodes
                values = get_value(torch.cat([obs, next_obs[None]]).flatten(0, 1))
                values = values.view(-1, envs.num_envs)
                final_obs = torch.Tensor(rollout.final_observations).to(device)
                final_values = agent.get_value(final_obs).flatten()
            advantages, returns = compute_gae(
                rewards, values.cpu().numpy(), final_values.cpu().numpy(), rollout.terminations,
                rollout.truncations, args.gamma, args.gae_lambda,
            )  # fmt: skip
            advantages = torch.from_numpy(advantages).to(device)
            returns = torch.from_numpy(returns).to(device)
            values = values[:-1]
            weights = torch.ones_like(logprobs)
            if args.decoupled:
                # A worker's policy may be many updates old. Clipping against that policy would tie
                # the learner to it: they never diverge, no worker pulls, training stalls. So clip
                # against the policy at the start of this update (proximal) and weight by proximal /
                # behavior: plain PPO if it acted itself. https://arxiv.org/abs/2110.00641
                with torch.no_grad():
                    proximal = Categorical(logits=actor(obs)).log_prob(actions)
                    weights = (proximal - logprobs).exp().clamp(max=args.clip_rho)
                    logprobs = proximal

            # flatten the batch, which from here on is that of all learners
            batch = {
                "obs": obs, "actions": actions, "logprobs": logprobs, "advantages": advantages,
                "returns": returns, "values": values, "weights": weights,
            }  # fmt: skip
            batch = {name: gather_rows(part) for name, part in batch.items()}

            # Optimizing the policy and value network. The learners draw the same minibatches. Each
            # takes its share of one, and the average of their gradients is the whole's gradient.
            share = slice(rank, None, world_size)
            clipfracs = []
            for _ in range(args.update_epochs):
                b_inds = torch.randperm(args.batch_size, device=device)
                for mb_inds in b_inds.split(args.minibatch_size):
                    mb = {name: part[mb_inds] for name, part in batch.items()}
                    if args.norm_adv:
                        mb["advantages"] = normalize(mb["advantages"])
                    mb = {name: part[share] for name, part in mb.items()}
                    losses = update(optimizer, agent, args, loss_fn, mb)
                    clipfracs += [losses["clipfrac"].clone()]  # CUDA graphs overwrite their tensors
                approx_kl = average(losses["approx_kl"])
                if args.target_kl is not None and approx_kl > args.target_kl:
                    break

            y_pred, y_true = batch["values"].cpu().numpy(), batch["returns"].cpu().numpy()
            var_y = np.var(y_true)
            explained_var = np.nan if var_y == 0 else 1 - np.var(y_true - y_pred) / var_y
            # TRY NOT TO MODIFY: record rewards for plotting purposes
            run.report(rollout, versions=iteration)
            run.stops = gather(run.stops)[0]  # by the first learner's clock
            losses = {**losses, "clipfrac": torch.stack(clipfracs).mean()}
            averages = average(torch.stack([*losses.values()]))
            run.log("losses", dict(zip(losses, averages, strict=True)))
            writer.add_scalar("losses/explained_variance", explained_var, run.global_step)
            writer.add_scalar("charts/learning_rate", lrnow, run.global_step)
            collected, learned = learn_start - collect_start, time.monotonic() - learn_start
            run.log("time", {"collect": collected, "learn": learned})

        if world_size > 1:
            dist.destroy_process_group()
        if rank > 0:
            sys.exit()
        run.finish(evaluate(args, envs, policy), updates=run.global_step // args.batch_size)
