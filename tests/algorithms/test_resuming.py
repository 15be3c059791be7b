"""A resumed run equals the run without an interruption: checkpoints hold everything that it needs,
and the loaded state is the saved state.

Checkpoints do not hold environments. For this reason, the runs train on `toys.Clockwork`, whose
episodes end where the checkpoint is.
"""

import shutil

import numpy as np
import pytest
import torch

from clusterenv_utils.checkpoint import load_checkpoint
from tests import scripts

from . import reference
from .recording import record

OF_ALL = {"curve", "envs", "optimizer"}
OF_DQN = OF_ALL | {"q_network", "target_network", "rb", "count"}
OF_SAC = {"curve", "envs", "actor", "entropy", "rb", "count", "q_optimizer", "actor_optimizer"}
OF_SAC |= {"qfs", "targets"}
SCRIPTS = {  # the kind of environment, and the content of a checkpoint
    "ppo_clusterenv.py": ("vector", OF_ALL | {"agent"}),
    "scripts/ppo_multilearner_clusterenv.py": ("vector", OF_ALL | {"agent"}),
    "scripts/ppo_continuous_clusterenv.py": (
        "box",
        OF_ALL | {"agent", "obs_moments", "return_moments"},
    ),
    "scripts/ppo_lstm_clusterenv.py": ("vector", OF_ALL | {"agent"}),
    "scripts/ppo_minatar_clusterenv.py": ("minatar", OF_ALL | {"agent"}),
    "scripts/ppo_atari_clusterenv.py": ("atari", OF_ALL | {"agent"}),
    "dqn_clusterenv.py": ("vector", OF_DQN),
    "scripts/dqn_atari_clusterenv.py": ("atari", OF_DQN),
    "scripts/sac_clusterenv.py": ("box", OF_SAC),
}
FLAGS = "--num-workers 1 --envs-per-worker 2 --num-steps 8 --total-timesteps 64 --eval-episodes 0"
FLAGS += " --seed 5 --sync-mode always --weights float32"
PPO = "--num-minibatches 2 --update-epochs 2 --learning-rate 0.001 --no-overlap"
# Each chunk is requested before the learner has learned from the previous one. So only random
# actions are the same in both runs.
DQN = "--deterministic --learning-starts 16 --train-frequency 2 --target-network-frequency 20"
DQN += " --batch-size 4 --buffer-size 40 --save-replay --tau 0.5"
RANDOM = "--start-e 1 --end-e 1"
# The actor learns so slowly that it acts in the same way in both runs. The Q-networks do learn.
SAC = "--deterministic --learning-starts 16 --batch-size 4 --buffer-size 40 --utd 0.5"
SAC += " --policy-lr 1e-30"
INTERRUPT = 2  # the interrupted iteration, of four with 16 steps each
STEP = 16 * INTERRUPT
BY_THE_CLOCK = "time/", "workers/", "charts/SPS", "throughput/consumed_sps"


def flags_of(script, *more):
    kind, _ = SCRIPTS[script]
    # If a flag is given twice, the last one counts.
    own = (PPO,) if "ppo" in script else (DQN, *(more or [RANDOM]))
    if "sac" in script:
        own = (SAC,)
    return [*" ".join([f"--env-id tests.algorithms.toys:Clockwork-{kind}-v0", FLAGS, *own]).split()]


def resume(script, directory, *flags):
    kind, _ = SCRIPTS[script]
    env_id = f"tests.algorithms.toys:Clockwork-{kind}-v0"
    return record(script, directory, "--env-id", env_id, "--resume", "runs/x", *flags)


