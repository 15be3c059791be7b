"""Streaming: chunks come from any worker that is ready, no chunk is lost, and workers pull weights
as in a rollout.
"""

import math
import os
import signal
import threading
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

from clusterenv_runtime import (
    CategoricalPolicy,
    ClusterEnv,
    EpsilonGreedyPolicy,
    Interrupted,
    WorkerDiedError,
)

from .envs import CountingEnv, FailingEnv, RandomEnv, assert_same
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
        with pytest.raises(
            NoAsyncCallError, match="Calling `recv` without any prior call to `send`."
        ):
            envs.recv()


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


def test_a_divergence_counts_only_for_the_version_it_was_measured_for():
    with ClusterEnv([RANDOM] * 2, 1, kl_threshold=0.0) as envs:
        policy = CategoricalPolicy(linear())
        envs.publish(policy)
        envs.reset(seed=1)
        envs.send(3)
        envs.recv()
        change(policy, 1.0)
        envs.publish(policy)  # 2, which the worker pulls
        envs.send(3)
        change(policy, 1.0)
        envs.publish(policy)  # 3: measured while version 1 is the worker's last known one
        assert envs.recv()[1].policy_versions.tolist() == [2, 2]
        envs.send(3)
        assert envs.recv()[1].policy_versions.tolist() == [2, 2]
        envs.publish(policy)  # 4: measured for version 2
        envs.send(3)
        assert envs.recv()[1].policy_versions.tolist() == [4, 4]
        assert envs.pulls.tolist() == [3]


def test_a_new_wrapper_and_numpy_numbers_do_not_change_the_policy():
    network = linear()
    with ClusterEnv([RANDOM] * 2, 1, sync_mode="never") as envs:
        for epsilon in np.linspace(1, 0, 4):
            envs.publish(EpsilonGreedyPolicy(network, epsilon))
            envs.reset(seed=1)
            envs.send(np.int64(2), np.int64(0))
            _, chunk = envs.recv()
        assert (
            chunk.actions == network(torch.as_tensor(chunk.observations)).argmax(-1).numpy()
        ).all()
        assert envs.pulls.tolist() == [1]


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


def test_epsilon_travels_with_each_request():
    with ClusterEnv([RANDOM] * 4, 1, weights="float32") as envs:
        policy = EpsilonGreedyPolicy(linear(), 0.0)
        envs.publish(policy)
        envs.reset(seed=1)
        envs.send(30)
        policy.epsilon = 1.0
        envs.send(30)
        shares = []
        for _ in range(2):
            _, chunk = envs.recv()
            greedy = (
                policy(torch.as_tensor(chunk.observations).flatten(0, 1)).argmax(-1).view(30, 4)
            )
            shares.append((chunk.actions == greedy.numpy()).mean())
        assert shares[0] == 1
        assert shares[1] == pytest.approx(1 / 3, abs=0.17)  # four standard deviations of 120 draws
        assert envs.pulls.tolist() == [1]


def test_another_policy_may_be_published_while_requests_are_outstanding():
    with ClusterEnv([RANDOM] * 2, 2, weights="float32") as envs:
        envs.publish(CategoricalPolicy(linear()))
        envs.reset(seed=1)
        for _ in range(3):
            envs.send(3)
        envs.recv()
        other = CategoricalPolicy(torch.nn.Linear(3, 3))
        envs.publish(other)
        for _ in range(5):
            envs.recv()
        envs.send(3)
        for _ in range(2):
            _, chunk = envs.recv()
            assert chunk.policy_versions.tolist() == [2]
            logprobs = torch.log_softmax(other(torch.as_tensor(chunk.observations)), -1)
            assert chunk.logprobs == pytest.approx(
                logprobs.gather(-1, torch.as_tensor(chunk.actions)[..., None])[..., 0]
                .detach()
                .numpy(),
                abs=1e-6,
            )


def test_one_outstanding_chunk_in_a_fixed_order_is_the_same_in_every_run():
    def run(delays):
        torch.manual_seed(3)
        policy, result = EpsilonGreedyPolicy(linear(), 0.3), []
        with ClusterEnv(
            [partial(RandomEnv, VECTOR, delay=delay) for delay in delays], 2, kl_threshold=0.05
        ) as envs:
            envs.publish(policy)
            envs.reset(seed=4)
            envs.send(3)
            for number in range(12):
                worker, chunk = envs.recv(number % 2)
                assert worker == number % 2
                policy.epsilon = 1 / (number + 2)
                envs.send(3, worker)
                change(policy, 0.1)
                envs.publish(policy)
                result.append(vars(chunk))
            return result, envs.pulls, envs.divergence

    first, second = run([0, 0.01]), run([0.01, 0])
    assert_same(first, second)
    assert first[1].min() > 1


# Overlapped rollouts.


