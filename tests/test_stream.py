"""Streaming of rollouts: the learner takes the first chunks that are ready, from any workers, and
learns from them as from one rollout.
"""

import itertools
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Rollout
from clusterenv_runtime.messages import Collect
from clusterenv_runtime.policy.sync import SyncRule
from clusterenv_utils import Run

from . import scripts
from .envs import CountingEnv, RandomEnv, assert_same
from .nets import MixedNet, linear
from .scripts import scalars

# Chunks as one rollout.

SPACES = {
    "vectors": (spaces.Box(-1, 1, (3,)), linear),
    "dicts": (
        spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)}),
        partial(MixedNet, 3, 3),
    ),
}


@pytest.mark.parametrize("kind", SPACES)
def test_chunks_of_all_workers_equal_the_rollout(kind):
    space, network = SPACES[kind]
    env_fns = [partial(RandomEnv, space, end=0.2)] * 5
    keys = "int", "array"
    with (
        ClusterEnv(env_fns, 2, info_keys=keys) as envs,
        ClusterEnv(env_fns, 2, info_keys=keys) as twin,
    ):
        for each in (envs, twin):
            each.reset(seed=3)
        for _ in range(2):
            expected = twin.rollout(CategoricalPolicy(network()), 7)
            envs.publish(CategoricalPolicy(network()))
            envs.send(7)
            found = Rollout.concatenate([envs.recv(worker)[1] for worker in range(2)])
            assert len(expected.final_observations) > 1
            for name, value in vars(expected).items():
                if name not in ("episodic_returns", "episodic_lengths"):
                    assert_same(getattr(found, name), value)
            for name in ("episodic_returns", "episodic_lengths"):
                assert sorted(getattr(found, name)) == sorted(getattr(expected, name))


def test_a_workers_chunks_become_separate_columns_and_an_episode_counts_once():
    # Episodes of five steps, in chunks of three.
    with ClusterEnv([CountingEnv] * 3, 3) as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        envs.reset()
        chunks = []
        for worker in (0, 2, 0, 0):
            envs.send(3, worker)
            chunks.append(envs.recv()[1])
        rollout = Rollout.concatenate(chunks)
        assert rollout.rows.tolist() == [0, 2, 0, 0]
        assert rollout.rewards.T.tolist() == [[1, 2, 3], [1, 2, 3], [4, 5, 1], [2, 3, 4]]
        assert rollout.observations[..., 0].T.tolist() == [[0, 1, 2]] * 2 + [[3, 4, 0], [1, 2, 3]]
        assert rollout.next_observations[:, 0].tolist() == [3, 3, 1, 4]
        assert rollout.final_observations.tolist() == [[5]]
        assert rollout.episodic_lengths.tolist() == [5]
        assert rollout.episodic_returns.tolist() == [15]


# Which worker gets a request, and whose chunk comes next.


def a_run(num_workers, num_iterations, outstanding, max_policy_lag=None, deterministic=False):
    args = SimpleNamespace(
        num_workers=num_workers, num_iterations=num_iterations, outstanding=outstanding,
        max_policy_lag=max_policy_lag, deterministic=deterministic, num_steps=3, batch_size=1,
    )  # fmt: skip
    return SimpleNamespace(args=args, global_step=0, waiting=0.0)


class Workers:
    """Simulated workers, which act at random by their speeds, and pull by a `ClusterEnv`'s rule."""

    def __init__(self, number, mode, max_policy_lag, speeds, seed):
        self.rule = SyncRule(mode, 0.01, None, max_policy_lag)
        self.held_versions = np.zeros(number, np.int64)
        self.asked = [deque() for _ in range(number)]  # the version at each request
        self.done = deque()  # workers with a chunk ready, and the versions that acted
        self.policy_version, self.speeds = 1, speeds
        self.random = np.random.default_rng(seed)

    def _act(self, worker):
        asked = self.asked[worker].popleft()
        self._pull(worker, asked)
        self.done.append((worker, self.held_versions[worker]))

    def _pull(self, worker, asked):
        if self.rule.wants_pull(self.held_versions[worker], Collect(1, asked, 0, 0.0, [], 1)):
            self.held_versions[worker] = self.policy_version

    def send(self, num_steps, worker):
        assert num_steps == 3
        if not self.asked[worker]:  # an idle worker pulls at once
            self._pull(worker, self.policy_version)
        self.asked[worker].append(self.policy_version)

    def recv(self, worker=None):
        while not any(worker in (None, each) for each, _ in self.done):
            busy = [number for number, asked in enumerate(self.asked) if asked]
            chances = self.speeds[busy] if worker is None else np.array(busy) == worker
            self._act(self.random.choice(busy, p=chances / chances.sum()))
        found = next(pair for pair in self.done if worker in (None, pair[0]))
        self.done.remove(found)
        return found


