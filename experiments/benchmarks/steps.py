"""The time of one gradient step: a script's `update` on a minibatch, run in several ways.

    python -m experiments.benchmarks.steps

The ways are: eager; with the loss compiled, as with `--compile`; and on a GPU, each of these as one
CUDA graph, which is what the scripts do there. Copying the inputs to the buffers of a graph is part
of the time. Prints medians over the rounds in milliseconds, and the difference between the first
steps' losses and eager ones (0: the losses are the same).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from inspect import isfunction
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn, optim
from torch.distributions import Distribution

import dqn_clusterenv as dqn
import ppo_clusterenv as ppo
from clusterenv_utils import CudaGraph
from scripts import dqn_atari_clusterenv as dqn_atari
from scripts import ppo_atari_clusterenv as ppo_atari
from scripts import ppo_continuous_clusterenv as ppo_continuous
from scripts import ppo_lstm_clusterenv as ppo_lstm
from scripts import sac_clusterenv as sac

ARGS = SimpleNamespace(
    clip_coef=0.2, norm_adv=True, clip_vloss=True, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5,
    gamma=0.99,
)  # fmt: skip
FIRST = 12  # steps before the clock starts; a graph is captured during these
SCRIPTS = "ppo", "ppo_continuous", "ppo_lstm", "ppo_atari", "dqn", "dqn_atari", "sac"
COMPILED = "ppo", "ppo_continuous", "ppo_atari", "dqn_atari", "sac"  # scripts that have --compile


@dataclass
class Args:
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """the learner's device"""
    steps: int = 100
    """steps per round"""
    rounds: int = 5
    """rounds per way"""
    scripts: tuple[str, ...] = SCRIPTS
    """scripts to measure"""
    compile: bool = True
    """also measure compiled losses"""
    tf32: bool = True
    """multiply matrices on a GPU in TensorFloat-32, as the scripts do"""


@dataclass
class Learner:
    """A script's `update` and its arguments.

    The arguments are the optimizer, fixed arguments, and the tensors of a minibatch by name.
    """

    update: Callable[..., Any]
    optimizer: optim.Optimizer
    fixed: list[Any]  # arguments that stay the same, the network first
    inputs: dict[str, torch.Tensor]

    def step(self, inputs: dict[str, torch.Tensor]) -> Any:
        return self.update(self.optimizer, *self.fixed, inputs)

    def graph(self) -> CudaGraph:
        return CudaGraph(self.update, self.optimizer, *self.fixed)


def envs_of(shape: tuple[int, ...], actions: gym.Space) -> SimpleNamespace:
    space = gym.spaces.Box(-1, 1, shape, np.float32)
    return SimpleNamespace(single_observation_space=space, single_action_space=actions)


BUTTONS = gym.spaces.Discrete(4)
OF_PPO = "logprobs", "advantages", "returns", "values", "weights"
VECTORS, PIXELS = envs_of((8,), BUTTONS), envs_of((4, 84, 84), BUTTONS)
ROBOT = envs_of((17,), gym.spaces.Box(-1, 1, (6,), np.float32))


def make(name: str, device: str, compiled: bool = False) -> Learner:
    """Make a script's learner, always the same, with a minibatch of the script's default size."""
    torch.manual_seed(1)
    frames = torch.randint(256, (256, 4, 84, 84), dtype=torch.uint8)
    buttons = torch.randint(4, (512,))
    learner = {
        "ppo": lambda: make_ppo(ppo, ppo.Agent(VECTORS, 64), [torch.randn(512, 8), buttons]),
        "ppo_continuous": lambda: make_ppo(
            ppo_continuous,
            ppo_continuous.Agent(ROBOT, 64),
            [torch.randn(512, 17), torch.randn(512, 6)],
        ),
        "ppo_lstm": make_lstm,
        "ppo_atari": lambda: make_ppo(ppo_atari, ppo_atari.Agent(PIXELS), [frames, buttons[:256]]),
        "dqn": make_dqn,
        "dqn_atari": lambda: make_dqn_atari(frames[:32], buttons[:32, None]),
        "sac": lambda: make_sac(device),
    }[name]()
    for module in learner.fixed:
        if isinstance(module, nn.Module):
            module.to(device)
    if compiled:
        options = {"cpp.use_decompose_tanh": True} if device == "cpu" else {}
        learner.fixed = [
            torch.compile(part, dynamic=False, options=options) if isfunction(part) else part
            for part in learner.fixed
        ]
    learner.inputs = {name: value.to(device) for name, value in learner.inputs.items()}
    return learner


def adam(network: nn.Module) -> optim.Optimizer:
    return optim.Adam(network.parameters(), lr=2**-10, eps=1e-5, fused=True)