@pytest.mark.parametrize(
    "arguments, lags",
    [({"sync_mode": "always"}, [0, 1, 1, 1, 1]), ({"sync_mode": "never"}, [0, 1, 2, 3, 4])],
)
def test_overlap_adds_one_version_of_lag(arguments, lags):
    with ClusterEnv([RANDOM] * 3, 2, **arguments) as envs:
        policy, seen = CategoricalPolicy(linear()), []
        envs.reset(seed=1)
        for iteration in range(5):
            rollout = envs.rollout(policy, 4, overlap=iteration < 4)
            seen.append(set((envs.policy_version - rollout.policy_versions).tolist()))
            change(policy, 0.1)
        assert seen == [{lag} for lag in lags]
        assert envs.policy_version == 5
        envs.step(envs.action_space.sample())  # nothing is outstanding


def test_an_interrupt_while_the_next_rollout_is_asked_for_loses_no_step(monkeypatch):
    policy = CategoricalPolicy(linear(1, 2))
    with ClusterEnv([partial(CountingEnv, length=100)] * 2, 2) as envs:
        envs.reset(seed=1)
        ask = envs._grant_ahead

        def interrupted(*asked):
            ask(*asked)
            envs.interrupt()
            envs._pool.wait_until(lambda: False, envs._granted)

        monkeypatch.setattr(envs, "_grant_ahead", interrupted)
        first = envs.rollout(policy, 5, overlap=True)
        monkeypatch.undo()
        with pytest.raises(Interrupted):
            envs.rollout(policy, 5, overlap=True)
        assert first.next_observations.ravel().tolist() == [5, 5]


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
    with ClusterEnv([partial(CountingEnv, length=100)] * 2, 2) as envs:
        with pytest.raises(ResetNeeded, match="Cannot call `send` before calling `reset`."):
            envs.send(5)
        with pytest.raises(
            NoAsyncCallError, match="Calling `recv` without any prior call to `send`."
        ):
            envs.recv()
        envs.reset()
        with pytest.raises(ValueError, match="there is no policy to act on: `publish` one first"):
            envs.send(5)
        envs.publish(policy)
        with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
            envs.send(0)
        for worker in (-1, 2):
            with pytest.raises(ValueError, match=f"worker must be 0 to 1, got {worker}"):
                envs.send(5, worker)
        envs.send(5, 1)
        for call in (
            partial(envs.step, [0, 0]),
            envs.reset,
            partial(envs.rollout, policy, 5),
        ):
            with pytest.raises(
                AlreadyPendingCallError,
                match="Calling `(step|reset|rollout)` while .*`send`.*: `recv` all chunks first",
            ):
                call()
        assert envs.call("pid") == tuple(pid_of(envs, worker) for worker in (0, 1))
        envs.call_async("pid")
        with pytest.raises(AlreadyPendingCallError, match="call `call_wait` first"):
            envs.send(5)
        assert len(envs.call_wait()) == 2
        with pytest.raises(NoAsyncCallError):
            envs.recv(0)
        assert envs.recv(1)[0] == 1
        envs.rollout(policy, 5, overlap=True)
        with pytest.raises(AlreadyPendingCallError, match="to `rollout` .*overlap=False"):
            envs.reset()
        assert envs.get_attr("count") == (10, 15)  # after the rollout under way
        envs.call_async("pid")
        with pytest.raises(AlreadyPendingCallError, match="Calling `rollout` while .* to `call`"):
            envs.rollout(policy, 5)
        envs.call_wait()
        with pytest.raises(
            NoAsyncCallError, match="Calling `recv` without any prior call to `send`"
        ):
            envs.recv()
        assert envs.rollout(policy, 5).rewards.shape == (5, 2)
        envs.send(5)
        with pytest.raises(
            AlreadyPendingCallError,
            match="Calling `rollout` while waiting for a pending call to `send`",
        ):
            envs.rollout(policy, 128)  # the outstanding requests are not its own
        assert [
            chunk.rows.tolist()
            for _, chunk in sorted((envs.recv(), envs.recv()), key=lambda pair: pair[0])
        ] == [
            [0],
            [1],
        ]
        rollout = envs.rollout(policy, 3, overlap=True)
        assert rollout.rows.tolist() == [0, 1]
        with pytest.raises(
            AlreadyPendingCallError,
            match="Calling `send` while an overlapped `rollout` is outstanding",
        ):
            envs.send(5)
        with pytest.raises(
            ValueError, match="the overlapped rollout was requested with 3 steps, not 4"
        ):
            envs.rollout(policy, 4)
        assert envs.rollout(policy, 3).rewards.shape == (3, 2)
        envs.rollout(policy, 3, overlap=True)
        with pytest.raises(AlreadyPendingCallError):
            envs.step_async([0, 0])
        envs.rollout(policy, 3)
        envs.step_async([0, 0])
        with pytest.raises(
            AlreadyPendingCallError,
            match="Calling `send` while waiting for a pending call to `step`",
        ):
            envs.send(5)
        envs.step_wait()
    for call in (
        partial(envs.send, 5),
        envs.recv,
        partial(envs.publish, policy),
        partial(envs.rollout, policy, 3),
    ):
        with pytest.raises(ClosedEnvironmentError):
            call()


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


