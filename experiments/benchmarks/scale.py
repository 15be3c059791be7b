"""The throughput and the costs of one head with up to a thousand workers.

    python -m experiments.benchmarks.scale

The head is a real ClusterEnv. Its workers are simulated, many in one process. Each has its own
socket and speaks the real protocol, but answers each request at once with the same canned rollout,
which the worker's own code has made once. So the head is the limit. The rollouts are vectors (8
float32, chunks of 8 environments), Atari's stacked images (84 x 84 x 4 uint8, 2 environments), and
the same stacks with each frame sent once, over ipc and over tcp with CURVE, by `send` and `recv`
and by `rollout`.

A fresh process measures each line. A pull storm is the time from `send` until the last worker has
its weights, when all workers have diverged at once. The one process of all workers then receives as
much as hundreds of processes would in a cluster. CPU time is that of all the head's threads. "main"
is the thread that runs Python. The rest is almost all libzmq's thread, which reads and decrypts.
Neither includes the measuring of divergences, with which `rollout` begins. That time is publish_s,
and depends on the policy.

Writes `results/scale.csv` and `results/scale.png` in this directory. At the end, prints the number
of workers at the knee, up to which the head keeps 80% of its best speed. It also extrapolates the
throughput of a head on a 25 Gbit/s network from the CPU time per MB measured here.
"""

import csv
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from gymnasium.wrappers import FrameStackObservation
from torch import nn

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_runtime.policy.tensors import flat_weights
from experiments.figures.drawing import subplots

from .idle import Corner, IdleEnv
from .simulation import SimulatedLauncher, spawn

# name: shape, dtype, environments per worker, bytes of weights (a 64-64 MLP's, a Nature CNN's)
OBSERVATIONS = {
    "vector": ((8,), np.float32, 8, 20_000),
    "image": ((84, 84, 4), np.uint8, 2, 6_700_000),
    "frames": ((84, 84), np.uint8, 2, 6_700_000),
}
STACK = 4  # images per stack of "frames"
TRANSPORTS = {"ipc": {}, "tcp+curve": {"bind_address": "127.0.0.1"}}
# columns of the table, and most of the CSV's columns; a MB is 10^6 bytes
COLUMNS = {
    "workers": "d",
    "steps_per_s": ",.0f",
    "mb_per_s": ",.1f",
    "message_bytes": ",d",
    "cpu_us_per_message": ",.0f",
    "cpu_ms_per_mb": ".2f",
    "main_us_per_message": ",.0f",
    "main_share": ".2f",
    "recv_us": ",.0f",
    "send_us": ",.0f",
    "publish_s": ".3f",
    "weight_bytes": ",d",
    "storm_s": ".3f",
    "storm_cpu_s": ".3f",
    "head_mb": ",.0f",
    "startup_s": ".1f",
}
NETWORK = 25e9 / 8  # bytes per second of 25 Gbit/s


@dataclass
class Args:
    workers: tuple[int, ...] = (1, 3, 10, 30, 100, 300, 1000)
    """numbers of workers"""
    observations: tuple[str, ...] = ("vector", "image", "frames")
    """kinds of observations: vector, image, frames"""
    transports: tuple[str, ...] = ("ipc", "tcp+curve")
    """transports: ipc, tcp+curve"""
    modes: tuple[str, ...] = ("send/recv", "rollout")
    """send/recv (streaming), rollout (the parts of all workers, joined)"""
    num_steps: int = 16
    """steps per chunk or rollout"""
    outstanding: int = 2
    """outstanding requests per worker, for send/recv"""
    seconds: float = 4
    """seconds per measurement"""
    storms: int = 3
    """pull storms per measurement; the median counts"""
    processes: int = 1
    """processes that the simulated workers share"""
    timeout: float = 180
    """seconds after which a measurement is given up"""
    out: Path = Path(__file__).parent / "results"
    """directory for scale.csv and scale.png"""


