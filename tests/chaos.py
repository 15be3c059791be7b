"""Train while workers are killed, stopped and cut off, and check every transition that arrives.

    python -m tests.chaos --script ppo_clusterenv.py --faults 100  # as root also cuts links

In about 6 minutes, this runs the script on CartPole-v1 with 4 workers, and hits a random worker
every 3 seconds: in turn by ``kill -9``, by SIGSTOP, and by taking its link down. If the workers
cannot have their own network namespaces, the process that forks them is killed instead. The head's
process computes each transition a second time from CartPole's equations. Each chunk must begin
where the previous chunk of its rows ended, or in a new episode if their worker was replaced in
between. So no transition is delivered twice, in part, or not at all.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from clusterenv_runtime import ClusterEnv, LocalLauncher
from experiments.figures.network import Network, why_no_namespaces

from .scripts import ROOT, environment, fork_server_of, workers_of

FLAGS = {
    "ppo_clusterenv.py": (
        "--envs-per-worker 16 --num-steps 32 --update-epochs 8 --learning-rate 1e-3"
    ),
    "dqn_clusterenv.py": "--envs-per-worker 4",
}
CUT_SECONDS = 6.0  # longer than the worker timeout


# The head's process.


def cartpole(observations, actions):
    """Return the next observations by CartPole-v1's equations, in float64.

    The observations are float32 of the shape ``(..., 4)``, the actions have the shape ``(...)``.
    """
    x, x_dot, theta, theta_dot = np.moveaxis(observations.astype(np.float64), -1, 0)
    force, cos, sin = np.where(actions == 1, 10.0, -10.0), np.cos(theta), np.sin(theta)
    temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * cos / 1.1
    return np.stack(
        [
            x + 0.02 * x_dot,
            x_dot + 0.02 * x_acc,
            theta + 0.02 * theta_dot,
            theta_dot + 0.02 * theta_acc,
        ],
        -1,
    )


class Checker:
    """Checks the deliveries of `ClusterEnv`, rollout by rollout."""

    def __init__(self):
        self.ends = {}  # row -> the observation after its last step
        self.transitions, self.jumps = 0, 0
        # After this many transitions, each call takes 5 s more until the file `done` exists, which
        # means that all faults have happened.
        self.half = math.inf
        # Seconds that the longest call took, and the longest time in a call after the last worker
        # was lost.
        self.longest = self.recovery = 0.0

    def check(self, rollout):
        ended = rollout.terminations | rollout.truncations
        led_to = np.concatenate([rollout.observations[1:], rollout.next_observations[None]])
        assert np.abs(led_to[ended]).max(initial=0) <= 0.05  # the next episode's first observation
        led_to[ended] = rollout.final_observations
        np.testing.assert_allclose(
            led_to, cartpole(rollout.observations, rollout.actions), atol=1e-5
        )
        for row, first, last in zip(
            rollout.rows, rollout.observations[0], rollout.next_observations, strict=True
        ):
            if not np.array_equal(first, self.ends.get(int(row), first)):
                self.jumps += 1
                assert np.abs(first).max() <= 0.05
            self.ends[int(row)] = last
        self.transitions += rollout.rewards.size

    def wrap(self, method):
        def wrapped(*args, **kwargs):
            start = time.time()
            result = method(*args, **kwargs)
            self.longest = max(self.longest, time.time() - start)
            losses = [restart["time"] for restart in args[0].restarts[-100:]]
            self.recovery = max(self.recovery, time.time() - max([start, *losses]))
            self.check(result[1] if isinstance(result, tuple) else result)
            end = time.time() + 5 * (self.transitions >= self.half)
            while time.time() < end and not os.path.exists("done"):
                time.sleep(0.05)
            return result

        return wrapped


def head(script, namespaces):
    """Run the script in this process and write a report to a file.

    ``namespaces`` are the workers' network namespaces, or None.
    """
    checker, command, close = Checker(), LocalLauncher.command, ClusterEnv.close
    if "--total-timesteps" in sys.argv:
        checker.half = int(sys.argv[sys.argv.index("--total-timesteps") + 1]) // 2
    if namespaces:
        LocalLauncher.command = lambda self, index: [
            "nsenter", f"--net=/run/netns/{namespaces[index]}", *command(self, index)
        ]  # fmt: skip

    def report(envs, **kwargs):
        lost_rows = sum(len(restart["seeds"]) for restart in envs.restarts)
        assert checker.jumps <= lost_rows, (checker.jumps, lost_rows)
        Path("report.json").write_text(
            json.dumps({**vars(checker), "ends": None, "restarts": envs.restarts})
        )
        close(envs, **kwargs)

    for method in (ClusterEnv.rollout, ClusterEnv.recv):
        setattr(ClusterEnv, method.__name__, checker.wrap(method))
    ClusterEnv.close = report
    runpy.run_path(str(ROOT / script), run_name="__main__")


# The process that starts the head and causes the faults.


def train(
    script, flags, faults, directory, network=None, interval=3.0, seed=1, say=print, timeout=1800
):
    """Train with this many faults.

    Return the run's summary, the checker's report and the list of faults.
    """
    command = [sys.executable, "-m", "tests.chaos", "--head", script]
    command.append(",".join(network.namespaces if network else []))
    # A worker may be hit several times before it has started.
    own = "--env-id CartPole-v1 --num-workers 4 --worker-timeout 3 --max-worker-restarts 20"
    flags = [*f"{own} {FLAGS[script]} {flags}".split(), "--seed", str(seed)]
    if network is not None:
        flags += ["--bind-address", network.head, "--worker-start", "spawn"]
    rng, done = random.Random(seed), []
    kinds = itertools.cycle(["kill", "stop", "fork" if network is None else "cut"])
    with open(f"{directory}/output", "w") as output:
        process = subprocess.Popen(
            [*command, *flags], cwd=directory, env=environment(), stdout=output, stderr=output
        )
    start = heal_at = next_at = time.monotonic()
    cut, kind, workers = None, next(kinds), set()
    try:
        while process.poll() is None and time.monotonic() < start + timeout:
            time.sleep(0.05)
            now = time.monotonic()
            if cut is not None and now > heal_at:
                network.heal(cut)
                cut = None
            if len(done) >= faults:
                Path(directory, "done").touch()
                continue
            if now < next_at or "step " not in Path(directory, "output").read_text():
                continue
            index = rng.randrange(4)
            if kind == "cut" and cut is None:
                network.cut(index)
                cut, heal_at = index, now + CUT_SECONDS
            elif kind == "fork":
                hit(process.pid, workers, index, kind)  # the third time, there is none
            elif kind == "cut" or not hit(process.pid, workers, index, kind):
                continue  # another worker is still cut off, or this one is being replaced
            done.append((kind, index))
            next_at, kind = now + interval, next(kinds)
            if len(done) % 10 == 0:
                say(f"{now - start:.0f} s: {len(done)} faults")
    finally:
        process.kill()
        process.wait()
    text = Path(directory, "output").read_text()
    assert process.returncode == 0, text[-3000:]
    # By every checksum, the workers held the weights that the head believed they held.
    assert "does not hold the weights" not in text
    (summary,) = Path(directory, "runs").glob("*/summary.json")
    return (
        json.loads(summary.read_text()),
        json.loads(Path(directory, "report.json").read_text()),
        done,
    )


def hit(head, workers, index, kind):
    """Kill or stop a worker of this head, or kill its fork server. Return whether there was one.

    ``workers`` are the pids of the workers seen so far, because some outlive their fork server.
    """
    number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process is ending
        workers |= set(workers_of(head).values())
        chosen = sorted(workers)[index % len(workers)] if workers else None
        pid = fork_server_of(head) if kind == "fork" else chosen
        workers.discard(pid)
        if pid is not None:
            os.kill(pid, number)
            return True
    return False


def main():
    if "--head" in sys.argv:
        _, _, script, namespaces, *flags = sys.argv
        sys.argv = [script, *flags]
        head(script, namespaces.split(",") if namespaces else None)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--script", choices=FLAGS, default="ppo_clusterenv.py")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--flags", default="", help="further flags of the script")
    args = parser.parse_args()
    reason = why_no_namespaces()
    print(f"links are not cut: {reason}" if reason else "workers are killed, stopped and cut off")
    results = {}
    for faults in (0, args.faults):
        network = None if reason else Network(4)
        with tempfile.TemporaryDirectory() as directory, network or tempfile.TemporaryDirectory():
            results[faults] = train(args.script, args.flags, faults, directory, network)
        summary, report, done = results[faults]
        print(
            f"{len(done)} faults: {len(report['restarts'])} restarts, {report['transitions']:,} "
            f"transitions checked, longest wait {report['longest']:.1f} s, "
            f"{report['recovery']:.1f} s after the last loss in it, "
            f"{summary['wall_seconds']:.0f} s in all; mean return of the last 100 episodes "
            f"{summary['mean_return_100']:.1f}, in the evaluation {summary['eval_return_mean']:.1f}"
        )


if __name__ == "__main__":
    main()
