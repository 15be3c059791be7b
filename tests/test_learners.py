"""Several learners, started by torchrun: their update equals that of one learner, and no learner
outlives another.

``LEARNER_KILLS=10 python -m pytest -s tests/test_learners.py -k random_moments`` kills a learner
ten times, instead of twice.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.distributed as dist

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Interrupted
from clusterenv_utils import ScriptError
from scripts import ppo_multilearner_clusterenv as script

from .envs import CountingEnv, assert_same
from .nets import linear
from .patience import PATIENCE, wait_until
from .scripts import (
    ROOT,
    alive,
    check_refusal_here,
    environment,
    events_of,
    lasting,
    ranks_of,
    train,
    workers_of,
)

TINY = "--total-timesteps", "1024", "--weights", "float32", "--eval-episodes", "2"
SCRIPT = "scripts/ppo_multilearner_clusterenv.py"
FEW = "--env-id CartPole-v1 --num-workers 4 --envs-per-worker 2 --num-steps 32"


def torchrun(number, *flags):
    standalone = ["--standalone", "--nproc-per-node", str(number)]
    return [sys.executable, "-m", "torch.distributed.run", *standalone, *flags]


def train_together(number, script, directory, *flags):
    """Run a script to its end with this many learners. Return the run's folder and summary."""
    command = [*torchrun(number), str(ROOT / script), *flags]
    result = subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    (folder,) = Path(directory, "runs").iterdir()
    return folder, json.loads((folder / "summary.json").read_text())


# Their update equals that of one learner.
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.long)])
def test_several_learners_learn_the_same_as_one(tmp_path, number):
    flags, runs = [*TINY, *FEW.split()], []
    together = partial(train_together, number, SCRIPT)
    for name, start in (("one", partial(train, "ppo_clusterenv.py")), ("several", together)):
        (tmp_path / name).mkdir()
        folder, summary = start(tmp_path / name, *flags)
        runs.append((events_of(folder), summary))
    assert_alike(*runs)


def assert_alike(one, several):
    (events, summary), (other_events, other_summary) = one, several
    both = events, other_events
    for tag in events.Tags()["scalars"]:
        if tag.startswith(("losses/", "charts/")) and tag != "charts/SPS":
            # The rounding differs, and after some updates some actions differ, too.
            logs = ([event.value for event in each.Scalars(tag)[:2]] for each in both)
            np.testing.assert_allclose(*logs, rtol=1e-3, atol=2e-5, err_msg=tag)
    for name in ("global_step", "pulls_per_worker"):
        assert summary[name] == other_summary[name]


def test_a_share_of_the_environments_has_the_seeds_and_the_noise_of_its_rows():
    policy = CategoricalPolicy(linear(4, 2))

    def rollout(number, **options):
        with ClusterEnv([partial(gym.make, "CartPole-v1")] * number, number, **options) as envs:
            envs.reset(seed=3)
            return envs.rollout(policy, 20)

    whole = rollout(4)
    second = rollout(2, learners=SimpleNamespace(first_row=2, sum=lambda own: own))
    for name in ("observations", "actions", "rewards"):
        assert_same(getattr(second, name), getattr(whole, name)[:, 2:])


@pytest.mark.parametrize("others, pulls", [([0.0, 2.0], [1, 1]), ([10.0, 2.0], [2, 2])])
def test_workers_pull_by_the_mean_divergence_of_all_learners_workers(others, pulls):
    policy = CategoricalPolicy(linear(1, 2))
    asked = []

    def sum_over_learners(own):
        asked.append(own.tolist())
        return own + ([*others, 2.0] if own[1] else 0)

    options = {"kl_threshold": 1.0, "learners": SimpleNamespace(first_row=0, sum=sum_over_learners)}
    with ClusterEnv([CountingEnv] * 2, 2, **options) as envs:
        envs.reset()
        for _ in range(2):
            envs.rollout(policy, 3)
        assert asked == [[0, 0, 2], [pytest.approx(0, abs=1e-5), 2, 2]]
        assert envs.pulls.tolist() == pulls
        with pytest.raises(
            ValueError, match="with several learners, use `rollout` instead of `send`"
        ):
            envs.send(3)


@pytest.mark.long
def test_what_cannot_be_divided_is_one_line_of_each_learner(tmp_path):
    command = [*torchrun(2), str(ROOT / SCRIPT), *FEW.split(), "--num-workers", "3"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert result.returncode != 0 and not list(tmp_path.glob("runs/*"))
    line = "error: cannot divide num_workers 3 among 2 learners"
    assert set(lines_of(result.stderr)) == {line}


def test_a_script_of_one_learner_refuses_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    says = "has one learner, and torchrun starts several"
    check_refusal_here(monkeypatch, "dqn_clusterenv.py", tmp_path, [], says)


# The end of learners.
FLAGS = *TINY[2:], *FEW.split()[2:], "--num-workers", "2", "--total-timesteps", "1000000"
KILLS = int(os.environ.get("LEARNER_KILLS", 2))
LOST = r"error: learner \d has lost the others: .*"


FAILING_ENV = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv


class FailingEnv(CartPoleEnv):
    steps = 0

    def reset(self, *, seed=None, options=None):
        self.number = self.number if seed is None else seed - 1
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        if (self.number, self.steps) == (3, 100):
            raise ValueError("no more")
        return super().step(action)


gym.register("Failing-v0", FailingEnv)
"""


class Together:
    """Two learners that train, and their output."""

    def __init__(self, directory, *options, flags=(), begin=("--run-name", "x"), after=-1):
        self.directory = directory
        command = [*torchrun(2, *options), str(ROOT / SCRIPT), *FLAGS, *flags, *begin]
        command += lasting(directory, 200, 0.01)
        self.process = subprocess.Popen(
            command, cwd=directory, env=environment(), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        wait_until(lambda: self.checkpoint() > after)
        self.learners = self.find_learners()
        self.workers = [worker for pid in self.learners for worker in workers_of(pid).values()]
        assert len(self.workers) == 2

    def checkpoint(self):
        """Return the step of the newest checkpoint, or -1 if there is none."""
        steps = [
            int(path.stem.split("-")[1])
            for path in (self.directory / "runs" / "x").glob("checkpoint-*.pt")
        ]
        return max(steps, default=-1)

    def find_learners(self):
        ranks = ranks_of(self.process.pid, "RANK")
        return [ranks[rank] for rank in sorted(ranks)]

    def finish(self):
        """Wait until all processes have ended by themselves. Return the scripts' error lines."""
        _, self.errors = self.process.communicate(timeout=PATIENCE)
        wait_until(lambda: not any(map(alive, [*self.learners, *self.workers])))
        assert "forcefully" not in self.errors
        return lines_of(self.errors)


def lines_of(errors):
    """Return the scripts' error lines, without the rank with which torch begins some of them."""
    lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in errors.splitlines()]
    return [line for line in lines if line.startswith(("error: ", "interrupted"))]


