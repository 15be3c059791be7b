"""The .sbatch files that train, submitted as a user submits them, on a real Slurm cluster."""

import json
import os
import re
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ..patience import PATIENCE
from . import lab

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch"))
# A job with this environment lasts until the file `go` exists, and leaves the cores to other tests.
SLOW_ENV = """
import os, time
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    def step(self, action):
        if not os.path.exists("go"):
            time.sleep(0.02)
        return super().step(action)

gym.register("Slow-v0", Slow, max_episode_steps=500)
"""
TINY = (
    "--env-id slow_env:Slow-v0 --envs-per-worker 2 --num-steps 16 --eval-episodes 2 "
    "--checkpoint-interval 0.5"
)
TINY += " --no-save-model --total-timesteps 1000000000 --no-cuda"
MORE = {
    "ppo_torchrun": " --num-minibatches 2",
    "ppo": " --num-minibatches 2",
    "dqn": " --learning-starts 100 --buffer-size 1000",
    "ppo_hetjob": "",
}


# A stand-in for Python with a training script. When it is told to stop, it saves, unless the file
# `early` exists, as if its handlers were not set yet. It ends when the file `go` exists.
STUB = """#!/usr/bin/env bash
for word in "$@"; do
    case $previous in
    --run-name | --resume) run=runs/${word#runs/} ;;
    --resume=*) run=${word#*=} ;;
    esac
    previous=$word
done
mkdir -p "$run/workers/clusterenv-$SLURM_JOB_ID"
if [[ ! -e early ]]; then trap 'touch "$run/checkpoint-1.pt"; exit 75' TERM; fi
while [[ -e hold ]]; do sleep 0.05; done
echo "began with $*"
while [[ ! -e go ]]; do sleep 0.05; done
"""


class Job:
    """A job that trains, in its own directory that looks like the repository's root."""

    def __init__(
        self, slurm, directory, file, *options, flags="", python=Path(sys.executable).parent
    ):
        if not (directory / "slurm").exists():
            for name in ("slurm", "scripts", *(path.name for path in ROOT.glob("*_clusterenv.py"))):
                (directory / name).symlink_to(ROOT / name)
        (directory / "slow_env.py").write_text(SLOW_ENV)
        path = f"{python}{os.pathsep}{slurm.env['PATH']}"
        env = {**slurm.env, "PATH": path, "PYTHONPATH": str(directory)}
        words = f"slurm/{file}.sbatch {TINY}{MORE[file]} {flags}".split()
        self.slurm, self.directory = slurm, directory
        where = [f"--output={directory}/log-%j", "--job-name=train"]
        self.id = slurm.submit(*where, *options, *words, cwd=directory, env=env)
        self.run = directory / "runs" / f"train-{self.id}"

    def log(self, job=None):
        with suppress(FileNotFoundError):
            return (self.directory / f"log-{job or self.id}").read_text()
        return ""

    def await_words(self, words, number=1):
        lab.wait_for(f"{words} in the log", PATIENCE, lambda: self.log().count(words) == number)

    def warn(self, task=None):
        """Tell the job's shell that time is up, as Slurm does."""
        self.slurm.run("scancel", "--batch", "--signal=TERM", task or self.id)

    def wait(self, *states):
        try:
            return self.slurm.wait(self.id, *states)
        except lab.LabError as error:
            raise lab.LabError(f"{error}\n{self.log()}") from None

    def await_requeue(self):
        """Wait until the job is, or was, pending for the second time."""
        job = partial(self.slurm.jobs, self.id)
        self.wait_for(
            "a requeue", lambda: job()[0]["JobState"] == "PENDING" or job()[0]["Restarts"] != "0"
        )

    def wait_for(self, what, condition):
        def reached():
            value = condition()
            states = {job["JobState"] for job in self.slurm.jobs(self.id)[:1]}
            goes_on = states and not states & {"FAILED", "COMPLETED"}
            assert value or goes_on, f"ended without {what}: {self.log()}"
            return value

        return lab.wait_for(what, PATIENCE, reached)

    def await_training(self, after=0):
        """Wait for a checkpoint of more than ``after`` steps, and return its number of steps."""

        def newer():
            return [step for step in checkpoints(self.run) if step > after]

        return max(self.wait_for("a checkpoint", newer))

    def places(self):
        """Return the node of each worker's step, by the step's name."""
        said = self.slurm.run("squeue", "--steps", "--noheader", "--format=%i %j %N").stdout
        steps = [line.split() for line in said.splitlines() if "worker" in line]
        # Each part of a heterogeneous job has its own id.
        mine = {part["JobId"] for part in self.slurm.jobs(self.id)}
        return {name: node for step, name, node in steps if step.split(".")[0] in mine}

    def worker(self, index):
        """Return the pid of a worker of this job, or None."""
        for pid in self.slurm.processes():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                mine = str(self.run) in " ".join(words) and "srun" not in words[0]
                if mine and words[words.index("--index") + 1] == str(index):
                    return pid
        return None

    def summary(self):
        return json.loads((self.run / "summary.json").read_text())


