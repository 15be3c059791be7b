"""The head's socket, without workers: peers in this process send arbitrary messages."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from clusterenv_runtime import StartupError
from clusterenv_runtime.head import transport as module
from clusterenv_runtime.head.transport import (
    MAX_HELLO,
    PING,
    Outgoing,
    Received,
    Transport,
    listening_address,
)
from clusterenv_runtime.wire.protocol import (
    Close,
    Ping,
    Pull,
    decode_from_head,
    encode,
    frames,
    pulse_of,
)
from clusterenv_runtime.wire.security import HeadKeys, WorkerKeys

from .patience import HOUR, PATIENCE, at_most, wait_until
from .scripts import ROOT


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a transport, by default on a socket file."""
    made = []

    def make(bind_address=None, port=0, security="none", keys=None):
        made.append(Transport(bind_address, port, security, keys, tmp_path))
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

        def dial(transport, identity=b"peer", keys=None):
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
    """Receive at least ``number`` messages, apart from pings, and return them."""
    received = []
    while len(received) < number:
        some, closed = transport.exchange([], PATIENCE)
        assert not closed
        received += some
    return received


def test_the_listening_address():
    assert listening_address(None, "*", "/d") == listening_address("", 1, "/d") == "ipc:///d/head"
    assert listening_address("127.0.0.1", "*", "/d") == "tcp://127.0.0.1:*"
    assert listening_address("::1", 5, "/d") == "tcp://[::1]:5"


def test_messages_are_sent_and_received(make, dial):
    transport = make()
    first, second = dial(transport, b"first"), dial(transport, b"second")
    first.send_multipart([*frames(3, Pull(7)), b"one", b""])
    second.send_multipart(frames(None, Pull(8)))
    received = {each.identity: each for each in hear(transport, 2)}
    assert received[b"first"].read() == (3, Pull(7)) and received[b"second"].read() == (
        None,
        Pull(8),
    )
    assert [bytes(frame) for frame in received[b"first"].frames[1:]] == [b"one", b""]
    sent = [
        Outgoing(b"second", 5, Close(), (b"array", memoryview(b"2"))),
        Outgoing(b"first", None, Ping()),
    ]
    assert transport.exchange(sent, None) == ([], [])
    header, *buffers = second.recv_multipart()
    assert decode_from_head(header) == (5, Close()) and buffers == [b"array", b"2"]
    assert decode_from_head(first.recv()) == (None, Ping())


def test_an_exchange_without_a_time_only_sends(make, dial, monkeypatch):
    transport = make()
    peer = dial(transport)
    for number in range(100):
        peer.send_multipart(frames(None, Pull(number)))
    # An exchange then takes only one message.
    monkeypatch.setattr(module, "MOST_AT_ONCE", 1)
    for number in range(100):
        (received,) = hear(transport)
        assert received.read() == (None, Pull(number))
        assert transport.exchange([Outgoing(b"peer", None, Ping())], None) == ([], [])


def test_an_exchange_with_a_closed_connection_receives_without_waiting(make, dial):
    transport = make()
    peer = dial(transport)
    peer.send_multipart(frames(None, Pull(1)))
    hear(transport)
    peer.send_multipart(frames(None, Pull(2)))
    sent, received = [Outgoing(b"peer", 1, Ping()), Outgoing(b"nobody", 1, Ping())], []
    while not received:
        received, closed = transport.exchange(sent, PATIENCE)
        assert closed == [b"nobody"]
    assert [each.read() for each in received] == [(None, Pull(2))]
    assert transport.exchange(sent[1:], 10**6) == ([], [b"nobody"])  # otherwise it waits for days


def test_an_exchange_waits_for_its_time_or_until_the_first_message(make, dial):
    transport, start = make(), time.monotonic()
    assert transport.exchange([], 0.5) == ([], [])
    assert 0.45 < time.monotonic() - start < PATIENCE
    dial(transport).send_multipart(frames(None, Pull(1)))
    with at_most():
        (received,), closed = transport.exchange([], HOUR)
    assert received.read() == (None, Pull(1)) and closed == []


def test_any_other_error_of_a_send_is_raised(make):
    transport = make()
    transport.close()
    with pytest.raises(zmq.ZMQError, match="on non-socket"):
        transport.exchange([Outgoing(b"nobody", 1, Ping())], None)


