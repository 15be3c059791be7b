"""Several learners, started by torchrun: their update is that of one, and none outlives another
unnoticed.

``LEARNER_KILLS=10 python -m pytest -s tests/test_learners.py -k random_moments`` kills one so
often, instead of twice.
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
from torch import nn

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Interrupted
from clusterenv_runtime.errors import LearnerLostError
from clusterenv_runtime.script.learners import LearnersRun, watch
from clusterenv_runtime.script.learners.exchange import fingerprint
from clusterenv_runtime.script.learners.learners import Learners
from clusterenv_runtime.script.learners.run import SharedWorkers
from clusterenv_runtime.script.learners.watch import DONE, INTERRUPTED, Place, Watch
from scripts import ppo_multilearner_clusterenv

from .envs import CountingEnv, assert_same
from .nets import linear
from .patience import PATIENCE, wait_until
from .scripts import ROOT, alive, environment, events_of, lasting, ranks_of, train, workers_of

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
    """Run a script to its end with so many learners; return the run's folder and its summary."""
    command = [*torchrun(number), str(ROOT / script), *flags]
    result = subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    (folder,) = Path(directory, "runs").iterdir()
    return folder, json.loads((folder / "summary.json").read_text())


# Their update is that of one learner.
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.long)])
def test_several_learners_learn_what_one_does(tmp_path, number):
    flags, runs = [*TINY, *FEW.split()], []
    together = partial(train_together, number, SCRIPT)
    for name, start in (("one", partial(train, "ppo_clusterenv.py")), ("several", together)):
        (tmp_path / name).mkdir()
        folder, summary = start(tmp_path / name, *flags)
        runs.append((events_of(folder), summary))
    assert_alike(*runs)


@pytest.mark.long
def test_the_pages_diff_gives_the_script_of_atari_several_learners(tmp_path):
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
        if not tag.startswith(("time/", "eval/")) and tag not in (
            "charts/SPS",
            "charts/collect_sps",
        ):
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
            ValueError, match="with several learners there is `rollout`, and no `send`"
        ):
            envs.send(3)


# Their part of a checkpoint.
class FakeEnvs:
    def state_dict(self):
        return {"pulls": 3, "workers": 2, "sync_bytes": 10, "restarts": [{"worker": 1}]}

    def load_state_dict(self, state):
        self.loaded = state


def test_a_checkpoint_counts_the_bytes_of_all_learners_and_the_first_one_goes_on_with_them():
    first, second = FakeEnvs(), FakeEnvs()
    workers = SharedWorkers(first, True)
    workers.others_bytes = 15
    state = workers.state_dict()
    assert state == {**first.state_dict(), "sync_bytes": 25}
    workers.load_state_dict(state)
    SharedWorkers(second, False).load_state_dict(state)
    assert first.loaded == state
    assert second.loaded == {**state, "sync_bytes": 0, "restarts": []}


# Their presence.
@pytest.fixture
def watches(monkeypatch, tmp_path):
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    places = [
        Place("here", os.getpid(), "this"),
        Place("there", 1, "other"),
        Place("there", 2, "other"),
    ]
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    made = []

    def make(rank):
        made.append(Watch(store, rank, 3, places))
        made[-1].ended = []
        made[-1].end = lambda one=made[-1]: one.ended.append(1)
        return made[-1]

    yield make
    for each in made:
        each.patience = 1e9
        each.close()


def test_who_leaves_is_noticed_and_only_what_comes_too_early_ends_the_others(watches):
    first, second, third = map(watches, range(3))
    third.leave(DONE)
    third.close()
    wait_until(lambda: 2 in first.left and 2 in second.left)
    assert first.left == {2: DONE} and not first.ended and first.culprit is None
    second.leave(INTERRUPTED)
    wait_until(lambda: first.ended)
    assert first.culprit is None and first.speaks and not second.speaks