def checkpoints(run):
    return [int(path.stem.split("-")[1]) for path in run.glob("checkpoint-*.pt")]


def left_in(run):
    return [path for path in (run / "workers").iterdir() if not path.name.endswith(".log")]


@pytest.fixture
def train(slurm, tmp_path):
    def submit(file, *options, flags=""):
        directory = tmp_path / f"{file}-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        return Job(slurm, directory, file, *options, flags=flags)

    return submit


@pytest.fixture
def stub(slurm, tmp_path):
    """Return a function that submits a job in which STUB stands in for Python. All jobs of a test
    share a directory.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(STUB)
    (tmp_path / "bin" / "python").chmod(0o755)
    return lambda *options, flags="": Job(
        slurm, tmp_path, "ppo", *options, flags=flags, python=tmp_path / "bin"
    )


@pytest.mark.long
def test_two_jobs_train_on_the_same_nodes_and_replace_a_killed_worker(train):
    spread = ["--nodes=3", "--ntasks=4"]
    ppo, dqn = (train(file, *spread, flags="--total-timesteps 40000") for file in ("ppo", "dqn"))
    for job in (ppo, dqn):
        job.await_training()
        assert set(job.places()) == {"worker-0", "worker-1", "worker-2"}
        assert set(job.places().values()) == set(job.slurm.nodes)
    node = ppo.places()["worker-1"]
    os.kill(ppo.worker(1), signal.SIGKILL)
    ppo.wait_for("a replacement", lambda: "another is started" in ppo.log())
    for job in (ppo, dqn):
        (job.directory / "go").touch()
        job.wait()
        assert (job.run / "learning_curve.png").exists() and not left_in(job.run)
    assert re.search(
        rf"worker 1 \(.*worker-1.log\) died: {node}: task 0: Killed; another is started", ppo.log()
    )
    assert "died" not in dqn.log()


@pytest.mark.long
def test_jobs_that_are_requeued_or_out_of_time_save_and_go_on(train):
    requeued = train("ppo", flags="--total-timesteps 40000")
    timed_out = train("dqn", "--time=60")
    timed_out.await_training()
    # --signal warns the job 60 s before its limit, and Slurm looks every 30 s, so at least 45 s
    # must be left.
    hours, minutes, seconds = map(int, timed_out.slurm.jobs(timed_out.id)[0]["RunTime"].split(":"))
    limit = hours * 60 + minutes + (seconds + 45) // 60 + 1
    timed_out.slurm.run("scontrol", "update", f"JobId={timed_out.id}", f"TimeLimit={limit}")
    requeued.await_training()
    requeued.slurm.run("scontrol", "requeue", requeued.id)
    before = {}
    for job in (requeued, timed_out):
        job.await_requeue()
        before[job] = max(checkpoints(job.run))
    timed_out.slurm.run("scontrol", "update", f"JobId={timed_out.id}", "TimeLimit=60")
    for job in (requeued, timed_out):
        job.wait("RUNNING", "COMPLETED")
        assert job.await_training(before[job]) > before[job]
        assert job.slurm.jobs(job.id)[0]["Restarts"] == "1"
        assert job.log().count("interrupted; to resume") == 1
        assert re.match(
            rf"job {job.id} on \S+: 2 workers, run directory runs/{job.run.name}\n", job.log()
        )
        assert [path.name for path in (job.directory / "runs").iterdir()] == [job.run.name]
    submit = "sbatch --ntasks=3 slurm/ppo.sbatch --env-id=slow_env:Slow-v0"
    assert f"interrupted; to resume: {submit} --resume runs/{requeued.run.name}\n" in requeued.log()
    assert f"requeued; it will go on from runs/{timed_out.run.name}" in timed_out.log()
    assert "requeued" not in requeued.log()  # Slurm has requeued this job
    timed_out.slurm.run("scancel", timed_out.id)
    (requeued.directory / "go").touch()
    requeued.wait()
    assert (
        requeued.summary()["global_step"] > before[requeued] and not (requeued.run / "job").exists()
    )


@pytest.mark.long
def test_a_run_belongs_to_one_job_at_a_time_and_continues_where_resume_says(stub):
    first = stub("--job-name=a: b")
    first.await_words("began with")
    run = first.directory / "runs" / f"a__b-{first.id}"
    assert f"--run-name a__b-{first.id} " in first.log() and "warning" not in first.log()
    second = stub(flags=f"--resume runs/{run.name}")
    second.wait("FAILED")
    assert second.log() == f"error: runs/{run.name} is being trained by job {first.id}\n"
    assert (run / "workers" / f"clusterenv-{first.id}").exists()
    (first.directory / "hold").touch()  # in case the job comes back at once
    first.warn()
    first.await_requeue()
    # The job comes back, and so keeps the run.
    assert (run / "job").read_text() == f"{first.id}\n" and not left_in(run)
    first.slurm.run("scancel", first.id)
    first.wait("CANCELLED")
    (first.directory / "hold").unlink()
    (run / "workers" / "clusterenv-old").mkdir()
    third = stub(flags=f"--resume={run}/")
    third.await_words("began with")
    third.warn()
    third.await_words("began with", 2)
    assert f"requeued; it will go on from runs/{run.name}\n" in third.log()
    (third.directory / "go").touch()
    assert third.wait()[0]["Restarts"] == "1" and not (run / "job").exists() and not left_in(run)
    assert [path.name for path in run.parent.iterdir()] == [run.name]


def test_a_variable_names_another_script(stub):
    job = stub("--export=ALL,SCRIPT=scripts/ppo_continuous_clusterenv.py")
    job.await_words(
        "began with scripts/ppo_continuous_clusterenv.py --launcher slurm --num-workers 2"
    )
    (job.directory / "go").touch()
    job.wait()


def test_of_an_array_only_the_task_that_was_warned_is_requeued(stub):
    array = stub("--array=0-1")
    tasks = {task["JobId"]: task["ArrayTaskId"] for task in array.wait("RUNNING")}
    assert array.id in tasks  # one task's id is the array's, too
    lab.wait_for(
        "both to begin", PATIENCE, lambda: all("began with" in array.log(job) for job in tasks)
    )
    array.warn(f"{array.id}_{tasks[array.id]}")
    array.await_words("began with", 2)
    assert {task["JobId"]: task["Restarts"] for task in array.slurm.jobs(array.id)} == {
        job: str(int(job == array.id)) for job in tasks
    }
    (array.directory / "go").touch()
    array.wait()


def test_a_job_that_is_warned_before_it_can_save_is_requeued_only_if_it_has_time(stub, tmp_path):
    (tmp_path / "early").touch()
    # The second job has so little time left that the warning counts as that of its time limit.
    early, late = (stub(f"--time={minutes}") for minutes in (10, 2))
    for job in (early, late):
        job.await_words("began with")
        job.warn()
    late.wait("FAILED")
    assert "error: stopped before the first checkpoint, so not requeued" in late.log()
    early.await_words("began with", 2)
    assert "requeued\n" in early.log()
    (tmp_path / "go").touch()
    early.wait()


def test_cores_that_no_worker_uses_are_told(stub):
    job = stub("--nodes=3", "--ntasks-per-node=2")
    job.await_words("began with")
    warning = (
        "warning: 2 workers, though the job's 6 CPUs are enough for more: --ntasks sets how many\n"
    )
    assert job.log().startswith(warning) and "--num-workers 2 " in job.log()
    (job.directory / "go").touch()
    job.wait()


@pytest.mark.long
def test_scancel_leaves_nothing_and_the_job_does_not_come_back(slurm, train):
    before = slurm.processes()
    job = train("ppo", "--nodes=3", "--ntasks=4")
    job.await_training()
    (key,) = left_in(job.run)
    assert key.name.startswith("clusterenv-") and key.stat().st_mode & 0o77 == 0
    assert (key / "key").stat().st_mode & 0o777 == 0o600
    job.slurm.run("scancel", job.id)
    # It would train for hours.
    lab.wait_for("all processes to end", PATIENCE, lambda: slurm.processes() <= before)
    assert not left_in(job.run)
    job.wait("CANCELLED")
    assert "requeued" not in job.log()


@pytest.mark.long
def test_a_heterogeneous_job_trains_with_its_workers_in_the_second_part(train):
    job = train("ppo_hetjob", flags="--total-timesteps 20000 --num-minibatches 2")
    places = job.wait_for("the steps", lambda: len(places := job.places()) == 4 and places)
    first, second = job.slurm.jobs(job.id)
    (job.directory / "go").touch()
    assert set(places.values()) <= nodes(job.slurm, second["NodeList"])
    assert job.wait() and job.summary()["args"]["num_workers"] == 4 and "gpu:1" in str(first)


@pytest.mark.long
def test_learners_on_two_nodes_are_requeued_and_go_on_to_the_end(train):
    job = train("ppo_torchrun", flags="--total-timesteps 40000")
    steps = job.await_training()
    job.warn()
    job.await_requeue()
    submit = (
        r"interrupted; to resume: sbatch --nodes=2 --cpus-per-task=\d slurm/ppo_torchrun.sbatch "
        r"--env-id"
    )
    assert re.search(submit, job.log())
    saved = max(checkpoints(job.run))
    assert saved >= steps
    (job.directory / "go").touch()
    assert job.wait()
    summary = job.summary()
    assert summary["global_step"] == 40000 // 128 * 128 and summary["args"]["num_workers"] == 4
    assert {path.name for path in (job.run / "workers").iterdir()} == {"learner-0", "learner-1"}
    assert not list(job.run.glob("workers/*/clusterenv-*"))


def test_too_few_cores_for_the_learners_are_one_line(train):
    job = train("ppo_torchrun", "--cpus-per-task=1")
    with pytest.raises(lab.LabError):
        job.wait()
    (line,) = job.log().splitlines()
    assert line.startswith(
        "error: a task on each node, with cores for 1 learners and as many workers each: sbatch "
    )


def nodes(slurm, text):
    return set(slurm.run("scontrol", "show", "hostnames", text).stdout.split())


def test_over_a_network_the_head_is_found_and_lost_nodes_are_replaced(slurm_networked, tmp_path):
    job = Job(
        slurm_networked, tmp_path, "ppo", "--nodes=3", "--ntasks=4", flags="--worker-timeout 3"
    )
    job.await_training()
    addresses = set(job.slurm.address.values())
    command = Path(f"/proc/{job.worker(2)}/cmdline").read_bytes().decode().split("\0")
    address = command[command.index("--connect") + 1]
    assert re.fullmatch(r"tcp://([\d.]+):\d+", address)[1] in addresses and "--key-file" in command
    (head,) = (node for node, where in job.slurm.address.items() if where in address)
    lost, node = next((name, node) for name, node in job.places().items() if node != head)
    job.slurm.cut(node)
    try:
        job.wait_for("a replacement", lambda: "another is started" in job.log())
        job.wait_for("a new place", lambda: job.places().get(lost) not in (None, node))
        job.await_training(max(checkpoints(job.run)))
    finally:
        job.slurm.heal(node)
        job.slurm.run("scancel", job.id)
    assert re.search(rf"{lost.replace('-', ' ')} .* died: cut off or silent", job.log())


@pytest.mark.parametrize("file", FILES)
def test_slurm_accepts_every_file(slurm, file):
    slurm.run("sbatch", "--test-only", str(ROOT / "slurm" / file))
