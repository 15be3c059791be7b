"""Workers that are simulated, many in one process: each has a socket of its own and speaks the real protocol.

They answer each request at once with the same canned rollout, made once by the worker's own code.
"""

import multiprocessing
import os
import pickle
import select
import time
from collections import deque

import torch
import zmq

from clusterenv_runtime import Launcher, protocol
from clusterenv_runtime.batch_slice import make_slice
from clusterenv_runtime.policy import Actor
from clusterenv_runtime.security import read_key_file

spawn = multiprocessing.get_context("spawn")


class SimulatedWorker:
    def __init__(self, index, socket):
        self.index, self.socket, self.version = index, socket, 0
        self.pulling, self.later = False, deque()


class Simulation:
    """Workers without environments of their own. Their canned rollouts are made by one real slice of environments."""

    def __init__(self, weights_at, frame_bytes):
        self.weights_at, self.frame_bytes = weights_at, frame_bytes  # shared with the head's process
        self.envs = self.actor = None
        self.canned = {}  # (number of steps, version): a value and its buffers

    def answer(self, worker, request, buffers):
        if worker.pulling and not isinstance(request, protocol.Weights | protocol.Ping):
            worker.later.append((request, buffers))
            return
        match request:
            case protocol.Ping():
                pass
            case protocol.Weights():
                self.weights_at[worker.index] = time.monotonic()
                worker.version, worker.pulling = request.version, False
                while worker.later and not worker.pulling:
                    self.answer(worker, *worker.later.popleft())
            case protocol.Collect() if self.envs.rule.wants_pull(worker.version, request):
                worker.pulling = True
                worker.later.append((request, buffers))
                worker.socket.send_multipart(protocol.frames(protocol.Pull(request.seq, worker.version)))
            case protocol.Collect():
                if (request.num_steps, worker.version) not in self.canned:
                    part = self.envs.collect(self.actor, request.num_steps)
                    part = {"version": worker.version, "waited": 0.0, **part}
                    self.canned[request.num_steps, worker.version] = pack(part)
                self.reply(worker, request, self.canned[request.num_steps, worker.version], self.generator)
            case protocol.Reset():
                self.reply(worker, request, self.observations)
            case protocol.Setup():
                if self.envs is None:
                    self.envs = make_slice(**pickle.loads(buffers[0]))
                    self.observations = pack(self.envs.reset(seed=1)[0])
                self.reply(worker, request)
            case protocol.Structure():
                worker.version = 0
                if self.actor is None:
                    generator = torch.Generator()
                    self.generator = generator.get_state().numpy().tobytes()
                    self.actor = Actor(pickle.loads(buffers[0]), generator)
                    self.actor.policy.load_flat_weights(bytes(self.actor.policy.flat_weights().numel()))  # all zero
                self.reply(worker, request)

    def reply(self, worker, request, canned=(None, ()), generator=b""):
        value, buffers = canned
        message = protocol.frames(protocol.Reply(request.seq, value, ["list", []], [], generator), *buffers)
        self.frame_bytes[: len(message)] = list(map(len, message))
        worker.socket.send_multipart(message, copy=False)


def pack(value):
    buffers = []
    return protocol.pack(value, buffers), buffers


def simulate(indices, flags, weights_at, frame_bytes):
    """Be these workers until they are all told to close, or the head is gone."""
    torch.set_num_threads(1)
    flags = dict(zip(flags[::2], flags[1::2], strict=True))
    keys = read_key_file(flags["--key-file"]) if "--key-file" in flags else None
    context = zmq.Context()
    context.max_sockets = len(indices) + 1
    versions, simulation, workers = protocol.shared_versions(), Simulation(weights_at, frame_bytes), {}
    head, epoll = multiprocessing.parent_process().sentinel, select.epoll()
    epoll.register(head, select.EPOLLIN)
    for index in indices:
        socket = context.socket(zmq.DEALER)
        socket.linger = socket.rcvhwm = 0
        protocol.set_limits(socket, float(flags["--head-timeout"]))
        if keys is not None:
            keys.secure(socket)
        socket.connect(flags["--connect"])
        hello = protocol.Hello(protocol.PROTOCOL_VERSION, index, "simulated", os.getpid(), versions)
        socket.send_multipart(protocol.frames(hello))
        workers[socket.FD] = SimulatedWorker(index, socket)
        epoll.register(socket.FD, select.EPOLLIN)
    ready = list(workers)
    while workers:
        for fd in ready:
            if fd == head:
                os._exit(1)
            worker = workers[fd]
            while True:  # libzmq tells of more messages only after it has said that there are none
                try:
                    header, *buffers = worker.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                request = protocol.decode_request(header.buffer)
                if isinstance(request, protocol.Close):
                    epoll.unregister(fd)
                    workers.pop(fd).socket.close()
                    break
                simulation.answer(worker, request, [buffer.buffer for buffer in buffers])
        ready = [fd for fd, _ in epoll.poll()] if workers else []
    context.term()


class SimulatedLauncher(Launcher):
    """Simulated workers in a few processes."""

    def __init__(self, processes):
        super().__init__()
        self._processes = [None] * processes

    def start(self):
        self.weights_at = spawn.RawArray("d", self._num_workers)  # time.monotonic() when a worker last got any
        self.frame_bytes = spawn.RawArray("q", 32)  # of the last answer
        for i in range(len(self._processes)):
            indices = range(i, self._num_workers, len(self._processes))
            arguments = indices, self._flags, self.weights_at, self.frame_bytes
            self._processes[i] = spawn.Process(target=simulate, args=arguments, daemon=True)
            self._processes[i].start()

    def exit_reason(self, index):
        code = self._processes[index % len(self._processes)].exitcode
        return None if code is None else f"exit code {code}"

    def stop(self, timeout):
        deadline = time.monotonic() + timeout
        for process in filter(None, self._processes):
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()
