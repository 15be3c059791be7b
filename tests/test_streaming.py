"""Streaming: chunks come from any worker that is ready, no chunk is lost, and workers pull weights
as in a rollout.
"""

import math
import os
import signal
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, WorkerDiedError

from .envs import CountingEnv, RandomEnv, assert_same
from .nets import change, linear
from .patience import PATIENCE, wait_until, with_more_time
from .test_rollout import Reference

VECTOR = spaces.Box(-1, 1, (3,))
RANDOM = partial(RandomEnv, VECTOR, end=0.1)


class LifeEnv(CountingEnv):
    """Its observation and reward are the number of steps in its whole life. An episode has
    ``length`` steps.
    """

    def __init__(self, length=7, gate=None):
        super().__init__(length, gate=gate)
        self.life = 0

    def step(self, action):
        _, _, terminated, truncated, info = super().step(action)
        self.life += 1
        return np.full(1, self.life, np.float32), float(self.life), terminated, truncated, info


def test_chunks_are_a_workers_rows_in_their_order():
    references = [Reference([RANDOM] * 2), Reference([RANDOM] * 2), Reference([RANDOM])]
    with ClusterEnv([RANDOM] * 5, 3, sync_mode="never") as envs:
        envs.publish(CategoricalPolicy(linear()))
        envs.reset(seed=5)
        for worker, reference in enumerate(references):
            reference.reset(seed=5 + 2 * worker)
        for num_steps in (6, 1):
            envs.send(num_steps)
        lengths = [[6, 1, 4] for _ in references]
        for _ in range(9):
            worker, chunk = envs.recv()
            num_steps = lengths[worker].pop(0)
            assert chunk.rewards.shape == (num_steps, references[worker].envs.num_envs)
            references[worker].check(chunk)
            if len(lengths[worker]) == 2:
                envs.send(4, worker)
        assert lengths == [[], [], []]


def test_no_transition_is_lost_or_doubled_and_slow_workers_hold_up_nobody(tmp_path):
    gate = tmp_path / "gate"
    fast, slow = LifeEnv, partial(LifeEnv, gate=str(gate))
    with ClusterEnv([fast, fast, slow, slow], 2) as envs:
        policy = CategoricalPolicy(linear(1, 2))
        envs.publish(policy)
        envs.reset()
        for _ in range(2):
            envs.send(4)
        received, seen = Counter(), {0: [], 1: []}
        for number in range(90):
            if number == 60:
                assert received == {0: 60}  # while the slow worker is at its first step
                gate.touch()
            worker, chunk = envs.recv()
            received[worker] += 1
            seen[worker].append(chunk.rewards)
            if received[worker] % 10 == 0:
                envs.publish(policy)
            envs.send(4, worker)
        for _ in range(4):  # the outstanding chunks
            worker, chunk = envs.recv()
            seen[worker].append(chunk.rewards)
        lives = []
        for rewards in seen.values():
            rewards = np.concatenate(rewards)
            steps = np.arange(1, len(rewards) + 1)
            assert_same(rewards, np.stack([steps, steps], 1).astype(float))
            lives += [len(rewards)] * 2
        assert envs.get_attr("life") == tuple(lives)


def test_a_worker_runs_ahead_by_the_requests_sent_and_no_more(tmp_path):
    class TellingEnv(CountingEnv):
        def step(self, action):
            (tmp_path / "steps").write_text(str(int((tmp_path / "steps").read_text() or 0) + 1))
            return super().step(action)

    (tmp_path / "steps").write_text("")
    with ClusterEnv([TellingEnv], 1) as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset()
        for _ in range(3):
            envs.send(5)
        envs.recv()
        wait_until(lambda: (tmp_path / "steps").read_text() == "15")
        before = envs.waiting_seconds
        for _ in range(2):
            envs.recv()
        assert (tmp_path / "steps").read_text() == "15"
        envs.send(5)
        envs.recv()
        assert (tmp_path / "steps").read_text() == "20"
        assert envs.waiting_seconds > before  # the worker had nothing to do


def test_a_worker_pulls_a_version_once_and_only_for_the_divergence_of_the_one_it_holds():
    with ClusterEnv([RANDOM] * 2, 1, kl_threshold=0.0, weights="float32") as envs:
        policy = CategoricalPolicy(linear())
        envs.publish(policy)
        envs.reset(seed=1)
        for _ in range(2):
            envs.send(3)
        assert envs.recv()[1].policy_versions.tolist() == [1, 1]
        change(policy, 1.0)
        envs.publish(policy)
        assert 0 < envs.divergence.item() < math.inf
        for _ in range(3):  # all three carry the divergence of version 1
            envs.send(3)
        assert [envs.recv()[1].policy_versions[0] for _ in range(4)] == [1, 2, 2, 2]
        assert envs.pulls.tolist() == [2]
        envs.publish(policy)  # the same weights
        assert envs.divergence.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("max_policy_lag", [0, 3])
