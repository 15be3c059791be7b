# SAC on environments in worker processes: CleanRL's sac_continuous_action.py, on a stream of chunks
# /// script
# requires-python = ">=3.11"
# dependencies = ["clusterenv-runtime[scripts]"]
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
from torch.distributions import Normal

from clusterenv_runtime import ClusterEnv, SquashedGaussianPolicy
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
    env_id: str = "Hopper-v5"
    """the id of the environment"""
    total_timesteps: int = 1000000
    """total timesteps of the experiments"""
    buffer_size: int = 1000000
    """the replay memory buffer size"""
    gamma: float = 0.99
    """the discount factor gamma"""
    tau: float = 0.005
    """target smoothing coefficient"""
    batch_size: int = 256
    """the batch size of sample from the replay memory"""
    learning_starts: int = 5000
    """timestep to start learning"""
    policy_lr: float = 3e-4
    """the learning rate of the policy network optimizer"""
    q_lr: float = 1e-3
    """the learning rate of the Q network optimizer"""
    policy_frequency: int = 2
    """the frequency of training policy (delayed), in gradient steps"""
    target_network_frequency: int = 1
    """the frequency of updates for the target networks, in gradient steps"""
    alpha: float = 0.2
    """entropy regularization coefficient"""
    autotune: bool = True
    """automatic tuning of the entropy coefficient"""
    utd: float = 1.0
    """gradient steps per environment step, for any number of workers"""

    # Distribution specific arguments
    torch_threads: int = 2
    """the number of torch threads in the learner; runs that share the machine do better with 1"""
    envs_per_worker: int = 1
    num_steps: int = 16
    """the number of steps in each environment per chunk that a worker sends"""
    outstanding: int = 2
    """chunks each worker may be ahead of the learner; with 1, it waits while a chunk travels"""
    deterministic: bool = False
    """take chunks in a fixed order, one outstanding per worker, so that a run repeats to the bit"""
    sync_check_frequency: int = 20
    """gradient steps between publications of the policy, at most one per chunk"""
    kl_threshold: float = 0.1
    max_policy_lag: int | None = 100
    save_replay: bool = True
    """whether checkpoints hold the replay buffer; if not, a resumed run fills a new one first"""
    compile: bool = False
    """compile the losses, which takes up to half a minute; a few percent slower on a CPU"""


def make_env(env_id, idx, capture_video, run_name, **kwargs):
    def thunk():
        if capture_video and idx == 0:
            env = gym.make(env_id, render_mode="rgb_array", **kwargs)
            env = gym.wrappers.RecordVideo(env, f"videos/{run_name}")
        else:
            env = gym.make(env_id, **kwargs)
        return env

    return thunk


class SoftQNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        num_inputs = np.array(env.single_observation_space.shape).prod()
        num_actions = np.prod(env.single_action_space.shape)
        self.fc1 = nn.Linear(num_inputs + num_actions, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 1)

    def forward(self, x, a):
        x = torch.cat([x, a.float()], -1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x).squeeze(-1)


LOG_STD_MAX = 2
LOG_STD_MIN = -5


class Actor(nn.Module):
    def __init__(self, env):
        super().__init__()
        num_inputs = np.array(env.single_observation_space.shape).prod()
        num_actions = np.prod(env.single_action_space.shape)
        self.fc1 = nn.Linear(num_inputs, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_mean = nn.Linear(256, num_actions)
        self.fc_logstd = nn.Linear(256, num_actions)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        log_std = torch.tanh(self.fc_logstd(x))
        return self.fc_mean(x), LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)


def make_policy(args, envs):
    """Return the actor that learns, and the policy that acts, which travels to the workers."""
    actor = Actor(envs)
    return actor, SquashedGaussianPolicy(actor, envs.single_action_space)


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
        "obs": chunk.observations, "actions": chunk.actions, "next_obs": next_obs,
        "rewards": chunk.rewards, "dones": chunk.terminations,  # a truncation is not a done
    }  # fmt: skip
    return {
        name: values.reshape(-1, *values.shape[2:]).astype(np.float32)
        for name, values in transitions.items()
    }


