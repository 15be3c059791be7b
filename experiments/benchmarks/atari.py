"""The needs of the Atari scripts' heads: time to measure divergences, and memory.

    python -m experiments.benchmarks.atari

`ppo_atari_clusterenv.py` runs for some iterations with real workers, first with CleanRL's 8
environments. This gives the share of an iteration in which the head measures the divergence of the
workers' policies, and the precision of that from so few states: the standard error of its mean over
them. Then the script runs with 64 environments, whose learner goes through a batch only once, which
does not change the memory. This gives the head's peak before the first rollout, with the first, and
in all. Last comes the size of a transition in `dqn_atari_clusterenv.py`: a buffer of its sizes is
allocated.
"""

import contextlib
import os
import resource
import runpy
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import tyro

from clusterenv_runtime.head.collect import Collector
from clusterenv_runtime.policy.base import Policy
from clusterenv_runtime.policy.versions import PolicyStore

from .scale import in_fresh_process
from .scripts import ROOT


class Enough(BaseException):
    """There have been as many iterations as wanted."""


@dataclass
class Args:
    env_id: str = "ALE/Pong-v5"
    """the game"""
    env_backend: str = "gymnasium"
    """gymnasium (ale-py), or envpool, whose games have other ids"""
    iterations: int = 6
    """that are measured, after one that is not"""
    workers: int = 2
    """processes that share the environments"""
    buffer_size: int = 100_000
    """transitions of the replay buffer"""
    flags: str = ""
    """further flags of the script with 8 environments, in one string"""
    timeout: float = 1200
    """seconds for each run"""


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def head(args, num_envs, iterations, flags, pipe):
    """Be the script's head for so many iterations. Send its seconds, those of measuring, the nats,
    and the peaks of memory.

    Nats are the divergence of each version in each state.
    """
    rollout, measure, kl = Collector.rollout, PolicyStore._measure, Policy.kl
    ends, measuring, nats, peaks = [], [0.0], [], []

    def timed_rollout(self, *arguments):
        if len(ends) > iterations:
            raise Enough
        peaks.append(peak_mb())
        measuring.append(0.0)
        result = rollout(self, *arguments)
        ends.append(time.perf_counter())
        peaks.append(peak_mb())
        return result

    def timed_measure(self, copies):
        start = time.perf_counter()
        measure(self, copies)
        measuring[-1] += time.perf_counter() - start

    def noted_kl(self, *params):
        nats.append(kl(self, *params))
        return nats[-1]

    Collector.rollout, PolicyStore._measure, Policy.kl = timed_rollout, timed_measure, noted_kl
    flags += [
        f"--env-id={args.env_id}",
        f"--env-backend={args.env_backend}",
        f"--num-workers={args.workers}",
    ]
    sys.argv = [
        "scripts/ppo_atari_clusterenv.py",
        *flags,
        f"--envs-per-worker={num_envs // args.workers}",
    ]
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w") as nowhere:
        os.chdir(directory)
        os.dup2(nowhere.fileno(), 1)
        with contextlib.suppress(Enough):
            runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
        os.chdir(ROOT)
    nats = [each.cpu().numpy() for each in nats[-iterations:]]
    pipe.send((np.diff(ends), measuring[2:], nats, (peaks[0], peaks[1], peak_mb())))


def main():
    args = tyro.cli(Args)
    flags = shlex.split(args.flags)
    seconds, measuring, nats, _ = in_fresh_process(
        head, args, 8, args.iterations, flags, timeout=args.timeout
    )
    share, states = sum(measuring) / sum(seconds), len(nats[-1])
    errors = [each.std() / each.mean() / states**0.5 for each in nats]
    print(
        f"8 environments x 128 steps: an iteration takes {np.median(seconds):.2f} s, of which "
        f"the divergence on"
    )
    print(
        f"{states} states {np.median(measuring) * 1e3:.0f} ms: {share:.1%} of all {len(seconds)} "
        f"iterations; its"
    )
    print(
        f"standard error is {np.median(errors):.1%} of it (median; {min(errors):.1%} to "
        f"{max(errors):.1%})"
    )

    *_, peaks = in_fresh_process(head, args, 64, 1, ["--update-epochs=1"], timeout=args.timeout)
    before, collected, learned = (f"{peak:,.0f} MB" for peak in peaks)
    print(
        f"64 environments x 128 steps: the head's peak is {before} before the first rollout, "
        f"{collected} with it,"
    )
    print(f"and {learned} with a pass of learning")

    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    script = runpy.run_path(str(ROOT / "scripts/dqn_atari_clusterenv.py"))
    chunk = script["Args"](exp_name="atari")
    num_frames = int(args.buffer_size * (1 + 2 * 4 / chunk.num_steps))
    buffer = script["ReplayBuffer"](args.buffer_size, num_frames, space)
    size = (
        sum(leaf.nbytes for leaf in vars(buffer).values() if hasattr(leaf, "nbytes"))
        / args.buffer_size
    )
    whole = 2 * np.prod(space.shape) + 16
    print(
        f"replay buffer, chunks of {chunk.num_steps} steps: {size:,.0f} bytes a transition; "
        f"whole stacks: {whole:,}"
    )


if __name__ == "__main__":
    main()