def test_an_exception_of_a_signal_handler_is_not_lost_if_there_is_nothing_to_receive(make):
    transport, raised, seen, done = make(), [], [], threading.Event()

    class Told(Exception):
        pass

    def handle(_, frame):
        while frame is not None and frame.f_code is not Transport.exchange.__code__:
            frame = frame.f_back
        if frame is not None:
            raised.append(1)
            raise Told

    def tell():
        while not done.wait(0.001):
            os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handle)
    thread = threading.Thread(target=tell)
    thread.start()
    try:
        while len(raised) < 300:
            try:
                transport.exchange([], 0)
            except Told:
                seen.append(1)
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGUSR2, before)
    assert len(seen) == len(raised)


def test_libzmq_reads_on_while_nothing_is_received(make):
    transport = make()
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.sndhwm, peer.sndtimeo, peer.linger = 1, int(PATIENCE * 1000), 0
        peer.connect(transport.address)
        for _ in range(20_000):  # more than the sockets hold
            peer.send(bytes(100))


@pytest.mark.parametrize("sent", [b"x" * 10, PING], ids=["something", "pings"])
def test_a_flood_is_received_in_limited_portions(make, dial, monkeypatch, sent):
    monkeypatch.setattr(module, "MOST_AT_ONCE", most := 5)
    transport, exchanges, last = make(), 0, []
    peer = dial(transport)  # Like a pulse, its identity begins with p.
    for each in [sent] * 1000 + [b"last"]:
        peer.send(each)
    while b"last" not in last:
        received, _ = transport.exchange([], PATIENCE)
        assert len(received) <= most
        exchanges, last = exchanges + 1, [bytes(each.frames[0]) for each in received]
    assert exchanges >= 1001 / most


def pulsing(transport, dial, number=0):
    """Connect a worker and its pulse, which the head expects from then on. Return the worker's
    identity, the worker and the pulse.
    """
    identity = b"w%d" % number
    worker, pulse = dial(transport, identity), dial(transport, pulse_of(identity))
    pulse.send(PING)
    for each in (pulse, worker):
        each.send_multipart(frames(None, Pull(1)))
    hear(transport, 2)  # The ping came before the pulse's other message.
    return identity, worker, pulse


def close(transport, pulse):
    """Close a pulse, and wait until the head's socket has noticed."""
    identity = pulse.routing_id
    pulse.close()
    wait_until(
        lambda: transport.exchange([Outgoing(identity, None, Close())], None) == ([], [identity])
    )


def ping(transport, *identities):
    """Ping these workers. Return the identities whose connection is closed."""
    received, closed = transport.exchange(
        [Outgoing(identity, None, Ping()) for identity in identities], None
    )
    assert received == []
    return closed


def test_a_worker_need_not_have_a_second_connection(make, dial):
    transport = make()
    worker = dial(transport, b"w0")
    worker.send_multipart(frames(None, Pull(1)))
    hear(transport)
    for _ in range(3):
        assert ping(transport, b"w0") == [] and worker.recv() == PING


def test_a_worker_whose_second_connection_closes_is_closed_after_its_messages_arrive(make, dial):
    transport = make()
    identity, worker, pulse = pulsing(transport, dial)
    for _ in range(3):
        assert ping(transport, identity) == [] and pulse.recv() == PING and worker.recv() == PING
    worker.send_multipart(frames(None, Pull(2)))
    close(transport, pulse)
    assert ping(transport, identity) == []  # The pulse may be missing once,
    assert [each.read() for each in hear(transport)] == [(None, Pull(2))]
    assert ping(transport, identity) == ping(transport, identity) == [identity]  # but not twice.
    transport.forget(identity)
    transport.forget(identity)
    assert ping(transport, identity) == []


def test_a_second_connection_may_be_missing_once_from_the_start(make, dial):
    transport = make()
    identity, _, pulse = pulsing(transport, dial)
    close(transport, pulse)
    assert ping(transport, identity) == []
    assert ping(transport, identity) == [identity]


