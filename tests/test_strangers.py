"""Strangers at the head's socket: their messages are dropped, counted, and change nothing."""

import os
import socket
from functools import partial

import msgspec
import pytest
import zmq

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime.head.transport import Transport
from clusterenv_runtime.wire.protocol import Error, Hello, Pull, Reply, encode, frames

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

    def noted(transport, identity, text):
        texts.append(text)
        drop(transport, identity, text)

    monkeypatch.setattr(Transport, "drop", noted)
    return texts


def address_of(workers):
    *_, command = workers.values()
    return command[command.index("--connect") + 1]


def header(value):
    """Return a Reply's header around a raw value, which may be valid msgpack or not."""
    return frames(1, Reply(None))[0].replace(b"\xa5value\xc0", b"\xa5value" + value)


RAW = {"type": "Reply", "value": None}
GARBAGE = {
    "nothing": [[b""]],
    "many frames": [[b"x"] * 50],
    "not msgpack": [[b"\xc1"], [os.urandom(99)], [b"GET / HTTP/1.1\r\n\r\n"]],
    "half a message": [[frames(None, Hello(1, 0, "host", 1, {}))[0][:-3]]],
    "another message": [
        [msgspec.msgpack.encode([1, {**RAW, "type": "Step"}])],
        [msgspec.msgpack.encode([1, 2])],
    ],
    "wrong types": [
        [msgspec.msgpack.encode(["1", RAW])],
        [msgspec.msgpack.encode([1, {**RAW, "dropped": 1}])],
    ],
    "a long list that is missing": [[header(b"\xdd\xff\xff\xff\xff")]],
    "not UTF-8": [[header(b"\xa2\xff\xfe")]],
    "very deep": [[header(b"\x91" * 20000 + b"\xc0")]],
    "impossible keys": [[header(b"\x81\x81\x01\x01\x01")]],
    "a map": [frames(1, Reply({1: 2}))],
    "names that move the cursor": [
        frames(None, Hello(1, 0, "host\x1b[2J", 1, {})),
        frames(None, Hello(1, 0, "host", 1, {"numpy": "2\n"})),
        [encode((1, {"type": "\x1b[2J"}))],
    ],
    "replies": [
        [*frames(seq, Reply(["array", 0, 0, "<f8", [1]])), b"8 bytes."] for seq in range(3000)
    ],
    "errors": [
        frames(seq, Error(0, "builtins.ValueError", "no", "no", True)) for seq in range(3000)
    ],
    "pulls": [frames(seq, Pull(0)) for seq in range(3000)],
    "hellos": [
        frames(None, Hello(version, index, "host", 1, {"numpy": "0"}))
        for version in (0, 1)
        for index in (-1, 0, 1, 9)
    ],
}


@pytest.mark.parametrize("messages", GARBAGE.values(), ids=GARBAGE)
def test_what_a_stranger_sends_changes_nothing(cluster, workers, monkeypatch, caplog, messages):
    (steps,) = set(cluster.get_attr("count"))
    dropped = drops(monkeypatch)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.sndhwm = stranger.linger = 0
        stranger.connect(address_of(workers()))
        for message in messages:
            stranger.send_multipart(message)
        while len(dropped) < len(messages):
            steps += 1
            assert cluster.step([0, 0])[0].tolist() == [[steps], [steps]]
        assert tuple(sorted(cluster.call("pid"))) == tuple(sorted(workers()))
        assert not stranger.poll(0)  # it got no message
    assert caplog.text.count("dropped ") == 1  # the head has logged it once
    assert "\x1b" not in caplog.text


def test_a_stranger_that_does_not_speak_zeromq_changes_nothing(cluster, workers):
    (steps,) = set(cluster.get_attr("count"))
    for data in (b"", b"\0" * 64, b"\xff" * 64, os.urandom(1000)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address_of(workers()).removeprefix("ipc://"))
            stranger.sendall(data)
            steps += 1
            assert cluster.step([0, 0])[0].tolist() == [[steps], [steps]]


def test_workers_have_identities_that_nobody_else_knows(monkeypatch):
    identities, exchange = set(), Transport.exchange

    def noted(*args):
        received, closed = exchange(*args)
        identities.update(each.identity for each in received)
        return received, closed

    monkeypatch.setattr(Transport, "exchange", noted)
    for _ in range(2):
        with ClusterEnv([CountingEnv] * 2, 2) as envs:
            envs.reset()
    assert len(identities) == 4  # The same worker of another run has another identity,
    assert all(len(identity) > 16 for identity in identities)  # and each is too long to guess.
