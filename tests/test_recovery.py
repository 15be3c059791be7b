"""Replacement of workers that die: batches are complete, nothing comes twice or in part, and the
user is told.
"""

import contextlib
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, WorkerDiedError

from .envs import BlockingEnv, CountingEnv, RandomEnv, Words, assert_same
from .nets import change, linear
from .patience import HOUR, at_most, kill, wait_until, with_more_time

VECTOR = spaces.Box(-1, 1, (3,))
RANDOM = partial(RandomEnv, VECTOR, end=0.1)


class OnceEnv(BlockingEnv):
    """Blocks in its steps like `BlockingEnv`, but only the first one built."""

    def __init__(self, pipe):
        self.first = not os.path.exists(f"{pipe}.born")
        Path(f"{pipe}.born").touch()
        super().__init__(pipe)

    def _block_in(self, place):
        if self.first:
            super()._block_in(place)


def pid_of(envs, worker):
    """Return the pid of the worker with that index."""
    return envs._pool.workers[worker].process.pid


@contextlib.contextmanager
def killing(pipe, number=signal.SIGKILL):
    """Kill or stop the process that writes its pid to the pipe, while the body runs."""
    thread = threading.Thread(target=lambda: os.kill(*pipe.pids(1), number))
    thread.start()
    yield
    thread.join()


# Environments that the head steps.


@pytest.mark.parametrize(
    "space",
    [VECTOR, spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 1)), Words()],
    ids=["Box", "Dict", "Words"],
)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_the_step_after_a_loss_says_that_the_episodes_are_truncated(mode, space):
    env_fns = [partial(RandomEnv, space, end=0.0)] * 5
    with ClusterEnv(env_fns, 2, autoreset_mode=mode) as envs:
        reference = SyncVectorEnv(env_fns, autoreset_mode=mode)
        envs.reset(seed=3)
        reference.reset(seed=3)
        last = reference.step([1] * 5)[0]
        assert_same(envs.step([1] * 5)[0], last)
        kill(pid_of(envs, 1))
        observations, rewards, terminations, truncations, infos = envs.step([2] * 5)
        expected, expected_rewards, *_ = reference.step([2] * 5)
        (restart,) = envs.restarts
        assert restart["worker"] == 1 and "died: killed by SIGKILL" in restart["reason"]
        fresh = SyncVectorEnv(env_fns[3:], autoreset_mode=mode)
        begun, fresh_infos = fresh.reset(seed=restart["seeds"])
        assert rewards.tolist() == [*expected_rewards[:3], 0, 0]
        assert not terminations.any() and truncations.tolist() == [False] * 3 + [True] * 2
        told = infos["final_info"] if mode == "SameStep" else infos  # as of any last step
        assert told["worker_lost"].tolist() == told["_worker_lost"].tolist() == truncations.tolist()

        def rows(part, start, stop):
            """Return some rows of a batch, as a list."""
            if isinstance(part, dict):
                return {key: rows(value, start, stop) for key, value in part.items()}
            return np.asarray(part, object)[start:stop].tolist()

        assert rows(observations, 0, 3) == rows(expected, 0, 3)
        if mode == "SameStep":
            assert rows(observations, 3, 5) == rows(begun, 0, 2)
            single = [infos["final_obs"][i] for i in (3, 4)]
            for key in set(fresh_infos) - {"options"}:
                assert_same(rows(infos[key], 3, 5), rows(fresh_infos[key], 0, 2))
            batched = (
                concatenate(space, single, create_empty_array(space, 2))
                if space != Words()
                else single
            )
            assert rows(batched, 0, 2) == rows(last, 3, 5)
        else:
            assert rows(observations, 3, 5) == rows(last, 3, 5)
        # The replacement's first reset is the one that the user sees.
        if mode == "Disabled":
            observations, _ = envs.reset(options={"reset_mask": truncations})
            assert rows(observations, 3, 5) == rows(begun, 0, 2)
        elif mode == "NextStep":
            observations, rewards, _, truncations, _ = envs.step([0] * 5)
            assert rows(observations, 3, 5) == rows(begun, 0, 2)
            assert rewards[3:].tolist() == [0, 0] and not truncations.any()
        observations, rewards, *_ = envs.step([1] * 5)
        begun, expected_rewards, *_ = fresh.step([1] * 2)
        assert rows(observations, 3, 5) == rows(begun, 0, 2)
        assert rewards[3:].tolist() == expected_rewards.tolist()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_lost_while_it_steps(pipe, workers, number):
    def check(worker_timeout):
        Path(f"{pipe.path}.born").unlink(missing_ok=True)
        env_fns = [CountingEnv, partial(OnceEnv, pipe.path)]
        with ClusterEnv(env_fns, 2, worker_timeout=worker_timeout) as envs:
            envs.reset()
            before = pid_of(envs, 1)
            with killing(pipe, number), at_most():
                observations, rewards, terminations, truncations, _ = envs.step([0, 0])
            assert observations.tolist() == [[1], [0]] and rewards.tolist() == [1, 0]
            assert truncations.tolist() == [False, True] and not terminations.any()
            assert envs.step([0, 0])[0].tolist() == [[2], [0]]  # the reset
            assert envs.step([0, 0])[0].tolist() == [[3], [1]]
            assert before not in workers() and len(workers()) == 2
            assert len(envs.restarts) == 1

    if number == signal.SIGKILL:
        check(HOUR)
    else:
        with_more_time(check, 1, 5, 20)