def measure(args, observation, transport, mode, num_workers, pipe):
    """Measure one row of the table, and send it into ``pipe``."""
    torch.set_num_threads(1)
    shape, dtype, envs_per_worker, weight_bytes = OBSERVATIONS[observation]
    policy, launcher = (
        CategoricalPolicy(Corner(weight_bytes)),
        SimulatedLauncher(min(args.processes, num_workers)),
    )
    stacked = observation == "frames"

    def make():
        return (
            FrameStackObservation(IdleEnv(shape, dtype), STACK)
            if stacked
            else IdleEnv(shape, dtype)
        )

    start = time.perf_counter()
    with ClusterEnv(
        [make] * (num_workers * envs_per_worker),
        num_workers,
        frame_stack=STACK if stacked else None,
        launcher=launcher,
        on_worker_loss="raise",
        weights="float32",  # so that a storm moves whole policies
        worker_timeout=args.timeout,  # a storm may take long where all share two cores
        **TRANSPORTS[transport],
    ) as envs:
        row = {
            "observation": observation,
            "transport": transport,
            "mode": mode,
            "workers": num_workers,
        }
        row["startup_s"] = time.perf_counter() - start
        watchdog = threading.Timer(args.timeout, envs.interrupt)
        watchdog.daemon = True
        watchdog.start()
        envs.reset(seed=1)
        for _ in range(2):
            envs.rollout(policy, args.num_steps)
        row["message_bytes"] = sum(launcher.frame_bytes)

        messages = steps = 0
        send_s = recv_s = policy_s = 0.0  # CPU seconds of the main thread
        publish = envs.publish

        def timed_publish(policy):
            nonlocal policy_s
            before = time.thread_time()
            publish(policy)
            policy_s += time.thread_time() - before

        envs.publish = timed_publish
        if mode == "send/recv":
            for _ in range(args.outstanding):
                envs.send(args.num_steps)
        start, main, cpu = time.perf_counter(), time.thread_time(), time.process_time()
        while time.perf_counter() < start + args.seconds:
            before = time.thread_time()
            if mode == "send/recv":
                worker, rollout = envs.recv()
                between = time.thread_time()
                envs.send(args.num_steps, worker)
                recv_s, send_s = recv_s + between - before, send_s + time.thread_time() - between
            else:
                rollout = envs.rollout(policy, args.num_steps)
            steps += rollout.rewards.size
            messages += rollout.rewards.shape[1] // envs_per_worker
        seconds, main, cpu = (
            time.perf_counter() - start,
            time.thread_time() - main,
            time.process_time() - cpu,
        )
        main, cpu, envs.publish = main - policy_s, cpu - policy_s, publish
        for _ in range(args.outstanding * num_workers * (mode == "send/recv")):
            envs.recv()
        megabytes = messages * row["message_bytes"] / 1e6
        row |= {
            "messages": messages,
            "steps_per_s": steps / seconds,
            "mb_per_s": megabytes / seconds,
        }
        row |= {
            "cpu_us_per_message": cpu / messages * 1e6,
            "main_us_per_message": main / messages * 1e6,
        }
        row |= {"cpu_ms_per_mb": cpu / megabytes * 1e3, "main_ms_per_mb": main / megabytes * 1e3}
        row |= {"main_share": main / seconds, "other_share": (cpu - main) / seconds}
        row |= {"recv_us": recv_s / messages * 1e6, "send_us": send_s / messages * 1e6}

        storms, storm_cpu, publishes = [], [], []
        for _ in range(args.storms):
            nn.init.normal_(policy.actor.linear.weight)
            start = time.monotonic()
            envs.publish(policy)
            published, cpu = time.monotonic(), time.process_time()
            envs.send(1)  # one step, so that the responses are small
            for _ in range(num_workers):
                envs.recv()
            storm_cpu.append(time.process_time() - cpu)
            publishes.append(published - start)
            storms.append(max(launcher.weights_at) - published)
            assert min(launcher.weights_at) > published, "not everyone pulled"
        row |= {
            "publish_s": np.median(publishes),
            "weight_bytes": sum(part.nbytes for part in flat_weights(policy)),
        }
        row |= {"storm_s": np.median(storms), "storm_cpu_s": np.median(storm_cpu)}
        row |= {"head_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        watchdog.cancel()
    pipe.send(row)


def in_fresh_process(function, *arguments, timeout):
    """Call ``function`` in a fresh process. Return what it sends into its last argument, a pipe."""
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=function, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise TimeoutError(f"no result within {timeout:g} s: {arguments[1:]}")
        return ours.recv()
    finally:
        process.join(10)
        process.kill()
        process.join()


def knee(rows):
    """Return the largest number of workers up to which the head keeps 80% of its best speed."""
    best, upto = max(row["steps_per_s"] for row in rows), 0
    for row in rows:
        if row["steps_per_s"] >= 0.8 * best:
            upto = row["workers"]
    return upto


def extrapolate(rows):
    """Return a line with the most that a head takes in, and how much of it 25 Gbit/s carries.

    The head's two busiest threads have a core each.
    """
    row = max(rows, key=lambda row: row["steps_per_s"])
    step_bytes = row["mb_per_s"] * 1e6 / row["steps_per_s"]
    other_ms_per_mb = row["cpu_ms_per_mb"] - row["main_ms_per_mb"]
    head = 1e9 / max(row["main_ms_per_mb"], other_ms_per_mb)
    limit = "Python" if row["main_ms_per_mb"] > other_ms_per_mb else "libzmq's thread"
    return (
        f"messages of {row['message_bytes'] / 1e3:,.1f} kB, {row['main_ms_per_mb']:.2f} + "
        f"{other_ms_per_mb:.2f} ms of "
        f"CPU per MB (main + other threads): {head / 1e9:.2f} GB/s, {head * 8e-9:.1f} Gbit/s, "
        f"{min(head, NETWORK) / step_bytes:,.0f} steps/s; limit: "
        f"{'network' if head > NETWORK else limit}"
    )


def plot(groups, path):
    figure, (row,) = subplots(1, 3, 15, 5)
    panels = {
        "steps_per_s": "environment steps per second",
        "cpu_us_per_message": "head's CPU per message (µs)",
        "storm_s": "pull storm (s)",
    }
    for ax, (key, label) in zip(row, panels.items(), strict=True):
        colors = {}
        for (observation, transport, mode), rows in groups.items():
            color = colors.setdefault((observation, transport), f"C{len(colors)}")
            style = {
                "color": color,
                "marker": "o",
                "linestyle": "-" if mode == "send/recv" else "--",
            }
            numbers = [each["workers"] for each in rows]
            ax.loglog(
                numbers,
                [each[key] for each in rows],
                **style,
                label=f"{observation}, {transport}, {mode}",
            )
        ax.set(xlabel="workers", title=label)
        ax.grid(alpha=0.3)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def main():
    args = tyro.cli(Args)
    args.out.mkdir(parents=True, exist_ok=True)
    groups = {}
    print(" " * 28 + "".join(f"{key:>{len(key) + 2}}" for key in COLUMNS))
    for observation in args.observations:
        for transport in args.transports:
            for mode in args.modes:
                rows = groups[observation, transport, mode] = []
                for num_workers in args.workers:
                    group = args, observation, transport, mode, num_workers
                    try:
                        row = in_fresh_process(measure, *group, timeout=args.timeout + 60)
                    except (EOFError, TimeoutError):
                        print(
                            f"{observation:7}{transport:10}{mode:11}{num_workers:9d}  not done "
                            f"in {args.timeout:g} s"
                        )
                        continue
                    rows.append(row)
                    numbers = "".join(
                        f"{row[key]:{len(key) + 2}{form}}" for key, form in COLUMNS.items()
                    )
                    print(f"{observation:7}{transport:10}{mode:11}{numbers}", flush=True)
    groups = {group: rows for group, rows in groups.items() if rows}
    with open(args.out / "scale.csv", "w", newline="") as file:
        everything = [row for rows in groups.values() for row in rows]
        writer = csv.DictWriter(file, everything[0].keys())
        writer.writeheader()
        writer.writerows(everything)
    plot(groups, args.out / "scale.png")
    print(
        f"\nwithin 20% of the best speed up to so many workers, and, extrapolated, a head on "
        f"{NETWORK * 8e-9:g} Gbit/s:"
    )
    for group, rows in groups.items():
        print(f"{', '.join(group)}: {knee(rows)} workers; {extrapolate(rows)}")


if __name__ == "__main__":
    main()
