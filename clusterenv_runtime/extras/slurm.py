"""Workers as steps of the Slurm job that the head runs in.

Each worker has its own ``srun``, so that each worker can be replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import StartupError
from ..launchers.base import WORKER, Exit, Launcher
from ..launchers.local import LocalLauncher, kill_group
from ..launchers.processes import VARIABLE, python_command

logger = logging.getLogger(__name__)
# By these variables, srun divides a step into tasks.
BY_TASK = "CPUS_PER_TASK|TRES_PER_TASK|NTASKS.*|NPROCS"
# These variables contradict the flags of a step with cores of its own.
OF_EXACT = "GPUS|(GPUS|CPUS|MEM)_PER_.*|MEM_BIND.*|CPU_BIND.*|GRES"
# This goes before a worker's command. With Slurm's variables, an MPI program that an environment
# starts would find the job and run on all of its nodes.
WITHOUT_SLURM = ["bash", "-c", 'unset "${!SLURM_@}" "${!PMI@}"; exec "$@"', "worker"]


@dataclass
class Allocation:
    """The cores for a job's workers: a heterogeneous job's second part, or all but the head's."""

    free: dict[str, int]  # by node, the number of cores that the head does not need
    cores: int  # the number of cores per task that the job asked for
    head: str | None  # the head's node; None if the job does not have that node
    het: bool  # whether the job is heterogeneous

    def places(self, num_workers: int, own_cores: int = 0) -> list[str]:
        """Return a node for each worker: the one with the most cores left, then the fewest workers.

        Raises:
            StartupError: there are too few cores for workers with ``own_cores`` cores of their own.
        """
        free = dict(self.free)
        places: list[str] = []
        for index in range(num_workers):
            node = max(free, key=lambda node: (free[node], -places.count(node)))
            if free[node] < own_cores:
                job = "the second part of it" if self.het else "it"
                raise StartupError(
                    f"no node has {own_cores} cores left for worker {index}; besides the head's "
                    f"this job has {self}: "
                    f"submit {job} with --cpus-per-task={own_cores}"
                )
            free[node] -= own_cores or self.cores
            places.append(node)
        return places

    def __str__(self) -> str:
        return ", ".join(f"{node} {cores}" for node, cores in self.free.items())


