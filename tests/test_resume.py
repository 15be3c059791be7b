"""Interruption, checkpoints, and runs that go on from one."""

import os
import threading
import time
from functools import partial

import pytest

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Interrupted

from .envs import BlockingEnv, CountingEnv
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