def get_action(actor, obs, scale, bias):
    """Return actions as the environment takes them, and their log-probabilities, by the
    reparameterization trick.
    """
    mean, log_std = actor(obs)
    normal = Normal(mean, log_std.exp())
    x_t = normal.rsample()
    y_t = torch.tanh(x_t)
    log_prob = normal.log_prob(x_t)
    # Enforcing action bound
    log_prob -= torch.log(scale * (1 - y_t.pow(2)) + 1e-6)
    return y_t * scale + bias, log_prob.sum(-1)


def q_loss(qfs, targets, actor, log_alpha, bounds, gamma, batch):
    """Return the loss of both Q-networks on a batch, a scalar, and the scalars to log."""
    with torch.no_grad():
        next_obs, alpha = batch["next_obs"], log_alpha.exp()
        next_actions, next_log_pi = get_action(actor, next_obs, *bounds)
        qf1_next_target, qf2_next_target = (target(next_obs, next_actions) for target in targets)
        min_qf_next_target = torch.min(qf1_next_target, qf2_next_target) - alpha * next_log_pi
        next_q_value = batch["rewards"] + (1 - batch["dones"]) * gamma * min_qf_next_target
    qf1_a_values, qf2_a_values = (qf(batch["obs"], batch["actions"]) for qf in qfs)
    qf1_loss = F.mse_loss(qf1_a_values, next_q_value)
    qf2_loss = F.mse_loss(qf2_a_values, next_q_value)
    return qf1_loss + qf2_loss, {
        "qf1_values": qf1_a_values.mean().detach(), "qf2_values": qf2_a_values.mean().detach(),
        "qf1_loss": qf1_loss.detach(), "qf2_loss": qf2_loss.detach(),
    }  # fmt: skip


