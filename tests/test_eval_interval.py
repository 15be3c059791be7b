"""Evaluations on a separate worker while the policy trains."""

import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_utils import Run, ScriptArgs
from clusterenv_utils.checkpoint import load_checkpoint
from clusterenv_utils.trained import load_model

from . import scripts
from .envs import CountingEnv
from .patience import wait_until
from .scripts import PPO, TINY
from .slurm.machine import free_ports


@dataclass
class Args(ScriptArgs):
    env_id: str = "Graded"
    total_timesteps: int = 1000
    run_name: str = "x"
    eval_episodes: int = 3
    num_envs: int = 4


class Graded(CountingEnv):
    """Each step's reward is the number in a file. The step waits until the file exists."""

    def __init__(self, file=None):
        super().__init__(3, gate=file)

    def step(self, action):
        observation, _, *others = super().step(action)
        return observation, float(self.gate.read_text()) if self.gate else 0.0, *others


@contextlib.contextmanager
def training(grade, **flags):
    """Train while the body runs, with an environment that waits for a file with its grade.

    Yield the run and the policy.
    """
    run = Run(Args(**flags))
    run.begin()
    policy = CategoricalPolicy(torch.nn.Linear(1, 2))
    made = [Graded] * 3 + [partial(Graded, grade)]
    envs = run.keep("envs", ClusterEnv(made, **run.options()))
    run.keep("policy", policy)
    envs.reset(seed=1)
    with run.training(envs, policy, policy):
        yield run, policy


def best(path="runs/x/experiment.best.cleanrl_model"):
    return load_model(path)["model"]["actor.bias"].tolist()


def wait_for(evaluations):
    wait_until(lambda: evaluations._look() or evaluations._weights is None)


def give(grade, value):
    temporary = grade.with_suffix(".tmp")
    temporary.write_text(value)
    temporary.rename(grade)


def test_the_best_policy_is_kept_as_it_was_when_it_was_sent(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grade = tmp_path / "grade"
    flags = {"eval_interval": 50, "eval_episodes": 1, "num_envs": 4}
    with training(grade, **flags) as (run, policy):
        evaluations = run._evaluations

        def evaluate(step, bias):
            """Have a policy evaluated, and change it during the evaluation."""
            policy.actor.bias.data.fill_(bias)
            evaluations.go_on(step)
            policy.actor.bias.data.fill_(-1)

        def finish(value):
            give(grade, value)
            wait_for(evaluations)
            grade.unlink()

        evaluate(49, 1)
        wait_for(evaluations)  # none was due
        assert run.curve.evaluations == []
        evaluate(60, 2)
        evaluate(170, 3)  # waits for the previous evaluation
        finish("2")
        assert best() == [2, 2]
        evaluate(190, 4)
        finish("1")
        assert best() == [2, 2]
        evaluate(199, 5)  # none is due
        evaluate(200, 6)
        finish("3")
        assert best() == [6, 6]
        found = [(60, 6.0), (190, 3.0), (200, 9.0)]
        assert run.curve.evaluations == found
        said = [line for line in capsys.readouterr().out.split("\n") if "evaluated" in line]
        assert said == [
            f"evaluated step {step}: return {mean}, the best so far {most}"
            for (step, mean), most in zip(found, [6.0, 6.0, 9.0], strict=True)
        ]
        run.global_step = 210
        run.save()
    steps = [event.step for event in scripts.events_of("runs/x").Scalars("eval/return_mean")]
    assert steps == [60, 190, 200]
    assert load_checkpoint("runs/x")["parts"]["curve"]["evaluations"] == found

    args = Args(**flags, resume="runs/x")
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setattr("tests.test_eval_interval.Args", lambda **_: args)
    with training(grade) as (run, policy):
        policy.actor.bias.data.fill_(7)
        run._evaluations.go_on(210)  # none is due
        run._evaluations.go_on(260)
        give(grade, "2")
        wait_for(run._evaluations)
        assert run.curve.evaluations == [*found, (260, 6.0)]
        assert best() == [6, 6]


def test_the_last_evaluation_is_in_the_last_checkpoint_and_frees_its_port(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grade = tmp_path / "grade"
    give(grade, "2")
    (port,) = free_ports(1)
    flags = {"eval_interval": 50, "eval_episodes": 1, "bind_address": "127.0.0.1", "port": port}
    with training(grade, **flags) as (run, _):
        for _ in run.iterations(2, 50):
            run.global_step += 50
        (found,) = load_checkpoint("runs/x")["parts"]["curve"]["evaluations"]
        assert found == (50, 6.0)
        socket.create_server(("127.0.0.1", port + 1)).close()


@pytest.mark.long
def test_training_is_the_same_with_and_without_evaluations(tmp_path):
    weights = []
    for number, flags in enumerate(([], ["--eval-interval", "64"])):
        directory = tmp_path / str(number)
        directory.mkdir()
        folder, summary = scripts.train(PPO, directory, *TINY[PPO], *flags)
        weights.append(load_model(folder / "ppo_clusterenv.cleanrl_model")["model"])
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])
    # The last logged return is that of the final evaluation.
    events = scripts.events_of(folder).Scalars("eval/return_mean")
    logged = [[event.step, event.value] for event in events]
    assert len(logged) >= 2 and logged[-1][0] == 320
    np.testing.assert_allclose(sorted(summary["evaluations"]), sorted(logged[:-1]), rtol=1e-6)
    assert os.path.exists(folder / "ppo_clusterenv.best.cleanrl_model")
