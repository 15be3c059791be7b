"""The LSTM script, run as a user runs it."""

import pytest

from . import scripts
from .scripts import scalars
from .test_ppo_clusterenv import METRICS, SUMMARY

SCRIPT = "scripts/ppo_lstm_clusterenv.py"
TINY = [
    "--envs-per-worker",
    "2",
    "--num-steps",
    "16",
    "--num-minibatches",
    "2",
    "--hidden-size",
    "8",
]
TINY += ["--total-timesteps", "320", "--eval-episodes", "2"]
EXACT = ["--sync-mode", "always", "--weights", "float32"]


def train(directory, *flags):
    return scripts.train(SCRIPT, directory, *flags)


@pytest.fixture(scope="module")
def always(tmp_path_factory):
    return train(tmp_path_factory.mktemp("always"), *TINY, *EXACT)


def test_run_leaves_summary_and_logs(always):
    folder, summary = always
    assert set(summary) >= SUMMARY
    assert (summary["global_step"], summary["pulls_per_worker"]) == (320, 5)
    assert set(scripts.events_of(folder).Tags()["scalars"]) >= METRICS


def test_the_learner_recomputes_the_policy_that_acted(always, tmp_path):
    """At lag 0 the proximal policy is the behavior policy, also across episode ends."""
    plain, _ = train(tmp_path, *TINY, *EXACT, "--no-decoupled")
    losses = [scalars(folder, "losses/policy_loss") for folder in (always[0], plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_a_minibatch_consists_of_whole_environments(tmp_path, monkeypatch):
    says = "--num-minibatches 3 must divide the 4 environments"
    scripts.check_refusal_here(
        monkeypatch, SCRIPT, tmp_path, [*TINY, "--num-minibatches", "3"], says
    )


def test_a_minibatch_of_one_is_refused_in_one_line(tmp_path, monkeypatch):
    flags = "--num-workers 1 --envs-per-worker 2 --num-steps 1 --num-minibatches 2"
    says = "--num-minibatches 2 leaves one sample in each, whose advantage cannot be normalized"
    scripts.check_refusal_here(monkeypatch, SCRIPT, tmp_path, flags.split(), says)
