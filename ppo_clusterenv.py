# PPO whose environments live in worker processes, anywhere. In the manner of CleanRL's ppo.py; what differs is distribution.
import difflib
import json
import os
import random
import re
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
import tyro
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter

from clusterenv_runtime import CategoricalPolicy, ClusterEnv


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """if toggled, the learner uses a GPU where there is one"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: str = "clusterenv"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """whether to record videos of environment 0 (check out the `videos` folder)"""
    save_model: bool = True
    """whether to save the model into the `runs/{run_name}` folder"""
    eval_episodes: int = 20
    """the number of episodes of the final evaluation"""
    max_seconds: float | None = None
    """stop cleanly after so many seconds of training"""

    # Algorithm specific arguments
    env_id: str = "LunarLander-v3"
    """the id of the environment"""
    total_timesteps: int = 3000000
    """total timesteps of the experiments"""
    learning_rate: float = 1e-3
    """the learning rate of the optimizer"""
    num_steps: int = 128
    """the number of steps to run in each environment per policy rollout"""
    anneal_lr: bool = True
    """toggle learning rate annealing for policy and value networks"""
    gamma: float = 0.995
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
    num_workers: int = 2
    """the number of environment worker processes"""
    envs_per_worker: int = 32
    """the number of parallel game environments on each worker"""
    launcher: Literal["local"] = "local"
    """where workers run: `local` starts them on this machine"""
    sync_mode: Literal["kl", "interval", "always", "never"] = "kl"
    """when workers pull weights: by divergence (APS), every `--sync-interval` updates, every update, or once"""
    kl_threshold: float = 0.05
    """a worker pulls when the mean KL(its policy || the learner's) exceeds this, in nats"""
    sync_interval: int | None = None
    """with `--sync-mode interval`: pull every so many updates"""
    max_policy_lag: int | None = None
    """pull anyway when more than this many updates behind"""
    decoupled: bool = True
    """clip against the policy at the start of the update, not against the (perhaps stale) one that acted"""
    clip_rho: float = 2.0
    """with `--decoupled`: the importance weight proximal / behavior policy is truncated to this"""

    # to be filled in runtime
    num_envs: int = 0
    """the number of environments (computed in runtime)"""
    batch_size: int = 0
    """the batch size (computed in runtime)"""
    minibatch_size: int = 0
    """the mini-batch size (computed in runtime)"""
    num_iterations: int = 0
    """the number of iterations (computed in runtime)"""


def parse_args():
    # W&B agents write booleans as --flag=True, which tyro spells --flag and --no-flag.
    argv, booleans = [], {field.name for field in fields(Args) if field.type is bool}
    for arg in sys.argv[1:]:
        match = re.fullmatch(r"--([\w-]+)=(true|false)", arg, re.IGNORECASE)
        if match and match[1].replace("-", "_") in booleans:
            arg = f"--{match[1]}" if match[2].lower() == "true" else f"--no-{match[1]}"
        argv.append(arg)
    args = tyro.cli(Args, args=argv)
    args.num_envs = args.num_workers * args.envs_per_worker
    args.batch_size = int(args.num_envs * args.num_steps)
    return args


def check_args(args):
    """Exit with one line if the arguments cannot work."""
    positive = ("num_workers", "envs_per_worker", "num_steps", "num_minibatches", "update_epochs", "eval_episodes")
    checks = [(getattr(args, name) >= 1, f"--{name.replace('_', '-')} must be at least 1") for name in positive] + [
        (args.learning_rate > 0, f"--learning-rate must be a number > 0, got {args.learning_rate}"),
        (args.kl_threshold >= 0, f"--kl-threshold must be a number of nats >= 0, got {args.kl_threshold}"),
        (args.sync_mode != "interval" or args.sync_interval, "--sync-mode interval needs --sync-interval, in updates"),
        (args.sync_interval is None or args.sync_interval >= 1, "--sync-interval must be at least 1 update"),
        (args.max_policy_lag is None or args.max_policy_lag >= 0, "--max-policy-lag must be at least 0 updates"),
    ]
    for fine, message in checks:
        if not fine:
            sys.exit(f"error: {message}")
    batch = f"the batch of {args.num_envs} environments x {args.num_steps} steps = {args.batch_size}"
    if args.batch_size % args.num_minibatches:
        sys.exit(f"error: --num-minibatches {args.num_minibatches} does not divide {batch}")
    if args.total_timesteps < args.batch_size:
        sys.exit(f"error: --total-timesteps {args.total_timesteps} is less than {batch}")
    try:
        gym.spec(args.env_id)
    except (gym.error.Error, ImportError) as error:
        close = difflib.get_close_matches(args.env_id, gym.registry, n=1)
        sys.exit(f"error: --env-id: {error}" + (f" Did you mean {close[0]}?" if close else ""))
    env = make_env(args.env_id, 1, False, "")()
    if not isinstance(env.action_space, gym.spaces.Discrete):
        sys.exit(f"error: --env-id: {args.env_id} has actions {env.action_space}; this script needs a Discrete space")
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        sys.exit(f"error: --env-id: {args.env_id} observes {env.observation_space}; this script needs a vector (Box)")
    env.close()


def make_env(env_id, idx, capture_video, run_name):
    def thunk():
        if capture_video and idx == 0:
            env = gym.make(env_id, render_mode="rgb_array")
            env = gym.wrappers.RecordVideo(env, f"videos/{run_name}")
        else:
            env = gym.make(env_id)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        return env

    return thunk


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(np.array(envs.single_observation_space.shape).prod(), 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(np.array(envs.single_observation_space.shape).prod(), 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, envs.single_action_space.n), std=0.01),
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        logits = self.actor(x)
        probs = Categorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def evaluate(agent, args, device):
    """Play one episode in each of `eval_episodes` fresh environments, sampling actions; return the returns."""
    envs = gym.vector.SyncVectorEnv([make_env(args.env_id, i, False, "") for i in range(1, args.eval_episodes + 1)])
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, bool)
    obs, _ = envs.reset(seed=args.seed + 100_000)
    while running.any():
        with torch.no_grad():
            action = agent.get_action_and_value(torch.Tensor(obs).to(device))[0]
        obs, reward, terminations, truncations, _ = envs.step(action.cpu().numpy())
        returns += reward * running
        running &= ~(terminations | truncations)
    envs.close()
    return returns