def test_who_falls_silent_counts_as_dead_and_the_first_of_the_others_says_so(watches, monkeypatch):
    monkeypatch.setattr(watch, "SILENCE_S", 0.5)
    first, second, third = map(watches, range(3))
    first.close()
    wait_until(lambda: second.ended and third.ended)
    assert (
        second.culprit
        == f"learner 0 (process {os.getpid()} on here) has died, or has been silent for 0.5 s"
    )
    assert second.speaks and not third.speaks


def test_a_dead_process_of_this_machine_is_noticed_at_once():
    process = subprocess.Popen(["true"])
    process.wait()
    here = Place.here()
    assert here.lives(here)
    dead = Place(here.host, process.pid, here.namespace)
    assert dead.lives(here) is False
    assert dead.lives(Place(here.host, 1, "of another machine")) is None
    assert Place(here.host, 1, "").lives(Place(here.host, 1, "")) is None


def test_a_lost_store_ends_all_and_the_first_that_others_see_says_so(monkeypatch):
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = [dist.TCPStore("127.0.0.1", store.port, None, False) for _ in range(3)]
    places = [Place("there", 1, "other"), Place.here(), Place.here()]
    watches = [Watch(ranks[rank], rank, 3, places) for rank in range(3)]
    ended = []
    for each in watches:
        each.patience = 1e9
        each.end = lambda: ended.append(1)
    # All have written to the store.
    wait_until(partial(ranks[0].check, [f"beat/{rank}" for rank in range(3)]))
    del store
    wait_until(lambda: len(ended) == 3)
    for each in watches:
        assert each.culprit == "torchrun is gone, or its machine, and with it the learners' store"
        each.leave(INTERRUPTED)
        each.wait_for_others()
        each.close()
    assert [each.speaks for each in watches] == [True, True, False]


def test_a_store_that_does_not_answer_is_lost(monkeypatch):
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    monkeypatch.setattr(watch, "SILENCE_S", 0.5)
    answers, told = threading.Event(), []

    class Store:
        def clone(self):
            return self

        def check(self, keys):
            answers.wait()
            return False

        def set(self, key, value):
            told.append(key)

    answers.set()
    one = Watch(Store(), 0, 2, [Place.here(), Place.here()])
    one.patience = 1e9
    wait_until(lambda: len(told) > 2)
    assert not one.store_is_lost and not one.left
    answers.clear()
    wait_until(lambda: one.store_is_lost)
    one.close()
    answers.set()


def test_an_error_of_one_is_named_by_the_others(watches):
    first, second, _ = map(watches, range(3))
    second.leave("has failed: ValueError: \x1b[2Jno")
    wait_until(lambda: first.ended)
    assert first.culprit == r"learner 1 (process 1 on there) has failed: ValueError: \x1b[2Jno"


