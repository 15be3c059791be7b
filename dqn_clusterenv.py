# DQN on environments that live in worker processes, anywhere: CleanRL's dqn.py but for what distribution changes
import itertools
import json
import os
import random
import time
from collections import deque
from dataclasses import asdict, dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from matplotlib.figure import Figure
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from clusterenv_runtime import ClusterEnv, EpsilonGreedyPolicy
from clusterenv_runtime.arguments import ClusterArgs, check, parse
from clusterenv_runtime.checkpoint import checkpoints, rng_state, save_checkpoint, set_rng_state


@dataclass
class Args(ClusterArgs):  # what is the runtime's, such as num_workers and sync_mode, it inherits
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
    envs_per_worker: int = 8
    num_steps: int = 16
    """the number of steps in each environment per chunk that a worker sends"""
    outstanding: int = 2
    """chunks each worker may be ahead of the learner; with one it waits while its last one travels"""
    deterministic: bool = False
    """take chunks in a fixed order, one outstanding each, so that two runs of one seed are the same to the last bit"""
    min_workers: int | None = None
    """begin when so many workers are up, the others come in later; by default when all are"""
    sync_check_frequency: int = 20
    """gradient steps between publishing the policy, which measures the workers' divergence from it"""
    max_policy_lag: int | None = 40
    save_replay: bool = True
    """whether checkpoints hold the replay buffer; without it, a resumed run collects another `--learning-starts` steps
    before it goes on learning, at the same rate as before"""


def make_env(env_id, idx, capture_video, run_name):
    def thunk():
        record = capture_video and idx == 0
        env = gym.make(env_id, render_mode="rgb_array") if record else gym.make(env_id)
        env = gym.wrappers.RecordVideo(env, f"videos/{run_name}") if record else env
        return gym.wrappers.RecordEpisodeStatistics(env)

    return thunk


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

    def __init__(self, size, observation_space):
        self.size, self.pos, self.inserted = size, 0, 0
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

    def sample(self, num_batches, batch_size, device):
        """Return observations, actions, next observations, rewards and dones, `(num_batches, batch_size, ...)`."""
        inds = torch.randint(min(self.inserted, self.size), (num_batches * batch_size,))
        columns = self.observations, self.actions, self.next_observations, self.rewards, self.dones
        shape = num_batches, batch_size
        drawn = (column.index_select(0, inds).view(*shape, *column.shape[1:]).to(device) for column in columns)
        obs, actions, next_obs, rewards, dones = drawn
        return obs.float(), actions, next_obs.float(), rewards, dones


def linear_schedule(start_e: float, end_e: float, duration: float, t: int):
    slope = (end_e - start_e) / duration
    return max(slope * t + start_e, end_e)