def is_lost_or_interrupted(line):
    """Return whether a line says that the other learners were lost, or that this one was
    interrupted: torchrun's signal may come before a learner notices the loss of another.
    """
    return re.fullmatch(LOST, line) or line.startswith("interrupted; to resume: ")


@pytest.mark.long
def test_killed_at_random_moments_a_run_goes_on_from_its_last_checkpoint(tmp_path):
    moment, begin, step = random.Random(1), ["--run-name", "x"], -1
    for number in range(KILLS):
        together = Together(tmp_path, flags=["--checkpoint-interval", "0"], begin=begin, after=step)
        time.sleep(2 * moment.random())
        rank = number % 2
        start = time.monotonic()
        os.kill(together.learners[rank], signal.SIGKILL)
        lines = together.finish()
        print(
            f"learner {rank} killed after step {together.checkpoint()}, nothing left "
            f"{time.monotonic() - start:.1f} s later: {lines}"
        )
        assert all(map(is_lost_or_interrupted, lines)) and len(lines) == 1 or rank == 0
        assert f"SIGKILL) received by PID {together.learners[rank]}\n" in together.errors
        assert together.checkpoint() > step
        begin, step = ["--resume", "runs/x"], together.checkpoint()
    (tmp_path / "go").touch()
    flags = *lasting(tmp_path, 0), "--resume", "runs/x", "--total-timesteps", str(step + 1024)
    _, summary = train_together(2, SCRIPT, tmp_path, *flags)
    assert summary["global_step"] == step + 1024


@pytest.mark.long
def test_killed_under_max_restarts_the_run_goes_on_from_its_last_checkpoint(tmp_path):
    flags = "--checkpoint-interval", "0"
    together = Together(tmp_path, "--max-restarts", "1", flags=flags)
    before = together.checkpoint()
    os.kill(together.learners[1], signal.SIGKILL)
    wait_until(lambda: not any(map(alive, together.learners)))
    wait_until(lambda: together.checkpoint() > before + 2000)
    together.learners = together.find_learners()
    assert len(list((tmp_path / "runs").iterdir())) == 1
    together.process.send_signal(signal.SIGTERM)
    (killed, interrupted) = together.finish()
    assert is_lost_or_interrupted(killed) and interrupted.startswith("interrupted; to resume: ")


@pytest.mark.long
@pytest.mark.parametrize("number, told", [(1, signal.SIGINT), (4, signal.SIGTERM)])
def test_a_signal_saves_once_and_the_run_goes_on_with_another_number_of_learners(
    tmp_path, number, told
):
    together = Together(tmp_path, flags=["--checkpoint-interval", "0.5"])
    together.process.send_signal(told)
    (line,) = together.finish()
    step = together.checkpoint()
    command = r"torchrun --nproc-per-node 2 \S+ --env-id=\S+ --resume runs/x"
    assert re.fullmatch(f"interrupted; to resume: {command}", line), line
    (tmp_path / "go").touch()
    flags = *lasting(tmp_path, 0), "--resume", "runs/x", "--num-workers", "4"
    flags = *flags, "--total-timesteps", str(step + 1024)
    _, summary = (train if number == 1 else partial(train_together, number))(
        SCRIPT, tmp_path, *flags
    )
    assert summary["global_step"] == step + 1024


@pytest.mark.long
def test_a_learner_that_raises_says_why_and_the_first_saves(tmp_path):
    Path(tmp_path, "failing_env.py").write_text(FAILING_ENV)
    flags = *FLAGS, "--env-id", "failing_env:Failing-v0", "--run-name", "x"
    command = [*torchrun(2), str(ROOT / SCRIPT), *flags]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "[rank1]: ValueError: no more\n" in result.stderr
    assert "EnvError: environment 3 on worker 0 " in result.stderr
    (line,) = lines_of(result.stderr)
    assert is_lost_or_interrupted(line) and "; to resume: torchrun " in line
    assert list((tmp_path / "runs" / "x").glob("checkpoint-*.pt"))


def test_a_lost_learner_is_an_error_in_an_update_and_an_interruption_before_it(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Connection closed by peer")

    for collective in ("all_gather_object", "all_gather", "all_reduce"):
        monkeypatch.setattr(dist, collective, fail)
    monkeypatch.setattr(script, "world_size", 2)
    says = "learner 0 has lost the others: Connection closed by peer"
    with pytest.raises(Interrupted, match=says):
        script.gather(np.zeros(2))
    for update in (script.gather_rows, script.average):
        with pytest.raises(ScriptError, match=says):
            update(torch.zeros(2, 2))
