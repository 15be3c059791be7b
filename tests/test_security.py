"""Over TCP nobody gets in without the run's keys. A silent link is noticed, and a slow environment
is not taken for a silent link.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, StartupError, WorkerDiedError
from clusterenv_runtime.messages import PROTOCOL_VERSION, Hello, hello_frames
from clusterenv_runtime.security import WorkerKeys, read_key_file

from .envs import CountingEnv
from .nets import linear
from .patience import PATIENCE, assert_ended, at_most, with_more_time
from .scripts import ROOT
from .test_fuzz import resident_bytes
from .test_strangers import drops


@pytest.fixture(scope="module")
def cluster():
    # A worker that is not forked has its flags in its own command line.
    options = {"bind_address": "127.0.0.1", "worker_start": "spawn"}
    with ClusterEnv([partial(CountingEnv, length=10**6)] * 2, 2, **options) as envs:
        envs.reset()
        yield envs


def flag_of(workers, flag):
    *_, command = workers().values()
    return command[command.index(flag) + 1]


def step(envs):
    (count,) = set(envs.get_attr("count"))
    assert envs.step([0, 0])[0].tolist() == [[count + 1], [count + 1]]


def test_curve_serves_everything_and_its_key_file_is_for_its_owner(cluster, workers):
    key_file = Path(flag_of(workers, "--key-file"))
    assert key_file.stat().st_mode & 0o777 == 0o600
    secrets = json.loads(key_file.read_text())
    assert secrets["worker_secret"] not in str(workers())  # anyone can read a command line
    assert cluster.rollout(CategoricalPolicy(linear(1, 2)), 3).rewards.shape == (3, 2)
    step(cluster)


def intruders(keys):
    foreign = WorkerKeys(keys.server_public, *(key.decode() for key in zmq.curve_keypair()))
    other_server, _ = zmq.curve_keypair()
    return {
        "no keys": None,
        "a foreign key and the right server key": foreign,
        "the right key and a wrong server key": WorkerKeys(
            other_server.decode(), keys.worker_public, keys.worker_secret
        ),
        "the public keys alone": WorkerKeys(
            keys.server_public, keys.worker_public, foreign.worker_secret
        ),
    }


@pytest.mark.parametrize("who", range(4))
def test_an_intruder_is_not_heard(cluster, workers, caplog, monkeypatch, who):
    keys = read_key_file(flag_of(workers, "--key-file"))
    name, keys = list(intruders(keys).items())[who]
    dropped = drops(monkeypatch)
    with zmq.Context() as context, context.socket(zmq.DEALER) as intruder:
        intruder.linger = 0
        if keys is not None:
            keys.secure(intruder)
        refusals = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        refusals |= zmq.EVENT_DISCONNECTED
        monitor = intruder.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | refusals)
        intruder.connect(flag_of(workers, "--connect"))
        with contextlib.suppress(zmq.Again):  # once it is refused
            hello = hello_frames(Hello(PROTOCOL_VERSION, 0, "intruder", 1, {}))
            for _ in range(5):
                intruder.send_multipart(hello, zmq.NOBLOCK)
        assert monitor.poll(PATIENCE * 1000)
        event = recv_monitor_message(monitor)["event"]
        is_refused_for_its_key = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        assert event & refusals
        assert is_refused_for_its_key == (name == "a foreign key and the right server key")
        for _ in range(3):
            step(cluster)
        assert not intruder.poll(0)
        intruder.disable_monitor()
    assert not dropped and "intruder" not in caplog.text


def start_worker(key_file):
    command = [sys.executable, "-m", "clusterenv_runtime.worker", "--key-file", str(key_file)]
    command += ["--connect", "tcp://127.0.0.1:1", "--index", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    return result.stderr


def test_a_worker_refuses_a_key_file_that_others_can_read_or_that_holds_no_keys(tmp_path):
    path = tmp_path / "key"
    says = f"error: cannot read the key file {path}: No such file or directory\n"
    assert start_worker(path) == says
    path.write_text('{"server_public": "short"}')
    path.chmod(0o640)
    says = f"error: others can read the key file {path} (mode 0640): chmod 600 it\n"
    assert start_worker(path) == says
    path.chmod(0o600)
    assert start_worker(path).startswith(f"error: {path} is not a worker's key file: ")


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0", "::", "0:0::0", "0", "0x0", "000.0.0.0", "*"]
    + ["nosuch0", "127.0.0.1 ", "tcp://127.0.0.1"],
)
def test_an_address_that_is_none_or_stands_for_all_is_refused(workers, address):
    before = workers()
    with pytest.raises(StartupError, match="must be one address, not all|^cannot listen on"):
        ClusterEnv([CountingEnv], 1, bind_address=address)
    assert workers() == before


def test_a_head_that_cannot_listen_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            StartupError, match=f"cannot listen on tcp://127.0.0.1:{port}: Address already in use"
        ):
            ClusterEnv([CountingEnv], 1, bind_address="127.0.0.1", port=port)
    with pytest.raises(
        StartupError, match=r"cannot listen on tcp://192.0.2.1:.*: Cannot assign requested address"
    ):
        ClusterEnv([CountingEnv], 1, bind_address="192.0.2.1")


# Liveness.


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_a_stopped_worker_is_noticed_and_ended(workers, address):
    def check(seconds):
        arguments = {"worker_timeout": seconds, "bind_address": address, "on_worker_loss": "raise"}
        with ClusterEnv([CountingEnv] * 4, 2, **arguments) as envs:
            envs.reset()
            *_, pid = envs.call("pid")
            os.kill(pid, signal.SIGSTOP)
            text = rf"worker 1 \(.*pid {pid}.*\) died: cut off or silent"
            # Sooner than with the default, 30 s.
            with at_most(25), pytest.raises(WorkerDiedError, match=text):
                envs.step([0] * 4)
            with at_most():
                envs.close()
        assert pid not in workers()

    with_more_time(check, 1, 10)


def test_a_step_longer_than_the_timeout_is_not_death():
    def check(seconds):
        env_fns = [partial(CountingEnv, delay=6 * seconds)]
        with ClusterEnv(env_fns, 1, worker_timeout=seconds, bind_address="127.0.0.1") as envs:
            envs.reset()
            assert envs.step([0])[1].tolist() == [1]
            assert envs.rollout(CategoricalPolicy(linear(1, 2)), 1).rewards.tolist() == [[2]]

    with_more_time(check, 0.5, 10)


def test_workers_of_a_stopped_head_end_by_themselves(tmp_path):
    code = """
