"""Strangers at the head's socket: their messages are dropped, counted, and change nothing.

A stranger is any peer whose connection has not said hello as a worker that the head expects.
"""

import json
import os
import pickle
import socket
from functools import partial

import pytest
import zmq

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime import messages as messages_module
from clusterenv_runtime.head.transport import Transport
from clusterenv_runtime.messages import (
    MAX_FRAME,
    MAX_HELLO,
    PING,
    PROTOCOL_VERSION,
    Error,
    Hello,
    Pull,
    Reply,
    worker_frames,
)
from clusterenv_runtime.pickling import to_frames

from .envs import CountingEnv


@pytest.fixture(scope="module")
def cluster():
    # A worker that is not forked has its flags in its own command line.
    with ClusterEnv([partial(CountingEnv, length=10**6)] * 2, 2, worker_start="spawn") as envs:
        envs.reset()
        yield envs


def drops(monkeypatch):
    """Return a list that collects the texts of all further drops by this process's heads."""
    texts, drop = [], Transport.drop

    def noted(transport, text):
        texts.append(text)
        drop(transport, text)

    monkeypatch.setattr(Transport, "drop", noted)
    return texts


def unpickles(monkeypatch):
    """Return a set that collects the frames of all messages that the head unpickles from now on."""
    unpickled, from_frames = set(), messages_module.from_frames

    def noted(frames, loads):
        unpickled.add(tuple(map(bytes, frames)))
        return from_frames(frames, loads)

    monkeypatch.setattr(messages_module, "from_frames", noted)
    return unpickled


def address_of(workers):
    *_, command = workers.values()
    return command[command.index("--connect") + 1]


class Bomb:
    def __reduce__(self):
        return os._exit, (7,)


HELLO = Hello(PROTOCOL_VERSION, 0, "host", 1, {})


def hello(**fields):
    return [json.dumps(vars(HELLO) | fields).encode()]


ERROR = Error(0, "builtins.ValueError", "no", "no", True)
GARBAGE = {
    "nothing": [[b""]],
    "many frames": [[b"x"] * 50],
    "no text": [[b"\xc1"], [os.urandom(99)], [b"GET / HTTP/1.1\r\n\r\n"]],
    "a ping": [PING],
    "half a hello": [[hello()[0][:-3]]],
    "wrong types": [hello(index="0"), hello(pid=None), hello(versions=[]), hello(host={})],
    "very deep": [[b"[" * 60_000], [b'{"a":' * 10_000]],
    "huge": [[b" " * MAX_FRAME], [b"9" * MAX_HELLO], [b"x" * 2**17] * 40],
    "too long by a byte": [[hello()[0].ljust(MAX_HELLO + 1)]],
    "names that move the cursor": [
        hello(host="host\x1b[2J"),
        hello(versions={"numpy": "2\n"}),
        hello(**{"\x1b[2J": 1}),
    ],
    "pickles": [
        [pickle.dumps(Bomb())],
        [pickle.dumps(Bomb())] * 20,
        to_frames(Bomb()),
        to_frames((None, HELLO)),
        [*hello(), pickle.dumps(Bomb())],
    ],
    "replies": [worker_frames(seq, Reply(None), ()) for seq in range(3000)],
    "errors": [worker_frames(seq, ERROR, ()) for seq in range(3000)],
    "pulls": [worker_frames(seq, Pull(0), ()) for seq in range(3000)],
    "hellos": [
        hello(protocol=version, index=index, versions={"numpy": "0"})
        for version in (0, PROTOCOL_VERSION)
        for index in (-1, 0, 1, 9, 10**40)
    ],
}


@pytest.mark.parametrize("messages", GARBAGE.values(), ids=GARBAGE)
def test_what_a_stranger_sends_changes_nothing(cluster, workers, monkeypatch, messages):
    (steps,) = set(cluster.get_attr("count"))
    dropped, unpickled = drops(monkeypatch), unpickles(monkeypatch)
    pids = set(cluster.call("pid"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.sndhwm = stranger.linger = 0
        stranger.connect(address_of(workers()))
        for message in messages:
            stranger.send_multipart(message)
        while len(dropped) < len(messages):
            steps += 1
            assert cluster.step([0, 0])[0].tolist() == [[steps], [steps]]
        assert set(cluster.call("pid")) == pids <= set(workers())
        assert not stranger.poll(0)  # it got no message
    assert unpickled and unpickled.isdisjoint(map(tuple, messages))
    assert all(text.isprintable() and len(text) < 1100 for text in dropped)


def test_a_stranger_with_a_frame_that_is_too_long_is_cut_off(cluster, workers):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(address_of(workers()).removeprefix("ipc://"))
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
        stranger.sendall(greeting + ready + b"\x02" + (10**9).to_bytes(8, "big"))
        with pytest.raises(ConnectionError):  # cut off long before it has sent all
            for _ in range(1000):
                stranger.sendall(bytes(10**6))
            pytest.fail("all was taken")
    cluster.call("pid")


def test_a_stranger_that_does_not_speak_zeromq_changes_nothing(cluster, workers):
    (steps,) = set(cluster.get_attr("count"))
    for data in (b"", b"\0" * 64, b"\xff" * 64, os.urandom(1000)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address_of(workers()).removeprefix("ipc://"))
            stranger.sendall(data)
            steps += 1
            assert cluster.step([0, 0])[0].tolist() == [[steps], [steps]]


def test_workers_have_identities_that_nobody_else_knows(monkeypatch):
    identities, receive = set(), Transport.receive

    def noted(*args):
        received = receive(*args)
        identities.update(identity for identity, _ in received)
        return received

    monkeypatch.setattr(Transport, "receive", noted)
    for _ in range(2):
        with ClusterEnv([CountingEnv] * 2, 2) as envs:
            envs.reset()
    assert len(identities) == 4  # the same worker of another run has another identity
    assert all(len(identity) > 16 for identity in identities)  # too long to guess
