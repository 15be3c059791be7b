"""The time that rounded differences cost and the bytes that they save, for 20 kB to 100 MB.

    python -m experiments.benchmarks.differences

Publishes a policy again and again, each time with slightly changed weights. Workers that all hold
the same weights pull each version, through the head's and the worker's own code, without a network.
Prints medians: the milliseconds to publish, to prepare the response to the first worker and to each
other worker, and to load the weights on a worker; and the bytes of a pull, compared with those of
all weights in float32. The first pull, of all weights in 8 bits each, is left out. Takes a minute,
and 2 GB of memory.
"""

import statistics
import time
from dataclasses import dataclass

import cloudpickle
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from torch import nn

from clusterenv_runtime import CategoricalPolicy
from clusterenv_runtime.policy.actor import Actor
from clusterenv_runtime.policy.tensors import pickled
from clusterenv_runtime.policy.versions import PolicyCopy, PolicyStore


@dataclass
class Args:
    widths: tuple[int, ...] = (64, 500, 5000)
    """widths of the two hidden layers; by default for 20 kB, 1 MB and 100 MB of weights"""
    num_workers: int = 100
    """workers that pull"""
    versions: int = 5
    """published versions, each pulled by all workers"""
    cuda: bool = False
    """if toggled, the learner's policy is on the GPU"""


def measure(width, rounds, args):
    """Return the medians of the table's columns: milliseconds, and the bytes of one pull."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )
    policy = CategoricalPolicy(net.to("cuda" if args.cuda else "cpu"))
    copies, actor = [PolicyCopy() for _ in range(args.num_workers)], Actor()
    store = PolicyStore(copies, rounds)
    store.act_in(Box(-1, 1, (8,), np.float32), Discrete(4))
    actor.load_structure(cloudpickle.loads(pickled(policy)))
    rows = []
    for _ in range(1 + args.versions):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        times = [time.perf_counter()]
        store.publish(policy)
        times.append(time.perf_counter())
        message = store.pull(copies[0], copies[0].held)
        times.append(time.perf_counter())
        for copy in copies[1:]:
            store.pull(copy, copy.held)
        times.append(time.perf_counter())
        message.buffers = [np.copy(buffer) for buffer in message.buffers]  # as received
        start = time.perf_counter()
        actor.load_weights(message)
        publish, first, others = np.diff(times) * 1000
        load = (time.perf_counter() - start) * 1000
        rows.append(
            (
                publish,
                first,
                others / (args.num_workers - 1),
                load,
                sum(each.nbytes for each in message.buffers),
            )
        )
    return [statistics.median(column) for column in zip(*rows[1:], strict=True)]


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    print(
        "| policy | weights | publish, ms | first pull, ms | each other, ms | worker loads, ms | "
        "bytes of a pull |"
    )
    print("|---" * 7 + "|")
    for width in args.widths:
        for rounds in (False, True):
            *times, size = measure(width, rounds, args)
            whole = 4 * (8 * width + width + width * width + width + 4 * width + 4)
            cells = " | ".join(f"{value:.3g}" for value in times)
            kind = "difference" if rounds else "float32"
            print(
                f"| {whole / 1e6:.3g} MB | {kind} | {cells} | {size:,} ({whole / size:.1f} times "
                f"fewer) |",
                flush=True,
            )