@pytest.mark.parametrize("outstanding", [1, 2, 3])
def test_every_requested_chunk_is_taken_and_followed_by_a_new_request(outstanding):
    envs = Workers(3, "always", None, np.array([10.0, 10.0, 1.0]), 1)
    ready = Run.chunks(a_run(3, 20, outstanding), envs)
    assert sum(map(len, envs.asked)) == 0  # no requests before the first chunk is wanted
    taken = []
    for number, version in enumerate(ready, 1):
        taken.append(version)
        outstanding_now = sum(map(len, envs.asked)) + len(envs.done)
        assert outstanding_now == min(3 * outstanding, 60 - number)
        envs.policy_version += 1
    assert len(taken) == 60


def test_the_learner_waits_for_a_chunk_only_when_the_lag_bound_requires_it():
    envs = Workers(4, "always", 3, np.array([20.0, 20.0, 20.0, 1e-9]), 1)
    turns, recv = [], envs.recv
    envs.recv = lambda worker: (turns.append(worker), recv(worker))[1]
    chunks = Run.chunks(a_run(4, 40, 1, 3), envs)
    while list(itertools.islice(chunks, 4)):
        envs.policy_version += 1
    # The slow worker's chunk comes in the fourth iteration after its request, as the last chunk of
    # that iteration.
    assert [number for number, worker in enumerate(turns) if worker is not None] == list(
        range(19, 160, 16)
    )
    assert {worker for worker in turns if worker is not None} == {3}


def test_the_learner_waits_for_no_worker_if_all_are_equally_fast():
    envs = Workers(4, "always", 5, np.ones(4), 1)
    in_turn, recv = itertools.cycle(range(4)), envs.recv
    envs.random = SimpleNamespace(choice=lambda busy, p: next(n for n in in_turn if n in busy))
    envs.recv = lambda worker: recv(pytest.fail("waits") if worker is not None else None)
    chunks = Run.chunks(a_run(4, 40, 2, 5), envs)
    while list(itertools.islice(chunks, 4)):
        envs.policy_version += 1


@pytest.mark.parametrize("mode", ["always", "never", "kl"])
@pytest.mark.parametrize("outstanding", [1, 2, 3])
def test_no_chunk_is_older_than_the_bound(outstanding, mode):
    for seed, bound in itertools.product(range(10), (0, 1, 5)):
        envs = Workers(4, mode, bound, np.array([1.0, 5.0, 20.0, 0.01]), seed)
        chunks, lags = Run.chunks(a_run(4, 50, outstanding, bound), envs), []
        while batch := list(itertools.islice(chunks, 4)):
            lags.append(max(envs.policy_version - version for version in batch))
            envs.policy_version += 1
        assert len(lags) == 50
        assert bound < max(lags) <= bound + outstanding


# The scripts.

STREAM = [*scripts.TINY[scripts.PPO], "--stream"]
CONTINUOUS = "scripts/ppo_continuous_clusterenv.py"
SCRIPTS = {scripts.PPO: "CartPole-v1", CONTINUOUS: "Pendulum-v1"}


@pytest.mark.parametrize("script", scripts.parameters(SCRIPTS, later={CONTINUOUS}))
def test_deterministic_runs_of_one_seed_are_the_same_and_one_version_behind(tmp_path, script):
    flags = [*STREAM, "--env-id", SCRIPTS[script], "--deterministic", "--sync-mode", "always"]
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        runs.append(scripts.train(script, tmp_path / name, *flags, "--num-workers", "2"))
    (folder, first), (other, second) = runs
    for key in ("mean_return_100", "eval_return_mean", "pulls_per_worker", "sync_bytes"):
        assert first[key] == second[key] or first[key] != first[key]
    tags = "losses/value_loss", "losses/policy_loss", "losses/approx_kl", "sync/kl"
    for tag in tags:
        assert scalars(folder, tag) == scalars(other, tag)
    assert scalars(folder, "sync/policy_lag") == [0, 1, 1, 1, 1]


def test_nobody_waits_for_a_slow_worker(tmp_path):
    slow_id = scripts.write_slow_env(tmp_path, 160)
    flags = ["--env-id", slow_id, "--total-timesteps", "1280"]
    folder, summary = scripts.train(scripts.PPO, tmp_path, *STREAM, *flags)
    assert summary["global_step"] == 1280 and summary["updates"] == 20
    # Ten chunks of the fast worker come first, which make five iterations.
    assert max(scalars(folder, "sync/policy_lag")) > 1


@pytest.mark.long
def test_an_interrupted_run_goes_on_with_each_step_once(tmp_path):
    flags = [*STREAM, "--total-timesteps", "1280"]
    process, workers = scripts.start_and_await_training(scripts.PPO, tmp_path, *flags)
    folder = tmp_path / scripts.check_interruption(process, workers)
    before = [event.step for event in scripts.events_of(folder).Scalars("charts/SPS")]
    (tmp_path / "go").touch()
    again = ["--env-id", scripts.LASTING_ID, "--resume", f"runs/{folder.name}"]
    _, summary = scripts.train(scripts.PPO, tmp_path, *again)
    assert summary["global_step"] == 1280 and summary["updates"] == 20
    assert summary["args"]["stream"] and 0 < len(before) < 20
    steps = [event.step for event in scripts.events_of(folder).Scalars("charts/SPS")]
    assert steps == list(range(64, 1281, 64))
