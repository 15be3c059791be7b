# PPO on environments that live in worker processes, anywhere: CleanRL's ppo.py but for what distribution changes
import json
import os
import random
import shutil
import time
from collections import deque
from dataclasses import asdict, dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from matplotlib.figure import Figure
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from torch.distributions import Categorical, Distribution
from torch.utils.tensorboard import SummaryWriter

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_runtime.arguments import ClusterArgs, check, parse
from clusterenv_runtime.checkpoint import checkpoints, rng_state, save_checkpoint, set_rng_state


@dataclass
class Args(ClusterArgs):  # what is the runtime's, such as num_workers and kl_threshold, it inherits
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
    compile: bool = False
    """if toggled, networks and loss are compiled: up to half a minute, then updates take half to two thirds as long"""

    # Algorithm specific arguments
    env_id: str = "LunarLander-v3"
    """the id of the environment"""
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

    # Distribution specific arguments
    decoupled: bool = True
    """clip to the policy at the start of the update, not to the one that acted; else KL stays below clip_coef^2 / 2"""
    clip_rho: float = 2.0
    """with `--decoupled`: the importance weight proximal / behavior policy is truncated to this"""
    overlap: bool = False
    """collect the next rollout while learning from this one; it acts one update behind"""


def make_env(env_id, idx, capture_video, run_name):
    def thunk():
        record = capture_video and idx == 0
        env = gym.make(env_id, render_mode="rgb_array") if record else gym.make(env_id)
        return gym.wrappers.RecordVideo(env, f"videos/{run_name}") if record else env

    return thunk


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        num_inputs = np.array(envs.single_observation_space.shape).prod()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(num_inputs, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            layer_init(nn.Linear(num_inputs, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, envs.single_action_space.n), std=0.01),
        )  # fmt: skip

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def ppo_loss(agent, args, obs, actions, logprobs, advantages, returns, values, weights):
    """The loss of a minibatch, and what is logged of it."""
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions)
    logratio = newlogprob - logprobs
    ratio = logratio.exp()
    with torch.no_grad():
        # calculate approx_kl http://joschu.net/blog/kl-approx.html
        old_approx_kl = (-logratio).mean()
        approx_kl = ((ratio - 1) - logratio).mean()
        clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    # Policy loss
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = (weights * torch.max(pg_loss1, pg_loss2)).mean()

    # Value loss
    newvalue = newvalue.view(-1)
    v_loss = (newvalue - returns) ** 2
    if args.clip_vloss:
        v_change = torch.clamp(newvalue - values, -args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (values + v_change - returns) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy_loss = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef
    return loss, pg_loss, v_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac


def evaluate(agent, args, device):
    """Play one episode in each of `eval_episodes` new environments; return the returns."""
    envs = args.make_vec([make_env(args.env_id, 1, False, "") for _ in range(args.eval_episodes)])
    obs, _ = envs.reset(seed=args.seed + 100_000)
    returns, running, steps = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool), 0
    while running.any() and (steps := steps + 1) <= 10_000:  # not every environment ends its episodes
        with torch.no_grad():
            action, _, _, _ = agent.get_action_and_value(torch.Tensor(obs).to(device))
        obs, reward, terminations, truncations, _ = envs.step(action.cpu().numpy())
        returns += reward * running
        running &= ~(terminations | truncations)
    envs.close()
    return returns


