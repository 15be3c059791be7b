"""Workers on a Ray cluster of two nodes on this machine: real processes, but no real network."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from clusterenv_runtime import ClusterEnv, StartupError

from .envs import CountingEnv
from .patience import HOUR, PATIENCE, assert_ended, wait_until
from .scripts import ROOT, environment

ray = pytest.importorskip(
    "ray",
    reason="Ray is not installed: pip install -r experiments/benchmarks/peers/requirements-ray.txt",
)
cluster_utils = pytest.importorskip("ray.cluster_utils")

PATIENT = {"startup_timeout": PATIENCE, "worker_timeout": HOUR}


@pytest.fixture(scope="module")
def nodes():
    """Return a cluster whose driver is this process, and its second node."""
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 5})
    second = cluster.add_node(num_cpus=3, resources={"simulator": 3})
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


class Pole(CartPoleEnv):
    """A CartPole that says in which process it is."""

    def pid(self):
        return os.getpid()


def worker_pids(envs):
    """Return the workers' pids, in the order of their indices."""
    return list(dict.fromkeys(envs.call("pid")))


def check_steps(envs, reference, steps=20):
    for _ in range(steps):
        actions = reference.action_space.sample()
        for ours, theirs in zip(envs.step(actions)[:4], reference.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_workers_are_actors_and_equal_environments_in_this_process(nodes):
    reference = gym.vector.SyncVectorEnv([Pole] * 4)
    with ClusterEnv(
        [Pole] * 4, 2, launcher="ray", worker_resources="simulator=1", **PATIENT
    ) as envs:
        np.testing.assert_array_equal(envs.reset(seed=1)[0], reference.reset(seed=1)[0])
        check_steps(envs, reference)
        free, pids = ray.available_resources(), worker_pids(envs)
        assert free["simulator"] == 1
    assert_ended(pids)
    wait_until(lambda: ray.available_resources().get("simulator") == 3)
    assert ray.is_initialized()  # the launcher must not end a cluster that it has not started


def test_a_killed_worker_is_replaced_and_reported(nodes, caplog):
    with ClusterEnv([CountingEnv] * 2, 2, launcher="ray", **PATIENT) as envs:
        envs.reset(seed=1)
        first = worker_pids(envs)
        os.kill(first[1], signal.SIGKILL)
        *_, infos = envs.step(np.zeros(2, np.int64))
        assert infos["worker_lost"].tolist() == [False, True] and len(envs.restarts) == 1
        assert "killed by SIGKILL" in envs.restarts[0]["reason"]
        assert worker_pids(envs)[0] == first[0]


@pytest.mark.long
def test_an_actor_that_dies_takes_its_worker_along(nodes):
    with ClusterEnv([CountingEnv] * 2, 1, launcher="ray", **PATIENT) as envs:
        envs.reset(seed=1)
        (worker,) = worker_pids(envs)
        with open(f"/proc/{worker}/stat") as file:
            actor = int(file.read().rpartition(")")[2].split()[1])
        os.kill(actor, signal.SIGKILL)
        assert_ended([worker])
        assert envs.step(np.zeros(2, np.int64))[4]["worker_lost"].all()


@pytest.mark.long
def test_the_start_waits_for_missing_resources_and_says_so(nodes, caplog, monkeypatch):
    monkeypatch.setattr("clusterenv_runtime.head.workers.NOTICE_S", 0.0)
    envs = []

    def start():
        envs.append(
            ClusterEnv(
                [CountingEnv], 1, launcher="ray", worker_resources="CPU=0 telescope=1", **PATIENT
            )
        )

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: "Ray has no place for it yet (CPU=0 telescope=1)" in caplog.text)
    third = nodes[0].add_node(num_cpus=1, resources={"telescope": 1})
    thread.join(PATIENCE)
    envs[0].close()
    nodes[0].remove_node(third)


@pytest.mark.long
def test_a_lost_node_costs_only_the_episodes_of_its_workers(nodes):
    cluster, second = nodes
    taken = ray.util.placement_group([{"CPU": 2, "node:__internal_head__": 0.01}])
    ray.get(taken.ready())  # one of four workers is then on the second node
    endless = partial(CountingEnv, length=10**9)  # an episode that had just ended would not be lost
    with ClusterEnv(
        [endless] * 8, 4, launcher="ray", startup_timeout=PATIENCE, worker_timeout=PATIENCE
    ) as envs:
        envs.reset(seed=1)
        ray.util.remove_placement_group(taken)
        cluster.remove_node(second, allow_graceful=False)
        lost, until, more = 0, time.monotonic() + PATIENCE, 100
        while more and time.monotonic() < until:
            more -= bool(envs.restarts)  # Ray is slow to notice a lost node
            *_, infos = envs.step(np.zeros(8, np.int64))
            lost += infos.get("worker_lost", np.zeros(8)).sum()
        # Ray may send a replacement to the lost node, but it has no episodes to lose.
        assert lost == 2 * len({restart["worker"] for restart in envs.restarts}) > 0


FLAGS = "--env-id CartPole-v1 --envs-per-worker 2 --num-steps 16 --num-minibatches 2 --launcher ray"
FLAGS += " --eval-episodes 2"


def run(directory, *flags, **extra):
    command = [sys.executable, str(ROOT / "ppo_clusterenv.py"), *shlex.split(FLAGS), *flags]
    return subprocess.run(
        command, cwd=directory, env=environment(**extra), capture_output=True, text=True
    )


@pytest.mark.long
def test_a_script_trains_on_ray(nodes, tmp_path):
    flags = f"--total-timesteps 128 --startup-timeout {PATIENCE} --worker-resources CPU=0.5"
    result = run(tmp_path, *flags.split(), RAY_ADDRESS=nodes[0].address)
    assert result.returncode == 0 and "mean return" in result.stdout, result.stderr


def test_a_missing_ray_is_a_one_line_error(monkeypatch):
    monkeypatch.setattr("clusterenv_runtime.extras.ray.ray", None)
    with pytest.raises(StartupError, match=r"needs Ray: pip install 'clusterenv-runtime\[ray\]'"):
        ClusterEnv([CountingEnv], 1, launcher="ray")


def test_a_cluster_that_cannot_be_reached_is_a_one_line_error(tmp_path):
    result = run(tmp_path, "--bind-address", "127.0.0.1", RAY_ADDRESS="127.0.0.1:1")
    (line,) = result.stderr.splitlines()
    says = (
        "error: cannot reach Ray (RAY_ADDRESS='127.0.0.1:1'): ConnectionRefusedError: [Errno 111]"
    )
    assert result.returncode == 1 and line == f"{says} Connection refused"
