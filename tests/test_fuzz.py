"""Many mutated messages, of strangers and of workers: memory does not grow, and the run goes on.

FUZZ_FRAMES=1000000 TEST_SECONDS=1800 python -m pytest tests/test_fuzz.py

By default, a test sends 50,000 messages.
"""

import os
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq
from gymnasium import spaces

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Frames, ProtocolError
from clusterenv_runtime.errors import one_line
from clusterenv_runtime.head.pool import Request
from clusterenv_runtime.head.workers import State
from clusterenv_runtime.messages import (
    PROTOCOL_VERSION,
    Built,
    Call,
    Collect,
    Error,
    Hello,
    Pull,
    Reply,
    Step,
    hello_frames,
    worker_frames,
)
from clusterenv_runtime.pickling import Absent, load_exception, pack_exception, to_frames, writer

from .envs import CountingEnv
from .nets import linear
from .test_parts import a_part
from .test_strangers import drops

FRAMES = int(os.environ.get("FUZZ_FRAMES", 50_000))
STEPS = 3


def built(**fields):
    """Return what a worker says after `Setup`."""
    said = {
        "observation_space": CountingEnv.observation_space,
        "action_space": CountingEnv.action_space,
        "metadata": {"autoreset_mode": "NextStep"},
        "render_mode": None,
    }
    return Reply(said | fields)


def a_step():
    arrays = np.zeros((1, 1), np.float32), np.zeros(1), np.zeros(1, bool), np.zeros(1, bool)
    return {"arrays": arrays, "infos": {"x": np.array([{"deep": 1}], object), "_x": arrays[2]}}


PART = a_part(CountingEnv.observation_space, STEPS, 1)
PART.infos = {"x": np.ones((STEPS, 1)), "_x": np.ones((STEPS, 1), bool)}
EXCEPTION = pack_exception(OSError(2, "no", "file"), ())
MESSAGES = [
    (None, built()),
    (None, built(observation_space=spaces.Dict(a=spaces.Text(3), b=spaces.Box(0, 1, (2,))))),
    (1, PART),
    (2, Reply(a_step(), ["y (builtins.object)"])),
    (3, Reply((1, "x"))),
    (1, Error(0, "builtins.OSError", "no", "traceback", False, True, EXCEPTION)),
    (1, Pull(1)),
    (None, Built()),
]


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
    originals = [worker_frames(*message, ()) for message in MESSAGES]
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


# A worker whose messages are forged


def deep(levels):
    nested = ()
    for _ in range(levels):
        nested = (nested, {"a": nested})[:1]
    return nested


LOOPED = []
LOOPED.append((LOOPED,))
FRAMES_OF_2 = np.zeros((2, 1), np.float32)
HOSTILE = [None, True, -1, 2, 10**6, 2**70, 1.5, 1j, float("nan"), "text", "\x1b[2J\n", "M8[s/0]"]
HOSTILE += [b"bytes", (), [], {}, {1: 2}, [("a", 1)], LOOPED, deep(300), Absent("x"), np.float32(2)]
HOSTILE += [
    *(np.zeros(shape) for shape in (0, (STEPS, 1))),
    np.zeros((STEPS, 1), np.int64),
    np.zeros((STEPS, 1, 1), np.float32),
    *(np.zeros(shape, bool) for shape in ((10**5, 1), (1, 10**5))),
    np.array(["a"]),
    *(np.array(each, object) for each in ([None, "x"], [LOOPED, None])),
    np.dtype("M8[s]"),
    np.random.default_rng(1),
    *(spaces.Discrete(2), spaces.Box(0, 1, (STEPS, 1, 1)), spaces.Dict(a=spaces.Discrete(2))),
    spaces.GraphInstance(1, 2, 3),
    *(Frames(FRAMES_OF_2, np.full((STEPS, 1, 1), at)) for at in (np.int32(0), 0.5, 7)),
    Frames(spaces.Box(0, 1, (2,)), np.zeros((STEPS, 1), np.int32)),
    Frames(None, LOOPED),
]


