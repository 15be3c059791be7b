"""The PPO script, run as a user runs it, with tiny numbers."""

import os
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from clusterenv_runtime.script.model import load_model

from . import scripts
from .scripts import ROOT, scalars

SCRIPT = "ppo_clusterenv.py"
TINY = [
    "--env-id",
    "CartPole-v1",
    "--envs-per-worker",
    "2",
    "--num-steps",
    "16",
    "--num-minibatches",
    "2",
]
TINY += ["--total-timesteps", "320", "--eval-episodes", "2"]
SUMMARY = {
    "global_step", "wall_seconds", "sps", "updates", "pulls_per_worker", "sync_bytes",
    "mean_return_100", "eval_return_mean", "eval_return_std", "kl_threshold", "seed", "env_id",
    "args",
}  # fmt: skip
METRICS = {
    "charts/episodic_return", "charts/episodic_length", "charts/mean_return_100",
    "charts/learning_rate", "charts/SPS", "losses/value_loss",
    "losses/policy_loss", "losses/entropy", "losses/old_approx_kl", "losses/approx_kl",
    "losses/clipfrac", "losses/explained_variance", "sync/kl", "sync/pulls_per_worker",
    "sync/policy_lag", "sync/bytes", "time/collect", "time/learn", "eval/return_mean",
}  # fmt: skip


run = partial(scripts.run, SCRIPT)


def train(directory, *flags, **extra):
    return scripts.train(SCRIPT, directory, *TINY, *flags, **extra)


def start_and_await_training(directory, *flags):
    flags = [*TINY, "--total-timesteps", "3840", "--num-workers", "2", *flags]
    return scripts.start_and_await_training(SCRIPT, directory, *flags)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"), "--kl-threshold", "1e-5")


ALWAYS = ["--sync-mode", "always", "--weights", "float32", "--decoupled", "--no-overlap"]