class GatedEnv(CountingEnv):
    """Before it steps or sets ``x``, waits until there is a file ``gate``, if one is given."""

    def __init__(self, gate=None):
        super().__init__(length=99)
        self.gate = gate

    def step(self, action):
        self._pass()
        return super().step(action)

    @property
    def x(self):
        return self._x

    @x.setter
    def x(self, value):
        self._pass()
        self._x = value

    def _pass(self):
        if self.gate is not None:
            wait_until(lambda: os.path.exists(self.gate))


@contextlib.contextmanager
def losing_the_first_before_the_second_answers(envs, gate, seconds):
    """Kill worker 0 while the body waits for worker 1, which answers once worker 0 is replaced.

    Worker 0 has most probably answered before it is killed, but only the head can know that.
    """

    def lose():
        time.sleep(seconds)
        os.kill(pid_of(envs, 0), signal.SIGKILL)
        wait_until(lambda: len(envs.restarts) == 1)
        gate.touch()

    thread = threading.Thread(target=lose)
    thread.start()
    yield
    thread.join()


def test_the_next_step_reports_a_worker_that_is_lost_after_its_answer(tmp_path):
    def check(seconds):
        gate = tmp_path / "gate"
        gate.touch()
        with ClusterEnv([GatedEnv, partial(GatedEnv, str(gate))], 2) as envs:
            envs.reset()
            envs.step([0, 0])
            gate.unlink()
            with losing_the_first_before_the_second_answers(envs, gate, seconds):
                assert envs.step([0, 0])[3].tolist() == [False, False]
            assert envs.step([0, 0])[3].tolist() == [True, False]
            assert envs.step([0, 0])[0].tolist() == [[0], [4]]  # the reset

    with_more_time(check, 0.5, 20)


