"""The MinAtar script, run as a user runs it."""

import numpy as np
import pytest

from . import scripts
from .scripts import scalars
from .test_ppo_clusterenv import METRICS, SUMMARY

pytest.importorskip("minatar", reason="MinAtar is not installed: pip install minatar")
SCRIPT = "scripts/ppo_minatar_clusterenv.py"
TINY = [
    "--envs-per-worker",
    "4",
    "--num-steps",
    "64",
    "--total-timesteps",
    "4096",
    "--eval-episodes",
    "2",
]


@pytest.mark.long
def test_it_trains_and_the_learner_recomputes_the_policy_that_acted(tmp_path):
    """At lag 0 the proximal policy is the behavior policy, so the decoupled objective is plain
    PPO's.
    """
    exact = [*TINY, "--sync-mode", "always", "--weights", "float32"]
    folder, summary = scripts.train(SCRIPT, tmp_path, *exact)
    assert set(summary) >= SUMMARY
    assert set(scripts.events_of(folder).Tags()["scalars"]) >= METRICS
    assert summary["pulls_per_worker"] == 8 and summary["mean_return_100"] > 0
    (tmp_path / "plain").mkdir()
    plain, _ = scripts.train(SCRIPT, tmp_path / "plain", *exact, "--no-decoupled")
    losses = [scalars(each, "losses/policy_loss") for each in (folder, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.long
def test_it_resumes(tmp_path):
    flags = [*TINY, "--env-id", "MinAtar/SpaceInvaders-v1", "--run-name", "x"]
    scripts.train(SCRIPT, tmp_path, *flags, "--max-seconds", "0.01")
    _, summary = scripts.train(SCRIPT, tmp_path, "--resume", "runs/x", "--max-seconds", "1000")
    assert summary["global_step"] == 4096 and np.isfinite(summary["eval_return_mean"])


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("CartPole-v1", "observations must be pixels of MinAtar"),
        ("MinAtar/Pong-v1", "Environment `Pong` doesn't exist in namespace MinAtar"),
    ],
)
def test_an_env_that_is_not_a_minatar_game_is_a_one_line_error(tmp_path, monkeypatch, env_id, says):
    scripts.check_refusal_here(monkeypatch, SCRIPT, tmp_path, ["--env-id", env_id], says)