@pytest.fixture(scope="module")
def always(tmp_path_factory):
    return train(tmp_path_factory.mktemp("always"), *ALWAYS)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Run with all other options that a run can have. Return the directory and the summary."""
    directory = tmp_path_factory.mktemp("other")
    flags = (
        "--anneal_lr=False --norm-adv=false --clip_vloss=True --no-torch-deterministic "
        "--save-model --no_cuda"
    )
    flags += (
        " --max_policy_lag 1000000 --sync-mode never --capture-video --total-timesteps 100000000 "
        "--max-seconds 1"
    )
    return directory, train(directory, *flags.split())[1]


def test_run_leaves_summary_model_picture_and_logs(trained):
    folder, summary = trained
    assert set(summary) >= SUMMARY
    assert summary["global_step"] == 320 and summary["updates"] == 5
    assert summary["args"]["num_workers"] == 2 and summary["args"]["learning_rate"] == 2e-3
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    saved = torch.load(folder / "ppo_clusterenv.cleanrl_model", weights_only=True)
    assert saved.keys() == {"model", "args", "script"} and "actor.0.weight" in saved["model"]
    assert (
        saved["script"] == "ppo_clusterenv.py" and saved["args"].items() <= summary["args"].items()
    )
    assert {path.name for path in (folder / "workers").iterdir()} == {
        "worker-0.log",
        "worker-1.log",
    }
    events = scripts.events_of(folder)
    assert set(events.Tags()["scalars"]) >= METRICS
    assert [event.step for event in events.Scalars("charts/SPS")] == [64, 128, 192, 256, 320]
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]
    # The rest of the time goes into checkpoints, logs and the progress line. It is short, unless
    # the machine happens to be busy.
    accounted = [
        sum(pair)
        for pair in zip(scalars(folder, "time/collect"), scalars(folder, "time/learn"), strict=True)
    ]
    assert sum(accounted) <= summary["wall_seconds"]
    # From the end of one update to the end of the next.
    taken = np.diff([event.wall_time for event in events.Scalars("time/learn")])
    assert max(accounted[1:] / taken) > 0.8


def test_pulls_are_much_smaller_than_the_actor(trained):
    folder, summary = trained
    model = load_model(folder / "ppo_clusterenv.cleanrl_model").model
    size = sum(
        value.numel() * value.element_size()
        for key, value in model.items()
        if key.startswith("actor")
    )
    assert summary["pulls_per_worker"] > 1
    # For each worker: one byte per weight at first, then little more than one bit.
    first, others = (
        size / 4,
        size / 10,
    )
    assert 0 < summary["sync_bytes"] / 2 < first + (summary["pulls_per_worker"] - 1) * others


def test_same_seed_gives_the_same_run(trained, tmp_path):
    _, first = trained
    _, second = train(tmp_path, "--kl-threshold", "1e-5")
    for key in (
        "mean_return_100",
        "eval_return_mean",
        "eval_return_std",
        "pulls_per_worker",
        "sync_bytes",
    ):
        assert first[key] == second[key]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_is_the_same_to_tolerance(always, tmp_path):
    # All weights are sent: in a rounded difference, the last bit may decide which weights move.
    folder, summary = train(tmp_path, *ALWAYS, "--compile")
    for tag in (
        "value_loss",
        "policy_loss",
        "entropy",
        "approx_kl",
        "clipfrac",
        "explained_variance",
    ):
        expected = scalars(always[0], f"losses/{tag}")
        assert scalars(folder, f"losses/{tag}") == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert summary["pulls_per_worker"] == always[1]["pulls_per_worker"]


def test_never_pulls_once_and_always_pulls_every_update(always, other):
    assert [summary["pulls_per_worker"] for _, summary in (always, other)] == [5, 1]


def test_decoupled_objective_is_plain_ppo_at_lag_0(always, tmp_path):
    plain, _ = train(tmp_path, *ALWAYS, "--no-decoupled")
    assert all(set(scalars(folder, "sync/policy_lag")) == {0} for folder in (plain, always[0]))
    decoupled = scalars(always[0], "losses/policy_loss")
    assert decoupled == pytest.approx(scalars(plain, "losses/policy_loss"), abs=1e-4)


def test_overlap_acts_one_update_behind(tmp_path):
    folder, summary = train(tmp_path, "--sync-mode", "always", "--eval-episodes", "0")
    assert scalars(folder, "sync/policy_lag") == [0, 1, 1, 1, 1]
    assert (
        summary["updates"] == 5
        and summary["pulls_per_worker"] == 4
        and summary["eval_return_mean"] is None
    )
    assert "eval/return_mean" not in scripts.events_of(folder).Tags()["scalars"]


def test_spellings_of_booleans_and_flags(other):
    args = other[1]["args"]
    assert [args[key] for key in ("anneal_lr", "norm_adv", "torch_deterministic", "cuda")] == [
        False
    ] * 4
    assert [args[key] for key in ("clip_vloss", "save_model")] == [True] * 2
    assert args["max_policy_lag"] == 1000000


def test_max_seconds_ends_the_run_cleanly(other):
    _, summary = other
    assert summary["global_step"] < 100000000 and summary["eval_return_mean"] > 0


def test_capture_video_records_environment_0(other):
    directory, _ = other
    assert list(directory.glob("videos/*/rl-video-episode-0.mp4"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--env-id LunrLander-v3", "Did you mean: `LunarLander`"),
        ("--env-id LunarLander-v99", "v3"),
        ("--env-id Pendulum-v1", "discrete"),
        ("--env-id FrozenLake-v1", "must be vectors"),
        ("--num-workers 0", "num_workers is 0: Expected `int` >= 1"),
        ("--kl-threshold -0.1", "kl_threshold is -0.1: Expected `float` >= 0.0"),
        ("--kl-threshold nan", "kl_threshold is nan: Expected `float` >= 0.0"),
        ("--num-minibatches 7", "must divide the batch of 64 environments x 128 steps = 8192"),
        ("--sync-mode interval", "sync_interval goes with sync_mode 'interval', and is None with"),
        ("--sync-interval 3", "sync_interval goes with sync_mode 'interval', and is 3 with 'kl'"),
        ("--sync-interval 0", "sync_interval is 0: Expected `int` >= 1"),
        ("--max-policy-lag -1", "max_policy_lag is -1: Expected `int` >= 0"),
        ("--learning-rate nan", "learning_rate is nan: Expected `float` > 0.0"),
        ("--max-seconds nan", "max_seconds is nan: Expected `float` > 0.0"),
        ("--clip-rho -1", "clip_rho is -1.0: Expected `float` > 0.0"),
        ("--total-timesteps 100", "at least the batch"),
    ],
)
def test_bad_input_is_a_one_line_error_before_anything_starts(tmp_path, monkeypatch, flags, says):
    scripts.check_refusal_here(monkeypatch, SCRIPT, tmp_path, flags.split(), says)


def test_an_unwritable_runs_directory_is_a_one_line_error(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    result = run(tmp_path, *TINY)
    assert result.returncode != 0
    assert (
        result.stderr.startswith("error: cannot write to runs/") and result.stderr.count("\n") == 1
    )


def test_env_that_cannot_be_built_shows_its_own_line_once(tmp_path):
    (tmp_path / "broken_env.py").write_text(
        "import gymnasium as gym\n"
        "class Broken(gym.Env):\n"
        "    def __init__(self, **kwargs):\n"
        "        raise LookupError('the simulator is not installed')\n"
        "gym.register('Broken-v0', Broken)\n"
    )
    result = run(
        tmp_path, "--env-id", "broken_env:Broken-v0", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}"
    )
    assert result.returncode != 0
    assert result.stderr.count("    raise LookupError('the simulator is not installed')") == 1
    assert result.stderr.endswith("\nLookupError: the simulator is not installed\n")
    assert not list(tmp_path.glob("runs/*/checkpoint*"))


def test_workers_that_do_not_start_are_a_one_line_error(tmp_path):
    # A forked worker might start in time.
    flags = ["--startup-timeout", "0.01", "--worker-start", "spawn"]
    result = run(tmp_path, *flags, PYTHONPATH=str(ROOT))
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert re.match(
        "error: worker 0 .* did not come up or build the next environment within 0.01 s",
        result.stderr,
    )


def test_ctrl_c_is_clean_and_does_not_wait_for_the_end(tmp_path):
    process, workers = start_and_await_training(tmp_path)
    scripts.check_interruption(process, workers)
    assert list(tmp_path.glob("runs/*/*.cleanrl_model")) and list(
        tmp_path.glob("runs/*/checkpoint-*.pt")
    )


def test_killed_worker_ends_the_run_with_its_name(tmp_path):
    flags = ["--on-worker-loss", "raise", "--worker-timeout", "3600"]
    process, workers = start_and_await_training(tmp_path, *flags)
    scripts.check_loss_of_worker_1(process, workers)
