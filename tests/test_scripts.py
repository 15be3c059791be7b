"""The nine scripts, run as a user runs them, with tiny numbers."""

import dataclasses
import importlib
import re
import shutil
import sys
import typing

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch

from clusterenv_utils import ScriptArgs, ScriptError, arguments
from clusterenv_utils.trained import load_model
from docs.flags import SCRIPTS as MODULES

from . import scripts
from .scripts import ROOT, TINY, scalars

PPO, DQN = "ppo_clusterenv.py", "dqn_clusterenv.py"
OFF_POLICY = DQN, "scripts/dqn_atari_clusterenv.py", "scripts/sac_clusterenv.py"
# The packages that a script needs, and those whose whole runs are left to `make test-all`.
NEEDS = {"atari": "ale_py", "minatar": "minatar", "continuous": "mujoco"}
LATER = {each for each in TINY if re.search("atari|minatar|multilearner|sac", each)}
EVERY = pytest.mark.parametrize("script", scripts.parameters(TINY, LATER))
SUMMARY = {
    "global_step", "wall_seconds", "sps", "pulls_per_worker", "sync_bytes", "mean_return_100",
    "eval_return_mean", "eval_return_std", "kl_threshold", "seed", "env_id", "args",
    "policy_versions", "learner_waiting_seconds", "workers_waiting_seconds",
}  # fmt: skip
METRICS = {
    "charts/mean_return_100", "charts/SPS", "sync/kl", "sync/pulls_per_worker", "sync/policy_lag",
    "sync/bytes", "workers/SPS_0", "workers/waiting_0", "workers/policy_lag_0",
}  # fmt: skip
OF_PPO = {"charts/learning_rate", "losses/explained_variance", "time/collect", "time/learn"}
OF_PPO |= {f"losses/{name}" for name in ("value_loss", "policy_loss", "entropy", "clipfrac")}
OF_PPO |= {"losses/old_approx_kl", "losses/approx_kl"}
OF_DQN = {"charts/epsilon", "losses/td_loss", "losses/q_values", "throughput/replay_ratio"}
STREAMED = {"time/learner_waiting", "time/workers_waiting"}
# Each update pulls all weights, so that no bit of a rounded difference decides what they are.
EXACT = "--sync-mode", "always", "--weights", "float32", "--seed", "3"


def train(script, directory, *flags):
    for kind, package in NEEDS.items():
        if kind in script:
            pytest.importorskip(package)
    directory.mkdir(exist_ok=True)
    return scripts.train(script, directory, *TINY[script], *flags)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Return a function that returns the folder and the summary of a script's only such run."""
    runs = {}

    def run(script):
        if script not in runs:
            streams = ["--deterministic"] * (script in OFF_POLICY)
            runs[script] = train(script, tmp_path_factory.mktemp("exact"), *EXACT, *streams)
        return runs[script]

    return run


@EVERY
def test_a_run_leaves_its_summary_model_picture_and_logs(script, exact):
    folder, summary = exact(script)
    name = script.split("/")[-1].removesuffix(".py")
    assert set(summary) >= SUMMARY and summary["args"]["seed"] == 3
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    saved = load_model(folder / f"{name}.cleanrl_model")
    assert saved["script"] == f"{name}.py" and saved["args"].items() <= summary["args"].items()
    logs = [f"worker-{index}.log" for index in range(summary["args"]["num_workers"])]
    assert sorted(path.name for path in (folder / "workers").iterdir()) == logs
    events = scripts.events_of(folder)
    own = OF_PPO
    if script in OFF_POLICY:
        own = STREAMED | (OF_DQN if "dqn" in script else {"losses/qf1_loss", "losses/actor_loss"})
        assert summary["transitions_inserted"] == summary["global_step"]
        assert summary["gradient_steps"] == len(range(scripts.TRAINS[script](summary)))
    assert set(events.Tags()["scalars"]) >= METRICS | own
    assert events.Scalars("charts/SPS")[-1].step == summary["global_step"]
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]