def test_the_policy_lag_is_bounded(max_policy_lag):
    with ClusterEnv([RANDOM] * 2, 2, sync_mode="never", max_policy_lag=max_policy_lag) as envs:
        policy = CategoricalPolicy(linear())
        envs.publish(policy)
        envs.reset(seed=1)
        envs.send(2)
        lags = []
        for number in range(20):
            _, chunk = envs.recv(number % 2)
            lags.append(envs.policy_version - chunk.policy_versions.item())
            envs.publish(policy)
            envs.send(2, number % 2)
        # The other worker's turn published after this worker's request, and perhaps after its pull.
        assert max(lags) == max_policy_lag + 1


# Overlapped rollouts.


def test_overlapped_rollouts_act_on_the_weights_of_their_version_and_are_the_same_in_every_run():
    def run(delays):
        torch.manual_seed(3)
        policy, result = CategoricalPolicy(linear()), []
        env_fns = [partial(RandomEnv, VECTOR, delay=delay) for delay in delays]
        with ClusterEnv(env_fns, 2, sync_mode="always", weights="float32") as envs:
            envs.reset(seed=4)
            held = None
            for _ in range(4):
                rollout = envs.rollout(policy, 5, overlap=True)
                if held is not None:
                    with torch.no_grad():
                        logits = held(torch.as_tensor(rollout.observations)).log_softmax(-1)
                    expected = logits.gather(-1, torch.as_tensor(rollout.actions)[..., None])[
                        ..., 0
                    ].numpy()
                    assert rollout.logprobs == pytest.approx(expected, abs=1e-6)
                held = linear()
                held.load_state_dict(policy.actor.state_dict())
                time.sleep(0.02)
                change(policy, 1.0)  # after the requests: the workers must not see it
                result.append(vars(rollout))
            return result

    assert_same(run([0, 0.01]), run([0.01, 0]))


# Misuse, and errors.


class GradedEnv(CountingEnv):
    """Its reward is its ``grade``."""

    def __init__(self):
        super().__init__()
        self._grade = 0

    @property
    def grade(self):
        return self._grade

    @grade.setter
    def grade(self, grade):
        if grade < 0:
            raise ValueError(f"no grade: {grade}")
        self._grade = grade

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.grade, *rest


def test_attributes_set_while_rollouts_are_outstanding_reach_the_next_requests():
    policy = CategoricalPolicy(linear(1, 2))
    with ClusterEnv([GradedEnv] * 4, 2, worker_timeout=PATIENCE) as envs:
        envs.reset(seed=1)
        seen = []
        for update in range(6):
            rewards = envs.rollout(policy, 3, overlap=update < 5).rewards
            assert (rewards == rewards[:1]).all()
            seen.append(rewards[0].tolist())
            if update == 1:
                envs.set_attr("grade", 1)  # the rollout of update 2 is under way
            if update == 2:
                envs.set_attr("grade", [2, 3, 4, 5])
            if update == 4:
                os.kill(pid_of(envs, 1), signal.SIGKILL)
        first = [[0] * 4, [0] * 4, [0] * 4, [1] * 4, [2, 3, 4, 5]]
        assert seen == [*first, [2, 3, 4, 5]]
        assert envs.get_attr("grade") == (2, 3, 4, 5)
        envs.send(2)
        envs.set_attr("grade", 7)
        envs.send(2)
        chunks = [envs.recv(worker)[1].rewards for worker in (0, 0, 1, 1)]
        expected = [[2, 3], [7, 7], [4, 5], [7, 7]]
        assert [chunk[0].tolist() for chunk in chunks] == expected


def pid_of(envs, worker):
    return envs._pool.workers[worker].process.pid


def test_an_error_of_set_attr_while_rollouts_are_outstanding_is_raised():
    policy = CategoricalPolicy(linear(1, 2))
    with ClusterEnv([GradedEnv] * 4, 2, worker_timeout=PATIENCE) as envs:
        envs.reset(seed=1)
        envs.rollout(policy, 3, overlap=True)
        with pytest.raises(ValueError, match="^no grade: -1$") as caught:
            envs.set_attr("grade", [0, 0, -1, 0])
        assert "environment 2 on worker 1" in str(caught.value.__cause__)
        envs.rollout(policy, 3)
        with pytest.raises(ValueError, match="length equal to the number"):
            envs.set_attr("grade", [1])


