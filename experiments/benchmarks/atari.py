"""The costs of divergences and of memory for the heads of the Atari scripts.

    python -m experiments.benchmarks.atari

First, `ppo_atari_clusterenv.py` runs for a few iterations with real workers and CleanRL's 8
environments. This run gives the share of an iteration that the head spends measuring the divergence
of the workers' policies. It also gives the precision of that divergence, which is a mean over few
states: the standard error of the mean.

Then the script runs with 64 environments. Its learner passes over each batch only once, which does
not change the memory. This run gives the head's peak memory before the first rollout, with the
first rollout, and in all.

Finally, the benchmark allocates a replay buffer of `dqn_atari_clusterenv.py`, and gives the size of
a transition.
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

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime.policy.base import Policy
from clusterenv_runtime.policy.versions import PolicyStore

from .scale import in_fresh_process
from .scripts import ROOT


class Enough(BaseException):
    """An exception that ends the script after the wanted number of iterations."""


@dataclass
class Args:
    env_id: str = "ALE/Pong-v5"
    """the Atari game"""
    iterations: int = 6
    """measured iterations, after one that is not measured"""
    workers: int = 2
    """worker processes that share the environments"""
    buffer_size: int = 100_000
    """capacity of the replay buffer, in transitions"""
    flags: str = ""
    """further flags of the run with 8 environments, in one string"""
    timeout: float = 1200
    """time limit of each run, in seconds"""


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def head(args, num_envs, iterations, flags, pipe):
    """Run the script's head for ``iterations`` measured iterations, and send the measurements.

    The measurements are the seconds of each iteration, the seconds spent measuring divergences, the
    divergences in nats of each version in each state, and the peaks of memory in MB.
    """
    rollout, measure, kl = ClusterEnv.rollout, PolicyStore._measure, Policy.kl
    ends, measuring, nats, peaks = [], [0.0], [], []

    def timed_rollout(self, *arguments, **options):
        if len(ends) > iterations:
            raise Enough
        peaks.append(peak_mb())
        measuring.append(0.0)
        result = rollout(self, *arguments, **options)
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

    ClusterEnv.rollout, PolicyStore._measure, Policy.kl = timed_rollout, timed_measure, noted_kl
    flags += [
        f"--env-id={args.env_id}",
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
