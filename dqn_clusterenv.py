# DQN on environments in worker processes: CleanRL's dqn.py, changed where distribution requires it
# /// script
# requires-python = ">=3.11"
# dependencies = ["clusterenv-runtime[scripts]"]
# tool.uv.sources.clusterenv-runtime = { path = ".", editable = true }
# ///
import os
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
    ReplayBuffer,
    Run,
    ScriptArgs,
    by_backend,
    check,
    check_chunks,
    check_discrete,
    check_vectors,
    env_setup,
    evaluate,
    parse,
    record_video,
    replay_device,
    seeded_device,
)
from clusterenv_utils.types import (
    EnvId,
    Fraction,
    Name,
    Nats,
    NotNegative,
    Positive,
    PositiveNumber,
)


@dataclass
class Args(ScriptArgs):  # with the flags of all scripts, for example seed and num_workers
    exp_name: Name = os.path.basename(__file__)[: -len(".py")]

    # Algorithm specific arguments
    env_id: EnvId = "CartPole-v1"
    """the id of the environment"""
    total_timesteps: Positive = 500000
    """total timesteps of the experiments"""
    learning_rate: PositiveNumber = 2.5e-4
    """the learning rate of the optimizer"""
    buffer_size: Positive = 10000
    """the replay memory buffer size"""
    gamma: Fraction = 0.99
    """the discount factor gamma"""
    tau: Fraction = 1.0
    """the target network update rate"""
    target_network_frequency: Positive = 500
    """the timesteps it takes to update the target network"""
    batch_size: Positive = 128
    """the batch size of sample from the replay memory"""
    start_e: Fraction = 1.0
    """the starting epsilon for exploration"""
    end_e: Fraction = 0.05
    """the ending epsilon for exploration"""
    exploration_fraction: PositiveNumber = 0.5
    """the fraction of `total-timesteps` it takes from start-e to go end-e"""
    learning_starts: NotNegative = 10000
    """timestep to start learning"""
    train_frequency: Positive = 10
    """the number of environment steps per gradient step, whatever the number and the speed of the
    workers
    """

    # Distribution specific arguments
    envs_per_worker: Positive = 8
    num_steps: Positive = 16
    """the number of steps in each environment per chunk that a worker sends"""
    outstanding: Positive = 2
    """chunks each worker may be ahead of the learner; with 1, a worker waits while a chunk travels
    """
    deterministic: bool = False
    """take chunks in a fixed order, one outstanding per worker, so that two runs with the same seed
    are identical to the last bit
    """
    sync_check_frequency: Positive = 20
    """gradient steps between publications of the policy, which measure the workers' divergence from
    it; at most one per chunk
    """
    kl_threshold: Nats = 0.001
    max_policy_lag: NotNegative | None = 40
    save_replay: bool = True
    """whether checkpoints hold the replay buffer; otherwise a resumed run first collects
    `--learning-starts` steps
    """


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


def td_loss(q_network, obs, actions, td_target):
    """Return the loss of a batch, a scalar, and the Q-values of its `actions`, `(batch_size,)`."""
    old_val = q_network(obs).gather(1, actions).squeeze(1)
    return F.mse_loss(td_target, old_val), old_val


def update(optimizer, q_network, obs, actions, td_target):
    """Take a gradient step on a batch. Return its loss, and the Q-values of its `actions`."""
    loss, old_val = td_loss(q_network, obs, actions, td_target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), old_val.detach()


