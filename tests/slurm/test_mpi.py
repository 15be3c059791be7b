"""Environments that are MPI jobs themselves, each on its worker's own cores, on a real Slurm
cluster with Open MPI.
"""

import os
import re
import shutil
import signal
import sys

import pytest

from ..machine import do_without
from ..patience import assert_ended
from ..scripts import children_of, ranks_of
from ..test_docs import BLOCKS
from .test_launcher import Job, checkpoints

pytestmark = pytest.mark.long

# The documentation's environment, to whose observation all ranks contribute.
(ENV,) = (code for page, kind, code in BLOCKS if page.stem == "mpi" and kind == "python")
# A solver like one with mpi4py, but with Open MPI alone: rank 0 passes its input on, and prints the
# sum over all ranks.
SOLVER = """
import ctypes, os, sys, time
from ctypes import byref, c_char, c_int

lib = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
names = "comm_world", "int", "op_sum"
world, kind, plus = (byref(c_char.in_dll(lib, f"ompi_mpi_{name}")) for name in names)
lib.MPI_Init(None, None)
rank, size, waits = c_int(), c_int(), c_int()
lib.MPI_Comm_rank(world, byref(rank))
lib.MPI_Comm_size(world, byref(size))

def passed_on():
    while not waits.value:  # does not spin, because the cores do not exist
        time.sleep(0.002)
        lib.MPI_Iprobe(0, 0, world, byref(waits), None)
    waits.value = 0
    lib.MPI_Recv(byref(word), 1, kind, 0, 0, world, None)
    return word

word, total = c_int(), c_int()
for line in sys.stdin if rank.value == 0 else iter(passed_on, None):
    if rank.value == 0:
        if not os.path.exists("go"):
            time.sleep(0.02)
        word.value = int(line)
        for other in range(1, size.value):
            lib.MPI_Send(byref(word), 1, kind, other, 0, world)
    mine = c_int(word.value * rank.value)
    lib.MPI_Allreduce(byref(mine), byref(total), 1, kind, plus, world)
    if rank.value == 0:
        print(total.value, 1.0, flush=True)
"""


@pytest.fixture
def job(slurm, tmp_path, monkeypatch):
    if not shutil.which("mpirun"):
        do_without("no mpirun of Open MPI here: python3 -m tests.slurm.lab install")
    for name in (
        "OMPI_ALLOW_RUN_AS_ROOT",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
        "OMPI_MCA_rmaps_base_oversubscribe",
    ):
        monkeypatch.setitem(slurm.env, name, "1")  # the cores are declared but do not exist
    (tmp_path / "my_env.py").write_text(ENV)
    (tmp_path / "solver.py").write_text(SOLVER)
    (tmp_path / "solver").write_text(f"#!/bin/sh\nexec {sys.executable} solver.py\n")
    (tmp_path / "solver").chmod(0o755)
    flags = (
        "--env-id my_env:Simulation-v0 --worker-resources CPU=4 --envs-per-worker 1 "
        "--eval-episodes 0"
    )
    # The job has memory and a GPU, for which no step may wait.
    options = "--cpus-per-task=4", "--mem=1000", "--gpus-per-node=1"
    job = Job(slurm, tmp_path, "ppo", *options, flags=f"{flags} --total-timesteps 2048")
    yield job
    slurm.run("scancel", job.id, check=False)


def ranks(worker):
    """Return the pids of the processes that a worker's environment has started, by rank."""
    (mpirun,) = children_of(worker)
    return ranks_of(mpirun, "OMPI_COMM_WORLD_RANK")


def test_four_ranks_have_cores_of_their_own_and_are_replaced_together(job):
    job.await_training()
    steps = job.slurm.run("scontrol", "--oneliner", "show", "steps").stdout
    cores = re.findall(rf"StepId={job.id}\.\d+ .*NodeList=(\S+) .*CPUs=(\d+) .*Name=worker", steps)
    assert len(cores) == 2 and len(dict(cores)) == 2 and set(dict(cores).values()) == {"4"}

    first = ranks(job.worker(1))
    assert sorted(first) == [0, 1, 2, 3]
    os.kill(first[2], signal.SIGKILL)
    job.await_words("another is started", 1)
    assert_ended(first.values())
    job.await_training(max(checkpoints(job.run)))

    second = ranks(worker := job.worker(1))
    assert sorted(second) == [0, 1, 2, 3]
    os.kill(worker, signal.SIGKILL)
    job.await_words("another is started", 2)
    assert_ended(second.values())
    job.await_training(max(checkpoints(job.run)))

    third = [pid for index in (0, 1) for pid in ranks(job.worker(index)).values()]
    assert len(third) == 8
    (job.directory / "go").touch()
    job.wait()
    assert_ended(third)
    assert job.summary()["eval_return_mean"] is None
    assert [restart["worker"] for restart in job.summary()["worker_restarts"]] == [1, 1]
