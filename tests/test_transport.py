"""The head's socket, without workers: peers in this process send arbitrary messages."""

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from clusterenv_runtime import StartupError
from clusterenv_runtime.head import transport as module
from clusterenv_runtime.head.transport import Transport
from clusterenv_runtime.messages import PING, pulse_of

from .patience import PATIENCE, wait_until
from .scripts import ROOT


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a transport, by default on a socket file."""
    made = []

    def make(bind_address=None, port=0, keys=None):
        made.append(Transport(bind_address, port, keys, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not any(tmp_path.iterdir())


@pytest.fixture
def dial():
    """Return a function that connects a peer with an identity to a transport."""
    with zmq.Context() as context:
        peers = []

        def dial(transport, identity=b"head's peer", keys=None):
            peers.append(peer := context.socket(zmq.DEALER))
            peer.routing_id, peer.linger, peer.rcvtimeo = identity, 0, int(PATIENCE * 1000)
            if keys is not None:
                keys.secure(peer)
            peer.connect(transport.address)
            return peer

        yield dial
        for peer in peers:
            peer.close()


def hear(transport, number=1):
    """Receive at least ``number`` messages, apart from those of pulses. Return them as bytes."""
    received = []
    while len(received) < number:
        received += transport.receive(PATIENCE)
    return [(identity, list(map(bytes, frames))) for identity, frames in received]


def test_messages_are_sent_and_received(make, dial):
    transport = make()
    first, second = dial(transport, b"first"), dial(transport, b"second")
    first.send_multipart([b"header", b"one", b""])
    second.send(b"hello")
    received = dict(hear(transport, 2))
    assert received == {b"first": [b"header", b"one", b""], b"second": [b"hello"]}
    assert transport.send(b"second", [b"header", memoryview(b"2"), b"x" * 10**5])
    assert transport.send(b"first", PING)
    assert second.recv_multipart() == [b"header", b"2", b"x" * 10**5]
    assert first.recv_multipart() == PING


def test_a_send_to_a_closed_connection_says_so(make, dial):
    transport = make()
    assert not transport.send(b"nobody", PING)
    peer = dial(transport, b"somebody")
    peer.send(b"")
    hear(transport)
    assert transport.send(b"somebody", PING)
    peer.close()
    wait_until(lambda: not transport.send(b"somebody", PING))


def test_an_exception_of_a_signal_handler_is_not_lost_if_there_is_nothing_to_receive(make):
    transport, raised, seen, done = make(), [], [], threading.Event()

    class Signal(Exception):
        pass

    def handle(_, frame):
        while frame is not None and frame.f_code is not Transport.receive.__code__:
            frame = frame.f_back
        if frame is not None:
            raised.append(1)
            raise Signal

    def send():
        while not done.wait(0.001):
            os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handle)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        while len(raised) < 300:
            try:
                transport.receive(0)
            except Signal:
                seen.append(1)
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGUSR2, before)
    assert len(seen) == len(raised)


def pulsing(transport, dial, number=0):
    """Connect a worker and its pulse, which the head expects from then on. Return the worker's
    identity, the worker and the pulse.
    """
    identity = b"w%d" % number
    worker, pulse = dial(transport, identity), dial(transport, pulse_of(identity))
    pulse.send_multipart(PING)
    worker.send(b"hello")
    hear(transport)
    while pulse_of(identity) not in transport._pulses:
        assert transport.receive(0.01) == []
    return identity, worker, pulse


def close(transport, pulse):
    """Close a pulse, and wait until the head's socket has noticed."""
    identity = pulse.routing_id
    pulse.close()
    wait_until(lambda: not transport.send(identity, [b"x"]))


def test_a_worker_need_not_have_a_second_connection(make, dial):
    transport = make()
    worker = dial(transport, b"w0")
    worker.send(b"hello")
    hear(transport)
    for _ in range(3):
        assert transport.has_pulse(b"w0") and worker.recv_multipart() == PING