def plot_learning_curve(history, args, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, returns, pulls = (np.array(column) for column in zip(*history, strict=True))
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5.5), sharex=True, height_ratios=[2, 1], layout="constrained")
    top.plot(steps, returns, color="#0072B2")
    top.set(ylabel="mean return, last 100 episodes", title=f"PPO on {args.env_id}, seed {args.seed}")
    bottom.plot(steps, np.arange(1, len(steps) + 1), color="#999999", label="updates (pulls if syncing always)")
    bottom.plot(steps, pulls, color="#D55E00", label=f"pulls per worker, {args.sync_mode} {args.kl_threshold:g}")
    bottom.set(xlabel="environment steps", ylabel="cumulative")
    bottom.legend(frameon=False)
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    fig.savefig(path, dpi=150)


if __name__ == "__main__":
    args = parse_args()
    check_args(args)
    args.minibatch_size = int(args.batch_size // args.num_minibatches)
    args.num_iterations = args.total_timesteps // args.batch_size
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    try:
        os.makedirs(f"runs/{run_name}")
    except OSError as error:
        sys.exit(f"error: cannot write runs/{run_name}: {error.strerror}")
    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            sync_tensorboard=True,
            config=vars(args),
            name=run_name,
            monitor_gym=args.capture_video,
            save_code=True,
        )
        wandb.define_metric("global_step")
        wandb.define_metric("*", step_metric="global_step")
    writer = SummaryWriter(f"runs/{run_name}")
    writer.add_text(
        "hyperparameters",
        "|param|value|\n|-|-|\n%s" % ("\n".join([f"|{key}|{value}|" for key, value in vars(args).items()])),
    )

    # TRY NOT TO MODIFY: seeding
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")

    # env setup
    envs = ClusterEnv(
        [make_env(args.env_id, i, args.capture_video, run_name) for i in range(args.num_envs)],
        num_workers=args.num_workers,
        launcher=args.launcher,
        sync_mode=args.sync_mode,
        kl_threshold=args.kl_threshold,
        sync_interval=args.sync_interval,
        max_policy_lag=args.max_policy_lag,
        log_dir=f"runs/{run_name}/workers",
    )

    agent = Agent(envs).to(device)
    policy = CategoricalPolicy(agent.actor)  # what travels to the workers
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    # TRY NOT TO MODIFY: start the game
    global_step = 0
    collect_time = 0.0
    start_time = time.time()
    recent_returns = deque(maxlen=100)
    history = []  # (global_step, mean return, pulls per worker)
    eval_returns = None
    envs.reset(seed=args.seed)
    progress = Progress(
        TextColumn("{task.fields[status]}"), BarColumn(bar_width=20), TimeRemainingColumn(), TextColumn("left")
    )
    task = progress.add_task("train", total=args.num_iterations, status="starting")

    with envs, writer, progress, suppress(KeyboardInterrupt):
        for iteration in range(1, args.num_iterations + 1):
            # Annealing the rate if instructed to do so.
            if args.anneal_lr:
                frac = 1.0 - (iteration - 1.0) / args.num_iterations
                lrnow = frac * args.learning_rate
                optimizer.param_groups[0]["lr"] = lrnow

            # Collect: the workers act and step; those whose policy has diverged pull this one first.
            collect_start = time.time()
            rollout = envs.rollout(policy, args.num_steps)
            collect_seconds = time.time() - collect_start
            collect_time += collect_seconds
            learn_start = time.time()
            global_step += args.batch_size
            obs = torch.Tensor(rollout.observations).to(device)  # (num_steps, num_envs, ...)
            actions = torch.as_tensor(rollout.actions).to(device)  # (num_steps, num_envs)
            logprobs = torch.as_tensor(rollout.logprobs).to(device)
            rewards = torch.Tensor(rollout.rewards).to(device)
            terminations = torch.as_tensor(rollout.terminations).to(device)
            truncations = torch.as_tensor(rollout.truncations).to(device)
            dones = (terminations | truncations).float()
            recent_returns.extend(rollout.episodic_returns.tolist())
            if len(rollout.episodic_returns):
                writer.add_scalar("charts/episodic_return", rollout.episodic_returns.mean(), global_step)
                writer.add_scalar("charts/episodic_length", rollout.episodic_lengths.mean(), global_step)

            # bootstrap value if not done; from the final observation where an episode was cut off
            with torch.no_grad():
                all_obs = torch.cat([obs, torch.Tensor(rollout.next_observations).to(device)[None]])
                all_values = agent.get_value(all_obs.flatten(0, 1)).view(args.num_steps + 1, args.num_envs)
                values, next_values = all_values[:-1], all_values[1:].clone()
                if truncations.any():
                    next_values[truncations] = agent.get_value(
                        torch.Tensor(rollout.final_observations).to(device)
                    ).flatten()
                deltas = rewards + args.gamma * next_values * (1.0 - terminations.float()) - values
                advantages = torch.zeros_like(rewards)
                lastgaelam = 0
                for t in reversed(range(args.num_steps)):
                    lastgaelam = deltas[t] + args.gamma * args.gae_lambda * (1.0 - dones[t]) * lastgaelam
                    advantages[t] = lastgaelam
                returns = advantages + values

            # flatten the batch
            b_obs = obs.reshape((-1,) + envs.single_observation_space.shape)
            b_logprobs = logprobs.reshape(-1)
            b_actions = actions.reshape((-1,) + envs.single_action_space.shape)
            b_advantages = advantages.reshape(-1)
            b_returns = returns.reshape(-1)
            b_values = values.reshape(-1)
            b_weights = torch.ones_like(b_logprobs)
            if args.decoupled:
                # A worker's policy may be many updates old. Clipping the ratio to that old policy would hold the
                # learner close to it, so that it never diverges, nobody pulls, and training stalls. So the ratio is
                # clipped against the policy at the start of this update (the proximal policy), and the data are
                # weighted by proximal / behavior. At lag 0 the weight is 1: plain PPO. https://arxiv.org/abs/2110.00641
                with torch.no_grad():
                    proximal = Categorical(logits=agent.actor(b_obs)).log_prob(b_actions)
                    b_weights = (proximal - b_logprobs).exp().clamp(max=args.clip_rho)
                    b_logprobs = proximal

            # Optimizing the policy and value network
            b_inds = np.arange(args.batch_size)
            clipfracs = []
            for _ in range(args.update_epochs):
                np.random.shuffle(b_inds)
                for start in range(0, args.batch_size, args.minibatch_size):
                    end = start + args.minibatch_size
                    mb_inds = b_inds[start:end]

                    _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
                    logratio = newlogprob - b_logprobs[mb_inds]
                    ratio = logratio.exp()

                    with torch.no_grad():
                        # calculate approx_kl http://joschu.net/blog/kl-approx.html
                        old_approx_kl = (-logratio).mean()
                        approx_kl = ((ratio - 1) - logratio).mean()
                        clipfracs += [((ratio - 1.0).abs() > args.clip_coef).float().mean()]

                    mb_advantages = b_advantages[mb_inds]
                    if args.norm_adv:
                        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

                    # Policy loss
                    pg_loss1 = -mb_advantages * ratio
                    pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                    pg_loss = (b_weights[mb_inds] * torch.max(pg_loss1, pg_loss2)).mean()

                    # Value loss
                    newvalue = newvalue.view(-1)
                    if args.clip_vloss:
                        v_loss_unclipped = (newvalue - b_returns[mb_inds]) ** 2
                        v_clipped = b_values[mb_inds] + torch.clamp(
                            newvalue - b_values[mb_inds],
                            -args.clip_coef,
                            args.clip_coef,
                        )
                        v_loss_clipped = (v_clipped - b_returns[mb_inds]) ** 2
                        v_loss_max = torch.max(v_loss_unclipped, v_loss_clipped)
                        v_loss = 0.5 * v_loss_max.mean()
                    else:
                        v_loss = 0.5 * ((newvalue - b_returns[mb_inds]) ** 2).mean()

                    entropy_loss = entropy.mean()
                    loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef

                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()

                if args.target_kl is not None and approx_kl > args.target_kl:
                    break

            y_pred, y_true = b_values.cpu().numpy(), b_returns.cpu().numpy()
            var_y = np.var(y_true)
            explained_var = np.nan if var_y == 0 else 1 - np.var(y_true - y_pred) / var_y

            # TRY NOT TO MODIFY: record rewards for plotting purposes
            sps = int(global_step / (time.time() - start_time))
            mean_return = float(np.mean(recent_returns)) if recent_returns else float("nan")
            pulls_per_worker = float(envs.pulls.mean())
            kl = float(envs.divergence.mean())  # inf before the workers' first rollout
            history.append((global_step, mean_return, pulls_per_worker))
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
            writer.add_scalar("losses/value_loss", v_loss.item(), global_step)
            writer.add_scalar("losses/policy_loss", pg_loss.item(), global_step)
            writer.add_scalar("losses/entropy", entropy_loss.item(), global_step)
            writer.add_scalar("losses/old_approx_kl", old_approx_kl.item(), global_step)
            writer.add_scalar("losses/approx_kl", approx_kl.item(), global_step)
            writer.add_scalar("losses/clipfrac", torch.stack(clipfracs).mean().item(), global_step)
            writer.add_scalar("losses/explained_variance", explained_var, global_step)
            if np.isfinite(kl):
                writer.add_scalar("sync/kl", kl, global_step)
            writer.add_scalar("sync/pulls_per_worker", pulls_per_worker, global_step)
            writer.add_scalar("sync/policy_lag", (envs.policy_version - rollout.policy_versions).mean(), global_step)
            writer.add_scalar("sync/bytes", envs.sync_bytes, global_step)
            writer.add_scalar("time/collect", collect_seconds, global_step)
            writer.add_scalar("time/learn", time.time() - learn_start, global_step)
            writer.add_scalar("charts/collect_sps", args.batch_size / collect_seconds, global_step)
            writer.add_scalar("charts/SPS", sps, global_step)
            status = (
                f"steps {global_step:,}  SPS {sps:,}  return {mean_return:.1f}  kl {kl:.3f}  "
                f"pulls {pulls_per_worker:g} of {iteration}"
            )
            progress.update(task, advance=1, status=status)
            if not progress.console.is_terminal and iteration % max(args.num_iterations // 20, 1) == 0:
                print(status, flush=True)
            if args.max_seconds is not None and time.time() - start_time > args.max_seconds:
                break

        wall_seconds = time.time() - start_time
        eval_returns = evaluate(agent, args, device)
        writer.add_scalar("eval/return_mean", eval_returns.mean(), global_step)

    if args.save_model:
        torch.save(agent.state_dict(), f"runs/{run_name}/{args.exp_name}.cleanrl_model")
    if not history or eval_returns is None:
        print(f"interrupted; what there is lies in runs/{run_name}", file=sys.stderr)
        sys.exit(130)
    plot_learning_curve(history, args, f"runs/{run_name}/learning_curve.png")
    summary = {
        "global_step": global_step,
        "wall_seconds": wall_seconds,
        "sps": global_step / wall_seconds,
        "updates": iteration,
        "pulls_per_worker": pulls_per_worker,
        "sync_bytes": envs.sync_bytes,
        "mean_return_100": mean_return,
        "eval_return_mean": float(eval_returns.mean()),
        "eval_return_std": float(eval_returns.std()),
        **{key: getattr(args, key) for key in ("kl_threshold", "seed", "env_id")},
        "args": vars(args),
    }
    with open(f"runs/{run_name}/summary.json", "w") as file:
        json.dump(summary, file, indent=2)
    if args.track:
        wandb.run.summary.update({key: value for key, value in summary.items() if key != "args"})
    print(
        f"{global_step:,} steps in {wall_seconds:.0f} s: return {mean_return:.1f} over the last 100 episodes, "
        f"{eval_returns.mean():.1f} +- {eval_returns.std():.1f} in {args.eval_episodes} evaluation episodes; "
        f"{pulls_per_worker:g} pulls per worker in {iteration} updates. Everything is in runs/{run_name}"
    )
