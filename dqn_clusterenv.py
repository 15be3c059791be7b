# DQN on environments in worker processes: CleanRL's dqn.py, changed where distribution requires it
# /// script
# requires-python = ">=3.11"
# dependencies = ["clusterenv-runtime[scripts]"]
# tool.uv.sources.clusterenv-runtime = { path = ".", editable = true }
# ///
import os
import random
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

from clusterenv_runtime import ClusterEnv, EpsilonGreedyPolicy
from clusterenv_utils import (
    Counters,
    CudaGraph,
    Run,
    ScriptArgs,
    check,
    device_with_room,
    evaluate,
    parse,
)


@dataclass
class Args(ScriptArgs):  # with the flags of all scripts, for example seed and num_workers
    exp_name: str = os.path.basename(__file__)[: -len(".py")]

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
    """the batch size of sample from the replay memory"""
    start_e: float = 1.0
    """the starting epsilon for exploration"""
    end_e: float = 0.05
    """the ending epsilon for exploration"""
    exploration_fraction: float = 0.5
    """the fraction of `total-timesteps` it takes from start-e to go end-e"""
    learning_starts: int = 10000
    """timestep to start learning"""
    train_frequency: int = 10
    """the number of environment steps per gradient step, for any number of workers"""

    # Distribution specific arguments
    torch_threads: int = 1
    """the number of torch threads in the learner; more gain nothing for networks this small"""
    envs_per_worker: int = 8
    num_steps: int = 16
    """the number of steps in each environment per chunk that a worker sends"""
    outstanding: int = 2
    """chunks each worker may be ahead of the learner; with 1, it waits while a chunk travels"""
    deterministic: bool = False
    """take chunks in a fixed order, one outstanding per worker, so that a run repeats to the bit"""
    sync_check_frequency: int = 20
    """gradient steps between publications of the policy, at most one per chunk"""
    kl_threshold: float = 0.001
    max_policy_lag: int | None = 40
    save_replay: bool = True
    """whether checkpoints hold the replay buffer; if not, a resumed run fills a new one first"""


def make_env(env_id, idx, capture_video, run_name, **kwargs):
    def thunk():
        if capture_video and idx == 0:
            env = gym.make(env_id, render_mode="rgb_array", **kwargs)
            env = gym.wrappers.RecordVideo(env, f"videos/{run_name}")
        else:
            env = gym.make(env_id, **kwargs)
        return env

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


def make_policy(args, envs):
    """Return the Q-network, and the policy that acts by it, which travels to the workers."""
    q_network = QNetwork(envs)
    return q_network, EpsilonGreedyPolicy(q_network, args.end_e)


class ReplayBuffer:
    """The last `size` transitions: tensors by name, with a row for each. New ones replace old ones.

    The names are those of the first transitions that are added.
    """

    def __init__(self, size, device="cpu"):
        self.size, self.device = size, torch.device(device)
        self.inserted, self.columns = 0, {}

    def add(self, transitions):
        """Add transitions, arrays `(number, ...)` by name."""
        tensors = {name: torch.from_numpy(values) for name, values in transitions.items()}
        if not self.columns:
            self.device = device_with_room(tensors, self.size, self.device)
            self.columns = {
                name: values.new_zeros(self.size, *values.shape[1:], device=self.device)
                for name, values in tensors.items()
            }
        number = len(tensors["rewards"])
        places = torch.arange(self.inserted, self.inserted + number, device=self.device) % self.size
        for name, column in self.columns.items():
            column[places] = tensors[name].to(self.device)
        self.inserted += number

    def sample(self, num_batches, batch_size, device):
        """Return tensors by name, `(num_batches, batch_size, ...)`, on the learner's device.

        `inds` are their rows, for example to give these new priorities.
        """
        num = min(self.inserted, self.size)
        self.inds = torch.randint(num, (num_batches, batch_size), device=self.device)
        return {name: column[self.inds].to(device) for name, column in self.columns.items()}

    def state_dict(self):
        return {"inserted": self.inserted, **self.columns}

    def load_state_dict(self, state):
        columns = dict(state)
        self.inserted = columns.pop("inserted")
        self.device = device_with_room(columns, self.size, self.device)
        self.columns = {name: values.to(self.device) for name, values in columns.items()}


def make_transitions(chunk):
    """Return a chunk's transitions, arrays `(num_steps * num_envs, ...)` by name.

    To look n steps ahead, keep each worker's chunk before, by `chunk.rows[0]`: its steps end with
    it. Where `chunk.starts`, a replaced worker's episode was cut off there, as by a truncation.
    """
    next_obs = np.concatenate([chunk.observations[1:], chunk.next_observations[None]])
    # An episode's last step leads to its final observation, not to the one after the reset.
    next_obs[chunk.terminations | chunk.truncations] = chunk.final_observations
    # Nothing follows a termination, but NaN times 0 would be NaN. All other values are finite.
    next_obs = np.nan_to_num(next_obs, posinf=0, neginf=0)
    transitions = {
        "obs": chunk.observations, "actions": chunk.actions[..., None], "next_obs": next_obs,
        "rewards": chunk.rewards.astype(np.float32),
        "dones": chunk.terminations.astype(np.float32),  # a truncation is not a done
    }  # fmt: skip
    return {name: values.reshape(-1, *values.shape[2:]) for name, values in transitions.items()}


def linear_schedule(start_e: float, end_e: float, duration: float, t: int):
    """Return epsilon at step `t`. It falls from `start_e` to `end_e` within `duration` steps, and
    then stays there.
    """
    slope = (end_e - start_e) / duration
    return max(slope * t + start_e, end_e)


