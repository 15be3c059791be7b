# DQN on environments that live in worker processes, anywhere: CleanRL's dqn.py but for what distribution changes
import itertools
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
import torch.nn.functional as F
import torch.optim as optim
import tyro
from matplotlib.figure import Figure
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from clusterenv_runtime import ClusterEnv, EpsilonGreedyPolicy


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
    env_id: str = "CartPole-v1"
    """the id of the environment"""
    total_timesteps: int = 500000
    """total timesteps of the experiments"""
    learning_rate: float = 2.5e-4
    """the learning rate of the optimizer"""
    buffer_size: int = 10000
    """the replay memory buffer size"""
    gamma: float = 0.99
    """the discount factor gamma"""
    tau: float = 1.0
    """the target network update rate"""
    target_network_frequency: int = 500
    """the timesteps it takes to update the target network"""
    batch_size: int = 128
    """the batch size of sample from the reply memory"""
    start_e: float = 1
    """the starting epsilon for exploration"""
    end_e: float = 0.05
    """the ending epsilon for exploration"""
    exploration_fraction: float = 0.5
    """the fraction of `total-timesteps` it takes from start-e to go end-e"""
    learning_starts: int = 10000
    """timestep to start learning"""
    train_frequency: int = 10
    """one gradient step per so many environment steps, however many workers there are and however fast"""

    # Distribution specific arguments
    num_workers: int = 2
    """the number of environment worker processes"""
    envs_per_worker: int = 8
    """the number of parallel game environments on each worker"""
    num_steps: int = 16
    """the number of steps in each environment per chunk that a worker sends"""
    outstanding: int = 2
    """chunks each worker may be ahead of the learner; with one it waits while its last one travels"""
    deterministic: bool = False
    """take chunks in a fixed order, one outstanding each, so that two runs of one seed are the same to the last bit"""
    launcher: Literal["local"] = "local"
    """where workers run: `local` starts them on this machine"""
    sync_mode: Literal["kl", "interval", "always", "never"] = "kl"
    """when workers pull weights: by divergence (APS), every `--sync-interval` checks, every check, or once"""
    sync_check_frequency: int = 20
    """gradient steps between publishing the policy, which measures the workers' divergence from it"""
    kl_threshold: float = 0.8
    """a worker pulls when the mean KL(its policy || the learner's) exceeds this, in nats"""
    sync_interval: int | None = None
    """with `--sync-mode interval`: pull every so many checks"""
    max_policy_lag: int | None = 40
    """pull anyway when more than this many checks behind"""


def check(fine, message):
    if not fine:
        sys.exit(f"error: {message}")


def make_env(env_id, idx, capture_video, run_name):
    def thunk():
        record = capture_video and idx == 0
        env = gym.make(env_id, render_mode="rgb_array") if record else gym.make(env_id)
        env = gym.wrappers.RecordVideo(env, f"videos/{run_name}") if record else env
        return gym.wrappers.RecordEpisodeStatistics(env)

    return thunk


# ALGO LOGIC: initialize agent here:
class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(np.array(env.single_observation_space.shape).prod(), 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(),
            nn.Linear(84, env.single_action_space.n),
        )  # fmt: skip

    def forward(self, x):
        return self.network(x)


class ReplayBuffer:
    """The last `size` transitions, in preallocated tensors; observations keep the dtype of their space."""

    def __init__(self, size, observation_space, device):
        self.size, self.pos, self.inserted, self.device = size, 0, 0, device
        dtype = torch.from_numpy(np.empty(0, observation_space.dtype)).dtype
        self.observations = torch.zeros(size, *observation_space.shape, dtype=dtype)
        self.next_observations = torch.zeros(size, *observation_space.shape, dtype=dtype)
        self.actions = torch.zeros(size, 1, dtype=torch.int64)
        self.rewards, self.dones = torch.zeros(size), torch.zeros(size)

    @staticmethod
    def num_bytes(size, observation_space):
        return size * (2 * int(np.prod(observation_space.shape)) * observation_space.dtype.itemsize + 8 + 4 + 4)

    def add(self, rollout):
        next_observations = np.concatenate([rollout.observations[1:], rollout.next_observations[None]])
        # An episode's last step leads to its final observation, not to the one its environment was reset to.
        next_observations[rollout.terminations | rollout.truncations] = rollout.final_observations
        num = rollout.rewards.size
        fit = min(num, self.size - self.pos)  # the rest goes to the front, where the oldest are
        for column, values in (
            (self.observations, rollout.observations),
            (self.next_observations, next_observations),
            (self.actions, rollout.actions),
            (self.rewards, rollout.rewards),
            (self.dones, rollout.terminations),  # a truncation is not the end
        ):
            values = torch.from_numpy(values).reshape(num, *column.shape[1:])
            column[self.pos : self.pos + fit], column[: num - fit] = values[:fit], values[fit:]
        self.pos, self.inserted = (self.pos + num) % self.size, self.inserted + num

    def sample(self, num_batches, batch_size):
        """Return observations, actions, next observations, rewards and dones, `(num_batches, batch_size, ...)`."""
        inds = torch.randint(min(self.inserted, self.size), (num_batches * batch_size,))
        columns = self.observations, self.actions, self.next_observations, self.rewards, self.dones
        shape = num_batches, batch_size
        drawn = (column.index_select(0, inds).view(*shape, *column.shape[1:]).to(self.device) for column in columns)
        obs, actions, next_obs, rewards, dones = drawn
        return obs.float(), actions, next_obs.float(), rewards, dones