def test_an_attribute_is_also_set_for_a_worker_that_is_lost_after_its_answer(tmp_path):
    gate = tmp_path / "gate"
    with ClusterEnv([GatedEnv, partial(GatedEnv, str(gate))], 2) as envs:
        envs.reset()
        with losing_the_first_before_the_second_answers(envs, gate, 0.5):
            envs.set_attr("x", [7, 8])
        assert envs.get_attr("x") == (7, 8)


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_an_episode_that_had_ended_is_not_truncated_again(mode):
    with ClusterEnv(
        [partial(CountingEnv, 2), partial(CountingEnv, 9)], 1, autoreset_mode=mode
    ) as envs:
        envs.reset()
        envs.step([0, 0])
        assert envs.step([0, 0])[3].tolist() == [True, False]
        kill(pid_of(envs, 0))
        if mode == "Disabled":
            mask = np.array([True, False])
            assert envs.reset(options={"reset_mask": mask})[0].tolist() == [[0], [2]]
        observations, rewards, _, truncations, infos = envs.step([0, 0])
        stepped = int(mode == "Disabled")  # the mask has begun the first row's next episode
        assert observations.tolist() == [[stepped], [2]] and rewards.tolist() == [stepped, 0]
        assert truncations.tolist() == infos["_worker_lost"].tolist() == [False, True]
        if mode == "Disabled":
            envs.reset(options={"reset_mask": truncations})
            observations, _, _, truncations, _ = envs.step([0, 0])
            assert observations.tolist() == [[2], [1]] and truncations.tolist() == [True, False]
        else:
            assert envs.step([0, 0])[0].tolist() == [[1], [0]]


