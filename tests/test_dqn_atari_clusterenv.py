"""The DQN script for Atari, run as a user runs it, and its replay buffer, which stores each frame
once.
"""

import gymnasium as gym
import numpy as np
import pytest
import torch

import dqn_clusterenv
from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from scripts.dqn_atari_clusterenv import ReplayBuffer

from . import scripts
from .scripts import scalars
from .test_dqn_clusterenv import METRICS, SUMMARY
from .test_frames import Net, stacked

SCRIPT = "scripts/dqn_atari_clusterenv.py"
TINY = [
    "--env-id",
    "ALE/Breakout-v5",
    "--envs-per-worker",
    "1",
    "--num-steps",
    "16",
    "--learning-starts",
    "64",
]
TINY += [
    "--total-timesteps",
    "192",
    "--buffer-size",
    "100",
    "--target-network-frequency",
    "40",
    "--eval-episodes",
    "1",
]
TINY += ["--sync-check-frequency", "5", "--batch-size", "8", "--deterministic", "--no-save-model"]
TINY += ["--end-e", "1"]  # a random policy's games are short
SPACE = stacked().observation_space


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_run_leaves_summary_and_logs_and_goes_on_with_its_buffer(tmp_path, backend):
    env_id = "ALE/Breakout-v5"
    if backend == "envpool":
        pytest.importorskip("envpool")
        env_id = "Breakout-v5"
    flags = [
        *TINY,
        "--save-replay",
        "--env-backend",
        backend,
        "--env-id",
        env_id,
        "--run-name",
        "x",
    ]
    folder, summary = scripts.train(SCRIPT, tmp_path, *flags)
    assert set(summary) >= SUMMARY
    assert summary["global_step"] == summary["transitions_inserted"] == 192
    assert summary["gradient_steps"] == (192 - 64) // 4
    assert set(scripts.events_of(folder).Tags()["scalars"]) >= {
        tag for tag in METRICS if "episodic" not in tag
    }
    folder, summary = scripts.train(
        SCRIPT, tmp_path, "--resume", "runs/x", "--total-timesteps", "256"
    )
    assert summary["global_step"] == summary["transitions_inserted"] == 256
    assert summary["gradient_steps"] == (256 - 64) // 4
    assert all(np.isfinite(scalars(folder, "losses/td_loss")))


def rollouts(frame_stack):
    """Yield chunks of both workers in turn. They are the same with frame stacks and without."""
    torch.manual_seed(1)
    policy = CategoricalPolicy(Net())
    with ClusterEnv([stacked] * 4, 2, frame_stack=frame_stack, sync_mode="never") as envs:
        envs.reset(seed=1)
        envs.publish(policy)
        for number in range(12):
            envs.send(10, number % 2)
            yield envs.recv(number % 2)[1]


@pytest.mark.parametrize(("num_frames", "all_fit"), [(290, True), (90, False)])
def test_the_buffer_holds_the_last_transitions_and_each_frame_once(num_frames, all_fit):
    ours, dense = (
        ReplayBuffer(75, num_frames, SPACE),
        dqn_clusterenv.ReplayBuffer(75, SPACE, gym.spaces.Discrete(2)),
    )
    assert len(ours.frames) < 2 * 4 * 75 / 2
    for with_frames, without in zip(rollouts(4), rollouts(None), strict=True):
        ours.add(with_frames)
        dense.add(without)
        num = min(ours.inserted - ours.chunks[0][0], 75)
        assert num == min(ours.inserted, 75) if all_fit else 20 <= num < 75
        last = torch.arange(ours.inserted - num, ours.inserted) % 75
        before, after = ours.frames[ours.stacks[last] % num_frames].unbind(1)
        assert torch.equal(before, dense.observations[last])
        assert torch.equal(after, dense.next_observations[last])
        for column in ("actions", "rewards", "dones"):
            assert torch.equal(getattr(ours, column)[last], getattr(dense, column)[last])

    obs, actions, next_obs, rewards, dones = ours.sample(600, "cpu")
    assert (obs.shape, obs.dtype, rewards.shape) == ((600, 4, 3, 2), torch.uint8, (600,))

    def keys(*columns):
        rows = torch.cat([column.reshape(len(columns[0]), -1).double() for column in columns], 1)
        return set(map(tuple, rows.tolist()))

    drawn = keys(obs, next_obs, actions, rewards, dones)
    columns = (
        dense.observations, dense.next_observations, dense.actions, dense.rewards, dense.dones,
    )  # fmt: skip
    assert drawn == keys(*(column[last] for column in columns))  # the sample happens to have all


def test_bytes_of_a_transition():
    space = np.empty((4, 84, 84), np.uint8)
    size, num_steps = 1_000_000, 32
    num_frames = size * (1 + 8 / num_steps)
    assert ReplayBuffer.num_bytes(size, num_frames, space) / size < (2 * 4 * 84 * 84) / 6


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--env-id CartPole-v1", "must be an Atari game, such as ALE/Pong-v5, got CartPole-v1"),
        (
            "--buffer-size 5",
            "--buffer-size 5 must be at least a chunk of 1 environments x 16 steps = 16",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, flags, says):
    scripts.check_refusal_here(monkeypatch, SCRIPT, tmp_path, [*TINY, *flags.split()], says)