def test_an_environment_that_raises_while_others_keep_streaming():
    with ClusterEnv(
        [CountingEnv, partial(FailingEnv, "step", ValueError("no more"), 0.2)], 2
    ) as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset()
        for _ in range(2):
            envs.send(4)
        deadline = time.monotonic() + PATIENCE
        with pytest.raises(ValueError, match="no more"):
            while time.monotonic() < deadline:
                worker, _ = envs.recv()
                envs.send(4, worker)
        for worker in (0, 1):
            with pytest.raises(
                ResetNeeded, match="before all environments are `reset`, because one has raised"
            ):
                envs.recv(worker)
        envs.reset()
        envs.send(4, 0)
        assert envs.recv()[0] == 0 and envs.restarts == []


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


def test_a_new_structure_arrives_while_a_worker_acts_and_has_another_request():
    with ClusterEnv([partial(CountingEnv, delay=0.05)], 1, sync_mode="always") as envs:
        envs.reset(seed=1)
        policy = CategoricalPolicy(linear(1, 2))
        envs.publish(policy)
        envs.send(10)
        change(policy, 0.1)
        envs.publish(policy)
        envs.send(1)  # when the worker pulls, there are only weights of the next structure
        envs.publish(CategoricalPolicy(torch.nn.Linear(1, 2)))
        versions = [envs.recv()[1].policy_versions.tolist() for _ in range(2)]
    assert versions == [[1], [3]]


# Policies of other classes, published while requests wait.


class GatedEnv(CountingEnv):
    """Takes its n-th step once ``folder`` has a file ``NAME-n``."""

    def __init__(self, folder, name):
        super().__init__()
        self.folder, self.name, self.steps = folder, name, 0

    def wait(self):
        self.steps += 1
        wait_until((self.folder / f"{self.name}-{self.steps}").exists)


def policy_that_reports(number):
    """Return a policy of a class of its own with a number, which its extras report by its name."""

    class Reporting(CategoricalPolicy):
        numbers = (f"number{number}", *["another"] * (number % 2))

        def extras(self, params, actions):
            name = self.numbers[0]
            return {name: torch.full(actions.shape, getattr(self, name))}

    policy = Reporting(linear(1, 2))
    setattr(policy, f"number{number}", float(number))
    policy.another = -1.0
    return policy


def test_a_request_that_waits_acts_on_the_policy_and_the_numbers_that_are_pulled_for_it(tmp_path):
    env_fns = [partial(GatedEnv, tmp_path, "first"), partial(GatedEnv, tmp_path, "second")]
    policies = [policy_that_reports(number) for number in range(4)]

    def open_second_after_a_pull():
        wait_until(lambda: envs.held_versions[0] == 3)
        (tmp_path / "second-1").touch()

    with ClusterEnv(env_fns, 2, sync_mode="always") as envs:
        envs.reset(seed=1)
        envs.publish(policies[0])
        envs.send(1)
        envs.publish(policies[1])
        envs.send(1, worker=0)
        envs.send(1, worker=0)
        envs.publish(policies[2])  # while both workers act, and two requests of the first one wait
        (tmp_path / "first-1").touch()
        worker, chunk = envs.recv()
        assert (worker, chunk.extras["number0"].tolist()) == (0, [[0]])
        opener = threading.Thread(target=open_second_after_a_pull)
        opener.start()
        assert envs.recv()[0] == 1
        opener.join()
        envs.publish(policies[3])  # the first worker acts on the policy before this one
        (tmp_path / "first-2").touch()
        worker, chunk = envs.recv()
        assert (worker, chunk.extras["number2"].tolist()) == (0, [[2]])
        (tmp_path / "first-3").touch()
        worker, chunk = envs.recv()  # of a request that is older than the policy before this one
        assert (worker, chunk.extras["number2"].tolist()) == (0, [[2]])
        assert not envs.restarts


def test_a_request_that_waits_acts_on_its_own_numbers_if_the_structure_is_the_same(tmp_path):
    policy = policy_that_reports(0)
    with ClusterEnv([partial(GatedEnv, tmp_path, "env")], 1, sync_mode="always") as envs:
        envs.reset(seed=1)
        for number in (1.0, 2.0):
            policy.number0 = number
            envs.publish(policy)
            envs.send(1)
        policy.number0 = 3.0
        envs.publish(policy)
        for step in (1, 2):
            (tmp_path / f"env-{step}").touch()
        chunks = [envs.recv()[1] for _ in range(2)]
        assert [chunk.extras["number0"].item() for chunk in chunks] == [1, 2]
        assert [chunk.policy_versions.item() for chunk in chunks] == [1, 3]
