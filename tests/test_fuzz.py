"""Many mutated messages of strangers: memory does not grow, and the run goes on.

FUZZ_FRAMES=1000000 TEST_SECONDS=1800 python -m pytest tests/test_fuzz.py

By default, the test sends 50,000 messages.
"""

import os
import random
from functools import partial
from pathlib import Path

import pytest
import zmq

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime.messages import (
    PROTOCOL_VERSION,
    Hello,
    hello_frames,
    worker_frames,
)

from .envs import CountingEnv
from .test_parts import a_part
from .test_protocol import MESSAGES
from .test_strangers import drops

FRAMES = int(os.environ.get("FUZZ_FRAMES", 50_000))


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
    rng = random.Random(1)
    part = a_part(CountingEnv.observation_space)
    # None has a frame near the limit, at which a mutation would cut off the stranger.
    originals = [worker_frames(1, message, ()) for message in (*MESSAGES[2:], part)]
    originals += [hello_frames(Hello(PROTOCOL_VERSION, 0, "host", 1, {"numpy": "2"}))] * 8
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