def assert_same(found, expected, where=""):
    """Assert that two trees of dicts, lists, tensors and numbers are the same to the last bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected or (found != found and expected != expected), where


def without_times(parts):
    """Return a checkpoint's parts without the seconds of waiting and the policy's version, which
    counts publications.
    """
    parts = {name: dict(part) for name, part in parts.items()}
    for key in ("waiting_seconds", "policy_version"):
        del parts["envs"][key]
    return parts


def logged(recording, after=0):
    tags = {
        tag: values for tag, values in recording.scalars.items() if not tag.startswith(BY_THE_CLOCK)
    }
    return {tag: values[after:] for tag, values in tags.items()}


LONG = SCRIPTS.keys() - {"ppo_clusterenv.py", "dqn_clusterenv.py"}


@pytest.mark.parametrize("script", scripts.parameters(SCRIPTS, later=LONG))
def test_the_resumed_run_equals_the_uninterrupted_run(tmp_path, script):
    for name in ("whole", "parted"):
        (tmp_path / name).mkdir()
    whole = record(script, tmp_path / "whole", *flags_of(script))
    record(script, tmp_path / "parted", *flags_of(script), interrupt=INTERRUPT)
    saved = load_checkpoint(tmp_path / "parted" / "runs" / "x")
    assert saved["global_step"] == STEP and saved["parts"].keys() == SCRIPTS[script][1]
    shutil.copytree(tmp_path / "parted", tmp_path / "again")
    resumed, again = (resume(script, tmp_path / name) for name in ("parted", "again"))

    # The loaded state is the saved state.
    assert_same(resumed.parts, saved["parts"])
    # Environments start again, with different seeds than the first time.
    assert (whole.seeds, resumed.seeds) == ([5], [5 + STEP])

    # The run continues like the uninterrupted run, and in the same way both times.
    names = "whole", "parted", "again"
    ends = {name: load_checkpoint(tmp_path / name / "runs" / "x") for name in names}
    for recording, end in ((resumed, ends["parted"]), (again, ends["again"])):
        for ours, theirs in zip(recording.calls, whole.calls[INTERRUPT:], strict=True):
            np.testing.assert_array_equal(ours.rollout.actions, theirs.rollout.actions)
            np.testing.assert_array_equal(ours.rollout.rewards, theirs.rollout.rewards)
        assert_same(recording.networks, whole.networks)
        parts = [without_times(each["parts"]) for each in (end, ends["whole"])]
        for part in parts:  # these include the cost of the policy's publication on resuming
            del part["envs"], part["curve"]
        assert_same(*parts)
        assert_same(end["rng"], ends["whole"]["rng"])
        assert end["global_step"] == 64
    losses = [{tag: v for tag, v in each.items() if tag.startswith(("losses/", "charts/"))}
              for each in (logged(resumed), logged(again), logged(whole))]  # fmt: skip
    assert losses[0] == losses[1]
    for tag, values in losses[0].items():
        assert values == losses[2][tag][len(losses[2][tag]) - len(values) :], tag
    assert logged(resumed) == logged(again)


@pytest.mark.parametrize("outstanding", [1, 3])
@pytest.mark.parametrize(
    "script",
    scripts.parameters(["dqn_clusterenv.py", "scripts/dqn_atari_clusterenv.py"], later=LONG),
)
def test_exploration_and_counts_go_on_where_they_were(tmp_path, script, outstanding):
    flags = "--start-e 0.9 --end-e 0.1 --exploration-fraction 0.9 --no-deterministic"
    flags += f" --outstanding {outstanding}"
    record(script, tmp_path, *flags_of(script, flags), interrupt=INTERRUPT)
    resumed = resume(script, tmp_path)
    args = reference.SimpleNamespace(**resumed.args)
    # Two chunks are left, and no more are requested: both at once, or the second after the first
    # has arrived and is counted.
    steps = (STEP, STEP) if outstanding == 3 else (STEP, STEP + 16)
    assert resumed.epsilons == pytest.approx(
        [reference.linear_epsilon(args, step) for step in steps]
    )
    end = load_checkpoint(tmp_path / "runs" / "x")["parts"]
    assert end["count"]["gradient_steps"] == (64 - 16) // 2
    assert end["rb"]["inserted"] == 64


def test_sac_without_its_replay_buffer_collects_before_it_learns(tmp_path):
    script = "scripts/sac_clusterenv.py"
    flags = [*flags_of(script), "--no-save-replay", "--learning-starts", "24"]
    record(script, tmp_path, *flags, interrupt=3)
    resumed = resume(script, tmp_path, "--total-timesteps", "96")
    end = load_checkpoint(tmp_path / "runs" / "x")["parts"]
    assert end["count"]["gradient_steps"] == (48 - 24) // 2 + (96 - 48 - 24) // 2
    assert resumed.summary["transitions_inserted"] == 96 - 48 and end["rb"] is None


@pytest.mark.parametrize(
    "script",
    scripts.parameters(["dqn_clusterenv.py", "scripts/dqn_atari_clusterenv.py"], later=LONG),
)
def test_dqn_without_its_replay_buffer_collects_before_it_learns_at_the_new_rate(tmp_path, script):
    record(script, tmp_path, *flags_of(script, f"{RANDOM} --no-save-replay"), interrupt=INTERRUPT)
    resumed = resume(script, tmp_path, "--learning-rate", "0.25")
    end = load_checkpoint(tmp_path / "runs" / "x")["parts"]
    # Another `learning_starts` steps are collected. Then the gradient steps continue from the eight
    # before the interruption.
    assert end["count"]["gradient_steps"] == (STEP - 16) // 2 + (64 - STEP - 16) // 2
    assert resumed.summary["transitions_inserted"] == 64 - STEP and end["rb"] is None
    assert resumed.steps["losses/td_loss"] == [64]
    assert end["optimizer"]["param_groups"][0]["lr"] == 0.25


@pytest.mark.parametrize("autotune", [True, False])
def test_sac_goes_on_at_new_rates_and_with_a_new_alpha(tmp_path, autotune):
    script = "scripts/sac_clusterenv.py"
    flags = [*flags_of(script), f"--autotune={autotune}"]
    record(script, tmp_path, *flags, interrupt=INTERRUPT)
    resume(script, tmp_path, "--q-lr", "0.25", "--policy-lr", "0.5", "--alpha", "0.125")
    end = load_checkpoint(tmp_path / "runs" / "x")["parts"]
    groups = end["q_optimizer"]["param_groups"] + end["actor_optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.25, 0.5] + [0.25] * autotune
    if not autotune:
        assert end["entropy"]["log_alpha"].exp().item() == pytest.approx(0.125)


def test_a_run_goes_on_with_another_number_of_workers(tmp_path):
    flags = "--num-workers 2 --num-envs 5 --num-steps 8 --total-timesteps 160 --num-minibatches 2"
    flags += " --env-id tests.algorithms.toys:Clockwork-vector-v0 --eval-episodes 0 --seed 5"
    flags += " --update-epochs 2 --sync-mode always --weights float32 --no-overlap"
    for name in ("whole", "parted"):
        (tmp_path / name).mkdir()
    whole = record("ppo_clusterenv.py", tmp_path / "whole", *flags.split())
    record("ppo_clusterenv.py", tmp_path / "parted", *flags.split(), interrupt=1)
    rollouts = [whole.calls[0].rollout]
    for workers, interrupt in (("3", 1), ("2", None)):
        resumed = record(
            "ppo_clusterenv.py", tmp_path / "parted", "--env-id",
            "tests.algorithms.toys:Clockwork-vector-v0", "--resume", "runs/x", "--num-workers",
            workers, interrupt=interrupt,
        )  # fmt: skip
        rollouts += [call.rollout for call in resumed.calls]
        assert resumed.args.get("num_envs", 5) == 5
    assert len(rollouts) == 4
    for found, expected in zip(rollouts, (call.rollout for call in whole.calls), strict=True):
        np.testing.assert_array_equal(found.actions, expected.actions)
        np.testing.assert_array_equal(found.observations, expected.observations)
    assert resumed.summary["global_step"] == 160 and resumed.summary["pulls_per_worker"] > 1