# Equality of their models.
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model: model.bias.data.add_(1e-3), "model is"),
        (lambda model: np.random.random(), "random numbers are"),
    ],
    ids=["model", "random numbers"],
)
def test_a_model_that_is_another_ends_the_run_by_its_name(tmp_path, monkeypatch, change, what):
    monkeypatch.chdir(tmp_path)
    run = LearnersRun(ppo_multilearner_clusterenv.Args(run_name="x"))
    model, told = nn.Linear(2, 2), []
    run.begin()
    run.learners = Learners(0, 2)
    # Its first message, and its message now.
    run.learners.gather = lambda own: told.append(own) or [told[0], own]
    rollout = SimpleNamespace(episodic_returns=np.zeros(3), episodic_lengths=np.zeros(3))
    with (
        run.training(contextlib.nullcontext(), model, None),
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
@pytest.mark.long
@pytest.mark.parametrize(
    "number, script, flags, says",
    [
        (
            2,
            SCRIPT,
            "--num-workers 3",
            "--num-workers 3 must be a multiple of the 2 learners of torchrun",
        ),
        (
            2,
            SCRIPT,
            "--num-workers 4 --min-workers 3",
            "--min-workers 3 must be a multiple of the 2",
        ),
        (
            2,
            SCRIPT,
            "--dry-run",
            "--dry-run prints the workers' commands of one learner",
        ),
        (
            2,
            SCRIPT,
            "--port 5000 --bind-address 127.0.0.1",
            "cannot be that of 2 learners",
        ),
        (
            2,
            SCRIPT,
            "--num-minibatches 7",
            "--num-minibatches 7 must divide the batch",
        ),
        (
            2,
            SCRIPT,
            "--num-workers 2 --envs-per-worker 1 --num-steps 6 --num-minibatches 4",
            "cannot divide 3 samples of a minibatch among 2 learners",
        ),
        (
            2,
            "dqn_clusterenv.py",
            "",
            "has one learner, and torchrun starts several",
        ),
    ],
)
def test_a_mistake_is_said_once(tmp_path, number, script, flags, says):
    command = [*torchrun(number), str(ROOT / script), *flags.split()]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert result.returncode != 0
    assert (
        len(
            [
                line
                for line in result.stderr.splitlines()
                if line.startswith("error: ") and says in line
            ]
        )
        == 1
    )
    assert not any(line.startswith("interrupted") for line in result.stderr.splitlines())
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_flags_that_differ_are_named(tmp_path):
    # In place of torchrun's.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    variables |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / SCRIPT), "--env-id", "CartPole-v1", "--seed",
                str(rank + 1)],
            cwd=tmp_path, env=environment(RANK=str(rank), **variables), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    _, errors = processes[1].communicate(timeout=PATIENCE)
    processes[0].kill()
    processes[0].communicate()
    assert errors == "error: learner 1 has --seed 2, learner 0 has 1: all must have the same\n"


