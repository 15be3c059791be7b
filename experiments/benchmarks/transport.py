"""The goodput of rollouts, compared with raw ZeroMQ messages of the same sizes.

    python -m experiments.benchmarks.transport

The rollouts are canned, as in `experiments.benchmarks.scale`: vectors (8 float32) and Atari's
stacked images (84 x 84 x 4 uint8), over ipc, and over tcp with CURVE. Raw ZeroMQ is a ROUTER, with
as many DEALERs in another process as there are workers, without copies on either side, and with as
many messages outstanding. The ROUTER drops the frames that it receives, while ClusterEnv decodes
and validates them, and returns writable arrays. Both take turns, `--rounds` times. Prints medians,
their ratio, and the receiver's CPU time per MB.
"""

import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
import zmq

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_runtime.security import Gate, HeadKeys, read_key_file, write_key_file

from .idle import Corner, IdleEnv
from .scale import OBSERVATIONS, TRANSPORTS
from .simulation import SimulatedLauncher, spawn


@dataclass
class Args:
    observations: tuple[str, ...] = ("vector", "image")
    """kinds of observations: vector, image"""
    transports: tuple[str, ...] = ("ipc", "tcp+curve")
    """transports: ipc, tcp+curve"""
    num_workers: int = 2
    """simulated workers, and raw sockets, in one process"""
    num_steps: int = 128
    """steps per rollout; a worker has 32 environments of vectors, or 8 of images"""
    outstanding: int = 2
    """outstanding requests per worker"""
    seconds: float = 2
    """seconds per measurement"""
    rounds: int = 5
    """rounds; each measures all ways in turn"""


def raw_workers(num_workers, address, key_file, sizes):
    """Send frames of these sizes for each message, until it is empty or the receiver is gone."""
    context, poller, head = zmq.Context(), zmq.Poller(), multiprocessing.parent_process().sentinel
    poller.register(head, zmq.POLLIN)
    frames = [np.ones(size, np.uint8).data for size in sizes]
    for _ in range(num_workers):
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        if key_file is not None:
            read_key_file(key_file).secure(socket)
        socket.connect(address)
        socket.send(b"hello")
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            if socket == head or not socket.recv():
                context.destroy(linger=0)
                return
            socket.send_multipart(frames, copy=False)


class Raw:
    """A ROUTER that requests frames from raw workers."""

    def __init__(self, num_workers, transport, sizes):
        self.context, self.directory = zmq.Context(), tempfile.TemporaryDirectory()
        self.socket = self.context.socket(zmq.ROUTER)
        key_file = Path(self.directory.name) / "key" if transport == "tcp+curve" else None
        self.gate = None
        if key_file is not None:
            keys = HeadKeys.make()
            write_key_file(key_file, keys.workers())
            self.gate = Gate(self.context, self.socket, keys)
        self.socket.bind(
            f"ipc://{self.directory.name}/head" if transport == "ipc" else "tcp://127.0.0.1:*"
        )
        address = self.socket.last_endpoint.decode().rstrip("\0")
        arguments = num_workers, address, key_file, sizes
        self.process = spawn.Process(target=raw_workers, args=arguments, daemon=True)
        self.process.start()
        self.socket.rcvtimeo = 20_000
        self.identities = [self.socket.recv_multipart()[0] for _ in range(num_workers)]

    def send(self, *identities):
        for identity in identities or self.identities:
            self.socket.send_multipart([identity, b"more"])

    def recv(self):
        identity, *_ = self.socket.recv_multipart(copy=False)
        return identity.bytes, None

    def close(self):
        self.socket.send_multipart([self.identities[0], b""])
        self.process.join(5)
        self.process.kill()
        if self.gate is not None:
            self.gate.stop()
        self.context.destroy(linger=0)
        self.directory.cleanup()


def stream(send, recv, args):
    """Return this process's messages per second, and its CPU seconds per message.

    Each worker is asked for its next message at once.
    """
    for _ in range(args.outstanding):
        send()
    messages, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < start + args.seconds:
        worker, _ = recv()
        send(worker)
        messages += 1
    rates = messages / (time.perf_counter() - start), (time.process_time() - cpu) / messages
    for _ in range(args.outstanding * args.num_workers):
        recv()
    return rates


def compare(args, observation, transport):
    shape, dtype, _, weight_bytes = OBSERVATIONS[observation]
    # As in ppo_clusterenv.py, and as is usual for Atari.
    envs_per_worker = {"vector": 32, "image": 8}[observation]
    launcher, policy = SimulatedLauncher(1), CategoricalPolicy(Corner(weight_bytes))
    env_fns = [lambda: IdleEnv(shape, dtype)] * (args.num_workers * envs_per_worker)
    with ClusterEnv(env_fns, args.num_workers, launcher=launcher, **TRANSPORTS[transport]) as envs:
        envs.reset(seed=1)
        envs.rollout(policy, args.num_steps)
        sizes = [size for size in launcher.frame_bytes if size]
        raw = Raw(args.num_workers, transport, sizes)
        ways = {
            "raw ZeroMQ": lambda: stream(raw.send, raw.recv, args),
            "send/recv": lambda: stream(
                lambda *worker: envs.send(args.num_steps, *worker), envs.recv, args
            ),
        }
        measured = {way: [] for way in ways}
        for number in range(args.rounds + 1):
            for way, run in ways.items():
                rates = run()
                if number:  # the first round is warm-up
                    measured[way].append(rates)
        raw.close()
    megabytes = sum(sizes) / 1e6
    goodput = {way: np.array(rates)[:, 0] * megabytes for way, rates in measured.items()}
    for way, rates in measured.items():
        cpu = np.median([cpu for _, cpu in rates]) / megabytes
        print(
            f"{observation}, {transport}, {way}: {np.median(goodput[way]):,.0f} MB/s "
            f"({min(goodput[way]):,.0f} to "
            f"{max(goodput[way]):,.0f}), {np.median(goodput[way] / goodput['raw ZeroMQ']):.2f} "
            f"of raw, "
            f"{cpu * 1e3:.2f} ms of CPU per MB ({megabytes:.2f} MB a message)",
            flush=True,
        )


def main():
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    for observation in args.observations:
        for transport in args.transports:
            compare(args, observation, transport)


if __name__ == "__main__":
    main()
