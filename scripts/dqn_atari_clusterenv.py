# DQN on Atari, with each frame once: CleanRL's dqn_atari.py, changed where distribution requires it
# /// script
# requires-python = ">=3.11"
# dependencies = ["clusterenv-runtime[scripts,atari]"]
# tool.uv.sources.clusterenv-runtime = { path = "..", editable = true }
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
from clusterenv_runtime.extras import atari
from clusterenv_utils import (
    Counters,
    CudaGraph,
    FrameReplayBuffer,
    Run,
    ScriptArgs,
    check,
    evaluate,
    parse,
)

FRAME_STACK = 4


@dataclass
class Args(ScriptArgs):  # with the flags of all scripts, for example seed and num_workers
    exp_name: str = os.path.basename(__file__)[: -len(".py")]

    # Algorithm specific arguments
    env_id: str = "ALE/Breakout-v5"
    """the id of the environment"""
    total_timesteps: int = 10000000
    """total timesteps of the experiments"""
    learning_rate: float = 1e-4
    """the learning rate of the optimizer"""
    buffer_size: int = 1000000
    """the replay memory buffer size"""
    gamma: float = 0.99
    """the discount factor gamma"""
    tau: float = 1.0
    """the target network update rate"""
    target_network_frequency: int = 1000
    """the timesteps it takes to update the target network"""
    batch_size: int = 32
    """the batch size of sample from the replay memory"""
    start_e: float = 1.0
    """the starting epsilon for exploration"""
    end_e: float = 0.01
    """the ending epsilon for exploration"""
    exploration_fraction: float = 0.10
    """the fraction of `total-timesteps` it takes from start-e to go end-e"""
    learning_starts: int = 80000
    """timestep to start learning"""
    train_frequency: int = 4
    """the number of environment steps per gradient step, for any number of workers"""

    # Distribution specific arguments
    envs_per_worker: int = 8
    num_steps: int = 32
    """the number of steps in each environment per chunk that a worker sends"""
    outstanding: int = 2
    """chunks each worker may be ahead of the learner; with 1, it waits while a chunk travels"""
    deterministic: bool = False
    """take chunks in a fixed order, one outstanding per worker, so that a run repeats to the bit"""
    sync_check_frequency: int = 250
    """gradient steps between publications of the policy, at most one per chunk"""
    kl_threshold: float = 0.001
    max_policy_lag: int | None = 8
    compile: bool = False
    """compile the losses: gradient steps on a GPU take about 0.9 of the time"""
    save_replay: bool = False
    """whether checkpoints hold the replay buffer; if not, a resumed run fills a new one first"""


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


class PixelPolicy(EpsilonGreedyPolicy):
    """The policy that travels to the workers. It gets frames as they are, in uint8."""

    float_observations = False


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(FRAME_STACK, 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512), nn.ReLU(),
            nn.Linear(512, env.single_action_space.n),
        )  # fmt: skip

    def forward(self, x):
        return self.network(x / 255.0)


def make_policy(args, envs):
    """Return the Q-network, and the policy that acts by it, which travels to the workers."""
    q_network = QNetwork(envs)
    return q_network, PixelPolicy(q_network, args.end_e)


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


def td_loss(q_network, batch, td_target):
    """Return the loss of a batch, a scalar, and the Q-values of its `actions`, `(batch_size,)`."""
    old_val = q_network(batch["obs"]).gather(1, batch["actions"]).squeeze(1)
    return F.mse_loss(td_target, old_val), old_val


def update(optimizer, q_network, target_network, args, target_fn, loss_fn, batch):
    """Take a gradient step on a batch, by `compute_td_target` and `td_loss`. Return its loss, and
    the Q-values of its actions.
    """
    td_target = target_fn(
        target_network, batch["next_obs"], batch["rewards"], batch["dones"], args.gamma
    )
    loss, old_val = loss_fn(q_network, batch, td_target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"td_loss": loss.detach(), "q_values": old_val.detach()}


def frames_of(buffer_size, num_steps, chunk_size):
    """Return the number of frames that a buffer of `buffer_size` transitions needs.

    Chunks and episodes begin and end with whole stacks. There is some room for those of episodes.
    """
    return int(buffer_size * (1 + 2 * FRAME_STACK / num_steps)) + 2 * FRAME_STACK * chunk_size


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
        num_frames = frames_of(args.buffer_size, args.num_steps, args.chunk_size)
        rb = FrameReplayBuffer(args.buffer_size, num_frames, envs.single_observation_space, device)
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
    functions = compute_td_target, td_loss
    if args.compile:
        functions = [torch.compile(function, dynamic=False) for function in functions]
    # On a GPU, the Python code of `update` and the losses runs only a few times. Then the
    # GPU repeats what it did, and a print, a counter or an `if` in it has no effect any more. Use
    # `functools.partial` in place of `CudaGraph` for these.
    update_once = CudaGraph(update, optimizer, q_network, target_network, args, *functions)
    run.keep("rb", rb, args.save_replay)
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
            rb.add(chunk)

            # ALGO LOGIC: training. One gradient step per `train_frequency` environment steps after
            # `learning_starts`.
            due = max(run.global_step - count.warm_up, 0) // args.train_frequency
            checks = count.gradient_steps // args.sync_check_frequency
            while count.gradient_steps < due:
                losses = update_once(rb.sample(args.batch_size, device))
                count.gradient_steps += 1
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
