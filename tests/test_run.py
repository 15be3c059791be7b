"""A run from its beginning to its summary, with workers and files, in this process."""

import itertools
import json
import math
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_utils import Run, ScriptArgs, ScriptError
from clusterenv_utils.checkpoint import load_checkpoint

from . import scripts
from .envs import CountingEnv
from .nets import linear


@dataclass
class Args(ScriptArgs):
    env_id: str = "Counting"
    total_timesteps: int = 16
    run_name: str = "x"


def train(args, eval_returns=(), last=None, evaluate=lambda: None, **more):
    """Train for two iterations, or leave the loop after the ``last``. Return the summary, which
    must be JSON.
    """
    run = Run(args)
    run.begin()
    policy = CategoricalPolicy(linear(1, 2))
    envs = run.keep("envs", ClusterEnv([CountingEnv] * 4, **run.options()))
    envs.reset(seed=1)
    with run.training(envs, policy, policy):
        for iteration in run.iterations(2, 8):
            rollout = envs.rollout(policy, 2)
            run.add_episodes(rollout)
            run.global_step += 8
            run.report(rollout, versions=iteration)
            run.log("losses", {"a": torch.tensor(2.0), "b": 3.0})
            if iteration == last:
                break
        evaluate()
        run.finish(np.array(eval_returns), **more)
    with open("runs/x/summary.json") as file:
        return json.load(file, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_run_without_an_iteration_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(Args())
    run.begin()
    with pytest.raises(ScriptError, match="--total-timesteps is less than the 20 steps of one"):
        next(run.iterations(16 // 20, 20))


def test_a_checkpoint_of_the_evaluation_has_the_seconds_of_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clock = itertools.count(0.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with monkeypatch.context() as patch:
        # Save as an interrupt in the evaluation would.
        finish = Run.finish
        patch.setattr(Run, "finish", lambda run, *args: (run.save(), finish(run, *args)))
        summary = train(Args())
    assert load_checkpoint("runs/x")["seconds"] == summary["wall_seconds"]


def test_a_clock_that_stands_still_does_not_end_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    summary = train(Args())
    assert summary["global_step"] == 16 and summary["wall_seconds"] > 0
    assert len(scripts.scalars("runs/x", "charts/SPS")) == 2


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_values_that_are_not_finite_are_null_in_the_summary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {"list": [1.0, -math.inf], "deeper": {"a": (math.nan, 2.0)}, "numpy": np.float64("inf")}
    summary = train(Args(kl_threshold=math.inf), eval_returns=[1.0, math.inf], found=found)
    assert summary["found"] == {"list": [1.0, None], "deeper": {"a": [None, 2.0]}, "numpy": None}
    assert (summary["kl_threshold"], summary["args"]["kl_threshold"]) == (None, None)
    assert summary["eval_return_mean"] is None
    assert summary["mean_return_100"] is None  # no episode has ended
    assert summary["global_step"] == 16


def test_a_run_whose_loop_is_left_early_has_a_checkpoint_and_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = train(Args(), last=1, evaluate=lambda: time.sleep(2))
    assert summary["global_step"] == load_checkpoint("runs/x")["global_step"] == 8
    assert summary["wall_seconds"] == load_checkpoint("runs/x")["seconds"] < 2
    assert list((tmp_path / "runs/x").glob("*.cleanrl_model"))


def test_losses_are_logged_as_numbers_or_as_tensors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(Args())
    assert [scripts.scalars("runs/x", f"losses/{name}")[-1] for name in "ab"] == [2.0, 3.0]


def test_each_workers_speed_waiting_and_lag_are_logged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(Args())
    for index in range(2):
        assert scripts.scalars("runs/x", f"workers/SPS_{index}")[0] > 0
        assert 0 <= scripts.scalars("runs/x", f"workers/waiting_{index}")[0] <= 1
        assert scripts.scalars("runs/x", f"workers/policy_lag_{index}") == [0]
