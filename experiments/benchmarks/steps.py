"""How long one step of a learner takes (a minibatch's loss, backward, clipping and Adam), by how it
is run.

    python -m experiments.benchmarks.steps

The ways are: eager; with the loss compiled, as `--compile` does it; and, on a GPU, the whole step
as one CUDA graph, with the loss eager or compiled. A graph's inputs are copied to its buffers,
which is part of the time. Prints medians over the rounds in milliseconds, and the difference
between the losses of the graph's first steps and eager ones (0: the same losses).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn, optim
from torch.distributions import Distribution

import dqn_clusterenv as dqn
import ppo_clusterenv as ppo
import scripts.dqn_atari_clusterenv as dqn_atari
import scripts.ppo_atari_clusterenv as ppo_atari
import scripts.ppo_continuous_clusterenv as ppo_continuous
import scripts.ppo_lstm_clusterenv as ppo_lstm

LOSS = SimpleNamespace(clip_coef=0.2, norm_adv=True, clip_vloss=True, ent_coef=0.01, vf_coef=0.5)
WARM_UP = 11  # steps before a capture, and before the clock starts


@dataclass
class Args:
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """where the learner is"""
    steps: int = 100
    """steps of a round"""
    rounds: int = 5
    """rounds of each way"""
    scripts: tuple[str, ...] = (
        "ppo",
        "ppo_continuous",
        "ppo_lstm",
        "ppo_atari",
        "dqn",
        "dqn_atari",
    )
    """what is measured"""
    compile: bool = True
    """measure compiled losses, too"""


@dataclass
class Learner:
    """A script's network, the inputs of its loss, `(minibatch_size, ...)` each, and its loss as a
    function of them.
    """

    network: nn.Module
    inputs: list[torch.Tensor]
    loss: Callable
    max_grad_norm: float | None = 0.5


def envs_of(shape, actions):
    space = gym.spaces.Box(-1, 1, shape, np.float32)
    return SimpleNamespace(single_observation_space=space, single_action_space=actions)


def ppo_learner(script, agent, obs, actions):
    rest = [torch.randn(len(obs)) for _ in range(5)]
    return Learner(
        agent, [obs, actions, *rest], lambda agent, *batch: script.ppo_loss(agent, LOSS, *batch)[0]
    )


def lstm_learner(num_steps=64, num_envs=8, hidden_size=64):
    agent = ppo_lstm.Agent(envs_of((2,), gym.spaces.Discrete(2)), hidden_size)
    floats = [torch.randn(num_steps, num_envs) for _ in range(5)]
    states = [torch.zeros(num_envs, hidden_size) for _ in range(2)]
    actions = torch.randint(2, (num_steps, num_envs))
    inputs = [
        torch.randn(num_steps, num_envs, 2),
        torch.zeros(num_steps, num_envs),
        actions,
        *floats,
        *states,
    ]
    return Learner(
        agent,
        inputs,
        lambda agent, *batch: ppo_lstm.ppo_loss(agent, LOSS, *batch[:-2], batch[-2:])[0],
    )


def dqn_learner(script, obs):
    envs = envs_of(obs.shape[1:], gym.spaces.Discrete(4))
    networks = nn.ModuleList([script.QNetwork(envs), script.QNetwork(envs)])
    inputs = [
        obs,
        torch.randint(4, (len(obs), 1)),
        obs.clone(),
        torch.randn(len(obs)),
        torch.zeros(len(obs)),
    ]

    def loss(networks, obs, actions, next_obs, rewards, dones):
        q_network, target_network = networks
        td_target = script.compute_td_target(target_network, next_obs, rewards, dones, 0.99)
        return script.td_loss(q_network, obs, actions, td_target)[0]

    return Learner(networks, inputs, loss, max_grad_norm=None)


def make(name):
    """Make a script's learner, always the same, with minibatches of the script's default size."""
    torch.manual_seed(1)
    vectors, pixels = (
        envs_of((8,), gym.spaces.Discrete(4)),
        envs_of((4, 84, 84), gym.spaces.Discrete(4)),
    )
    robot = envs_of((17,), gym.spaces.Box(-1, 1, (6,), np.float32))
    frames = torch.randint(256, (256, 4, 84, 84), dtype=torch.uint8)
    return {
        "ppo": lambda: ppo_learner(
            ppo, ppo.Agent(vectors, 64), torch.randn(512, 8), torch.randint(4, (512,))
        ),
        "ppo_continuous": lambda: ppo_learner(
            ppo_continuous,
            ppo_continuous.Agent(robot, 64),
            torch.randn(512, 17),
            torch.randn(512, 6),
        ),
        "ppo_lstm": lstm_learner,
        "ppo_atari": lambda: ppo_learner(
            ppo_atari, ppo_atari.Agent(pixels), frames, torch.randint(4, (256,))
        ),
        "dqn": lambda: dqn_learner(dqn, torch.randn(128, 4)),
        "dqn_atari": lambda: dqn_learner(dqn_atari, frames[:32]),
    }[name]()


def step_of(learner, loss_fn, capturable):
    """Return a function that takes one step, and returns its loss."""
    parameters = [p for p in learner.network.parameters() if p.requires_grad]
    lr = torch.tensor(1e-3, device=parameters[0].device) if capturable else 1e-3
    optimizer = optim.Adam(parameters, lr=lr, eps=1e-5, fused=True, capturable=capturable)

    def step():
        loss = loss_fn(learner.network, *learner.inputs)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if learner.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, learner.max_grad_norm)
        optimizer.step()
        return loss.detach()

    return step


def graph_of(step, inputs):
    """Capture a step as a CUDA graph; return a function that replays it on copies of the inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    fresh = [tensor.clone() for tensor in inputs]

    def replay():
        for tensor, new in zip(inputs, fresh, strict=True):
            tensor.copy_(new)
        graph.replay()
        return loss.clone()

    replay.step = step  # the graph reads and writes its network and optimizer, wherever they are
    return replay