def update_q(optimizer, qfs, targets, actor, log_alpha, bounds, args, loss_fn, batch):
    """Take a gradient step of both Q-networks on a batch, by `q_loss`. Return scalars to log."""
    loss, losses = loss_fn(qfs, targets, actor, log_alpha, bounds, args.gamma, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return losses


def pi_loss(qfs, actor, log_alpha, bounds, obs):
    """Return the loss of actions that the actor draws, a scalar, and their log-probabilities."""
    pi, log_pi = get_action(actor, obs, *bounds)
    qf1_pi, qf2_pi = (qf(obs, pi) for qf in qfs)
    min_qf_pi = torch.min(qf1_pi, qf2_pi)
    return (log_alpha.exp().detach() * log_pi - min_qf_pi).mean(), log_pi.detach()


def update_actor(optimizer, qfs, actor, log_alpha, bounds, args, loss_fn, batch):
    """Take a gradient step of the actor, by `pi_loss`, and with `--autotune` also of alpha. Return
    the scalars to log.

    `optimizer` has the parameters of both, in two groups.
    """
    loss, log_pi = loss_fn(qfs, actor, log_alpha, bounds, batch["obs"])
    optimizer.zero_grad()
    loss.backward(inputs=list(actor.parameters()))  # the Q-networks need no gradients
    if args.autotune:
        target_entropy = -bounds[0].numel()
        (-log_alpha.exp() * (log_pi + target_entropy)).mean().backward()
    optimizer.step()
    return {"actor_loss": loss.detach(), "alpha": log_alpha.exp().detach().clone()}


if __name__ == "__main__":
    run = Run(parse(Args), fixed=("env_id", "num_steps", "buffer_size", "learning_starts", "utd"))
    args = run.args  # with --resume, the checkpoint's flags, except for flags given now
    args.chunk_size = int(args.num_envs // args.num_workers * args.num_steps)
    args.num_iterations = args.total_timesteps // args.chunk_size
    check(args.num_envs % args.num_workers == 0, "--num-workers must divide --num-envs")
    room = args.buffer_size >= args.chunk_size
    check(room, f"--buffer-size must be at least a chunk of {args.chunk_size} steps")
    run.begin()

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
        vectors = continuous and len(space.shape) == 1 and space.is_bounded()
        check(vectors, f"actions must be bounded continuous vectors, not {space}")
        shape = envs.single_observation_space.shape or ()
        check(len(shape) == 1, f"observations must be vectors, not {shape}")
    run.keep("envs", envs)
    actor, policy = make_policy(args, envs)
    run.keep("actor", actor.to(device))
    qfs = run.keep("qfs", nn.ModuleList([SoftQNetwork(envs) for _ in range(2)]).to(device))
    targets = nn.ModuleList([SoftQNetwork(envs) for _ in range(2)]).to(device)
    targets.load_state_dict(qfs.state_dict())
    run.keep("targets", targets)
    bounds = policy.scale.to(device), policy.bias.to(device)
    q_optimizer = run.keep("q_optimizer", optim.Adam(qfs.parameters(), lr=args.q_lr, fused=True))
    # Automatic entropy tuning
    log_alpha = nn.Parameter(torch.zeros((), device=device))
    run.keep("entropy", nn.ParameterDict({"log_alpha": log_alpha}))
    groups = [{"params": actor.parameters(), "lr": args.policy_lr}]
    if args.autotune:
        groups.append({"params": [log_alpha], "lr": args.q_lr})
    actor_optimizer = run.keep("actor_optimizer", optim.Adam(groups, fused=True))
    # The learning rates and alpha may differ from the checkpoint's.
    q_optimizer.param_groups[0]["lr"] = args.q_lr
    for group, given in zip(actor_optimizer.param_groups, groups, strict=True):
        group["lr"] = given["lr"]
    if not args.autotune:
        log_alpha.data.fill_(args.alpha).log_()
    common = actor, log_alpha, bounds, args
    loss_fns = q_loss, pi_loss
    if args.compile:
        options = {"cpp.use_decompose_tanh": True}  # a tanh that is several times as fast on CPUs
        loss_fns = [torch.compile(each, dynamic=False, options=options) for each in loss_fns]
    q_loss_fn, pi_loss_fn = loss_fns
    # On a GPU, the Python code of the updates and losses runs only a few times. Then the
    # GPU repeats what it did, and a print, a counter or an `if` in it has no effect any more. Use
    # `functools.partial` in place of `CudaGraph` for these.
    update_q_once = CudaGraph(update_q, q_optimizer, qfs, targets, *common, q_loss_fn)
    update_actor_once = CudaGraph(update_actor, actor_optimizer, qfs, *common, pi_loss_fn)
    rb = run.keep("rb", ReplayBuffer(args.buffer_size, device), args.save_replay)
    # warm_up: the environment steps before learning
    count = run.keep("count", Counters(gradient_steps=0, warm_up=args.learning_starts))
    if run.global_step and not rb.inserted:
        # After another `learning_starts` steps, gradient steps go on from their old number.
        learned = int(count.gradient_steps / args.utd)
        count.warm_up = run.global_step + args.learning_starts - learned
        print(f"no replay buffer in the checkpoint: collecting {args.learning_starts} steps first")

    def explore(step):
        policy.uniform = float(step < args.learning_starts)

    envs.publish(policy)  # the workers load it before they reset the environments
    envs.reset(seed=args.seed + run.global_step)

    with run.training(envs, actor, policy):
        losses = {}
        # Take a chunk and learn, while its worker goes on.
        for chunk in run.stream(envs, explore):
            chunk.actions = policy.to_env(torch.from_numpy(chunk.actions)).numpy()
            rb.add(make_transitions(chunk))

            # ALGO LOGIC: training. `utd` gradient steps per environment step after
            # `learning_starts`.
            due = round(max(run.global_step - count.warm_up, 0) * args.utd)
            checks = count.gradient_steps // args.sync_check_frequency
            number = max(due - count.gradient_steps, 0)  # a run without its buffer collects first
            data = rb.sample(number, args.batch_size, device)
            for step in range(number):
                batch = {name: part[step] for name, part in data.items()}
                losses |= update_q_once(batch)
                count.gradient_steps += 1
                if count.gradient_steps % args.policy_frequency == 0:
                    for _ in range(args.policy_frequency):  # compensate for the delay
                        losses |= update_actor_once({"obs": batch["obs"]})
                # update the target networks
                if count.gradient_steps % args.target_network_frequency == 0:
                    parameters = targets.parameters(), qfs.parameters()
                    for target_param, q_param in zip(*parameters, strict=True):
                        target_param.data.lerp_(q_param.data, args.tau)
            # Workers pull between two chunks, so only the last of several publications would count.
            if count.gradient_steps // args.sync_check_frequency > checks:
                envs.publish(policy)

            if run.report_is_due():
                # TRY NOT TO MODIFY: record rewards for plotting purposes
                run.report(chunk, versions=envs.policy_version)
                run.log("losses", losses)

        policy.uniform = 0.0
        returns = evaluate(args, envs, policy)
        run.finish(returns, gradient_steps=count.gradient_steps, transitions_inserted=rb.inserted)