def linear_schedule(start_e: float, end_e: float, duration: float, t: int):
    slope = (end_e - start_e) / duration
    return max(slope * t + start_e, end_e)


def evaluate(q_network, args, device):
    """Play one episode in each of `eval_episodes` new environments, with epsilon at its end; return the returns."""
    envs = gym.vector.SyncVectorEnv([make_env(args.env_id, 1, False, "") for _ in range(args.eval_episodes)])
    obs, _ = envs.reset(seed=args.seed + 100_000)
    returns, running, steps = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool), 0
    while running.any() and (steps := steps + 1) <= 10_000:  # not every environment ends its episodes
        with torch.no_grad():
            actions = q_network(torch.Tensor(obs).to(device)).argmax(dim=1).cpu().numpy()
        explore = np.random.rand(args.eval_episodes) < args.end_e
        actions[explore] = np.random.randint(envs.single_action_space.n, size=explore.sum())
        obs, reward, terminations, truncations, _ = envs.step(actions)
        returns += reward * running
        running &= ~(terminations | truncations)
    envs.close()
    return returns


def plot_learning_curve(history, title, path):
    steps, returns, pulls, versions = np.array(history).T
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    top.plot(steps, returns, color="#0072B2")
    top.set(title=title, ylabel="mean return of the last 100 episodes")
    bottom.plot(steps, versions, "--", color="#555555", label="policy versions (checks)")
    bottom.plot(steps, pulls, color="#D55E00", label="pulls per worker")
    bottom.set(xlabel="environment steps", ylabel="cumulative number")
    bottom.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    # W&B agents write booleans as --flag=True; tyro's spelling is --flag and --no-flag
    booleans = "|".join(field.name.replace("_", "[-_]") for field in fields(Args) if field.type is bool)
    argv = [re.sub(rf"^--({booleans})=[Tt]rue$", r"--\1", arg) for arg in sys.argv[1:]]
    args = tyro.cli(Args, args=[re.sub(rf"^--({booleans})=[Ff]alse$", r"--no-\1", arg) for arg in argv])
    positive = "num_workers envs_per_worker num_steps outstanding batch_size train_frequency target_network_frequency "
    for flag in (positive + "sync_check_frequency eval_episodes").split():
        check(getattr(args, flag) >= 1, f"--{flag.replace('_', '-')} must be at least 1, got {getattr(args, flag)}")
    for flag in ("learning_rate", "exploration_fraction", "max_seconds"):
        value = getattr(args, flag)
        check(value is None or value > 0, f"--{flag.replace('_', '-')} must be a number > 0, got {value}")
    for flag in ("start_e", "end_e", "tau"):
        check(0 <= getattr(args, flag) <= 1, f"--{flag.replace('_', '-')} must be in [0, 1], got {getattr(args, flag)}")
    check(args.learning_starts >= 0, f"--learning-starts must be at least 0, got {args.learning_starts}")
    check(args.kl_threshold >= 0, f"--kl-threshold must be a number of nats >= 0, got {args.kl_threshold}")
    check(args.sync_mode != "interval" or args.sync_interval, "--sync-mode interval needs --sync-interval, in checks")
    check(args.sync_interval is None or args.sync_interval >= 1, "--sync-interval must be at least 1 check")
    check(args.max_policy_lag is None or args.max_policy_lag >= 0, "--max-policy-lag must be at least 0 checks")
    args.chunk_size = int(args.envs_per_worker * args.num_steps)
    args.num_iterations = args.total_timesteps // args.chunk_size
    chunk = f"a chunk of {args.envs_per_worker} environments x {args.num_steps} steps = {args.chunk_size}"
    check(args.num_iterations >= 1, f"--total-timesteps {args.total_timesteps} must be at least {chunk}")
    check(args.buffer_size >= args.chunk_size, f"--buffer-size {args.buffer_size} must be at least {chunk}")
    target_every, rest = divmod(args.target_network_frequency, args.train_frequency)  # in gradient steps
    check(rest == 0, "--target-network-frequency must be a multiple of --train-frequency: it counts environment steps")
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 10**6}"
    try:
        env = make_env(args.env_id, 0, args.capture_video, run_name)()
    except (ModuleNotFoundError, gym.error.Error) as error:
        check(False, error)
    discrete = isinstance(env.action_space, gym.spaces.Discrete) and env.action_space.start == 0
    check(discrete, f"actions must be discrete, from 0, not {env.action_space}: {args.env_id}")
    check(len(env.observation_space.shape or ()) == 1, f"observations must be vectors, not {env.observation_space}")
    needed = ReplayBuffer.num_bytes(args.buffer_size, env.observation_space) / 2**30
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    check(needed < memory, f"--buffer-size {args.buffer_size} takes {needed:.1f} GiB, this machine has {memory:.1f}")
    env.close()
    try:
        os.makedirs(f"runs/{run_name}")
    except OSError as error:
        check(False, f"cannot write to runs/{run_name}: {error.strerror}")
    print(f"replay buffer: {args.buffer_size:,} transitions, {needed * 1024:,.1f} MiB")
    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, name=run_name, config=vars(args),
            sync_tensorboard=True, monitor_gym=args.capture_video, save_code=True,
        )  # fmt: skip
        wandb.define_metric("*", step_metric="global_step")
    writer = SummaryWriter(f"runs/{run_name}")
    table = "\n".join([f"|{key}|{value}|" for key, value in vars(args).items()])
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.set_num_threads(1)  # networks this small gain nothing from more, and runs side by side would stall each other

    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    # env setup
    num_envs = args.num_workers * args.envs_per_worker
    envs = ClusterEnv(
        [make_env(args.env_id, i, args.capture_video, run_name) for i in range(num_envs)],
        num_workers=args.num_workers, launcher=args.launcher, log_dir=f"runs/{run_name}/workers",
        sync_mode=args.sync_mode, kl_threshold=args.kl_threshold,
        sync_interval=args.sync_interval, max_policy_lag=args.max_policy_lag,
    )  # fmt: skip
    q_network = QNetwork(envs).to(device)
    policy = EpsilonGreedyPolicy(q_network, args.start_e)  # what travels to the workers
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    target_network = QNetwork(envs).to(device)
    target_network.load_state_dict(q_network.state_dict())
    rb = ReplayBuffer(args.buffer_size, envs.single_observation_space, device)

    envs.publish(policy)  # while the environments reset, the workers load it
    envs.reset(seed=args.seed)
    global_step, gradient_steps, start_time, waiting = 0, 0, time.time(), 0.0
    recent_returns, episodes, eval_returns = deque(maxlen=100), [], None
    history = []  # (global_step, mean return, pulls per worker, policy version)
    progress = Progress(TextColumn("{task.fields[status]}"), TimeRemainingColumn(), TextColumn("left"))
    task = progress.add_task("train", total=args.num_iterations, status="starting")

    with envs, writer, progress, suppress(KeyboardInterrupt):
        # Who may send the next chunk, and whose to take next (None: whichever is ready). Nothing sent is left unused.
        turns = itertools.cycle(range(args.num_workers) if args.deterministic else [None])
        ahead = list(range(args.num_workers)) * (1 if args.deterministic else args.outstanding)
        for worker in ahead[: args.num_iterations]:
            envs.send(args.num_steps, worker)
        for iteration in range(1, args.num_iterations + 1):
            # Collect: take a chunk, and let its worker go on, with the exploration of now.
            collect_start = time.time()
            worker, chunk = envs.recv(next(turns))
            learn_start = time.time()
            waiting += learn_start - collect_start
            global_step += args.chunk_size
            duration = args.exploration_fraction * args.total_timesteps
            policy.epsilon = linear_schedule(args.start_e, args.end_e, duration, global_step)
            if iteration + len(ahead) <= args.num_iterations:
                envs.send(args.num_steps, worker)
            rb.add(chunk)
            recent_returns.extend(chunk.episodic_returns.tolist())
            episodes.append((chunk.episodic_returns, chunk.episodic_lengths))

            # ALGO LOGIC: training. One gradient step per `train_frequency` environment steps after `learning_starts`.
            due = max(global_step - args.learning_starts, 0) // args.train_frequency
            while gradient_steps < due:
                # As many as the target network stays the same for: their batches and targets come in one go.
                until_target, until_check = (n - gradient_steps % n for n in (target_every, args.sync_check_frequency))
                burst = min(due - gradient_steps, until_target, until_check)
                b_obs, b_actions, b_next_obs, b_rewards, b_dones = rb.sample(burst, args.batch_size)
                with torch.no_grad():
                    target_max, _ = target_network(b_next_obs).max(dim=-1)
                    b_td_target = b_rewards + args.gamma * target_max * (1 - b_dones)
                for obs, actions, td_target in zip(b_obs, b_actions, b_td_target, strict=True):
                    old_val = q_network(obs).gather(1, actions).squeeze(1)
                    loss = F.mse_loss(td_target, old_val)
                    # optimize the model
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                gradient_steps += burst
                # update target network
                if gradient_steps % target_every == 0:
                    for target_param, q_param in zip(target_network.parameters(), q_network.parameters(), strict=True):
                        target_param.data.lerp_(q_param.data, args.tau)
                if gradient_steps % args.sync_check_frequency == 0:
                    envs.publish(policy)

            stop = args.max_seconds is not None and time.time() - start_time > args.max_seconds
            if not (stop or iteration % max(args.num_iterations // 200, 1) == 0 or iteration == args.num_iterations):
                continue
            # TRY NOT TO MODIFY: record rewards for plotting purposes
            seconds = time.time() - start_time
            mean_return = float(np.mean(recent_returns)) if recent_returns else float("nan")
            pulls = float(envs.pulls.mean())  # per worker
            kl = float(envs.divergence.mean())  # inf until every worker has acted
            history.append((global_step, mean_return, pulls, envs.policy_version))
            returns, lengths = (np.concatenate(column) for column in zip(*episodes, strict=True))
            episodes = []
            if len(returns):
                writer.add_scalar("charts/episodic_return", returns.mean(), global_step)
                writer.add_scalar("charts/episodic_length", lengths.mean(), global_step)
            writer.add_scalar("charts/epsilon", policy.epsilon, global_step)
            if gradient_steps:
                writer.add_scalar("losses/td_loss", loss.item(), global_step)
                writer.add_scalar("losses/q_values", old_val.mean().item(), global_step)
            if np.isfinite(kl):
                writer.add_scalar("sync/kl", kl, global_step)
            writer.add_scalar("sync/pulls_per_worker", pulls, global_step)
            writer.add_scalar("sync/policy_lag", (envs.policy_version - chunk.policy_versions).mean(), global_step)
            writer.add_scalar("sync/bytes", envs.sync_bytes, global_step)
            writer.add_scalar("time/learner_waiting", waiting, global_step)
            writer.add_scalar("time/workers_waiting", envs.waiting_seconds.mean(), global_step)
            writer.add_scalar("throughput/produced_sps", global_step / seconds, global_step)
            writer.add_scalar("throughput/consumed_sps", gradient_steps * args.batch_size / seconds, global_step)
            writer.add_scalar("throughput/replay_ratio", gradient_steps * args.batch_size / global_step, global_step)
            writer.add_scalar("charts/SPS", sps := int(global_step / seconds), global_step)
            versions = envs.policy_version
            status = f"step {global_step:,} SPS {sps} return {mean_return:.1f} KL {kl:.3f} pulls {pulls:g}/{versions}"
            progress.update(task, completed=iteration, status=status)
            if not progress.console.is_terminal and iteration % max(args.num_iterations // 20, 1) == 0:
                print(status, flush=True)
            if stop:
                break
        wall_seconds = time.time() - start_time
        eval_returns = evaluate(q_network, args, device)
        writer.add_scalar("eval/return_mean", eval_returns.mean(), global_step)

    if args.save_model:
        torch.save(q_network.state_dict(), f"runs/{run_name}/{args.exp_name}.cleanrl_model")
    check(eval_returns is not None, f"interrupted; what there is lies in runs/{run_name}")
    plot_learning_curve(history, f"DQN on {args.env_id}, seed {args.seed}", f"runs/{run_name}/learning_curve.png")
    summary = {
        "global_step": global_step, "wall_seconds": wall_seconds, "sps": global_step / wall_seconds,
        "gradient_steps": gradient_steps, "transitions_inserted": rb.inserted, "policy_versions": envs.policy_version,
        "learner_waiting_seconds": waiting, "workers_waiting_seconds": envs.waiting_seconds.tolist(),
        "pulls_per_worker": pulls, "sync_bytes": envs.sync_bytes,
        "mean_return_100": mean_return if recent_returns else None, "eval_return_mean": float(np.mean(eval_returns)),
        "eval_return_std": float(np.std(eval_returns)), "kl_threshold": args.kl_threshold, "seed": args.seed,
        "env_id": args.env_id, "args": vars(args),
    }  # fmt: skip
    with open(f"runs/{run_name}/summary.json", "w") as file:
        json.dump(summary, file, indent=2)
    if args.track:
        wandb.run.summary.update(summary)
    print(f"{global_step:,} steps in {wall_seconds:.0f} s; {pulls:g} pulls a worker of {envs.policy_version} versions")
    print(f"mean return {mean_return:.1f}, in the evaluation {np.mean(eval_returns):.1f}; see runs/{run_name}")