def ways(args, name):
    """Yield each way's name, and a function that takes one step. The capture comes before any
    compiling.
    """
    device = torch.device(args.device)

    def learner():
        learner = make(name)
        learner.network.to(device)
        learner.inputs = [tensor.to(device) for tensor in learner.inputs]
        return learner

    def compiled(loss, **options):
        return torch.compile(loss, dynamic=False, options=options)

    # The loop of ppo_lstm takes minutes to compile.
    on_gpu, compiles = (
        device.type == "cuda",
        args.compile and name != "ppo_lstm",
    )
    new = learner()
    yield "eager", step_of(new, new.loss, capturable=False)
    if on_gpu:
        new = learner()
        yield "graph", graph_of(step_of(new, new.loss, capturable=True), new.inputs)
        if compiles:
            new = learner()
            yield (
                "graph, compiled",
                graph_of(step_of(new, compiled(new.loss), capturable=True), new.inputs),
            )
    if compiles:
        new = learner()
        options = {"triton.cudagraphs": True} if on_gpu else {"cpp.use_decompose_tanh": True}
        yield "compiled", step_of(new, compiled(new.loss, **options), capturable=False)


def measure(args, name):
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    found, losses = {}, {}
    for way, step in ways(args, name):
        synchronize()
        start = time.perf_counter()
        losses[way] = torch.stack([step().clone() for _ in range(WARM_UP)]).cpu()
        if "graph" not in way:  # a capture has taken as many steps already
            losses[way] = torch.stack([step().clone() for _ in range(WARM_UP)]).cpu()
        first, seconds = time.perf_counter() - start, []
        for _ in range(args.rounds):
            start = time.perf_counter()
            for _ in range(args.steps):
                step()
            synchronize()
            seconds.append((time.perf_counter() - start) / args.steps)
        found[way] = statistics.median(seconds)
        apart = (losses[way] - losses["eager"]).abs().max().item()
        print(
            f"{name}, {way}: {found[way] * 1000:.3f} ms, {found['eager'] / found[way]:.2f} times "
            f"eager; losses differ "
            f"by {apart:.1e}; first steps {first:.1f} s",
            flush=True,
        )


def main():
    args = tyro.cli(Args)
    Distribution.set_default_validate_args(False)
    torch.set_num_threads(1)
    print(
        torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch",
        torch.__version__,
        flush=True,
    )
    for name in args.scripts:
        measure(args, name)


if __name__ == "__main__":
    main()
