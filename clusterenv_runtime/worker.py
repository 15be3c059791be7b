"""The worker process: ``python -m clusterenv_runtime.worker --connect ADDRESS --index I``.

It dials the head, is handed its environments, and answers one request after another until told to close or the link
to the head is lost. torch is imported only when the first policy arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import pickle
import shutil
import socket
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any

import numpy as np
import zmq
import zmq.utils.monitor

from . import protocol
from .batch_slice import BatchSlice, make_slice
from .env_slice import EnvSlice, failed_env
from .errors import StartupError
from .protocol import Error, Hello, Pull, Reply, Request, Weights
from .security import WorkerKeys, read_key_file

logger = logging.getLogger(__name__)
HELLO_S = 5.0  # how often a worker that waits for the head's first answer says that it is there


class _End(BaseException):
    """There is nothing more to do: the head has said so, perhaps instead of sending weights, or a request failed."""


class Worker:
    """One link to the head, and the requests that come over it."""

    def __init__(self, args: argparse.Namespace, keys: WorkerKeys | None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 5000  # the last message may be why we die
        self._socket.connect_timeout = 2000  # ms, and then once more
        self._socket.rcvhwm = 0  # the head bounds what it asks; were pings to pile up unread, the link would seem dead
        protocol.set_limits(self._socket, args.head_timeout)
        if keys is not None:
            keys.secure(self._socket)
        monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        threading.Thread(target=_exit_with_head, args=(monitor, args), daemon=True).start()
        self._socket.connect(args.connect)
        self._hello = protocol.frames(
            Hello(protocol.PROTOCOL_VERSION, args.index, socket.gethostname(), os.getpid(), protocol.shared_versions())
        )
        self._socket.send_multipart(self._hello)
        self._later: deque[tuple[Request, list[Any]]] = deque()  # requests that arrived while waiting for weights
        self._envs: EnvSlice | BatchSlice | None = None
        self._first_row = 0
        self._actor: Any = None
        self._version = 0  # of the policy held; 0 for none
        self._waited = 0.0  # seconds, for the head since it was last told
        self._seed: list[int] | None = None
        self._generator: Any = None  # of the policy's noise; a torch.Generator once torch is here

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
        self._socket.close()
        self._context.term()

    def run(self, startup_timeout: float) -> None:
        """Answer requests until `_End`."""
        start, warned = time.monotonic(), False
        # Once more from time to time: the head may not know yet that the one before is dead.
        while not self._socket.poll(HELLO_S * 1000):
            self._socket.send_multipart(self._hello)
            if not warned and (warned := time.monotonic() > start + startup_timeout):
                logger.warning("no answer for %g s: the head is busy, or does not expect this worker", startup_timeout)
        while True:
            self._answer(*(self._later.popleft() if self._later else self._receive()))

    def _answer(self, request: Request, buffers: list[Any]) -> None:
        try:
            dropped: list[str] = []
            answer_buffers: list[Any] = []
            value = protocol.pack(self._handle(request, buffers), answer_buffers)
            infos = protocol.pack(self._envs.take_infos(), answer_buffers, dropped)
            acted = isinstance(request, protocol.Collect)
            generator = self._generator.get_state().numpy().tobytes() if acted else b""
            reply = Reply(request.seq, value, infos, dropped, generator)
            self._socket.send_multipart(protocol.frames(reply, *answer_buffers), copy=False)
        except (Exception, SystemExit) as error:
            # An environment that raised while it was built, reset or stepped is in no state to go on.
            fatal = not isinstance(request, protocol.Call | protocol.SetAttr)
            env = failed_env(error)
            reply = Error(
                request.seq,
                env=None if env is None else self._first_row + env,
                kind=f"{type(error).__module__}.{type(error).__qualname__}",
                message=str(error.args[0]) if len(error.args) == 1 else str(error),
                traceback=traceback.format_exc(),
                fatal=fatal,
            )
            self._socket.send_multipart(protocol.frames(reply))
            if fatal:
                raise _End from error

    def _receive(self) -> tuple[Request, list[Any]]:
        start, request = time.perf_counter(), None
        while request is None or isinstance(request, protocol.Ping):
            header, *buffers = self._socket.recv_multipart(copy=False)
            try:
                request = protocol.decode_request(header.buffer)
            except Exception as error:  # whatever bytes make msgspec raise
                logger.warning("dropped a malformed message: %s", error)
        self._waited += time.perf_counter() - start
        if isinstance(request, protocol.Close):
            raise _End
        return request, [buffer.buffer for buffer in buffers]

    def _handle(self, request: Request, buffers: list[Any]) -> Any:
        match request:
            case protocol.Setup():
                sys.path.extend(path for path in request.sys_path if path not in sys.path)
                self._first_row = request.first_row
                self._envs = make_slice(**pickle.loads(buffers[0]))
            case protocol.Reset():
                seeds, options, mask = pickle.loads(buffers[0])
                if mask is not None:
                    options = {**options, "reset_mask": mask}
                # A reset mask with no row here would be Gymnasium's error; nothing is to be done then.
                observations = self._envs._observations
                if mask is None or mask.any():
                    observations, _ = self._envs.reset(seed=seeds, options=options)
                self._waited = 0.0  # from here on the head may have work
                if seeds[0] is not None:
                    self._seed = [seeds[0], self._first_row]
                    self._seed_generator()
                return observations
            case protocol.Step():
                return self._envs.step(pickle.loads(buffers[0]))[:4]
            case protocol.Lost():
                return self._envs.cut_off(*pickle.loads(buffers[0]))
            case protocol.Call():
                args, kwargs = pickle.loads(buffers[0])
                return self._envs.call(request.name, *args, **kwargs)
            case protocol.SetAttr():
                self._envs.set_attr(request.name, pickle.loads(buffers[0]))
            case protocol.Structure():
                import torch  # which a worker that only steps does not need

                from .policy import Actor

                if self._generator is None:
                    self._generator = torch.Generator()
                    self._seed_generator()
                self._actor, self._version = Actor(pickle.loads(buffers[0]), self._generator), 0
            case protocol.Collect():
                if buffers:
                    self._actor.load_generator_state(buffers[0])
                if self._envs.rule.wants_pull(self._version, request):
                    self._pull(request.seq)
                if hasattr(self._actor.policy, "epsilon"):
                    self._actor.policy.epsilon = request.epsilon
                waited, self._waited = self._waited, 0.0
                part = self._envs.collect(self._actor, request.num_steps)
                return {"version": self._version, "waited": waited, **part}
        return None

    def _pull(self, seq: int) -> None:
        self._socket.send_multipart(protocol.frames(Pull(seq, self._version)))
        while True:
            message, buffers = self._receive()
            if isinstance(message, Weights):
                break
            if isinstance(message, protocol.Structure):  # the weights to come are its
                self._answer(message, buffers)
            else:
                self._later.append((message, buffers))
        self._actor.policy.load_flat_weights(buffers[0])
        self._version = message.version

    def _seed_generator(self) -> None:
        if self._generator is not None:
            self._generator.manual_seed(int(np.random.SeedSequence(self._seed).generate_state(1, np.uint64)[0]))


def _exit_with_head(monitor: zmq.Socket[bytes], args: argparse.Namespace) -> None:
    """End this process, whatever its environments are doing, when the head at the other end is gone."""
    event = connected = None
    deadline = time.monotonic() + args.startup_timeout
    with contextlib.suppress(zmq.ContextTerminated):
        # What is not connected yet is tried again and again: the network may be down for a moment.
        while event != zmq.EVENT_DISCONNECTED and (connected or not _orphaned(args) and time.monotonic() < deadline):
            if monitor.poll(1000):
                event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
                connected = True
        logger.error("there is no head at the other end: exiting")
        deadline = time.monotonic() + 1  # a process's links close a moment before it has ended
        while args.head_pid is not None and not _orphaned(args) and time.monotonic() < deadline:
            time.sleep(0.01)
        _tidy_up(args)
        os._exit(1)
    monitor.close()


def _orphaned(args: argparse.Namespace) -> bool:
    return args.head_pid is not None and os.getppid() != args.head_pid


def _tidy_up(args: argparse.Namespace) -> None:
    if _orphaned(args):  # the head was killed, perhaps: it left this
        shutil.rmtree(args.head_directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="clusterenv_runtime.worker", description="A ClusterEnv environment worker.")
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="the head's address, as ZeroMQ writes it")
    parser.add_argument("--index", required=True, type=int, help="which of the head's workers this is, from 0")
    parser.add_argument("--startup-timeout", type=float, default=60, help="seconds to try to reach the head")
    parser.add_argument("--head-timeout", type=float, default=30, help="seconds of a silent link before giving up")
    parser.add_argument("--head-pid", type=int, help="the head's, if it is this process's parent")
    parser.add_argument("--head-directory", metavar="DIR", help="to remove, should that parent vanish")
    parser.add_argument("--key-file", metavar="FILE", help="the run's keys, for tcp; only its owner may read it")
    args = parser.parse_args()
    logging.basicConfig(format=f"worker {args.index}: %(message)s")
    try:
        keys = None if args.key_file is None else read_key_file(args.key_file)
    except StartupError as error:
        sys.exit(f"error: {error}")
    if args.head_pid is not None and os.getppid() != args.head_pid:
        with contextlib.suppress(OSError):
            os.kill(args.head_pid, 0)
            args.head_pid = None  # it lives, our parent is of a --worker-prefix; the link will tell when it ends
    worker = Worker(args, keys)
    try:
        with contextlib.suppress(_End):
            worker.run(args.startup_timeout)
    finally:
        worker.close()
        _tidy_up(args)
        gc.freeze()  # this process ends: to collect what torch has made would take most of a second


if __name__ == "__main__":
    main()
