"""Training with workers behind a slow link: return against seconds, for each kind of pull.

    python -m experiments.figures.slow_network  # as root, on Linux; about two hours
    python -m experiments.figures.plot

All workers are in a network namespace whose only link is limited to some Mbit/s in each direction
(by the token bucket of tc), and may have a round-trip delay of some milliseconds (by a relay). The
head is outside: tcp with CURVE, --launcher external. Runs PPO on CartPole-v1, with hidden layers of
WIDTH instead of 64. A run that is in the table is not run again. New runs are added to it.
"""

import argparse
import contextlib
import csv
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.figures.network import Delay, Network, why_no_namespaces
from experiments.machine import here

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 512  # 1 MB of weights
RULES = {
    "always": ["--sync-mode", "always", "--weights", "float32"],
    "KL > 0.1": ["--kl-threshold", "0.1", "--weights", "float32"],
    "always, differences": ["--sync-mode", "always", "--weights", "difference"],
    "KL > 0.01, differences": ["--kl-threshold", "0.01", "--weights", "difference"],
}
FLAGS = (
    "--env-id CartPole-v1 --num-steps 64 --update-epochs 4 --learning-rate 5e-4 "
    "--total-timesteps 200000 "
)
FLAGS += (
    "--max-seconds 500 --eval-episodes 1 --no-cuda --launcher external --on-worker-loss raise "
    "--worker-timeout 120 --no-overlap"
)
COLUMNS = (
    "mbits",
    "delay_ms",
    "rule",
    "seed",
    "seconds",
    "step",
    "return",
    "pulls",
    "bytes",
    "machine",
    "software",
)
TAGS = ("charts/mean_return_100", "sync/pulls_per_worker", "sync/bytes")


def why_not():
    """Return why no link can be slowed down here, or None if one can."""
    if reason := why_no_namespaces():
        return reason
    try:
        with Network(1) as network:
            network.limit(0, "1mbit")
    except FileNotFoundError as error:
        return f"there is no command {error.filename} (package iproute2, or iproute-tc)"
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(error.cmd)}: {error.stderr.strip()}"


def train(network, flags, directory, delay_ms=0):
    """Run the head here and its workers in the namespace. Yield a row for each iteration.

    A row has the values of COLUMNS from `seconds` to `bytes`.
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(ROOT / "ppo_clusterenv.py"),
        "--hidden-size",
        str(WIDTH),
        *FLAGS.split(),
        *flags,
    ]
    command += [
        "--bind-address",
        network.head,
        "--worker-prefix",
        f"nsenter --net=/run/netns/{network.namespaces[0]}",
    ]
    log = Path(directory, "output.txt")
    with log.open("w") as output, contextlib.ExitStack() as stack:
        options = {"cwd": directory, "env": env, "stdout": output, "stderr": output}
        head, workers = subprocess.Popen(command, **options), []
        try:
            while head.poll() is None:
                printed = [
                    line
                    for line in log.read_text().splitlines(keepends=True)
                    if line.startswith("nsenter ")
                ]
                for line in printed[len(workers) :]:
                    if not line.endswith("\n"):
                        continue
                    if delay_ms:
                        relay = Delay(
                            network.head,
                            int(re.search(rf"{network.head}:(\d+)", line)[1]),
                            delay_ms / 2000,
                        )
                        stack.callback(relay.close)
                        line = re.sub(rf"({network.head}):\d+", rf"\1:{relay.port}", line)
                    workers.append(subprocess.Popen(shlex.split(line), **options))
                if any(worker.poll() for worker in workers):
                    break  # otherwise the head waits until somebody starts the worker again
                time.sleep(0.1)
        finally:
            for process in (head, *workers):
                process.kill()
                process.wait()
    if head.returncode != 0:
        last = "\n".join(log.read_text().splitlines()[-15:])
        sys.exit(f"error: {shlex.join(command)} failed:\n{last}")
    (logs,) = Path(directory).glob("runs/*/events.out.tfevents.*")
    events = EventAccumulator(str(logs), size_guidance={"scalars": 0})
    events.Reload()
    seconds = np.cumsum(
        [[each.value for each in events.Scalars(f"time/{what}")] for what in ("collect", "learn")],
        1,
    )
    for total, *scalars in zip(seconds.sum(0), *map(events.Scalars, TAGS), strict=True):
        yield [
            f"{value:.7g}"
            for value in (total, scalars[0].step, *(scalar.value for scalar in scalars))
        ]


def link(text):
    """Return Mbit/s and milliseconds from "100" or "100:50"."""
    mbits, _, delay_ms = text.partition(":")
    return float(mbits), float(delay_ms or 0)


def main():
    parser = argparse.ArgumentParser(
        description="Train behind slow links. Append the runs that are not in the table yet."
    )
    links = "Mbit/s of each link, and after a colon its delay in milliseconds, if any"
    parser.add_argument(
        "--links", type=link, nargs="+", default=[(1, 0), (10, 0), (100, 0), (100, 100)], help=links
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1")
    parser.add_argument(
        "--table",
        type=Path,
        default="experiments/figures/results/main/slow_network.csv",
        help="table of the results",
    )
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"error: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which runs every `finally`
    done, this = set(), here()
    where = [
        this["machine"],
        ", ".join(f"{name} {version}" for name, version in this["versions"].items()),
    ]
    if args.table.exists():
        with open(args.table, newline="") as file:
            done = {
                (float(row["mbits"]), float(row["delay_ms"]), row["rule"], int(row["seed"]))
                for row in csv.DictReader(file)
            }
    for (mbits, delay_ms), seed, rule in itertools.product(
        args.links, range(1, args.seeds + 1), RULES
    ):
        if (mbits, delay_ms, rule, seed) in done:
            continue
        with Network(1) as network, tempfile.TemporaryDirectory() as directory:
            network.limit(0, f"{mbits:g}mbit")
            rows = list(train(network, [*RULES[rule], "--seed", str(seed)], directory, delay_ms))
        args.table.parent.mkdir(parents=True, exist_ok=True)
        with open(args.table, "a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([] if file.tell() else [COLUMNS])
            writer.writerows(
                [f"{mbits:g}", f"{delay_ms:g}", rule, seed, *row, *where] for row in rows
            )
        seconds, step, returned, pulls, _ = rows[-1]
        name = f"{mbits:g} Mbit/s, {delay_ms:g} ms, {rule}, seed {seed}"
        print(f"{name}: {step} steps in {seconds} s, {pulls} pulls, return {returned}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; finished runs are in the table, and are not run again")
