"""Many mutated and random messages: all are dropped, memory does not grow, and the run continues.

FUZZ_FRAMES=1000000 TEST_SECONDS=1800 python -m pytest tests/test_fuzz.py

By default, a test sends 50,000 messages.
"""

import contextlib
import os
import pickle
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq

from clusterenv_runtime import ClusterEnv, Launcher
from clusterenv_runtime.envs.blueprint import Blueprint
from clusterenv_runtime.envs.likeness import Likeness
from clusterenv_runtime.policy.sync import SyncRule
from clusterenv_runtime.wire.buffers import to_buffers
from clusterenv_runtime.wire.codec import pack
from clusterenv_runtime.wire.protocol import (  # fmt: skip
    Call,
    Close,
    Collect,
    Error,
    Hello,
    Pull,
    Reply,
    Reset,
    Setup,
    Step,
    decode_from_head,
    decode_from_worker,
    frames,
)

from .envs import CountingEnv
from .patience import PATIENCE
from .scripts import ROOT
from .test_strangers import drops

FRAMES = int(os.environ.get("FUZZ_FRAMES", 50_000))


def valid_messages(*, to_head):
    arrays = []
    value = pack({"a": np.arange(3), "b": [1.5, None, ("x", np.float32(2))]}, arrays)
    if to_head:
        yield [*frames(7, Reply(value, value, ["x"])), *to_buffers(arrays)]
        yield frames(7, Error(0, "builtins.ValueError", "no", "no", True))
        yield frames(7, Pull(3))
        yield frames(None, Hello(1, 0, "host", 1, {"numpy": "2"}))
    else:
        yield frames(7, Collect(8, 1, 1, 0.1, [0.1]))
        yield [*frames(7, Step()), b"not a pickle"]
        yield [*frames(7, Reset()), b"not a pickle"]
        yield frames(7, Call("pid"))


def mutated(rng, message):
    """Return a message with a few random mutations: bytes are changed, removed, inserted or
    repeated, and frames are appended or removed.
    """
    message = [bytearray(frame) for frame in message]
    for _ in range(rng.randint(1, 4)):
        frame = rng.choice(message)
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(6):
            case 0 if at < len(frame):
                frame[at] = rng.randrange(256)
            case 1:
                del frame[at : at + rng.randint(1, 8)]
            case 2:
                frame[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                frame[at:at] = frame[: rng.randint(0, 30)]
            case 4:
                message.append(bytearray(rng.randbytes(rng.randint(0, 30))))
            case 5 if len(message) > 1:
                del message[rng.randrange(1, len(message))]
    return message


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def cluster():
    # A worker that is not forked has its own command line, with its flags.
    with ClusterEnv([partial(CountingEnv, length=10**9)] * 2, 2, worker_start="spawn") as envs:
        envs.reset()
        yield envs


def test_a_strangers_mutations_change_nothing(cluster, workers, monkeypatch):
    rng, originals = random.Random(1), list(valid_messages(to_head=True))
    *_, command = workers().values()
    sizes, steps, dropped = [], 0, drops(monkeypatch)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = stranger.sndhwm = 0
        stranger.connect(command[command.index("--connect") + 1])
        for _ in range(FRAMES // 100):
            dropped.clear()
            for _ in range(100):
                stranger.send_multipart(mutated(rng, rng.choice(originals)))
            while len(dropped) < 100:
                steps += 1
                assert cluster.step([0, 0])[0].tolist() == [[steps], [steps]]
            sizes.append(resident_bytes(os.getpid()))
        assert not stranger.poll(0)
    assert sizes[-1] < sizes[len(sizes) // 5] + 20e6  # the first rounds warm up


class Head:
    """Stands in for the head of one worker, and can send messages that no head would send."""

    def __init__(self, socket, directory):
        self.socket, self.seq = socket, 0
        socket.sndhwm, socket.rcvtimeo = 0, int(PATIENCE * 1000)
        socket.bind(address := f"ipc://{directory}/head")
        command = [
            sys.executable,
            "-m",
            "clusterenv_runtime.worker",
            "--index",
            "0",
            "--connect",
            address,
        ]
        self.process = subprocess.Popen(command, cwd=ROOT)
        self.identity, *_ = next(self.received())  # the sender of its `Hello`

    def received(self):
        """Yield the sender and the content of each message, except those of the worker's pulse."""
        while True:
            identity, header, *_ = self.socket.recv_multipart()
            if identity.startswith(b"w"):
                yield identity, *decode_from_worker(header)

    def ask(self, request, *arguments):
        """Send the worker a request, and return its response."""
        self.seq += 1
        self.socket.send_multipart([self.identity, *frames(self.seq, request, *arguments)])
        return next(answer for _, seq, answer in self.received() if seq == self.seq)


def test_a_worker_drops_what_it_cannot_decode():
    rng, originals = random.Random(2), list(valid_messages(to_head=False))
    setup, _ = Blueprint([CountingEnv], None, "same", "NextStep").setup(slice(0, 1))
    sizes, nothing = [], pickle.dumps(((), {}))
    with (
        tempfile.TemporaryDirectory() as directory,
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as socket,
    ):
        head = Head(socket, directory)
        own = Reply(pack((head.process.pid,), []), pack([], []))
        likeness = pickle.dumps(Likeness.of_this_process(Launcher()))
        assert isinstance(head.ask(Setup(0, 1), setup, pickle.dumps(SyncRule()), likeness), Reply)
        for _ in range(10):
            for number in range(FRAMES // 10):
                (header, *_) = mutated(rng, rng.choice(originals)[:1])
                with contextlib.suppress(Exception):
                    decode_from_head(header)
                    continue  # the worker would obey this message
                socket.send_multipart([head.identity, header])
                if number % 500 == 0:
                    assert head.ask(Call("pid"), nothing) == own
            assert head.ask(Call("pid"), nothing) == own
            sizes.append(resident_bytes(head.process.pid))
        socket.send_multipart([head.identity, *frames(None, Close())])
        assert head.process.wait(PATIENCE) == 0
    assert sizes[-1] < sizes[2] + 20e6
