"""SAC: `sac_clusterenv.py` compared with CleanRL's script, and with its own gradient steps alone.

    python -m experiments.benchmarks.sac --cleanrl path/to/cleanrl/cleanrl/sac_continuous_action.py

CleanRL is not part of this repository: clone https://github.com/vwxyzjn/cleanrl and pass the path
of its script. It runs in this Python, with torch's default threads and with one thread, and the
faster run counts. Our script runs with its default. All runs take turns, and have batches of 256
and the same `--learning-starts`. Counts the environment steps per second once learning has started:
with one gradient step for each environment step, and for our script also with one for eight.

The floor is the fastest way to take the same gradient steps in a loop on data in memory. The ways
are: as the script does, with compiled losses, with the whole update compiled, with target networks
that follow as one flat tensor, and with torch's other Adam. Prints ratios, and medians over the
rounds.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import tyro
from torch import nn, optim
from torch.distributions import Distribution

from scripts import sac_clusterenv as sac

from .scripts import ROOT, train
from .steps import ROBOT

BATCH_SIZE, NUM_BATCHES = 256, 16
WAYS = "as in the script", "compiled losses", "compiled update", "flat targets", "Adam not fused"


@dataclass
class Args:
    cleanrl: Path | None = None
    """path of CleanRL's sac_continuous_action.py; by default only the floor is compared"""
    env_id: str = "HalfCheetah-v5"
    """the environment"""
    total_timesteps: int = 5000
    """environment steps of each run"""
    learning_starts: int = 1000
    """environment steps before learning starts"""
    ways: tuple[str, ...] = WAYS
    """ways to take the floor's gradient steps"""
    threads: tuple[int, ...] = (1, 2)
    """numbers of threads for the floor's gradient steps"""
    steps: int = 200
    """gradient steps of the floor per round"""
    flags: str = ""
    """further flags of sac_clusterenv.py, in one string"""
    one_thread: bool = False
    """run CleanRL's script with one thread only, if that is known to be faster"""
    rounds: int = 3
    """rounds; each measures everything in turn"""


def learner(way: str) -> Callable[[int], None]:
    """Return a function that takes the gradient step of a given number, on data in memory."""
    actor, (*qfs, qf1_target, qf2_target) = (
        sac.Actor(ROBOT),
        [sac.SoftQNetwork(ROBOT) for _ in "1234"],
    )
    log_alpha = nn.Parameter(torch.zeros(()))
    targets = [qf1_target, qf2_target]
    flat = [flattened(qfs), flattened(targets)] if way == "flat targets" else []
    fused = way != WAYS[4]
    q_adam = optim.Adam([p for qf in qfs for p in qf.parameters()], lr=1e-3, fused=fused)
    groups = [{"params": list(actor.parameters()), "lr": 3e-4}, {"params": [log_alpha], "lr": 1e-3}]
    adam = optim.Adam(groups, fused=fused)
    args = SimpleNamespace(gamma=0.99, autotune=True)
    bounds = torch.ones(6), torch.zeros(6)
    options = {"cpp.use_decompose_tanh": True}

    def maybe(function, when):
        return torch.compile(function, dynamic=False, options=options) if way == when else function

    update_q, update_actor = (maybe(each, WAYS[2]) for each in (sac.update_q, sac.update_actor))
    q_loss, pi_loss = (maybe(each, WAYS[1]) for each in (sac.q_loss, sac.pi_loss))
    shape = NUM_BATCHES, BATCH_SIZE
    data = {
        "obs": torch.randn(*shape, 17), "actions": torch.rand(*shape, 6),
        "next_obs": torch.randn(*shape, 17), "rewards": torch.randn(shape),
        "dones": torch.zeros(shape),
    }  # fmt: skip

    def step(number):
        batch = {name: part[number % NUM_BATCHES] for name, part in data.items()}
        update_q(q_adam, qfs, targets, actor, log_alpha, bounds, args, q_loss, batch)
        for _ in range(2 if number % 2 == 0 else 0):
            update_actor(adam, qfs, actor, log_alpha, bounds, args, pi_loss, {"obs": batch["obs"]})
        if flat:
            flat[1].lerp_(flat[0], 0.005)
        else:
            for target, qf in zip(targets, qfs, strict=True):
                for slow, fast in zip(target.parameters(), qf.parameters(), strict=True):
                    slow.data.lerp_(fast.data, 0.005)

    return step


def flattened(networks: list[nn.Module]) -> torch.Tensor:
    """Return the networks' parameters as one tensor. The parameters become views of it."""
    parameters = [parameter for network in networks for parameter in network.parameters()]
    flat = torch.cat([parameter.data.reshape(-1) for parameter in parameters])
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view(parameter.shape)
    return flat


def rate(step: Callable[[int], None], threads: int, number: int) -> float:
    """Return the gradient steps per second."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    for each in range(number):
        step(each)
    return number / (time.perf_counter() - start)


def learning_rate(args: Args, script: Path, *flags: str, **variables: str) -> float:
    """Return a script's environment steps per second once it learns."""
    common = ["--env-id", args.env_id, "--total-timesteps", str(args.total_timesteps)]
    common += ["--learning-starts", str(args.learning_starts)]
    scalars, _ = train(script, *flags, *common, **variables)
    events = [each for each in scalars("charts/SPS") if each.step > 1.1 * args.learning_starts]
    first, last = events[0], events[-1]
    return (last.step - first.step) / (last.wall_time - first.wall_time)


def main() -> None:
    args = tyro.cli(Args)
    Distribution.set_default_validate_args(False)
    learners = {way: learner(way) for way in args.ways}
    for step in learners.values():
        rate(step, 1, 4)  # compile before the clock starts
    ours = [ROOT / "scripts/sac_clusterenv.py", "--eval-episodes", "0", *args.flags.split()]
    theirs = (
        [] if args.cleanrl is None else [{"OMP_NUM_THREADS": "1"}] + [{}] * (not args.one_thread)
    )
    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        floors = {
            f"{way}, {threads} threads": rate(step, threads, args.steps)
            for way, step in learners.items()
            for threads in args.threads
        }
        floor = max(floors.values())
        one, eighth = (learning_rate(args, *ours, "--utd", utd) for utd in ("1", "0.125"))
        ratios = {f"floor: {way}": value / floor for way, value in floors.items()}
        ratios["--utd 1, of the floor"] = one / floor
        wrapper = ROOT / "experiments/benchmarks/cleanrl.py"
        cleanrl = [
            learning_rate(args, wrapper, str(args.cleanrl.resolve()), **variables)
            for variables in theirs
        ]
        if cleanrl:
            ratios["--utd 1, times CleanRL"] = one / max(cleanrl)
            ratios["--utd 0.125, times CleanRL"] = eighth / max(cleanrl)
        for name, ratio in ratios.items():
            found.setdefault(name, []).append(ratio)
        speeds = ", ".join(f"{value:,.1f}" for value in (floor, one, eighth, *cleanrl))
        print(f"floor, --utd 1, --utd 0.125, CleanRL: {speeds} steps/s", flush=True)
    print(f"medians ({args.env_id}, {os.cpu_count()} cores, torch {torch.__version__}):")
    for name, values in found.items():
        print(f"{name}: {statistics.median(values):.2f}")


if __name__ == "__main__":
    main()