@EVERY
def test_the_same_seed_gives_the_same_run(script, exact, tmp_path):
    streams = ["--deterministic"] * (script in OFF_POLICY)
    folder, _ = train(script, tmp_path / "again", *EXACT, *streams)
    events, others = (scripts.events_of(each) for each in (exact(script)[0], folder))
    for tag in events.Tags()["scalars"]:
        if not tag.startswith(("time/", "throughput/", "workers/", "charts/SPS")):
            logs = ([event.value for event in each.Scalars(tag)] for each in (events, others))
            np.testing.assert_array_equal(*logs, err_msg=tag)


# Mistakes in flags.


@pytest.mark.parametrize("script", TINY)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--num-workers 0", "--num-workers must be at least 1, got 0"),
        ("--kl-threshold -0.1", "--kl-threshold must be at least 0, got -0.1"),
        ("--kl-threshold nan", "--kl-threshold must be finite, got nan"),
        ("--gamma 1.5", "--gamma must be at least 0 and at most 1, got 1.5"),
        ("--max-seconds inf", "--max-seconds must be finite, got inf"),
        ("--num-steps 0", "--num-steps must be at least 1, got 0"),
        ("--total-timesteps 1", "--total-timesteps 1 is less than one iteration"),
        ("--sync-mode interval", "sync_interval goes with sync_mode 'interval', and is None with"),
        ("--run-name ../x", "--run-name must be of letters"),
        ("--env-kwargs a", "must be name=value pairs"),
        ("--env-id nonesuch:Mine-v0", "No module named 'nonesuch'"),
    ],
)
def test_a_mistake_in_a_flag_is_one_line_and_leaves_nothing(
    empty, monkeypatch, script, flags, says
):
    flags = [*TINY[script], *flags.split()]
    scripts.check_refusal_here(monkeypatch, script, empty, flags, says)


@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        (PPO, "--env-id LunrLander-v3", "Did you mean: `LunarLander`"),
        (PPO, "--env-id LunarLander-v99", "v3"),
        (PPO, "--env-id Pendulum-v1", "actions must be discrete"),
        (PPO, "--env-id FrozenLake-v1", "observations must be vectors"),
        (PPO, "--num-minibatches 7", "--num-minibatches must divide the batch of 64 samples"),
        (PPO, "--num-minibatches 64", "leaves one sample in each"),
        (PPO, "--sync-interval 3", "sync_interval goes with sync_mode 'interval', and is 3"),
        (PPO, "--learning-rate 0", "--learning-rate must be above 0, got 0.0"),
        (PPO, "--no-decoupled --vtrace", "--vtrace needs --decoupled"),
        (PPO, "--eval-interval 8 --eval-episodes 0", "--eval-interval needs --eval-episodes"),
        (PPO, "--env-id ALE/Nonesuch-v5", "Atari's games need ale-py"),
        (PPO, "--env-id json:Mine-v0", "The module json registers no environment of this name"),
        (PPO, "--env-id Mine-v0", "name the module that registers it, too: --env-id my_env:Mine"),
        (PPO, "--env-id ./my_env.py:Mine-v0", "a module, as in an import: my_env for the file"),
        ("scripts/ppo_lstm_clusterenv.py", "--num-minibatches 3", "divide the 4 environments"),
        ("scripts/ppo_continuous_clusterenv.py", "--env-id CartPole-v1", "continuous vectors"),
        ("scripts/ppo_minatar_clusterenv.py", "--env-id CartPole-v1", "must be pixels of MinAtar"),
        ("scripts/ppo_atari_clusterenv.py", "--env-id CartPole-v1", "must be an Atari game"),
        ("scripts/dqn_atari_clusterenv.py", "--env-id CartPole-v1", "must be an Atari game"),
        ("scripts/sac_clusterenv.py", "--env-id CartPole-v1", "bounded continuous vectors"),
        (DQN, "--env-id Pendulum-v1", "actions must be discrete"),
        (DQN, "--train-frequency 7", "must be a multiple of --train-frequency"),
        (DQN, "--buffer-size 3", "--buffer-size must be at least a chunk of 8 steps"),
        (DQN, "--num-envs 3", "--num-workers must divide --num-envs"),
    ],
)
def test_a_mistake_in_a_scripts_own_flag_is_one_line(empty, monkeypatch, script, flags, says):
    if "minatar" in script:
        pytest.importorskip("minatar")
    flags = [*TINY[script], *flags.split()]
    scripts.check_refusal_here(monkeypatch, script, empty, flags, says)