def evaluate(q_network, args, device):
    """Play one episode in each of `eval_episodes` new environments, with epsilon at its end; return the returns."""
    envs = args.make_vec([make_env(args.env_id, 1, False, "") for _ in range(args.eval_episodes)])
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
    steps, returns, pulls, versions = np.array(history).reshape(-1, 4).T
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
    args, saved = parse(Args, fixed=("env_id", "num_steps", "buffer_size", "train_frequency"))  # saved: to resume from
    positive = "num_steps outstanding batch_size train_frequency target_network_frequency sync_check_frequency "
    args.require(positive + "eval_episodes", lambda value: value >= 1, "at least 1")
    args.require("learning_rate exploration_fraction max_seconds", lambda value: value > 0, "a number > 0")
    args.require("start_e end_e tau", lambda value: 0 <= value <= 1, "in [0, 1]")
    args.require("learning_starts", lambda value: value >= 0, "at least 0")
    args.chunk_size = int(args.envs_per_worker * args.num_steps)
    args.num_iterations = args.total_timesteps // args.chunk_size
    chunk = f"a chunk of {args.envs_per_worker} environments x {args.num_steps} steps = {args.chunk_size}"
    check(args.num_iterations >= 1, f"--total-timesteps {args.total_timesteps} must be at least {chunk}")
    check(args.buffer_size >= args.chunk_size, f"--buffer-size {args.buffer_size} must be at least {chunk}")
    target_every, rest = divmod(args.target_network_frequency, args.train_frequency)  # in gradient steps
    check(rest == 0, "--target-network-frequency must be a multiple of --train-frequency: it counts environment steps")
    global_step, gradient_steps = saved.get("global_step", 0), saved.get("gradient_steps", 0)
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
    needed = ReplayBuffer.num_bytes(args.buffer_size, obs_space) / 2**30
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    check(needed < memory, f"--buffer-size {args.buffer_size} takes {needed:.1f} GiB, this machine has {memory:.1f}")
    env.close()
    args.begin(f"runs/{run_name}")
    where = "also in each checkpoint" if args.save_replay else "not in checkpoints"
    print(f"replay buffer: {args.buffer_size:,} transitions, {needed * 1024:,.1f} MiB, {where}")
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
    torch.set_num_threads(1)  # networks this small gain nothing from more, and runs side by side would stall each other

    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    # env setup
    num_envs = args.num_workers * args.envs_per_worker
    env_fns = [make_env(args.env_id, i, args.capture_video, run_name) for i in range(num_envs)]
    envs = ClusterEnv(args.env_fns(env_fns), **args.cluster(f"runs/{run_name}"))
    q_network = QNetwork(envs).to(device)
    policy = EpsilonGreedyPolicy(q_network, args.start_e)  # what travels to the workers
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    target_network = QNetwork(envs).to(device)
    target_network.load_state_dict(q_network.state_dict())
    rb = ReplayBuffer(args.buffer_size, envs.single_observation_space)
    # warm_up: environment steps without learning
    warm_up, waiting, loss = saved.get("warm_up", args.learning_starts), saved.get("waiting", 0.0), None
    recent_returns, episodes = deque(saved.get("recent_returns", []), maxlen=100), saved.get("episodes", [])
    history = saved.get("history", [])  # (global_step, mean return, pulls per worker, policy version)
    stateful = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer, "envs": envs}

    def save():
        writer.flush()  # up to here the logs belong to this checkpoint, what comes later is dropped on resume
        state = {
            **{name: part.state_dict() for name, part in stateful.items()}, "rng": rng_state(), "args": asdict(args),
            "replay": vars(rb) if args.save_replay else {}, "epsilon": policy.epsilon, "warm_up": warm_up,
            "global_step": global_step, "gradient_steps": gradient_steps, "waiting": waiting, "history": history,
            "seconds": time.time() - start_time, "recent_returns": list(recent_returns), "episodes": episodes,
            "wandb_id": wandb.run.id if args.track else None,
        }  # fmt: skip
        save_checkpoint(f"runs/{run_name}", state, global_step)
        if args.save_model:
            torch.save(q_network.state_dict(), f"runs/{run_name}/{args.exp_name}.cleanrl_model")

    if saved:
        for name, part in stateful.items():
            part.load_state_dict(saved[name])
        optimizer.param_groups[0]["lr"], policy.epsilon = args.learning_rate, saved["epsilon"]
        set_rng_state(saved["rng"])
        vars(rb).update(saved["replay"])
        if not saved["replay"]:  # after another `learning_starts` steps, gradient steps go on from where they were
            warm_up = global_step + args.learning_starts - gradient_steps * args.train_frequency
            print(f"no replay buffer in the checkpoint: collecting {args.learning_starts:,} steps before learning")
    envs.publish(policy)  # while the environments reset, the workers load it
    envs.reset(seed=args.seed + global_step)
    done, start_time = global_step // args.chunk_size, time.time() - saved.get("seconds", 0)
    progress = Progress(TextColumn("{task.fields[status]}"), TimeRemainingColumn(), TextColumn("left"))
    task = progress.add_task("train", total=args.num_iterations, completed=done, status="starting")

    with envs, writer, progress, checkpoints(envs, save, f"runs/{run_name}", args.checkpoint_interval) as save_if_due:
        # Who may send the next chunk, and whose to take next (None: whichever is ready). Nothing sent is left unused.
        turns = itertools.cycle(range(args.num_workers) if args.deterministic else [None])
        ahead = list(range(args.num_workers)) * (1 if args.deterministic else args.outstanding)
        for worker in ahead[: max(args.num_iterations - done, 0)]:
            envs.send(args.num_steps, worker)
        for iteration in range(done + 1, args.num_iterations + 1):
            save_if_due()
            # Collect: take a chunk, and let its worker go on, with the exploration of now.
            collect_start = time.time()
            worker, chunk = envs.recv(next(turns))
            waiting += time.time() - collect_start
            duration = args.exploration_fraction * args.total_timesteps
            policy.epsilon = linear_schedule(args.start_e, args.end_e, duration, iteration * args.chunk_size)
            if iteration + len(ahead) <= args.num_iterations:
                envs.send(args.num_steps, worker)
            # From here to the next chunk nothing waits for workers, so a checkpoint holds all of this one or nothing.
            global_step += args.chunk_size
            rb.add(chunk)
            recent_returns.extend(chunk.episodic_returns.tolist())
            episodes += zip(chunk.episodic_returns.tolist(), chunk.episodic_lengths.tolist(), strict=True)

            # ALGO LOGIC: training. One gradient step per `train_frequency` environment steps after `learning_starts`.
            due = max(global_step - warm_up, 0) // args.train_frequency
            while gradient_steps < due:
                # As many as the target network stays the same for: their batches and targets come in one go.
                until_target, until_check = (n - gradient_steps % n for n in (target_every, args.sync_check_frequency))
                burst = min(due - gradient_steps, until_target, until_check)
                b_obs, b_actions, b_next_obs, b_rewards, b_dones = rb.sample(burst, args.batch_size, device)
                with torch.no_grad():
                    target_max, _ = target_network(b_next_obs).max(dim=-1)
                    b_td_target = b_rewards + args.gamma * target_max * (1 - b_dones)
                for obs, actions, td_target in zip(b_obs, b_actions, b_td_target, strict=True):
                    old_val = q_network(obs).gather(1, actions).squeeze(1)
                    loss = F.mse_loss(td_target, old_val)
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
            pulls, versions = float(envs.pulls.mean()), envs.policy_version  # per worker
            kl = float(envs.divergence.mean())  # inf until every worker has acted
            history.append((global_step, mean_return, pulls, versions))
            if episodes:  # since the last time
                returns, lengths = np.mean(episodes, axis=0)
                writer.add_scalar("charts/episodic_return", returns, global_step)
                writer.add_scalar("charts/episodic_length", lengths, global_step)
            episodes = []
            writer.add_scalar("charts/mean_return_100", mean_return, global_step)
            writer.add_scalar("charts/epsilon", policy.epsilon, global_step)
            if loss is not None:
                writer.add_scalar("losses/td_loss", loss.item(), global_step)
                writer.add_scalar("losses/q_values", old_val.mean().item(), global_step)
            if np.isfinite(kl):
                writer.add_scalar("sync/kl", kl, global_step)
            writer.add_scalar("sync/pulls_per_worker", pulls, global_step)
            writer.add_scalar("sync/policy_lag", (envs.policy_version - chunk.policy_versions).mean(), global_step)
            writer.add_scalar("sync/bytes", envs.sync_bytes, global_step)
            writer.add_scalar("charts/worker_restarts", len(envs.restarts), global_step)
            writer.add_scalar("time/learner_waiting", waiting, global_step)
            writer.add_scalar("time/workers_waiting", envs.waiting_seconds.mean(), global_step)
            writer.add_scalar("throughput/produced_sps", global_step / seconds, global_step)
            writer.add_scalar("throughput/consumed_sps", gradient_steps * args.batch_size / seconds, global_step)
            writer.add_scalar("throughput/replay_ratio", gradient_steps * args.batch_size / global_step, global_step)
            writer.add_scalar("charts/SPS", sps := int(global_step / seconds), global_step)
            status = f"step {global_step:,} SPS {sps} return {mean_return:.1f} KL {kl:.3f} pulls {pulls:g}/{versions}"
            progress.update(task, completed=iteration, status=status)
            if not progress.console.is_terminal and len(history) % max(min(args.num_iterations, 200) // 20, 1) == 0:
                print(status, flush=True)
            if stop:
                break
        wall_seconds = time.time() - start_time
        save()
        envs.close()
        save_if_due()  # a signal of late
        eval_returns = evaluate(q_network, args, device)
        writer.add_scalar("eval/return_mean", eval_returns.mean(), global_step)

    mean_return = float(np.mean(recent_returns)) if recent_returns else float("nan")
    plot_learning_curve(history, f"DQN on {args.env_id}, seed {args.seed}", f"runs/{run_name}/learning_curve.png")
    summary = {
        "global_step": global_step, "wall_seconds": wall_seconds, "sps": global_step / wall_seconds,
        "gradient_steps": gradient_steps, "transitions_inserted": rb.inserted, "policy_versions": envs.policy_version,
        "learner_waiting_seconds": waiting, "workers_waiting_seconds": envs.waiting_seconds.tolist(),
        "pulls_per_worker": (pulls := float(envs.pulls.mean())), "sync_bytes": envs.sync_bytes,
        "mean_return_100": mean_return if recent_returns else None, "eval_return_mean": float(np.mean(eval_returns)),
        "eval_return_std": float(np.std(eval_returns)), "kl_threshold": args.kl_threshold, "seed": args.seed,
        "env_id": args.env_id, "worker_restarts": envs.restarts, "args": vars(args),
    }  # fmt: skip
    with open(f"runs/{run_name}/summary.json", "w") as file:
        json.dump(summary, file, indent=2)
    if args.track:
        wandb.run.summary.update(summary)
    print(f"{global_step:,} steps in {wall_seconds:.0f} s; {pulls:g} pulls a worker of {envs.policy_version} versions")
    print(f"mean return {mean_return:.1f}, in the evaluation {np.mean(eval_returns):.1f}; see runs/{run_name}")