def forged(rng, value, chance=0.3):
    """Return a value in which something inside is replaced by something hostile."""
    if rng.random() < chance:
        return rng.choice(HOSTILE)
    match value:
        case dict() if value:
            key = rng.choice(list(value))
            if rng.random() < 0.1:
                return {k: v for k, v in value.items() if k != key}
            return value | {key: forged(rng, value[key])}
        case list() | tuple() if value:
            at = rng.randrange(len(value))
            return type(value)([*value[:at], forged(rng, value[at]), *value[at + 1 :]])
        case spaces.Space():
            other = object.__new__(type(value))
            vars(other).update(vars(value), **forged(rng, {**vars(value)}, chance=0))
            return other
    return rng.choice(HOSTILE)


def forged_message(rng, seq, message):
    """Return the frames of a forged message of a worker."""
    content = seq, type(message).__name__, vars(message)
    if rng.random() < 0.2:
        content = forged(rng, content)
    else:  # mostly only its fields
        content = *content[:2], forged(rng, content[2], chance=0.05)
    try:
        return to_frames(content, writer((Frames,)))
    except (TypeError, AttributeError, RecursionError):  # a space without a shape
        return forged_message(rng, seq, message)


def test_what_a_worker_sends_is_read_or_ends_the_run_in_one_line(monkeypatch):
    rng = random.Random(3)
    outcomes = dict.fromkeys(("refused", "taken", "unlike"), 0)
    with ClusterEnv([partial(CountingEnv, length=10**9)] * 2, 2) as envs:
        envs.reset()
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.call("pid")
        pool, worker = envs._pool, envs._pool.workers[0]
        real, process = pool.environments, worker.process
        with monkeypatch.context() as patch:
            patch.setattr(pool._transport, "send", lambda identity, frames: True)
            patch.setattr(pool, "describe", lambda worker: f"worker {worker.index}")
            for name in "note_built", "note_ready", "end":
                patch.setattr(pool, name, lambda *_: None)
            for number in range(FRAMES // 5):
                asked = Collect(STEPS, 1, 0, 0.0, []), Step(None), Call("x", b"")
                pool.outstanding = {
                    seq: Request(seq, worker, message) for seq, message in enumerate(asked, 1)
                }
                pool.environments = rng.choice([real, {}])
                process.state = rng.choice([State.BUILDING, State.READY])
                seq, message = rng.choice(MESSAGES)
                frames = forged_message(rng, seq, message)
                if rng.random() < 0.2:
                    frames = mutated(rng, worker_frames(seq, message, ()))
                frames = [memoryview(bytearray(frame)) for frame in frames]
                try:
                    pool._handle(process.identity, frames)
                    outcomes["taken"] += 1
                except ProtocolError as error:
                    assert re.match("worker 0 sent (a malformed|a wrong|wrong)", str(error))
                    outcomes["refused"] += 1
                except RuntimeError as error:
                    assert "all must be alike" in str(error), f"{number}: {one_line(error)}"
                    outcomes["unlike"] += 1
                for text, error in pool.errors:
                    assert " on worker 0 raised " in text
                    if error.exception is not None:
                        raised = load_exception(error.exception, ())
                        assert raised is None or isinstance(raised, Exception)
                pool.errors.clear()
                pool.answered.clear()
                pool.to_reset.clear()
        pool.outstanding, pool.environments, process.state = {}, real, State.READY
        assert envs.step([0, 0])[0].tolist() == [[1], [1]]
    assert min(outcomes.values()) > 10, outcomes


def test_forging_is_thorough():
    """At least some of the forged messages must be read, or the test above would say nothing."""
    rng = random.Random(1)
    kinds = {type(forged(rng, vars(PART))) for _ in range(100)}
    assert dict in kinds and len(kinds) > 3
    assert len(writer((Frames,))(HOSTILE)) > 1000