def test_a_worker_whose_second_connection_closes_is_gone_after_its_messages_arrive(make, dial):
    transport = make()
    identity, worker, pulse = pulsing(transport, dial)
    for _ in range(3):
        assert transport.has_pulse(identity)
        assert pulse.recv_multipart() == PING and worker.recv_multipart() == PING
    worker.send(b"2")
    close(transport, pulse)
    assert transport.has_pulse(identity)  # the pulse may be missing once
    assert hear(transport) == [(identity, [b"2"])]
    assert not transport.has_pulse(identity) and not transport.has_pulse(identity)
    transport.forget(identity)
    transport.forget(identity)
    assert transport.has_pulse(identity)


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 10**6, (65_536, 10**6)),
        (1024, 4096, (4096, 4096)),
        (1024, resource.RLIM_INFINITY, (65_536, resource.RLIM_INFINITY)),
        (65_536, 10**6, None),
        (10**5, 10**6, None),
        (4096, 4096, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_of_open_files_is_raised_and_never_lowered(
    monkeypatch, make, soft, hard, expected
):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: limits.append((which, limit)))
    make()
    assert limits == ([] if expected is None else [(resource.RLIMIT_NOFILE, expected)])


def test_a_transports_directory_is_private_and_is_removed_with_it(tmp_path):
    parent = tmp_path / "a" / "b"  # a socket's path must not be long
    transport = Transport(None, 0, None, parent)
    directory = Path(transport.directory)
    assert directory.parent == parent and directory.name.startswith("clusterenv-")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert transport.address == f"ipc://{directory}/head" and transport.key_file is None
    if (pid := os.fork()) == 0:  # a child of the learner does not remove it
        try:
            transport.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert directory.exists()
    transport.close()
    transport.close()
    assert not directory.exists()
    gone = Transport(None, 0, None, tmp_path)
    shutil.rmtree(gone.directory)
    gone.close()


def test_a_socket_file_with_too_long_a_path_is_an_error(tmp_path):
    parent = tmp_path / ("x" * (107 - len(f"{tmp_path}//clusterenv-12345678/head")))
    transport = Transport(None, 0, None, parent)
    assert len(transport.address.removeprefix("ipc://")) == 107
    transport.close()
    parent = parent.with_name(parent.name + "x")
    with pytest.raises(
        StartupError,
        match="the socket's path ipc://.*/head is longer than 107 bytes: set TMPDIR to",
    ):
        Transport(None, 0, None, parent)
    assert not any(parent.iterdir())


@pytest.mark.parametrize("sent", [b"", b"\xff", b"\xff" + bytes(8) + b"\x7f\x03\x01"])
@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_a_handshake_that_does_not_end_is_cut_off(make, monkeypatch, address, sent):
    monkeypatch.setattr(module, "HANDSHAKE_MS", 300)
    transport = make(address)
    *_, place = transport.address.partition("://")
    family = socket.AF_INET if address else socket.AF_UNIX
    with socket.socket(family) as stranger:
        host, _, port = place.rpartition(":")
        stranger.connect((host, int(port)) if address else place)
        stranger.settimeout(PATIENCE)
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1000):  # the head's greeting
                pass
    assert transport.receive(0) == []


def test_a_peer_that_does_not_read_blocks_neither_sending_nor_closing(make, dial):
    transport = make()
    # The connection queues a thousand messages.
    dial(transport).send(b"1")
    ((identity, _),) = hear(transport)

    def send():
        for _ in range(3000):
            assert transport.send(identity, [bytes(2**17)])

    sending = threading.Thread(target=send, daemon=True)
    closing = threading.Thread(target=transport.close, daemon=True)
    for each in (sending, closing):
        each.start()
        each.join(PATIENCE)
        assert not each.is_alive()


BREAKS = """
import time, zmq
from clusterenv_runtime import ClusterEnv
from tests.conftest import worker_commands
from tests.envs import CountingEnv
with ClusterEnv([CountingEnv] * 2, 2, worker_timeout=1, worker_start="spawn") as envs:
    envs.reset()
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger, peer.heartbeat_ivl, peer.heartbeat_ttl = 0, 100, 300
        *_, command = worker_commands().values()
        peer.connect(command[command.index("--connect") + 1])
        for _ in range(300):
            peer.send(b"")
        time.sleep(0.5)
    time.sleep(2)  # in which the head reads nothing
    envs.step([0, 0])
"""


def test_a_connection_that_breaks_while_much_is_unread_does_not_end_the_head():
    """libzmq breaks the connection when it has to send a PING on it."""
    subprocess.run([sys.executable, "-c", BREAKS], check=True, cwd=ROOT, timeout=PATIENCE)


def test_the_limit_of_open_files_is_restored_unless_somebody_else_has_changed_it(make):
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(soft, 512)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        transport = make()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > low
        transport.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low, hard)
        transport = make()
        resource.setrlimit(resource.RLIMIT_NOFILE, (low + 1, hard))
        transport.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low + 1, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