@pytest.mark.parametrize("module", MODULES.values())
def test_every_number_among_the_flags_has_a_range(module):
    kind = importlib.import_module(module).Args
    hints = typing.get_type_hints(kind)
    numbers = {name for name, hint in hints.items() if re.search(r"\b(int|float)\b", str(hint))}
    assert len(numbers) > 20
    assert {name for name in numbers if arguments.range_of(name) is None} <= {*arguments.FREE}


@pytest.mark.parametrize("module", MODULES.values())
def test_a_functions_global_args_travel_to_workers(module):
    kind = importlib.import_module(module).Args
    copy = dataclasses.make_dataclass("Copy", [], bases=(kind,))  # as if of __main__
    copy.__module__ = "__main__"
    args = cloudpickle.loads(cloudpickle.dumps(copy(gamma=0.5)))
    assert args.gamma == 0.5


def test_a_mistake_ends_no_study_in_the_same_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hook = sys.excepthook
    with pytest.raises(ScriptError, match="^--gamma must be"):
        monkeypatch.setattr(sys, "argv", ["script.py", "--gamma", "2"])
        arguments.parse(importlib.import_module("ppo_clusterenv").Args)
    monkeypatch.setattr(sys, "excepthook", hook)
    assert issubclass(ScriptError, Exception)


@pytest.mark.parametrize(
    ("number", "high", "value"),
    [("own_coef", 0, -1), ("own_steps", 1, 0), ("num_own", 1, 0), ("own_size", 1, 0)],
)
def test_a_users_own_flag_has_the_range_of_its_name(monkeypatch, number, high, value):
    own = dataclasses.make_dataclass("Own", [(number, int, high)], bases=(ScriptArgs,))
    arguments.check_ranges(own())
    with pytest.raises(ScriptError, match=f"must be at least {high}, got {value}"):
        arguments.check_ranges(own(**{number: value}))


def test_tuned_defaults_are_told_if_another_environment_is_trained(tmp_path):
    result = scripts.run(PPO, tmp_path, *TINY[PPO], "--total-timesteps", "64")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("CartPole-v1__ppo_clusterenv__1__")
    _, told, *_ = result.stdout.splitlines()
    assert told.startswith("the defaults are tuned for LunarLander-v3; CleanRL's are --learning-")
    flags = [*TINY[PPO], *told.partition("CleanRL's are ")[2].split(), "--dry-run"]
    assert scripts.run(PPO, tmp_path, *flags).returncode == 0


# What single scripts do.


def test_never_pulls_once_and_always_pulls_every_update(exact, tmp_path):
    assert exact(PPO)[1]["pulls_per_worker"] == 4  # the last rollout was requested ahead
    folder, summary = train(PPO, tmp_path, "--sync-mode", "never", "--eval-episodes", "0")
    assert summary["pulls_per_worker"] == 1 and summary["eval_return_mean"] is None
    assert scalars(folder, "sync/policy_lag")[1:] == [1, 2, 3, 4]
    assert "eval/return_mean" not in scripts.events_of(folder).Tags()["scalars"]


def test_spellings_of_flags_and_a_clean_end_after_max_seconds_with_a_video(tmp_path):
    flags = "--anneal_lr=False --norm-adv=false --clip_vloss=True --no-torch-deterministic"
    flags += " --max_policy_lag 1000000 --capture-video --no_cuda --max-seconds 1"
    _, summary = train(PPO, tmp_path, *flags.split(), "--total-timesteps", "100000000")
    args = summary["args"]
    off = "anneal_lr", "norm_adv", "torch_deterministic", "cuda"
    assert not any(args[name] for name in off) and args["clip_vloss"]
    assert summary["global_step"] < 100000000 and summary["eval_return_mean"] > 0
    assert list(tmp_path.glob("videos/*/rl-video-episode-0.mp4"))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_is_the_same_to_tolerance(exact, tmp_path):
    folder, _ = train(PPO, tmp_path, *EXACT, "--compile")
    for tag in (*OF_PPO & {"losses/value_loss", "losses/policy_loss", "losses/entropy"},):
        expected = scalars(exact(PPO)[0], tag)
        assert scalars(folder, tag) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.long