def test_a_busy_head_can_fall_behind_by_any_number_of_responses():
    def check(seconds):
        with ClusterEnv(
            [partial(CountingEnv, length=10**6)] * 2, 2, worker_timeout=seconds
        ) as envs:
            envs.reset()
            envs.publish(CategoricalPolicy(linear(1, 2)))
            for _ in range(100):
                envs.send(1)
            time.sleep(4 * seconds)  # the head receives nothing during this
            answered = [envs.recv() for _ in range(200)]
            assert sorted(index for index, _ in answered) == [0] * 100 + [1] * 100
            assert not envs.restarts

    with_more_time(check, 1, 10)


def test_misuse():
    policy = CategoricalPolicy(linear(1, 2))

    def check(error, text, call, *arguments):
        with pytest.raises(error, match=text):
            call(*arguments)

    pending = partial(check, AlreadyPendingCallError)
    with ClusterEnv([partial(CountingEnv, length=100)] * 2, 2) as envs:
        check(ResetNeeded, "Cannot call `send` before calling `reset`.", envs.send, 5)
        check(NoAsyncCallError, "Calling `recv` without any prior call to `send`.", envs.recv)
        envs.reset()
        check(ValueError, "there is no policy to act on: `publish` one first", envs.send, 5)
        envs.publish(policy)
        for call in (envs.send, partial(envs.rollout, policy)):
            check(ValueError, "num_steps must be at least 1, got 0", call, 0)
        for worker in (-1, 2):
            check(ValueError, f"worker must be 0 to 1, got {worker}", envs.send, 5, worker)
        envs.send(5, 1)
        for call in (partial(envs.step, [0, 0]), envs.reset, partial(envs.rollout, policy, 5)):
            text = "Calling `(step|reset|rollout)` while .*`send`.*: `recv` all chunks first"
            pending(text, call)
        assert envs.call("pid") == tuple(pid_of(envs, worker) for worker in (0, 1))
        check(NoAsyncCallError, "Calling `recv` without any prior call", envs.recv, 0)
        assert envs.recv(1)[0] == 1
        envs.rollout(policy, 5, overlap=True)
        pending("to `rollout` .*overlap=False", envs.reset)
        pending("Calling `send` while an overlapped `rollout` is outstanding", envs.send, 5)
        check(ValueError, "was requested with 5 steps, not 4", envs.rollout, policy, 4)
        assert envs.get_attr("count") == (10, 15)  # after the rollout under way
        check(NoAsyncCallError, "Calling `recv` without any prior call to `send`", envs.recv)
        assert envs.rollout(policy, 5).rewards.shape == (5, 2)
    calls = envs.recv, partial(envs.send, 5), partial(envs.publish, policy)
    for call in (*calls, partial(envs.rollout, policy, 3)):
        check(ClosedEnvironmentError, "after a call to `close", call)


@pytest.mark.parametrize("seconds", [0, 0.02], ids=["an idle learner", "a busy learner"])
def test_a_worker_that_dies_while_others_keep_streaming(seconds):
    with ClusterEnv([CountingEnv] * 4, 2, on_worker_loss="raise") as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset()
        pids = envs.call("pid")
        for _ in range(2):
            envs.send(4)
        os.kill(pids[-1], signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        with pytest.raises(
            WorkerDiedError, match=rf"worker 1 \(.*pid {pids[-1]}.*\) died: killed by SIGKILL"
        ):
            while time.monotonic() < deadline:
                worker, _ = envs.recv()
                envs.send(4, worker)
                time.sleep(seconds)
        for _ in range(2):
            assert envs.recv(0)[0] == 0  # the other worker's chunks are not lost
        with pytest.raises(WorkerDiedError, match="^worker 1 .* is gone$"):
            envs.recv()


class NotedEnv(CountingEnv):
    """Steps slowly, and makes a file when it is closed."""

    def __init__(self, closed):
        super().__init__(delay=0.1)
        self.closed = closed

    def close(self):
        self.closed.touch()


def test_a_worker_that_acts_is_closed_after_its_step(tmp_path):
    envs = ClusterEnv([partial(NotedEnv, tmp_path / str(env)) for env in range(2)], 2)
    envs.reset(seed=1)
    envs.publish(CategoricalPolicy(linear(1, 2)))
    envs.send(10_000)
    started = time.monotonic()
    envs.close()
    assert time.monotonic() - started < PATIENCE / 2
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
