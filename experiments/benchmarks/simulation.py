"""Simulated workers, many in one process.

Each has its own socket and speaks the real protocol. It answers each request at once with the same
canned rollout, which the worker's own code has made once.
"""

import multiprocessing
import os
import pickle
import select
import struct
import time
from collections import deque

import torch
import zmq

from clusterenv_runtime import Exit, Launcher, messages
from clusterenv_runtime.pickling import from_frames
from clusterenv_runtime.policy.actor import Actor
from clusterenv_runtime.policy.tensors import flat_weights, load_weights
from clusterenv_runtime.security import read_key_file
from clusterenv_runtime.setup import loads
from clusterenv_runtime.worker.envs import WorkerEnvs

SEQ = 2**30  # of a canned response; its place in the pickle is that of each request's own
spawn = multiprocessing.get_context("spawn")


class SimulatedWorker:
    def __init__(self, index, socket):
        self.index, self.socket, self.version = index, socket, 0
        self.pulling, self.later = False, deque()


class Simulation:
    """Workers that share the canned rollouts of one real slice of environments."""

    def __init__(self, weights_at, frame_bytes):
        # Both are shared with the head's process.
        self.weights_at, self.frame_bytes = weights_at, frame_bytes
        self.envs = self.actor = None
        self.canned = {}  # the frames of responses, by the number of steps and the version

    def answer(self, worker, seq, request):
        if worker.pulling and not isinstance(request, messages.Weights | messages.Ping):
            worker.later.append((seq, request))
            return
        match request:
            case messages.Weights():
                self.weights_at[worker.index] = time.monotonic()
                worker.version, worker.pulling = request.version, False
                while worker.later and not worker.pulling:
                    self.answer(worker, *worker.later.popleft())
            case messages.Collect() if self.rule.wants_pull(worker.version, request):
                worker.pulling = True
                worker.later.append((seq, request))
                self.send(worker, seq, messages.Pull(worker.version))
            case messages.Collect():
                if (request.num_steps, worker.version) not in self.canned:
                    self.actor.version = worker.version
                    part = self.envs.collect(self.actor, request)
                    frames = messages.worker_frames(SEQ, part, ())
                    self.canned[request.num_steps, worker.version] = frames
                self.send_canned(worker, seq, self.canned[request.num_steps, worker.version])
            case messages.Reset():
                self.send(worker, seq, messages.Reply({"arrays": (self.first,), "infos": {}}))
            case messages.Setup():
                if self.envs is None:
                    self.rule = request.rule
                    env_fns, num_envs, modes, _ = loads(request.environments, request.arrays)
                    self.envs = WorkerEnvs(env_fns, range(num_envs), *modes)
                    self.first, _ = self.envs.reset([1] * num_envs)
                self.send(worker, seq, messages.Reply(self.envs.describe()))
            case messages.Structure():
                worker.version = 0
                if self.actor is None:
                    self.actor = Actor()
                    self.actor.load_structure(pickle.loads(request.pickled))
                    # All of the policy's weights are zero.
                    zeros = map(torch.zeros_like, flat_weights(self.actor.policy))
                    load_weights(self.actor.policy, *(each.numpy() for each in zeros))
                self.send(worker, seq, messages.Reply(None))

    def send(self, worker, seq, message):
        worker.socket.send_multipart(messages.worker_frames(seq, message, ()), copy=False)

    def send_canned(self, worker, seq, frames):
        sizes, head, *rest = frames
        head = head.replace(struct.pack("<ci", b"J", SEQ), struct.pack("<ci", b"J", seq), 1)
        self.frame_bytes[: len(frames)] = list(map(len, frames))
        worker.socket.send_multipart([sizes, head, *rest], copy=False)


def simulate(indices, flags, weights_at, frame_bytes):
    """Run these workers until all of them are told to close, or the head is gone."""
    torch.set_num_threads(1)
    flags = dict(zip(flags[::2], flags[1::2], strict=True))
    keys = read_key_file(flags["--key-file"]) if "--key-file" in flags else None
    context = zmq.Context()
    context.max_sockets = len(indices) + 1
    versions, simulation = messages.shared_versions(), Simulation(weights_at, frame_bytes)
    workers = {}
    head, epoll = multiprocessing.parent_process().sentinel, select.epoll()
    epoll.register(head, select.EPOLLIN)
    for index in indices:
        socket = context.socket(zmq.DEALER)
        socket.linger = socket.rcvhwm = 0
        messages.set_limit(socket)
        messages.keep_alive(socket, float(flags["--head-timeout"]))
        if keys is not None:
            keys.secure(socket)
        socket.connect(flags["--connect"])
        hello = messages.Hello(messages.PROTOCOL_VERSION, index, "simulated", os.getpid(), versions)
        socket.send_multipart(messages.hello_frames(hello))
        workers[socket.FD] = SimulatedWorker(index, socket)
        epoll.register(socket.FD, select.EPOLLIN)
    ready = list(workers)
    while workers:
        for fd in ready:
            if fd == head:
                os._exit(1)
            worker = workers[fd]
            while True:  # until none is left: only then does libzmq's FD report more
                try:
                    frames = worker.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                seq, request = from_frames([frame.buffer for frame in frames])
                if isinstance(request, messages.Close):
                    epoll.unregister(fd)
                    workers.pop(fd).socket.close()
                    break
                simulation.answer(worker, seq, request)
        ready = [fd for fd, _ in epoll.poll()] if workers else []
    context.term()


class SimulatedLauncher(Launcher):
    """A launcher of simulated workers in a few processes."""

    remote = False

    def __init__(self, processes):
        super().__init__()
        self._processes = [None] * processes

    def start(self):
        # The time.monotonic() at which each worker last got weights.
        self.weights_at = spawn.RawArray("d", self.num_workers)
        self.frame_bytes = spawn.RawArray("q", 1024)  # bytes of each frame of the last response
        for i in range(len(self._processes)):
            indices = range(i, self.num_workers, len(self._processes))
            arguments = indices, self.flags, self.weights_at, self.frame_bytes
            self._processes[i] = spawn.Process(target=simulate, args=arguments, daemon=True)
            self._processes[i].start()

    def exit(self, index):
        code = self._processes[index % len(self._processes)].exitcode
        return None if code is None else Exit(f"exit code {code}")

    def stop(self, timeout):
        deadline = time.monotonic() + timeout
        for process in filter(None, self._processes):
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()