import sys, time
from clusterenv_runtime import ClusterEnv
from tests.envs import CountingEnv
envs = ClusterEnv([CountingEnv] * 2, 2, worker_timeout=1, bind_address="127.0.0.1")
print(*envs.call("pid"), flush=True)
time.sleep(3600)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    head = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in head.stdout.readline().split()]
    head.send_signal(signal.SIGSTOP)
    try:
        assert_ended(pids, 25)  # sooner than with the default, 30 s
    finally:
        head.kill()
        head.communicate()


# The resources that strangers take before they authenticate.

# The greeting of a ZMTP 3.1 client.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
HUGE_COMMAND = b"\x06" + (500 * 10**6).to_bytes(8, "big")


def test_a_huge_handshake_is_cut_off(cluster, workers):
    host, port = flag_of(workers, "--connect").removeprefix("tcp://").split(":")
    before = resident_bytes(os.getpid())
    for _ in range(6):
        with socket.create_connection((host, int(port)), PATIENCE) as stranger:
            stranger.sendall(GREETING + HUGE_COMMAND)
            with pytest.raises(ConnectionError):  # cut off long before it has sent all
                for _ in range(500):
                    stranger.sendall(bytes(10**6))
                pytest.fail("all was taken")
        step(cluster)
    assert resident_bytes(os.getpid()) < before + 100 * 2**20