if __name__ == "__main__":
    run = Run(
        parse(Args),
        fixed=("env_id", "num_steps", "buffer_size", "learning_starts", "train_frequency"),
    )
    args = run.args  # with --resume, the checkpoint's flags, except for flags given now
    args.chunk_size = int(args.num_envs // args.num_workers * args.num_steps)
    args.num_iterations = args.total_timesteps // args.chunk_size
    check_chunks(args)
    target_every, rest = divmod(args.target_network_frequency, args.train_frequency)
    steps = "a multiple of --train-frequency: it counts environment steps"
    check(rest == 0, f"--target-network-frequency must be {steps}")
    writer = run.begin()

    # TRY NOT TO MODIFY: seeding
    # More threads gain nothing for networks this small, and stall runs that share the machine.
    device = seeded_device(args, threads=1)

    # env setup
    env_fns = [
        make_env(args.env_id, i, args.capture_video, run.video_name, **args.make_kwargs)
        for i in range(args.num_envs)
    ]
    env_fns = by_backend(args, env_fns, make_env)
    with env_setup(run):
        envs = ClusterEnv(env_fns, num_envs=args.num_envs, **run.options())
        spaces = envs.single_observation_space, envs.single_action_space
        check_vectors(spaces[0])
        check_discrete(args, spaces[1])
        needed = ReplayBuffer.num_bytes(args.buffer_size, *spaces)
        rb_device = replay_device(args, needed, device)
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
    update_once = CudaGraph(update, optimizer, q_network)
    rb = ReplayBuffer(args.buffer_size, *spaces, args.save_replay, rb_device)
    run.keep("rb", rb)
    # warm_up: the environment steps before learning
    count = run.keep("count", Counters(gradient_steps=0, warm_up=args.learning_starts))
    if run.global_step and not rb.inserted:
        # After another `learning_starts` steps, gradient steps go on from their old number.
        learned = count.gradient_steps * args.train_frequency
        count.warm_up = run.global_step + args.learning_starts - learned
        first = f"collecting {args.learning_starts:,} steps before learning"
        print(f"no replay buffer in the checkpoint: {first}")

    def explore(step):
        duration = args.exploration_fraction * args.total_timesteps
        policy.epsilon = linear_schedule(args.start_e, args.end_e, duration, step)

    envs.publish(policy)  # the workers load it before they reset the environments
    envs.reset(seed=args.seed + run.global_step)

    with run.training(envs, q_network, policy):
        loss = None
        # Take a chunk and learn, while its worker goes on.
        for chunk in run.stream(envs, explore):
            rb.add(chunk)

            # ALGO LOGIC: training. One gradient step per `train_frequency` environment steps after
            # `learning_starts`.
            due = max(run.global_step - count.warm_up, 0) // args.train_frequency
            checks = count.gradient_steps // args.sync_check_frequency
            while count.gradient_steps < due:
                # At once, draw the batches and compute the targets of all steps up to the next
                # update of the target network.
                until_target = target_every - count.gradient_steps % target_every
                burst = min(due - count.gradient_steps, until_target)
                samples = rb.sample(burst, args.batch_size, device)
                b_obs, b_actions, b_next_obs, b_rewards, b_dones = samples
                b_td_target = compute_td_target(
                    target_network, b_next_obs, b_rewards, b_dones, args.gamma
                )
                for batch in zip(b_obs, b_actions, b_td_target, strict=True):
                    loss, old_val = update_once(*batch)
                count.gradient_steps += burst
                # update target network
                if count.gradient_steps % target_every == 0:
                    parameters = target_network.parameters(), q_network.parameters()
                    for target_param, q_param in zip(*parameters, strict=True):
                        target_param.data.lerp_(q_param.data, args.tau)
            # Workers pull between two chunks, so only the last of several publications would count.
            if count.gradient_steps // args.sync_check_frequency > checks:
                envs.publish(policy)

            if not run.report_is_due():
                continue
            # TRY NOT TO MODIFY: record rewards for plotting purposes
            run.report(chunk, versions=envs.policy_version)
            writer.add_scalar("charts/epsilon", policy.epsilon, run.global_step)
            if loss is not None:
                losses = {"td_loss": loss, "q_values": old_val.mean()}
                run.logs.add_group("losses", losses, run.global_step)
            learned = count.gradient_steps * args.batch_size
            writer.add_scalar("time/learner_waiting", run.waiting, run.global_step)
            writer.add_scalar("time/workers_waiting", envs.waiting_seconds.mean(), run.global_step)
            produced = run.global_step
            writer.add_scalar("throughput/produced_sps", produced / run.seconds, run.global_step)
            writer.add_scalar("throughput/consumed_sps", learned / run.seconds, run.global_step)
            writer.add_scalar("throughput/replay_ratio", learned / run.global_step, run.global_step)

        policy.epsilon = args.end_e
        run.finish(
            evaluate(args, envs, policy),
            gradient_steps=count.gradient_steps,
            transitions_inserted=rb.inserted,
            policy_versions=envs.policy_version,
            learner_waiting_seconds=run.waiting,
            workers_waiting_seconds=envs.waiting_seconds.tolist(),
        )
        record_video(run, policy, make_env)
