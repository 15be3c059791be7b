"""Mutated and random messages, many of them: nothing escapes, nothing grows, and the run goes on.

FUZZ_FRAMES=1000000 TEST_SECONDS=1800 python -m pytest tests/test_fuzz.py    # the suite sends 50,000
"""

import contextlib
import os
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime.codec import pack
from clusterenv_runtime.protocol import (
    Call,
    Collect,
    Error,
    Hello,
    Pull,
    Reply,
    Reset,
    Step,
    decode_request,
    frames,
)  # fmt: skip

from .envs import CountingEnv

FRAMES = int(os.environ.get("FUZZ_FRAMES", 50_000))


def valid_messages(*, to_head):
    buffers = []
    value = pack({"a": np.arange(3), "b": [1.5, None, ("x", np.float32(2))]}, buffers)
    if to_head:
        yield [*frames(7, Reply(value, value, ["x"])), *buffers]
        yield frames(7, Error(0, "builtins.ValueError", "no", "no", True))
        yield frames(7, Pull(3))
        yield frames(None, Hello(1, 0, "host", 1, {"numpy": "2"}))
    else:
        yield frames(7, Collect(8, 1, 1, 0.1, [0.1]))
        yield [*frames(7, Step()), b"not a pickle"]
        yield [*frames(7, Reset()), b"not a pickle"]
        yield frames(7, Call("pid"))


def mutated(rng, message):
    """One of the things that may happen to bytes: some change, go, come, repeat; frames, too."""
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
    with ClusterEnv([partial(CountingEnv, length=10**9)] * 2, 2) as envs:
        envs.reset()
        yield envs


def test_a_strangers_mutations_change_nothing(cluster, workers):
    rng, originals = random.Random(1), list(valid_messages(to_head=True))
    *_, command = workers().values()
    sizes, steps = [], 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = stranger.sndhwm = 0
        stranger.connect(command[command.index("--connect") + 1])
        for _ in range(FRAMES // 100):
            dropped = cluster._pool.transport.dropped
            for _ in range(100):
                stranger.send_multipart(mutated(rng, rng.choice(originals)))
            while cluster._pool.transport.dropped < dropped + 100:
                steps += 1
                assert cluster.step([0, 0])[0].tolist() == [[steps], [steps]]
            sizes.append(resident_bytes(os.getpid()))
        assert not stranger.poll(0)
    assert sizes[-1] < sizes[len(sizes) // 5] + 20e6  # the first warm up


def test_a_worker_drops_what_it_cannot_decode(cluster, workers):
    rng, originals = random.Random(2), list(valid_messages(to_head=False))
    worker = cluster._pool.workers[1]
    sizes = []
    for _ in range(10):
        for number in range(FRAMES // 10):
            (header, *_) = mutated(rng, rng.choice(originals)[:1])
            with contextlib.suppress(Exception):
                decode_request(header)
                continue  # one that the worker would obey
            cluster._pool.transport._socket.send_multipart([worker.identity, header])
            if number % 500 == 0:
                assert cluster.call("pid")[1] == worker.pid
        assert cluster.call("pid")[1] == worker.pid
        sizes.append(resident_bytes(worker.pid))
    assert sizes[-1] < sizes[2] + 20e6
    assert worker.pid in workers()