def test_a_malformed_message_is_described_in_one_printable_line():
    assert Received(b"", frames(1, Pull(2))).read() == (1, Pull(2))
    seq, malformed = Received(b"", [encode((1, {"type": "\x1b[2J\n"}))]).read()
    assert seq is None and isinstance(malformed, str)
    assert malformed.startswith("a malformed message: ") and malformed.isprintable()
    assert str(Received(b"", [b""]).read()[1]).startswith("a malformed message: ")


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_strangers_message_is_short(beyond):
    header = frames(1, Pull(2))
    received = Received(b"", [*header, bytes(MAX_HELLO - len(header[0]) - 3 + beyond), b"end"])
    assert received.read() == (1, Pull(2))
    assert received.read(is_strange=True) == ((None, "a long message") if beyond else (1, Pull(2)))


def test_drops_are_counted_and_logged_once_for_each_of_a_hundred_peers(make, caplog):
    transport = make()
    for number in range(120):
        for _ in range(2):
            transport.drop(b"%d" % number, f"what {number} sent")
    assert transport.dropped == 240
    assert [record.getMessage() for record in caplog.records] == [
        f"dropped what {number} sent" for number in range(100)
    ]


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
    transport = Transport(None, 0, "none", None, parent)
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
    gone = Transport(None, 0, "none", None, tmp_path)
    shutil.rmtree(gone.directory)
    gone.close()


def test_a_closed_transport_leaves_nothing_open(make):
    before = len(os.listdir("/proc/self/fd"))
    transport = make("127.0.0.1", security="curve")
    assert len(os.listdir("/proc/self/fd")) > before
    transport.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_socket_file_with_too_long_a_path_is_an_error(tmp_path):
    parent = tmp_path / ("x" * (107 - len(f"{tmp_path}//clusterenv-12345678/head")))
    transport = Transport(None, 0, "none", None, parent)
    assert len(transport.address.removeprefix("ipc://")) == 107
    transport.close()
    parent = parent.with_name(parent.name + "x")
    with pytest.raises(
        StartupError,
        match="the socket's path ipc://.*/head is longer than 107 bytes: set TMPDIR to",
    ):
        Transport(None, 0, "none", None, parent)
    assert not any(parent.iterdir())


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing(make, tmp_path):
    first = make("127.0.0.1")
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(
        StartupError, match=f"^cannot listen on tcp://127.0.0.1:{port}: Address already in use$"
    ):
        make("127.0.0.1", port, "curve")
    assert [path.name for path in tmp_path.iterdir()] == [Path(first.directory).name]
    assert not [thread for thread in threading.enumerate() if "Authent" in type(thread).__name__]
    first.close()
    assert make("127.0.0.1", port).address == f"tcp://127.0.0.1:{port}"


def test_keys_are_for_tcp_alone(make, dial, caplog):
    keys = HeadKeys.make()
    local = make(None, security="curve", keys=keys)
    assert local.key_file is None
    assert make("127.0.0.1", security="none", keys=keys).key_file is None
    transport = make("127.0.0.1", security="curve", keys=keys)
    assert transport.key_file == Path(transport.directory) / "key" and transport._gate.refused == 0
    public, secret = zmq.curve_keypair()
    foreign = WorkerKeys(keys.server_public, public.decode(), secret.decode())
    for number in range(1, 3):
        with contextlib.suppress(zmq.Again):  # it is refused already
            peer = dial(transport, b"foreign", foreign)
            peer.send_multipart(frames(None, Pull(1)), zmq.DONTWAIT)
        while transport._gate.refused < number:
            assert transport.exchange([], 0.01) == ([], [])
    dial(transport, b"own", keys.workers()).send_multipart(frames(None, Pull(2)))
    assert [(each.identity, each.read()) for each in hear(transport)] == [(b"own", (None, Pull(2)))]
    assert caplog.text.count("refused a connection with a foreign key") == 1


def test_a_peer_that_does_not_read_blocks_neither_sending_nor_closing(make, dial):
    transport = make()
    # The connection queues a thousand messages.
    dial(transport).send_multipart(frames(None, Pull(1)))
    hear(transport)
    sent = threading.Thread(
        target=transport.exchange,
        args=([Outgoing(b"peer", 1, Ping(), (bytes(2**17),))] * 3000, None),
        daemon=True,
    )
    closed = threading.Thread(target=transport.close, daemon=True)
    for each in (sent, closed):
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


def test_a_taken_identity_goes_to_the_last_peer_and_nothing_of_the_others_is_kept(make, dial):
    transport = make()
    for number in range(5):
        dial(transport, b"taken").send(b"%d" % number)
        (received,) = hear(transport)
        assert (received.identity, bytes(received.frames[0])) == (b"taken", b"%d" % number)