# The end of learners.
FLAGS = *TINY[2:], *FEW.split()[2:], "--total-timesteps", "1000000"
KILLS = int(os.environ.get("LEARNER_KILLS", 2))


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
        if (self.number, self.steps) == (5, 100):
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
        assert len(self.workers) == 4

    def checkpoint(self):
        """The step of the newest checkpoint, -1 if there is none."""
        steps = [
            int(path.name.split("-")[1])
            for path in (self.directory / "runs" / "x").glob("checkpoint-*.pt")
        ]
        return max(steps, default=-1)

    def find_learners(self):
        ranks = ranks_of(self.process.pid, "RANK")
        return [ranks[rank] for rank in sorted(ranks)]

    def finish(self):
        """Wait until all has ended; return the scripts' lines of errors."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        wait_until(lambda: not any(map(alive, [*self.learners, *self.workers])))
        return [line for line in errors.splitlines() if line.startswith(("error", "interrupted"))]


@pytest.mark.long
def test_killed_at_random_moments_a_run_goes_on_from_its_last_checkpoint(tmp_path):
    moment, begin, step = random.Random(1), ["--run-name", "x"], -1
    for number in range(KILLS):
        together = Together(tmp_path, flags=["--checkpoint-interval", "0"], begin=begin, after=step)
        time.sleep(2 * moment.random())
        rank = number % 2
        start = time.monotonic()
        os.kill(together.learners[rank], signal.SIGKILL)
        wait_until(lambda: not any(map(alive, [*together.learners, *together.workers])))  # noqa: B023
        seconds = time.monotonic() - start
        print(
            f"learner {rank} killed after step {together.checkpoint()}, nothing left "
            f"{seconds:.1f} s later"
        )
        (line,) = together.finish()
        name = rf"learner {rank} \(process {together.learners[rank]} on .*\) has died"
        assert re.match(f"error: {name}", line), line
        assert together.checkpoint() > step
        begin, step = ["--resume", "runs/x"], together.checkpoint()
    (tmp_path / "go").touch()
    flags = *lasting(tmp_path, 0), "--resume", "runs/x", "--total-timesteps", str(step + 1024)
    _, summary = train_together(2, SCRIPT, tmp_path, *flags)
    assert summary["global_step"] == step + 1024


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_learner_that_stops_ends_the_others_by_its_name(tmp_path, rank):
    together = Together(tmp_path, flags=["--checkpoint-interval", "0"])
    os.kill(together.learners[rank], signal.SIGSTOP)
    wait_until(lambda: not alive(together.learners[1 - rank]))
    os.kill(together.learners[rank], signal.SIGKILL)
    (line,) = together.finish()
    name = rf"learner {rank} \(process {together.learners[rank]} on .*\) has died"
    assert re.match(f"error: {name}", line), line


@pytest.mark.long
def test_killed_under_max_restarts_the_run_goes_on_from_its_last_checkpoint(tmp_path):
    together = Together(tmp_path, "--max-restarts", "1", flags=["--checkpoint-interval", "0"])
    before = together.checkpoint()
    os.kill(together.learners[1], signal.SIGKILL)
    wait_until(lambda: not any(map(alive, together.learners)))
    wait_until(lambda: together.checkpoint() > before + 2000)
    together.learners = together.find_learners()
    assert len(list((tmp_path / "runs").iterdir())) == 1
    together.process.send_signal(signal.SIGTERM)
    (killed, interrupted) = together.finish()
    assert "learner 1 " in killed and interrupted.startswith("interrupted; to go on: ")


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
    assert re.fullmatch(f"interrupted; to go on: {command}", line), line
    (tmp_path / "go").touch()
    flags = *lasting(tmp_path, 0), "--resume", "runs/x", "--total-timesteps", str(step + 1024)
    _, summary = (train if number == 1 else lambda *rest: train_together(number, *rest))(
        SCRIPT, tmp_path, *flags
    )
    assert summary["global_step"] == step + 1024


@pytest.mark.long
def test_a_torchrun_that_is_killed_ends_all_and_the_first_saves(tmp_path):
    together = Together(tmp_path, flags=["--checkpoint-interval", "0.5"])
    together.process.kill()
    (line,) = together.finish()
    assert line.startswith(
        "error: torchrun is gone, or its machine, and with it the learners' store; to go on: "
        "torchrun"
    )


@pytest.mark.long
def test_a_learner_that_raises_says_why_and_the_others_name_it(tmp_path):
    Path(tmp_path, "failing_env.py").write_text(FAILING_ENV)
    flags = *FLAGS, "--env-id", "failing_env:Failing-v0"
    command = [*torchrun(2), str(ROOT / SCRIPT), *flags]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert result.returncode != 0
    assert (
        "\nValueError: no more\n" in result.stderr
        and "EnvError: environment 5 on worker 0 " in result.stderr
    )
    (line,) = [
        line for line in result.stderr.splitlines() if line.startswith(("error", "interrupted"))
    ]
    assert re.match(
        r"error: learner 1 \(process \d+ on .*\) has failed: ValueError: no more; to go on: ", line
    ), line


@pytest.mark.long
def test_a_signal_to_one_learner_ends_all_and_the_first_saves(tmp_path):
    together = Together(tmp_path, flags=["--checkpoint-interval", "0.5"])
    os.kill(together.learners[1], signal.SIGTERM)
    (line,) = together.finish()
    assert line.startswith("interrupted; to go on: ")


def test_who_waits_for_the_others_can_be_interrupted():
    class Work:
        def is_completed(self):
            return False

    learners = Learners(0, 2)
    gathers = []
    learners.raise_if_interrupted = lambda: (_ for _ in ()).throw(Interrupted("interrupted"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(dist, "all_gather", lambda *_, **__: gathers.append(1) or Work())
        learners.gather(np.zeros(2))
    assert gathers == [1]


def test_amid_an_update_a_lost_learner_is_an_error_and_before_it_an_interruption(monkeypatch):
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
