"""The DQN script, run as a user runs it, with small numbers, and its replay buffer."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_runtime.script.model import load_model
from dqn_clusterenv import ReplayBuffer

from . import scripts
from .envs import CountingEnv
from .nets import linear
from .scripts import scalars

SCRIPT = "dqn_clusterenv.py"
TINY = [
    "--envs-per-worker",
    "2",
    "--num-steps",
    "4",
    "--learning-starts",
    "100",
    "--batch-size",
    "16",
]
TINY += [
    "--total-timesteps",
    "800",
    "--buffer-size",
    "500",
    "--eval-episodes",
    "2",
    "--sync-check-frequency",
    "5",
]
SUMMARY = {
    "global_step", "wall_seconds", "sps", "gradient_steps", "transitions_inserted",
    "policy_versions", "learner_waiting_seconds", "workers_waiting_seconds", "pulls_per_worker",
    "sync_bytes", "mean_return_100", "eval_return_mean", "eval_return_std", "kl_threshold", "seed",
    "env_id", "args",
}  # fmt: skip
METRICS = {
    "charts/episodic_return", "charts/episodic_length", "charts/mean_return_100", "charts/epsilon",
    "charts/SPS", "losses/td_loss", "losses/q_values", "sync/kl", "sync/pulls_per_worker",
    "sync/policy_lag", "sync/bytes", "time/learner_waiting", "time/workers_waiting",
    "throughput/produced_sps", "throughput/consumed_sps", "throughput/replay_ratio",
    "eval/return_mean",
}  # fmt: skip
run = partial(scripts.run, SCRIPT)


def train(directory, *flags, **extra):
    return scripts.train(SCRIPT, directory, *TINY, *flags, **extra)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"), "--deterministic", "--kl-threshold", "1e-5")


def test_run_leaves_summary_model_picture_and_logs(trained):
    folder, summary = trained
    assert set(summary) >= SUMMARY
    assert summary["args"]["learning_rate"] == 2.5e-4
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    model = load_model(folder / "dqn_clusterenv.cleanrl_model").model
    assert {path.name for path in (folder / "workers").iterdir()} == {
        "worker-0.log",
        "worker-1.log",
    }
    events = scripts.events_of(folder)
    assert set(events.Tags()["scalars"]) >= METRICS
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]
    size = sum(value.numel() * value.element_size() for value in model.values())
    assert summary["pulls_per_worker"] > 1
    # The bytes of each worker's pulls: one per weight at first, then little more than a bit.
    first, others = (
        size / 4,
        size / 10,
    )
    assert 0 < summary["sync_bytes"] / 2 < first + (summary["pulls_per_worker"] - 1) * others


@pytest.mark.long
def test_deterministic_runs_of_one_seed_are_the_same(trained, tmp_path):
    folder, first = trained
    other, second = train(tmp_path, "--deterministic", "--kl-threshold", "1e-5")
    for key in (
        "mean_return_100",
        "eval_return_mean",
        "eval_return_std",
        "pulls_per_worker",
        "sync_bytes",
    ):
        assert first[key] == second[key]
    for tag in ("losses/td_loss", "losses/q_values", "sync/kl", "sync/policy_lag"):
        assert scalars(folder, tag) == scalars(other, tag)


@pytest.mark.parametrize(
    ("workers", "mode"), [pytest.param(1, "never", marks=pytest.mark.long), (4, "always")]
)
def test_gradient_steps_are_exact_nothing_is_lost_and_pulls_are_as_told(tmp_path, workers, mode):
    flags = (
        f"--num-workers {workers} --sync-mode {mode} --train-frequency 4 "
        f"--target-network-frequency 40"
    )
    _, summary = train(tmp_path, *flags.split())
    assert summary["global_step"] == summary["transitions_inserted"] == 800
    assert summary["gradient_steps"] == (800 - 100) // 4
    assert (summary["pulls_per_worker"] == 1) == (mode == "never")


def test_the_ratio_is_exact_and_nobody_waits_for_a_slow_worker(tmp_path):
    slow_id = scripts.write_slow_env(tmp_path, 1500)
    flags = ["--env-id", slow_id, "--total-timesteps", "4000"]
    # During its first chunk, the slow worker waits for the 1500th step of the other worker's two
    # environments, which is 3000 of all steps.
    _, summary = train(tmp_path, *flags)
    assert summary["global_step"] == summary["transitions_inserted"] == 4000
    assert summary["gradient_steps"] == (4000 - 100) // 10


@pytest.mark.long
def test_offline_wandb_spellings_of_booleans_and_max_seconds(tmp_path):
    flags = (
        "--track=True --save_model=False --deterministic=true --no_cuda --total-timesteps "
        "100000000 --max-seconds 1"
    )
    _, summary = train(tmp_path, *flags.split())
    assert summary["global_step"] < 100000000 and summary["eval_return_mean"] > 0
    (offline,) = tmp_path.glob("wandb/offline-run-*")
    record = next(offline.glob("*.wandb")).read_bytes()
    for text in (
        b"train_frequency",
        b"kl_threshold",
        b"global_step",
        b"eval_return_mean",
        b"throughput/replay_ratio",
    ):
        assert text in record
    assert not list(tmp_path.glob("runs/*/*.cleanrl_model"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--env-id LunrLander-v3", "Did you mean: `LunarLander`"),
        ("--env-id Pendulum-v1", "discrete"),
        ("--env-id FrozenLake-v1", "must be vectors"),
        ("--num-workers 0", "num_workers is 0: Expected `int` >= 1"),
        ("--outstanding 0", "outstanding is 0: Expected `int` >= 1"),
        ("--kl-threshold nan", "kl_threshold is nan: Expected `float` >= 0.0"),
        ("--sync-mode interval", "sync_interval goes with sync_mode 'interval', and is None with"),
        (
            "--train-frequency 7",
            "--target-network-frequency must be a multiple of --train-frequency",
        ),
        ("--start-e 1.5", "start_e is 1.5: Expected `float` <= 1.0"),
        ("--learning-starts -1", "learning_starts is -1: Expected `int` >= 0"),
        ("--exploration-fraction 0", "exploration_fraction is 0.0: Expected `float` > 0.0"),
        ("--total-timesteps 10", "at least a chunk of 8 environments x 16 steps = 128"),
        ("--buffer-size 10", "at least a chunk of 8 environments x 16 steps = 128"),
        (
            "--buffer-size 100000000000",
            "--buffer-size 100000000000 takes 4470.3 GiB, this machine has",
        ),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(tmp_path, monkeypatch, flags, says):
    scripts.check_refusal_here(monkeypatch, SCRIPT, tmp_path, flags.split(), says)


@pytest.mark.long
def test_killed_worker_ends_the_run_with_its_name(tmp_path):
    flags = [
        *TINY,
        "--total-timesteps",
        "4800",
        "--on-worker-loss",
        "raise",
        "--worker-timeout",
        "3600",
    ]
    process, workers = scripts.start_and_await_training(SCRIPT, tmp_path, *flags)
    scripts.check_loss_of_worker_1(process, workers)


# The replay buffer.


class PixelEnv(CountingEnv):
    """Observes its count as uint8. Terminates after 3 steps if ``length`` is more than 3, and
    otherwise truncates.
    """

    observation_space = gym.spaces.Box(0, 255, (2,), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.uint8), {}

    def step(self, action):
        _, reward, _, truncated, info = super().step(action)
        terminated = self.length > 3 and self.count == 3
        return np.full(2, self.count, np.uint8), reward, terminated, truncated, info


def test_transitions_are_exact_at_the_ends_of_episodes_and_the_oldest_give_way():
    rb = ReplayBuffer(25, PixelEnv.observation_space, gym.spaces.Discrete(2))
    assert sum(
        column.nbytes for column in vars(rb).values() if isinstance(column, torch.Tensor)
    ) == (ReplayBuffer.num_bytes(25, PixelEnv.observation_space, gym.spaces.Discrete(2)))
    with ClusterEnv([partial(PixelEnv, 2), partial(PixelEnv, 9)], 1) as envs:
        envs.publish(CategoricalPolicy(linear(2, 2)))
        envs.reset()
        for _ in range(3):
            envs.send(5)
            rb.add(envs.recv()[1])
    assert rb.inserted == 30 and rb.observations.dtype == torch.uint8
    # The first environment truncates at 2, which does not count as done. The second terminates at
    # 3, which does.
    expected = {(0, 1, 0), (1, 2, 0)} | {(0, 1, 0), (1, 2, 0), (2, 3, 1)}
    columns = rb.observations[:, 0], rb.next_observations[:, 0], rb.dones
    transitions = [tuple(map(int, transition)) for transition in zip(*columns, strict=True)]
    assert set(transitions) == expected
    assert transitions.count((2, 3, 1)) in (4, 5)
    assert torch.equal(rb.rewards, rb.next_observations[:, 0].float())
    obs, actions, next_obs, rewards, dones = rb.sample(3, 7, torch.device("cpu"))
    assert obs.shape == next_obs.shape == (3, 7, 2) and obs.dtype == torch.float32
    assert actions.shape == (3, 7, 1) and rewards.shape == dones.shape == (3, 7)
    assert torch.equal(obs[..., 0] + 1, next_obs[..., 0]) and torch.equal(rewards, next_obs[..., 0])