@torch.no_grad()
def compute_td_target(target_network, next_obs, rewards, dones, gamma):
    """Return the TD targets, `(..., batch_size)` like `rewards` and `dones`. A truncation is not a
    `done`.
    """
    target_max = target_network(next_obs).amax(-1)
    return rewards + gamma * target_max * (1 - dones)


def td_loss(q_network, batch):
    """Return the loss of a batch, a scalar, and the Q-values of its `actions`, `(batch_size,)`."""
    old_val = q_network(batch["obs"]).gather(1, batch["actions"]).squeeze(1)
    return F.mse_loss(batch["td_target"], old_val), old_val


def update(optimizer, q_network, batch):
    """Take a gradient step on a batch. Return its loss, and the Q-values of its `actions`."""
    loss, old_val = td_loss(q_network, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"td_loss": loss.detach(), "q_values": old_val.detach()}


if __name__ == "__main__":
    run = Run(
        parse(Args),
        fixed=("env_id", "num_steps", "buffer_size", "learning_starts", "train_frequency"),
    )
    args = run.args  # with --resume, the checkpoint's flags, except for flags given now
    args.chunk_size = int(args.num_envs // args.num_workers * args.num_steps)
    args.num_iterations = args.total_timesteps // args.chunk_size
    check(args.num_envs % args.num_workers == 0, "--num-workers must divide --num-envs")
    room = args.buffer_size >= args.chunk_size
    check(room, f"--buffer-size must be at least a chunk of {args.chunk_size} steps")
    target_every, rest = divmod(args.target_network_frequency, args.train_frequency)
    check(rest == 0, "--target-network-frequency must be a multiple of --train-frequency")
    writer = run.begin()

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
        shape = envs.single_observation_space.shape or ()
        check(len(shape) == 1, f"observations must be vectors, not {shape}")
    run.keep("envs", envs)
    q_network, policy = make_policy(args, envs)
    run.keep("q_network", q_network.to(device))
    adam = optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    optimizer = run.keep("optimizer", adam)
    # The learning rate may differ from the checkpoint's.
    optimizer.param_groups[0]["lr"] = args.learning_rate
    target_network = QNetwork(envs).to(device)
    target_network.load_state_dict(q_network.state_dict())
    run.keep("target_network", target_network)
    # On a GPU, the Python code of `update` and `td_loss` runs only a few times. Then the
    # GPU repeats what it did, and a print, a counter or an `if` in it has no effect any more. Use
    # `functools.partial` in place of `CudaGraph` for these.
    update_once = CudaGraph(update, optimizer, q_network)
    rb = run.keep("rb", ReplayBuffer(args.buffer_size, device), args.save_replay)
    # warm_up: the environment steps before learning
    count = run.keep("count", Counters(gradient_steps=0, warm_up=args.learning_starts))
    if run.global_step and not rb.inserted:
        # After another `learning_starts` steps, gradient steps go on from their old number.
        learned = count.gradient_steps * args.train_frequency
        count.warm_up = run.global_step + args.learning_starts - learned
        print(f"no replay buffer in the checkpoint: collecting {args.learning_starts} steps first")

    def explore(step):
        duration = args.exploration_fraction * args.total_timesteps
        policy.epsilon = linear_schedule(args.start_e, args.end_e, duration, step)

    envs.publish(policy)  # the workers load it before they reset the environments
    envs.reset(seed=args.seed + run.global_step)

    with run.training(envs, q_network, policy):
        losses = {}
        # Take a chunk and learn, while its worker goes on.
        for chunk in run.stream(envs, explore):
            rb.add(make_transitions(chunk))

            # ALGO LOGIC: training. One gradient step per `train_frequency` environment steps after
            # `learning_starts`.
            due = max(run.global_step - count.warm_up, 0) // args.train_frequency
            checks = count.gradient_steps // args.sync_check_frequency
            while count.gradient_steps < due:
                # At once, draw the batches and compute the targets of all steps up to the next
                # update of the target network.
                until_target = target_every - count.gradient_steps % target_every
                burst = min(due - count.gradient_steps, until_target)
                data = rb.sample(burst, args.batch_size, device)
                data["obs"], data["next_obs"] = data["obs"].float(), data["next_obs"].float()
                data["td_target"] = compute_td_target(
                    target_network, data["next_obs"], data["rewards"], data["dones"], args.gamma
                )
                for step in range(burst):
                    losses = update_once({name: part[step] for name, part in data.items()})
                count.gradient_steps += burst
                # update target network
                if count.gradient_steps % target_every == 0:
                    parameters = target_network.parameters(), q_network.parameters()
                    for target_param, q_param in zip(*parameters, strict=True):
                        target_param.data.lerp_(q_param.data, args.tau)
            # Workers pull between two chunks, so only the last of several publications would count.
            if count.gradient_steps // args.sync_check_frequency > checks:
                envs.publish(policy)

            if run.report_is_due():
                # TRY NOT TO MODIFY: record rewards for plotting purposes
                run.report(chunk, versions=envs.policy_version)
                writer.add_scalar("charts/epsilon", policy.epsilon, run.global_step)
                run.log("losses", {name: values.mean() for name, values in losses.items()})
                learned = count.gradient_steps * args.batch_size
                rates = {
                    "consumed_sps": learned / run.seconds,
                    "replay_ratio": learned / run.global_step,
                }
                run.log("throughput", rates)

        policy.epsilon = args.end_e
        returns = evaluate(args, envs, policy)
        run.finish(returns, gradient_steps=count.gradient_steps, transitions_inserted=rb.inserted)