class BeginsEnv(CountingEnv):
    """Says in its info that an episode begins."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {"begins": True}


def test_a_reset_by_a_mask_after_a_loss_keeps_the_infos_of_the_other_rows():
    with ClusterEnv([BeginsEnv] * 3, 1, autoreset_mode="SameStep") as envs:
        envs.reset()
        envs.step([0, 0, 0])
        kill(pid_of(envs, 0))
        envs.reset(options={"reset_mask": np.array([False, True, False])})
        observations, _, _, truncations, infos = envs.step([0, 0, 0])
        lost = [True, False, True]
        assert observations.tolist() == [[0], [1], [0]] and truncations.tolist() == lost
        assert infos["final_info"]["worker_lost"].tolist() == infos["begins"].tolist() == lost


class NotingEnv(CountingEnv):
    """Keeps the options of its reset, and the order in which attributes are set."""

    order = ()

    def reset(self, *, seed=None, options=None):
        self.options = options
        return super().reset(seed=seed)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name in ("mode", "goal"):
            self.order += (name,)


def test_a_replacement_gets_attributes_and_options_as_they_were_when_last_given():
    goal, options = np.zeros(2), {"level": 1}
    with ClusterEnv([NotingEnv], 1) as envs:
        envs.reset(options=options)
        for name, value in (("mode", "easy"), ("goal", goal), ("mode", "hard")):
            envs.set_attr(name, value)
        goal += 7
        options["level"] = 99
        kill(pid_of(envs, 0))
        assert envs.get_attr("goal")[0].tolist() == [0, 0]
        assert envs.get_attr("options") == ({"level": 1},)
        assert (envs.get_attr("mode"), envs.get_attr("order")) == (("hard",), (("goal", "mode"),))


# Environments in which workers act.


class LifeEnv(CountingEnv):
    """Its reward is the number of steps in its whole life. It observes this number, and another one
    that no other environment has.
    """

    observation_space = spaces.Box(0, np.inf, (2,), np.float64)

    def __init__(self, length=7):
        super().__init__(length)
        self.life, self.name = 0, time.time_ns()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.life, self.name], np.float64), {}

    def step(self, action):
        self.life += 1
        self.count += 1
        observation = np.array([self.life, self.name], np.float64)
        return observation, float(self.life), False, self.count >= self.length, {}


def lives(chunks):
    """Check that an environment's transitions, in their order, have every step of each life once.

    Return the number of lives.
    """
    observations = np.concatenate([observations for observations, _ in chunks])
    rewards = np.concatenate([rewards for _, rewards in chunks])
    names, starts = np.unique(observations[:, 1], return_index=True)
    for life in np.split(np.arange(len(rewards)), np.sort(starts)[1:]):
        assert rewards[life].tolist() == list(range(1, len(life) + 1))  # none twice, none left out
        assert len(set(observations[life, 1])) == 1
    return len(names)


@pytest.mark.parametrize("overlap", [False, True])
def test_rollouts_are_complete_whichever_worker_dies(overlap, workers):
    with ClusterEnv([LifeEnv] * 5, 2, kl_threshold=0.0) as envs:
        policy = CategoricalPolicy(linear(2, 2))
        envs.reset(seed=1)
        chunks = [[] for _ in range(5)]
        for number in range(9):
            if number % 3 == 1:
                kill(pid_of(envs, number % 2))
            rollout = envs.rollout(policy, 20, overlap=overlap and number < 8)
            assert rollout.rewards.shape == (20, 5)
            assert rollout.policy_versions.min() >= number + (not overlap or number == 0)
            for row in range(5):
                chunks[row].append((rollout.observations[:, row], rollout.rewards[:, row]))
            change(policy, 0.01)
        assert sum(map(lives, chunks)) == 5 + sum(
            len(restart["seeds"]) for restart in envs.restarts
        )
        # The last loss may come after the worker's last response, and then nobody notices it.
        assert 2 <= len(envs.restarts) <= 3
        assert len(workers()) == 2


def test_streaming_goes_on_whichever_worker_dies():
    with ClusterEnv([LifeEnv] * 5, 3) as envs:
        envs.publish(CategoricalPolicy(linear(2, 2)))
        envs.reset(seed=1)
        chunks, asked, received = {row: [] for row in range(5)}, [2] * 3, [0] * 3
        for _ in range(2):
            envs.send(8)
        for number in range(150):
            if number % 40 == 20:
                with contextlib.suppress(ProcessLookupError, KeyError):  # it is being replaced
                    kill(pid_of(envs, number // 40 % 3))
            worker, chunk = envs.recv()
            received[worker] += 1
            for i, row in enumerate(chunk.rows):
                chunks[row].append((chunk.observations[:, i], chunk.rewards[:, i]))
            if number < 144:
                asked[worker] += 1
                envs.send(8, worker)
        assert received == asked  # each request was answered once
        assert envs.restarts
        assert sum(map(lives, chunks.values())) <= 5 + sum(
            len(restart["seeds"]) for restart in envs.restarts
        )


def test_a_replacement_goes_on_with_its_predecessors_noise():
    network = linear(1, 2)
    for parameter in network.parameters():
        parameter.data.zero_()  # so that all observations are the same to it
    policy = CategoricalPolicy(network)

    def actions(losses, overlap=False):
        with ClusterEnv([CountingEnv] * 4, 2) as envs:
            envs.reset(seed=1)
            for number in range(4):
                if number in losses:
                    kill(pid_of(envs, 1))
                yield envs.rollout(policy, 8, overlap=overlap and number < 3).actions.tolist()

    expected = list(actions(()))
    assert len({str(part) for part in expected}) == 4
    assert len(set(zip(*expected[0], strict=True))) > 1  # rows have noise of their own
    assert list(actions((1, 3))) == list(actions((2,), overlap=True)) == expected


# Too many lost workers.


class DyingEnv(CountingEnv):
    """Ends its process in its first step."""

    def step(self, action):
        os._exit(9)


@pytest.mark.parametrize("times", [0, 2])
def test_replacements_that_die_in_a_row_end_the_run(times, workers, tmp_path):
    env_fns = [partial(CountingEnv, length=99), DyingEnv]
    arguments = {"max_worker_restarts": times, "worker_timeout": HOUR, "log_dir": str(tmp_path)}
    with ClusterEnv(env_fns, 2, **arguments) as envs:
        envs.reset()
        text = r"worker 1 \(.*worker-1\.log\) died: exit code 9"
        text += f" \\(and so did {times} before it, in a row\\)" * (times > 0)
        with at_most(), pytest.raises(WorkerDiedError, match=text + "$"):
            envs.rollout(CategoricalPolicy(linear(1, 2)), 3)
        assert len(envs.restarts) == times
    assert not workers()
