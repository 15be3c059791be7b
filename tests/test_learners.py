"""Several learners, started by torchrun: their update equals that of one learner, and no learner
outlives another.

``LEARNER_KILLS=10 python -m pytest -s tests/test_learners.py -k random_moments`` kills a learner
ten times, instead of twice.
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.distributed as dist
from clusterenv_utils.learners import LearnersRun
from clusterenv_utils.learners.learners import Learners
from clusterenv_utils.learners.run import SharedWorkers, _NoWriter, fingerprint
from torch import nn

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Frames, Interrupted
from clusterenv_runtime.errors import LearnerLostError
from scripts import ppo_multilearner_clusterenv

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
from .test_signals import Envs

TINY = "--total-timesteps", "1024", "--weights", "float32", "--eval-episodes", "2"
SCRIPT = "scripts/ppo_multilearner_clusterenv.py"
FEW = "--env-id CartPole-v1 --num-workers 4 --envs-per-worker 2 --num-steps 32"


def torchrun(number, *flags):
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(number),
        *flags,
    ]


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


@pytest.mark.long
def test_the_pages_diff_gives_the_atari_script_several_learners(tmp_path):
    pytest.importorskip("ale_py", reason="Atari is not installed: pip install ale-py")
    diff = re.search(r"```diff\n(.*?)```", (ROOT / "docs" / "learners.md").read_text(), re.S)[1]
    several = tmp_path / "several"
    (several / "scripts").mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts/ppo_atari_clusterenv.py", several / "scripts")
    subprocess.run(["patch", "-p0"], cwd=several, input=diff, text=True, check=True)
    flags = "--num-workers 2 --envs-per-worker 2 --num-steps 64"
    flags = [*TINY, *flags.split(), "--total-timesteps", "512"]
    (tmp_path / "one").mkdir()
    runs = []
    for start, directory in ((train, tmp_path / "one"), (partial(train_together, 2), several)):
        folder, summary = start(script, directory, *flags)
        runs.append((events_of(folder), summary))
    assert_alike(*runs)


def assert_alike(one, several):
    (events, summary), (other_events, other_summary) = one, several
    tags = events.Tags()["scalars"]
    assert tags == other_events.Tags()["scalars"] and "losses/policy_loss" in tags
    for tag in tags:
        if not tag.startswith(("time/", "eval/")) and tag != "charts/SPS":
            values, others = (
                [event.value for event in each.Scalars(tag)] for each in (events, other_events)
            )
            # The rounding differs, and after some updates some actions differ, too.
            np.testing.assert_allclose(values[:2], others[:2], rtol=1e-3, atol=2e-5, err_msg=tag)
    for name in ("global_step", "pulls_per_worker", "sync_bytes"):
        assert summary[name] == other_summary[name]


def test_a_share_of_the_environments_has_the_seeds_and_the_noise_of_its_rows():
    policy = CategoricalPolicy(linear(4, 2))

    def rollout(number, **options):
        with ClusterEnv([partial(gym.make, "CartPole-v1")] * number, number, **options) as envs:
            envs.reset(seed=3)
            return envs.rollout(policy, 20)

    whole, second = (
        rollout(4),
        rollout(2, learners=SimpleNamespace(first_row=2, sum=lambda own: own)),
    )
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


# Their part of a checkpoint.
class FakeEnvs:
    def state_dict(self):
        return {"pulls": 3, "workers": 2, "sync_bytes": 10, "restarts": [{"worker": 1}]}

    def load_state_dict(self, state):
        self.loaded = state


def test_a_checkpoint_counts_the_bytes_of_all_learners_and_the_first_one_resumes_them():
    first, second = FakeEnvs(), FakeEnvs()
    workers = SharedWorkers(first, True)
    workers.others_bytes = 15
    state = workers.state_dict()
    assert state == {**first.state_dict(), "sync_bytes": 25}
    workers.load_state_dict(state)
    SharedWorkers(second, False).load_state_dict(state)
    assert first.loaded == state
    assert second.loaded == {**state, "sync_bytes": 0, "restarts": []}


# What they compute together.
class Thread(Learners):
    """One of two learners, which are threads."""

    meeting, parts = threading.Barrier(2), [None, None]

    def _gather(self, values):
        self.parts[self.rank] = values
        self.meeting.wait(PATIENCE)
        parts = list(self.parts)
        self.meeting.wait(PATIENCE)
        return parts


def by_two_learners(compute):
    """Return what each of two learners computes."""
    results = [None, None]

    def run(rank):
        results[rank] = compute(Thread(rank, 2))

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_values_of_different_lengths_are_gathered_and_so_are_texts():
    gathered = by_two_learners(lambda one: one.gather(np.arange(2.0 + one.rank)))
    for values in gathered:
        assert [part.tolist() for part in values] == [[0, 1], [0, 1, 2]]
    texts = by_two_learners(lambda one: one.tell("é" * one.rank))
    assert texts == [["", "é"], ["", "é"]]
    assert by_two_learners(lambda one: one.sum(np.array([1.0, one.rank]))[1]) == [1, 1]


def test_frames_of_two_learners_are_joined_and_each_is_kept_once():
    def rows(one):
        number = 3 + one.rank  # the number of frames
        frames = torch.arange(number)[:, None] + 10 * one.rank
        index = torch.tensor([[0, 1], [1, number - 1]])  # (num_steps, own_envs)
        joined = one.gather_rows(Frames(frames, index[..., None]))
        return joined.frames[joined.index].squeeze().tolist(), len(joined.frames)

    assert by_two_learners(rows) == [([[0, 1, 10, 11], [1, 2, 11, 13]], 7)] * 2


# Equality of their models.
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model: model.bias.data.add_(1e-3), "model is"),
        (lambda model: torch.rand(1), "random numbers are"),
    ],
    ids=["model", "random numbers"],
)
def test_a_model_that_differs_ends_the_run_and_its_learner_is_named(
    tmp_path, monkeypatch, change, what
):
    monkeypatch.chdir(tmp_path)
    run = LearnersRun(ppo_multilearner_clusterenv.Args(run_name="x"))
    model, told = nn.Linear(2, 2), []
    run.begin()
    run.learners = Learners(0, 2)
    # Learner 0 sends this run's first message, and learner 1 its present message.
    run.learners.gather = lambda own: told.append(own) or [told[0], own]
    ends = np.zeros((1, 1), bool)
    rollout = SimpleNamespace(
        episodic_returns=np.zeros(3), episodic_lengths=np.zeros(3), rows=np.arange(1),
        observations=np.zeros((1, 1, 2)), next_observations=np.zeros((1, 2)),
        final_observations=np.zeros((0, 2)), terminations=ends, truncations=ends,
    )  # fmt: skip
    with (
        run.training(Envs(), model, None),
        contextlib.closing(run.iterations(1, 8)) as iterations,
    ):
        next(iterations)
        run.global_step = 40
        for _ in range(2):
            run.add_episodes(rollout)
        change(model)
        with pytest.raises(
            SystemExit, match=f"error: learner 1's {what} not the first one's after step 40: "
        ):
            run.add_episodes(rollout)


def test_the_checksum_is_of_all_of_a_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    sums = [fingerprint(model)[0]]
    for value in itertools.chain(model.parameters(), model.buffers()):
        value.data += 1
        sums.append(fingerprint(model)[0])
    assert len(set(sums)) == len(sums)


# Mistakes.
class Alike(Learners):
    """One of two learners. The other one has and sends the same."""

    def gather(self, values):
        return [values, values]


@pytest.fixture
def two_learners(monkeypatch):
    monkeypatch.setattr(Learners, "of_torchrun", lambda cuda: Alike(0, 2))


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--num-workers 3", "--num-workers 3 must be a multiple of the 2 learners of torchrun"),
        ("--dry-run", "--dry-run prints the workers' commands of one learner"),
        ("--port 5000 --bind-address 127.0.0.1", "cannot serve 2 learners"),
        ("--num-minibatches 7", "--num-minibatches 7 must divide the batch"),
        (
            "--num-workers 2 --envs-per-worker 1 --num-steps 6 --num-minibatches 4",
            "cannot divide 3 samples of a minibatch among 2 learners",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, two_learners, flags, says):
    check_refusal_here(monkeypatch, SCRIPT, tmp_path, flags.split(), says)


def test_a_script_of_one_learner_refuses_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    says = "has one learner, and torchrun starts several"
    check_refusal_here(monkeypatch, "dqn_clusterenv.py", tmp_path, [], says)


def test_flags_that_differ_are_named(tmp_path, monkeypatch, two_learners):
    def tell(self, text):
        return [text, json.dumps({**json.loads(text), "--seed": "2"}) if text else ""]

    monkeypatch.setattr(Alike, "tell", tell)
    says = "error: learner 1 has --seed 2, learner 0 has 1: all must have the same"
    check_refusal_here(monkeypatch, SCRIPT, tmp_path, [], says)


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
        command = [
            *torchrun(2, *options),
            str(ROOT / SCRIPT),
            *FLAGS,
            *flags,
            *begin,
            *lasting(directory, 200, 0.01),
        ]
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
            int(path.name.split("-")[1])
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
def test_a_torchrun_that_is_killed_ends_all_and_the_first_saves(tmp_path):
    together = Together(tmp_path, flags=["--checkpoint-interval", "0.5"])
    together.process.kill()
    (line,) = together.finish()
    assert line.startswith("interrupted; to resume: torchrun ")


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


@pytest.mark.long
def test_a_signal_to_one_learner_ends_all_and_the_first_saves(tmp_path):
    together = Together(tmp_path, flags=["--checkpoint-interval", "0.5"])
    os.kill(together.learners[1], signal.SIGTERM)
    (line,) = together.finish()
    assert is_lost_or_interrupted(line) and "; to resume: torchrun " in line


def test_a_lost_learner_is_an_error_in_an_update_and_an_interruption_before_it(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Connection closed by peer")

    learners = Learners(1, 2)
    for collective in ("all_gather", "all_reduce"):
        monkeypatch.setattr(dist, collective, fail)
    with pytest.raises(
        Interrupted, match="learner 1 has lost the others: RuntimeError: Connection closed by peer"
    ):
        learners.sum(np.zeros(2))
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    for update in (
        lambda: learners.average_gradients([parameter]),
        lambda: learners.gather_rows(torch.zeros(2, 2)), lambda: learners.average(torch.zeros(2)),
    ):  # fmt: skip
        with pytest.raises(LearnerLostError, match="learner 1 has lost the others"):
            update()


def test_the_writer_of_a_learner_without_logs_accepts_all_calls():
    writer = _NoWriter()
    assert writer.add_scalar("losses/mine", 1.0, global_step=3) is None
    assert writer.add_histogram("weights", np.zeros(2), 3) is None