def read_allocation() -> Allocation:
    """Return the allocation that the variables of a Slurm job describe.

    Raises:
        StartupError: this process is in no job, or Slurm's commands are missing or fail.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise StartupError(
            "the launcher slurm starts workers inside a job, and there is none (SLURM_JOB_ID is "
            "not set): "
            "sbatch slurm/ppo.sbatch, or run this in a shell of salloc"
        )
    if not shutil.which("srun"):
        raise StartupError(
            "there is no srun here: inside a container, Slurm's commands must be made visible in it"
        )
    het = "SLURM_JOB_NODELIST_HET_GROUP_1" in os.environ
    part = "_HET_GROUP_1" if het else ""
    nodes = _scontrol("show", "hostnames", os.environ[f"SLURM_JOB_NODELIST{part}"]).split()
    # for example 4(x2),2
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ[f"SLURM_JOB_CPUS_PER_NODE{part}"])
    cpus = [int(number) for number, times in counts for _ in range(int(times or 1))]
    free, head = dict(zip(nodes, cpus, strict=True)), os.environ.get("SLURMD_NODENAME")
    cores = int(os.environ.get(f"SLURM_CPUS_PER_TASK{part}", 1))
    if head in free:
        free[head] -= cores
    return Allocation(free, cores, head, het)


def srun_command(
    index: int, node: str, het: bool, log: str | None, worker: list[str], own_cores: int = 0
) -> list[str]:
    """Return the command that runs a worker as a step on a node.

    The step has ``own_cores`` cores of its own. If this is 0, it shares the cores of all steps.
    """
    if own_cores:
        # The step gets all of the job's memory, and no GPU. If it claimed memory or a GPU of its
        # own, it would wait for the other steps to end.
        cores = [
            "--exact",
            f"--cpus-per-task={own_cores}",
            "--cpu-bind=cores",
            "--mem=0",
            "--gres=none",
        ]
        worker = [*WITHOUT_SLURM, *worker]
    else:
        # The step shares all of the job's cores on that node. With cores of its own, it would wait
        # while other steps hold the job's memory or GPU, and a replacement would wait while Slurm
        # cleans up after the lost worker. Each worker computes on one thread, and the kernel
        # spreads these threads over the cores. If they were bound, all would get the first core.
        cores = ["--overlap", "--cpu-bind=none"]
    return [
        "srun",
        *["--het-group=1"] * het,
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        *cores,
        f"--job-name=worker-{index}",  # the name in `squeue --steps`
        "--export=ALL",  # even if the job itself was submitted with --export=NONE
        # srun writes the log where the head runs: workers may share no directory with the head.
        *([] if log is None else [f"--output={log.replace('%', '%%')}", "--open-mode=append"]),
        "--verbose",  # so that srun says when the task has started
        *worker,
    ]


class SlurmLauncher(LocalLauncher):
    """Starts workers as steps of the job that this process runs in.

    Workers log to ``log_dir/worker-I.log``. ``log_dir`` must be on a file system that the workers'
    nodes share, because it also holds the keys. ``prefix`` may start a container, for example
    "apptainer exec image.sif". With the resource CPU, each worker has that many cores on one node
    to itself. The worker's environments then do not see the job: the processes that they start, for
    example by MPI, run on these cores and end with the worker.

    Raises:
        StartupError: this process is in no Slurm job, or Slurm's commands are missing or fail.
    """

    name, remote = "slurm", True
    directory = Launcher.directory  # type: ignore[assignment]

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        super().__init__(log_dir, prefix)
        self.same_python = not self.prefix
        self._allocation = read_allocation()
        self._places: list[str] = []  # each worker's node
        self._words: dict[int, IO[bytes]] = {}  # the output of each srun itself
        # The times (`time.monotonic`) until which killed sruns may end by themselves.
        self._patience: dict[int, float] = {}

    def variables(self) -> dict[str, str]:
        if not self.prefix:
            return super().variables()
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
        return {**super().variables(), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    @property
    def _own_cores(self) -> int:
        """The number of cores that each worker has to itself; 0 if workers share all cores."""
        return _own_cores_of(self.resources)

    def check_resources(self, resources: Mapping[str, float], num_workers: int) -> None:
        cores = resources.get("CPU", 1)
        if set(resources) - {"CPU"} or cores < 1 or cores % 1:
            got = " ".join(f"{name}={number:g}" for name, number in resources.items())
            raise ValueError(
                f"worker_resources must be CPU=NUMBER with the launcher slurm, whole cores for "
                f"each worker, got {got}"
            )
        self._allocation.places(num_workers, _own_cores_of(resources))

    def address(self, num_workers: int) -> str:
        """Return the address of this machine's interface to the workers' nodes.

        Raises:
            StartupError: this machine has no such interface.
        """
        places = set(self._allocation.places(num_workers)) - {self._allocation.head}
        if not places:
            return "127.0.0.1"
        node = sorted(places)[0]
        found = re.search(r"\bNodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", node))
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                # This sends nothing: the kernel only looks up the route.
                sock.connect((found[1] if found else node, 9))
                return str(sock.getsockname()[0])
        except OSError as error:
            raise StartupError(
                f"found no route from here to the node {node} ({error.strerror or error}): "
                "name the network with --interface or --bind-address"
            ) from None

    def prepare(self, num_workers: int, flags: list[str], directory: str) -> None:
        super().prepare(num_workers, flags, directory)
        self._places = self._allocation.places(num_workers, self._own_cores)
        if sum(self._allocation.free.values()) < num_workers:
            logger.warning(
                "%d workers share fewer cores: besides the head's, this job has %s",
                num_workers,
                self._allocation,
            )

    def command(self, index: int) -> list[str]:
        worker = python_command(WORKER, *self.worker_flags(index))
        if self.prefix:  # it starts a container, where this Python's path means nothing
            worker = [*self.prefix, "python", *self.arguments(index)]
        place = index, self._places[index], self._allocation.het
        return srun_command(*place, self.log(index), worker, self._own_cores)

    def environment(self, mark: str) -> dict[str, str]:
        # A job's requests per task would make srun give each step cores of its own, see
        # `srun_command`. The mark is also removed: on the head's node, a worker that kills all
        # processes with its mark would kill its own srun, which reports why the worker ended. Slurm
        # ends a step's processes.
        names = BY_TASK if not self._own_cores else f"{BY_TASK}|{OF_EXACT}"
        unset = re.compile(f"{VARIABLE}|(SLURM|SRUN)_({names})(_HET_GROUP_.)?")
        return {
            name: value
            for name, value in super().environment(mark).items()
            if not unset.fullmatch(name)
        }

    def start_worker(self, index: int) -> None:
        before, words = self._words.get(index), tempfile.TemporaryFile()  # noqa: SIM115
        place = self._places[index]
        if before is not None:
            # If all workers are on the head's node, the head listens on this machine only.
            is_alone = set(self._places) == {self._allocation.head}
            # If the step ended, and not the worker, the node may be down.
            if "task 0: " not in self._said(index) and not is_alone:
                self._places[index] = self._next_place(index)
        self._words[index] = words
        try:
            super().start_worker(index)
        except OSError:  # the start is undone, because it will be tried again
            self._places[index] = place
            if before is not None:
                self._words[index] = before
                words.close()
            raise
        if before is not None:
            before.close()

    def _next_place(self, index: int) -> str:
        """Return the next node that has room for a worker, or the worker's present node."""
        free, here = self._allocation.free, self._places[index]
        nodes = list(free)
        at = nodes.index(here)
        for node in [*nodes[at + 1 :], *nodes[:at]]:
            if free[node] >= self._own_cores * (self._places.count(node) + 1):
                return node
        return here

    def output(self, index: int) -> contextlib.AbstractContextManager[IO[bytes]]:
        # This is the output of srun itself. The worker's output goes to its log, see
        # `srun_command`.
        return contextlib.nullcontext(self._words[index])

    def pending(self, index: int) -> str | None:
        said = self._said(index)
        if "tasks started" in said:
            return None
        return said.splitlines()[-1] if said else "srun has said nothing yet"

    def exit(self, index: int) -> Exit | None:
        code = self._processes[index].poll()
        if code is None:
            return None
        errors = "; ".join(re.findall(r"^srun: error: (.*)", self._said(index), re.MULTILINE))
        return Exit(
            errors or f"srun ended with exit code {code}", by_signal=code < 0 or 128 < code <= 192
        )

    def kill(self, index: int) -> None:
        self._processes[index].terminate()  # srun then kills its task, if it reaches the node
        self._patience[index] = time.monotonic() + 3

    def has_ended(self, index: int) -> bool:
        if super().has_ended(index):
            return True
        if time.monotonic() > self._patience[index]:
            # A worker that outlives its srun ends when it finds its link closed.
            kill_group(self._processes[index])
        return False

    def stop(self, timeout: float) -> None:
        super().stop(timeout)
        for words in self._words.values():
            words.close()

    def _said(self, index: int) -> str:
        return os.pread(self._words[index].fileno(), 2**16, 0).decode(errors="replace")


def _own_cores_of(resources: Mapping[str, float]) -> int:
    return int(resources.get("CPU", 0))


def _scontrol(*arguments: str) -> str:
    command = ["scontrol", *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
        fault = result.stderr.strip() if result.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = str(error)
    if fault is not None:
        raise StartupError(f"{' '.join(command)}: {fault}")
    return result.stdout