def test_offline_wandb(tmp_path):
    flags = "--track=True --save_model=False --total-timesteps 100000000 --max-seconds 1"
    _, summary = train(DQN, tmp_path, *flags.split())
    assert summary["global_step"] < 100000000 and summary["eval_return_mean"] > 0
    (offline,) = tmp_path.glob("wandb/offline-run-*")
    record = next(offline.glob("*.wandb")).read_bytes()
    for text in (b"train_frequency", b"kl_threshold", b"global_step", b"throughput/replay_ratio"):
        assert text in record
    assert not list(tmp_path.glob("runs/*/*.cleanrl_model"))


def test_the_ratio_is_exact_and_nobody_waits_for_a_slow_worker(tmp_path):
    slow_id = scripts.write_slow_env(tmp_path, 1500)
    # During its first chunk, the slow worker waits for the 1500th step of the other worker's two
    # environments, which is 3000 of all steps.
    _, summary = train(DQN, tmp_path, "--env-id", slow_id, "--total-timesteps", "4000")
    assert summary["global_step"] == summary["transitions_inserted"] == 4000
    assert summary["gradient_steps"] == (4000 - 100) // 10


def test_ctrl_c_is_clean_and_does_not_wait_for_the_end(tmp_path):
    flags = [*TINY[PPO], "--total-timesteps", "3840", "--num-workers", "2"]
    process, workers = scripts.start_and_await_training(PPO, tmp_path, *flags)
    scripts.check_interruption(process, workers)
    assert list(tmp_path.glob("runs/*/*.cleanrl_model"))
    assert list(tmp_path.glob("runs/*/checkpoint-*.pt"))


@pytest.mark.parametrize("script", scripts.parameters([PPO, DQN], [DQN]))
def test_a_killed_worker_ends_the_run_with_its_name(tmp_path, script):
    flags = "--total-timesteps 4800 --on-worker-loss raise --worker-timeout 3600 --num-workers 2"
    flags = [*TINY[script], *flags.split()]
    process, workers = scripts.start_and_await_training(script, tmp_path, *flags)
    scripts.check_loss_of_worker_1(process, workers)


def test_an_unwritable_runs_directory_is_a_one_line_error(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    result = scripts.run(PPO, tmp_path, *TINY[PPO])
    scripts.check_refusal(result, "error: cannot write to runs/")


def test_an_env_that_cannot_be_built_shows_its_own_line_once(tmp_path):
    (tmp_path / "broken_env.py").write_text(
        "import gymnasium as gym\n"
        "class Broken(gym.Env):\n"
        "    def __init__(self, **kwargs):\n"
        "        raise LookupError('the simulator is not installed')\n"
        "gym.register('Broken-v0', Broken)\n"
    )
    result = scripts.run(PPO, tmp_path, "--env-id", "broken_env:Broken-v0", PYTHONPATH=str(ROOT))
    assert result.returncode != 0
    assert result.stderr.count("    raise LookupError('the simulator is not installed')") == 1
    assert result.stderr.endswith("\nLookupError: the simulator is not installed\n")
    assert not list(tmp_path.glob("runs/*/checkpoint*"))


def test_workers_that_do_not_start_are_a_one_line_error(tmp_path):
    # A forked worker might start in time.
    flags = ["--startup-timeout", "0.01", "--worker-start", "spawn"]
    result = scripts.run(PPO, tmp_path, *flags, PYTHONPATH=str(ROOT))
    scripts.check_refusal(result, "did not come up or build the next environment within 0.01 s")


def test_a_missing_ale_is_a_one_line_error(monkeypatch):
    atari = importlib.import_module("scripts.ppo_atari_clusterenv")
    monkeypatch.setattr(gym.envs.registration, "registry", {})
    says = "Namespace ALE not found. .* Atari's games need ale-py"
    errors = importlib.import_module("clusterenv_utils.errors")
    args = atari.Args()
    with pytest.raises(ScriptError, match=says), errors.one_line_for_environments(args):
        atari.make_env(args.env_id, 0, False, "")()


@pytest.fixture(autouse=True)
def validates():
    yield
    torch.distributions.Distribution.set_default_validate_args(__debug__)