def make_ppo(script: ModuleType, agent: nn.Module, inputs: list[torch.Tensor]) -> Learner:
    inputs += [torch.randn(len(inputs[0])) for _ in range(5)]
    named = dict(zip(("obs", "actions", *OF_PPO), inputs, strict=True))
    return Learner(script.update, adam(agent), [agent, ARGS, script.ppo_loss], named)


def make_lstm(num_steps: int = 64, num_envs: int = 8, hidden_size: int = 64) -> Learner:
    agent = ppo_lstm.Agent(envs_of((2,), gym.spaces.Discrete(2)), hidden_size)
    shape = num_steps, num_envs
    inputs = [
        torch.zeros(num_envs, hidden_size), torch.zeros(num_envs, hidden_size),
        torch.randn(*shape, 2), torch.zeros(shape), torch.randint(2, shape),
        *(torch.randn(shape) for _ in range(5)),
    ]  # fmt: skip
    names = "hidden", "cell", "obs", "starts", "actions", *OF_PPO
    named = dict(zip(names, inputs, strict=True))
    return Learner(ppo_lstm.update, adam(agent), [agent, ARGS], named)


def make_dqn(batch_size: int = 128) -> Learner:
    network = dqn.QNetwork(VECTORS)
    actions = torch.randint(4, (batch_size, 1))
    obs, td_target = torch.randn(batch_size, 8), torch.randn(batch_size)
    inputs = {"obs": obs, "actions": actions, "td_target": td_target}
    return Learner(dqn.update, adam(network), [network], inputs)


def make_dqn_atari(obs: torch.Tensor, actions: torch.Tensor) -> Learner:
    network, target_network = dqn_atari.QNetwork(PIXELS), dqn_atari.QNetwork(PIXELS)
    inputs = {
        "obs": obs, "actions": actions, "next_obs": obs.flip(0), "rewards": torch.randn(len(obs)),
        "dones": torch.zeros(len(obs)),
    }  # fmt: skip
    fixed = [network, target_network, ARGS, dqn_atari.compute_td_target, dqn_atari.td_loss]
    return Learner(dqn_atari.update, adam(network), fixed, inputs)


def make_sac(device: str, batch_size: int = 256) -> Learner:
    """Make the learner of SAC's Q-networks."""
    qfs, targets = (nn.ModuleList([sac.SoftQNetwork(ROBOT) for _ in range(2)]) for _ in range(2))
    log_alpha, scale, bias = (torch.zeros(size, device=device) for size in ((), 6, 6))
    inputs = {
        "obs": torch.randn(batch_size, 17), "actions": torch.rand(batch_size, 6),
        "next_obs": torch.randn(batch_size, 17), "rewards": torch.randn(batch_size),
        "dones": torch.zeros(batch_size),
    }  # fmt: skip
    fixed = [qfs, targets, sac.Actor(ROBOT), log_alpha, (scale + 1, bias), ARGS, sac.q_loss]
    return Learner(sac.update_q, adam(qfs), fixed, inputs)


def ways(args: Args, name: str) -> Any:
    """Yield each way's name, the tensors of its minibatch, and a function that takes its step."""
    for compiled in (False, True) if args.compile and name in COMPILED else (False,):
        learner = make(name, args.device, compiled)
        yield "compiled" if compiled else "eager", learner.inputs, learner.step
        if args.device == "cuda":
            learner = make(name, args.device, compiled)
            way = "one graph, compiled" if compiled else "one graph"
            yield way, learner.inputs, learner.graph()


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss by which steps are compared: the loss of the values, or of DQN."""
    name = next(each for each in ("td_loss", "qf1_loss", "value_loss") if each in outputs)
    return outputs[name].clone()


def measure(args: Args, name: str) -> None:
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    medians, losses = {}, {}
    for way, inputs, step in ways(args, name):
        torch.manual_seed(2)
        start = time.perf_counter()
        losses[way] = torch.stack([loss_of(step(inputs)) for _ in range(FIRST)]).cpu()
        first, seconds = time.perf_counter() - start, []
        for _ in range(args.rounds):
            start = time.perf_counter()
            for _ in range(args.steps):
                step(inputs)
            synchronize()
            seconds.append((time.perf_counter() - start) / args.steps)
        medians[way] = statistics.median(seconds)
        apart = (losses[way] - losses["eager"]).abs().max().item()
        print(
            f"{name}, {way}: {medians[way] * 1000:.3f} ms, "
            f"{medians['eager'] / medians[way]:.2f} times eager; losses differ by {apart:.1e}; "
            f"first steps {first:.1f} s",
            flush=True,
        )


def main() -> None:
    args = tyro.cli(Args)
    Distribution.set_default_validate_args(False)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(where, "torch", torch.__version__, flush=True)
    for name in args.scripts:
        measure(args, name)


if __name__ == "__main__":
    main()