def plot_learning_curve(history, title, path):
    steps, returns, pulls = np.array(history).T
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    top.plot(steps, returns, color="#0072B2")
    top.set(title=title, ylabel="mean return of the last 100 episodes")
    bottom.plot(steps, np.arange(len(steps)) + 1, "--", color="#555555", label="updates (= pulls if synced always)")
    bottom.plot(steps, pulls, color="#D55E00", label="pulls per worker")
    bottom.set(xlabel="environment steps", ylabel="cumulative number")
    bottom.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    args, saved = parse(Args, fixed=("env_id", "num_steps"))  # saved: the checkpoint to resume from, or empty
    args.require("num_steps num_minibatches update_epochs eval_episodes", lambda value: value >= 1, "at least 1")
    args.require("learning_rate clip_rho max_seconds", lambda value: value > 0, "a number > 0")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    check(not args.compile or compiler, "--compile needs a C++ compiler, g++ or clang++, and there is none")
    args.num_envs = int(args.num_workers * args.envs_per_worker)
    args.batch_size = int(args.num_envs * args.num_steps)
    args.minibatch_size = int(args.batch_size // args.num_minibatches)
    args.num_iterations = args.total_timesteps // args.batch_size
    batch = f"the batch of {args.num_envs} environments x {args.num_steps} steps = {args.batch_size}"
    check(args.batch_size % args.num_minibatches == 0, f"--num-minibatches {args.num_minibatches} must divide {batch}")
    check(args.num_iterations >= 1, f"--total-timesteps {args.total_timesteps} must be at least {batch}")
    global_step = saved.get("global_step", 0)
    done = f"the {global_step} steps that {args.resume} has done"
    check(args.total_timesteps >= global_step, f"--total-timesteps {args.total_timesteps} must be at least {done}")
    run_name = args.named or f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 10**6}"
    try:
        env = args.make_vec([make_env(args.env_id, 0, args.capture_video, run_name)])
    except (ModuleNotFoundError, gym.error.Error) as error:
        check(False, error)
    obs_space, action_space = env.single_observation_space, env.single_action_space
    discrete = isinstance(action_space, gym.spaces.Discrete) and action_space.start == 0
    check(discrete, f"actions must be discrete, from 0, not {action_space}: {args.env_id}")
    check(len(obs_space.shape or ()) == 1, f"observations must be vectors, not {obs_space}")
    env.close()
    args.begin(f"runs/{run_name}")
    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, name=run_name, config=vars(args), save_code=True,
            sync_tensorboard=True, monitor_gym=args.capture_video, id=saved.get("wandb_id"), resume="allow",
        )  # fmt: skip
        wandb.define_metric("*", step_metric="global_step")
    writer = SummaryWriter(f"runs/{run_name}", purge_step=global_step + bool(saved))
    table = "\n".join([f"|{key}|{value}|" for key, value in vars(args).items()])
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", global_step)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    Distribution.set_default_validate_args(False)  # the workers, who act, check theirs
    torch.set_num_threads(1)  # networks this small gain nothing from more, and runs side by side would stall each other
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    # env setup
    env_fns = [make_env(args.env_id, i, args.capture_video, run_name) for i in range(args.num_envs)]
    envs = ClusterEnv(args.env_fns(env_fns), **args.cluster(f"runs/{run_name}"))
    agent = Agent(envs).to(device)
    policy = CategoricalPolicy(agent.actor)  # what travels to the workers
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    loss_fn, get_value, actor = ppo_loss, agent.get_value, agent.actor
    if args.compile:
        options = {"cpp.use_decompose_tanh": True}  # a tanh that is several times as fast on CPUs
        get_value, actor = (torch.compile(part, dynamic=False, options=options) for part in (get_value, actor))
        loss_fn = torch.compile(ppo_loss, dynamic=False, options=options | {"triton.cudagraphs": device.type == "cuda"})
    recent_returns = deque(saved.get("recent_returns", []), maxlen=100)
    history = saved.get("history", [])  # (global_step, mean return, pulls per worker)
    stateful = {"agent": agent, "optimizer": optimizer, "envs": envs}

    def save():
        writer.flush()  # up to here the logs belong to this checkpoint, what comes later is dropped on resume
        state = {
            **{name: part.state_dict() for name, part in stateful.items()}, "rng": rng_state(), "args": asdict(args),
            "global_step": global_step, "seconds": time.time() - start_time, "recent_returns": list(recent_returns),
            "history": history, "wandb_id": wandb.run.id if args.track else None,
        }  # fmt: skip
        save_checkpoint(f"runs/{run_name}", state, global_step)
        if args.save_model:
            torch.save(agent.state_dict(), f"runs/{run_name}/{args.exp_name}.cleanrl_model")

    if saved:
        for name, part in stateful.items():
            part.load_state_dict(saved[name])
        set_rng_state(saved["rng"])
    envs.publish(policy)  # while the environments reset, the workers load it
    envs.reset(seed=args.seed + global_step)
    done, start_time = global_step // args.batch_size, time.time() - saved.get("seconds", 0)
    progress = Progress(TextColumn("{task.fields[status]}"), TimeRemainingColumn(), TextColumn("left"))
    task = progress.add_task("train", total=args.num_iterations, completed=done, status="starting")

    with envs, writer, progress, checkpoints(envs, save, f"runs/{run_name}", args.checkpoint_interval) as save_if_due:
        for iteration in range(done + 1, args.num_iterations + 1):
            save_if_due()
            # Annealing the rate if instructed to do so.
            frac = 1.0 - (iteration - 1.0) / args.num_iterations if args.anneal_lr else 1.0
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
            # Collect: the workers act and step; those whose policy has diverged pull this one first.
            collect_start = time.time()
            rollout = envs.rollout(policy, args.num_steps, overlap=args.overlap and iteration < args.num_iterations)
            learn_start = time.time()
            global_step += args.batch_size
            obs = torch.Tensor(rollout.observations).to(device)  # (num_steps, num_envs, ...)
            next_obs = torch.Tensor(rollout.next_observations).to(device)  # (num_envs, ...)
            actions = torch.as_tensor(rollout.actions).to(device)  # (num_steps, num_envs)
            logprobs = torch.Tensor(rollout.logprobs).to(device)
            rewards = torch.Tensor(rollout.rewards).to(device) * args.reward_scale
            terminations = torch.Tensor(rollout.terminations).to(device)
            dones = torch.Tensor(rollout.terminations | rollout.truncations).to(device)
            recent_returns.extend(rollout.episodic_returns.tolist())
            if len(rollout.episodic_returns):
                writer.add_scalar("charts/episodic_return", rollout.episodic_returns.mean(), global_step)
                writer.add_scalar("charts/episodic_length", rollout.episodic_lengths.mean(), global_step)

            # bootstrap value if not done; from the final observation where an episode was cut off
            with torch.no_grad():
                values = get_value(torch.cat([obs, next_obs[None]]).flatten(0, 1)).view(-1, args.num_envs)
                values, nextvalues = values[:-1], values[1:].clone()
                nextvalues[dones.bool()] = agent.critic(torch.Tensor(rollout.final_observations).to(device)).flatten()
                delta = rewards + args.gamma * nextvalues * (1.0 - terminations) - values
                advantages, lastgaelam = torch.zeros_like(rewards), 0
                for t in reversed(range(args.num_steps)):
                    advantages[t] = lastgaelam = delta[t] + args.gamma * args.gae_lambda * (1.0 - dones[t]) * lastgaelam
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
                # A worker's policy may be many updates old. Clipping the ratio to it would pin the learner to it: it
                # never diverges, nobody pulls, training stalls. So clip against the policy at the start of this update
                # (proximal) and weight by proximal / behavior: plain PPO at lag 0. https://arxiv.org/abs/2110.00641
                with torch.no_grad():
                    proximal = Categorical(logits=actor(b_obs)).log_prob(b_actions)
                    b_weights = (proximal - b_logprobs).exp().clamp(max=args.clip_rho)
                    b_logprobs = proximal

            # Optimizing the policy and value network
            batch = b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values, b_weights
            b_inds = np.arange(args.batch_size)
            clipfracs = []
            for _ in range(args.update_epochs):
                np.random.shuffle(b_inds)
                epoch = [part[torch.as_tensor(b_inds, device=device)] for part in batch]
                for start in range(0, args.batch_size, args.minibatch_size):
                    mb = [part[start : start + args.minibatch_size] for part in epoch]
                    loss, pg_loss, v_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac = loss_fn(agent, args, *mb)
                    clipfracs += [clipfrac.clone()]  # a CUDA graph's next replay overwrites it
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
            mean_return = float(np.mean(recent_returns)) if recent_returns else float("nan")
            pulls = float(envs.pulls.mean())  # per worker
            kl = float(envs.divergence.mean())  # inf before the workers' first rollout
            history.append((global_step, mean_return, pulls))
            writer.add_scalar("charts/mean_return_100", mean_return, global_step)
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
            writer.add_scalar("sync/pulls_per_worker", pulls, global_step)
            writer.add_scalar("sync/policy_lag", (envs.policy_version - rollout.policy_versions).mean(), global_step)
            writer.add_scalar("sync/bytes", envs.sync_bytes, global_step)
            writer.add_scalar("charts/worker_restarts", len(envs.restarts), global_step)
            writer.add_scalar("time/collect", learn_start - collect_start, global_step)
            writer.add_scalar("time/learn", time.time() - learn_start, global_step)
            writer.add_scalar("charts/collect_sps", args.batch_size / (learn_start - collect_start), global_step)
            writer.add_scalar("charts/SPS", sps := int(global_step / (time.time() - start_time)), global_step)
            status = f"step {global_step:,} SPS {sps} return {mean_return:.1f} KL {kl:.3f} pulls {pulls:g}/{iteration}"
            progress.update(task, advance=1, status=status)
            if not progress.console.is_terminal and iteration % max(args.num_iterations // 20, 1) == 0:
                print(status, flush=True)
            if args.max_seconds is not None and time.time() - start_time > args.max_seconds:
                break
        wall_seconds = time.time() - start_time
        save()
        envs.close()
        save_if_due()  # a signal of late
        eval_returns = evaluate(agent, args, device)
        writer.add_scalar("eval/return_mean", eval_returns.mean(), global_step)

    updates, (_, mean_return, pulls) = global_step // args.batch_size, history[-1]
    plot_learning_curve(history, f"PPO on {args.env_id}, seed {args.seed}", f"runs/{run_name}/learning_curve.png")
    summary = {
        "global_step": global_step, "wall_seconds": wall_seconds, "sps": global_step / wall_seconds,
        "updates": updates, "pulls_per_worker": pulls, "sync_bytes": envs.sync_bytes,
        "mean_return_100": mean_return if recent_returns else None, "eval_return_mean": float(np.mean(eval_returns)),
        "eval_return_std": float(np.std(eval_returns)), "kl_threshold": args.kl_threshold, "seed": args.seed,
        "env_id": args.env_id, "worker_restarts": envs.restarts, "args": vars(args),
    }  # fmt: skip
    with open(f"runs/{run_name}/summary.json", "w") as file:
        json.dump(summary, file, indent=2)
    if args.track:
        wandb.run.summary.update(summary)
    print(f"{global_step:,} steps in {wall_seconds:.0f} s; {pulls:g} pulls a worker in {updates} updates")
    print(f"mean return {mean_return:.1f}, in the evaluation {np.mean(eval_returns):.1f}; see runs/{run_name}")
