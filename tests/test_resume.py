"""Interruption, checkpoints, and runs that go on from one."""

import os
import threading
import time
from functools import partial

import pytest
import torch
from gymnasium.error import AlreadyPendingCallError

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Interrupted

from .envs import BlockingEnv, CountingEnv, assert_same
from .nets import linear

# Interruption.


def actions(envs):
    return envs.action_space.sample()


@pytest.mark.parametrize("method", ["step", "rollout", "recv"])
def test_a_wait_for_a_long_step_is_interrupted_at_once(tmp_path, method):
    os.mkfifo(tmp_path / "pipe")
    policy = CategoricalPolicy(linear(1, 2))
    interrupted_at = []

    def interrupt():
        with open(tmp_path / "pipe") as pipe:  # which the environment writes to as it begins its step of a minute
            pipe.readline()
        interrupted_at.append(time.monotonic())
        envs.interrupt()

    with ClusterEnv([partial(BlockingEnv, str(tmp_path / "pipe")), CountingEnv], 2) as envs:
        envs.reset()
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(Interrupted):
            if method == "step":
                envs.step(actions(envs))
            elif method == "rollout":
                envs.rollout(policy, 3)
            else:
                envs.publish(policy)
                envs.send(3)
                envs.recv(0)
        assert time.monotonic() - interrupted_at[0] < 1
        thread.join()
        envs.close(terminate=True)


def test_an_interruption_while_nothing_is_awaited_is_of_the_next_wait_and_of_no_other():
    with ClusterEnv([CountingEnv] * 2, 2) as envs:
        envs.reset()
        envs.interrupt()
        with pytest.raises(Interrupted):
            envs.step(actions(envs))
        # What was given up has been done all the same.
        assert envs.step(actions(envs))[0].tolist() == [[2], [2]]


def test_a_chunk_that_is_there_outlasts_an_interruption():
    with ClusterEnv([CountingEnv] * 2, 2) as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset()
        envs.send(3)
        envs.recv(0)
        envs.interrupt()
        with pytest.raises(Interrupted):
            envs.recv(1)
        assert envs.recv(1)[1].rewards.tolist() == [[1], [2], [3]]


# The state of a ClusterEnv.


def test_workers_go_on_with_the_random_numbers_of_the_state_and_the_counters_count_on():
    policy = CategoricalPolicy(linear(1, 2))
    with ClusterEnv([CountingEnv] * 4, 2, sync_mode="always") as envs:
        envs.reset(seed=1)
        for _ in range(2):
            envs.rollout(policy, 5)
        state = envs.state_dict()
        expected = envs.rollout(policy, 5).actions
        after = envs.state_dict()
        assert envs.rollout(policy, 5).actions.tolist() != expected.tolist()
    generators = [torch.frombuffer(bytearray(item), dtype=torch.uint8) for item in state["generators"]]
    assert len(generators) == 2 and not torch.equal(*generators)
    for generator in generators:
        torch.Generator().set_state(generator)
    assert (state["policy_version"], state["pulls"]) == (2, [2, 2]) and min(state["waiting_seconds"]) > 0
    with ClusterEnv([CountingEnv] * 4, 2, sync_mode="always") as envs:
        envs.publish(policy)  # of no account
        envs.load_state_dict(state)
        assert_same(envs.state_dict(), state)
        envs.reset(seed=2)
        assert envs.rollout(policy, 5).actions.tolist() == expected.tolist()
        assert envs.policy_version == 3 and envs.pulls.tolist() == [3, 3]
        assert envs.sync_bytes == after["sync_bytes"] == state["sync_bytes"] * 3 // 2
        assert envs.state_dict()["generators"] == after["generators"]
        assert envs.rollout(policy, 5).actions.tolist() != expected.tolist()  # restored once, not each time


def test_a_state_of_other_workers_or_amid_a_rollout_is_refused():
    with ClusterEnv([CountingEnv] * 2, 2) as envs, ClusterEnv([CountingEnv], 1) as other:
        with pytest.raises(ValueError, match="the state is of 1 workers, these are 2"):
            envs.load_state_dict(other.state_dict())
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset()
        envs.send(3)
        with pytest.raises(AlreadyPendingCallError):
            envs.load_state_dict(envs.state_dict())
