"""Workers as steps of the Slurm job that the head runs in.

Each worker has its own ``srun``, so that each worker can be replaced.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import StartupError
from ..launchers.base import Exit, Launcher
from ..launchers.local import VARIABLE, LocalLauncher, kill_group

# By these variables, srun divides a step into tasks.
BY_TASK = "CPUS_PER_TASK|TRES_PER_TASK|NTASKS.*|NPROCS"
# These variables contradict the flags of a step with cores of its own.
OF_EXACT = "GPUS|(GPUS|CPUS|MEM)_PER_.*|MEM_BIND.*|CPU_BIND.*|GRES"
# The step shares all of the job's cores on its node. With cores of its own, it would wait while
# other steps hold the job's memory or GPU, and a replacement would wait while Slurm cleans up after
# the lost worker. Each worker computes on one thread, and the kernel spreads these threads over the
# cores. If they were bound, all would get the first core.
SHARED = ["--overlap", "--cpu-bind=none"]
# The step has cores of its own, all of the job's memory, and no GPU. If it claimed memory or a GPU
# of its own, it would wait for the other steps to end.
EXACT = ["--cpu-bind=cores", "--mem=0", "--gres=none"]
# This goes before the command of a worker with cores of its own. With Slurm's variables, an MPI
# program that an environment starts would find the job and run on all of its nodes.
WITHOUT_SLURM = ["bash", "-c", 'unset "${!SLURM_@}" "${!PMI@}"; exec "$@"', "worker"]
PATIENCE_S = 3.0  # seconds that a killed srun has to end by itself


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
        free, places = dict(self.free), list[str]()
        for index in range(num_workers):
            node = max(free, key=lambda node: (free[node], -places.count(node)))
            if free[node] < own_cores:
                job = "the second part of the job" if self.het else "the job"
                raise StartupError(
                    f"no node has {own_cores} cores left for worker {index}: "
                    f"submit {job} with --cpus-per-task={own_cores}"
                )
            free[node] -= own_cores or self.cores
            places.append(node)
        return places


def read_allocation() -> Allocation:
    """Return the allocation that the variables of a Slurm job describe.

    Raises:
        StartupError: this process is in no job, or Slurm's commands are missing or fail.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise StartupError(
            "the launcher slurm starts workers inside a job, and there is none: "
            "sbatch slurm/ppo.sbatch, or run this in a shell of salloc"
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


class SlurmLauncher(LocalLauncher):
    """Starts workers as steps of the job that this process runs in.

    Workers log to ``log_dir/worker-I.log``. ``log_dir`` must be on a file system that the workers'
    nodes share, because it also holds the keys. ``prefix`` may start a container, for example
    "apptainer exec image.sif". With the resources "CPU=4", each worker has four cores on one node
    to itself. The worker's environments then do not see the job: the processes that they start, for
    example by MPI, run on these cores and end with the worker.

    Raises:
        StartupError: this process is in no Slurm job, or Slurm's commands are missing or fail.
        ValueError: the resources are not whole cores, or the prefix is malformed.
    """

    name, remote = "slurm", True
    directory = Launcher.directory  # type: ignore[assignment]

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "", resources: str = ""
    ) -> None:
        super().__init__(log_dir, prefix)
        cores = re.fullmatch(r"(?:CPU=([1-9]\d*))?", resources)
        if cores is None:
            raise ValueError(
                "worker_resources must be CPU=NUMBER with the launcher slurm, whole cores for each "
                f"worker, got {resources}"
            )
        self._own_cores = int(cores[1] or 0)  # of each worker; 0 if workers share all cores
        self._allocation = read_allocation()
        self._places: list[str] = []  # each worker's node
        self._words: dict[int, IO[bytes]] = {}  # the output of each srun itself
        # The times (`time.monotonic`) until which killed sruns may end by themselves.
        self._patience: dict[int, float] = {}

    def check(self, num_workers: int) -> None:
        self._places = self._allocation.places(num_workers, self._own_cores)

    @property
    def _is_alone(self) -> bool:
        """Whether all workers are on the head's node."""
        return {*self._places} == {self._allocation.head}

    def variables(self) -> dict[str, str]:
        variables = super().variables()
        if self.prefix:
            paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return variables

    def address(self, num_workers: int) -> str:
        """Return the address of this machine's interface to the workers' nodes.

        Raises:
            StartupError: this machine has no such interface.
        """
        if self._is_alone:
            return "127.0.0.1"
        node = min({*self._places} - {self._allocation.head})
        found = re.search(r"\bNodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", node))
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                # This sends nothing: the kernel only looks up the route.
                sock.connect((found[1] if found else node, 9))
                return str(sock.getsockname()[0])
        except OSError as error:
            raise StartupError(
                f"found no route to the node {node} ({error}): name the network with --bind-address"
            ) from None

    def command(self, index: int) -> list[str]:
        worker = super().command(index)
        if self.prefix:  # it starts a container, where this Python's path means nothing
            worker = [*self.prefix, "python", *self.arguments(index)]
        log, flags = self.log(index), SHARED
        if self._own_cores:
            worker = [*WITHOUT_SLURM, *worker]
            flags = ["--exact", f"--cpus-per-task={self._own_cores}", *EXACT]
        return [
            "srun",
            *["--het-group=1"] * self._allocation.het,
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={self._places[index]}",
            *flags,
            f"--job-name=worker-{index}",  # the name in `squeue --steps`
            "--export=ALL",  # even if the job itself was submitted with --export=NONE
            # srun writes the log where the head runs: workers may share no directory with the head.
            *([] if log is None else [f"--output={log.replace('%', '%%')}", "--open-mode=append"]),
            "--verbose",  # so that srun says when the task has started
            *worker,
        ]

    def environment(self, mark: str) -> dict[str, str]:
        # A job's requests per task would make srun give each step cores of its own, see `SHARED`.
        # The mark is also removed: on the head's node, a worker that kills all processes with its
        # mark would kill its own srun, which reports why the worker ended. Slurm ends a step's
        # processes.
        names = f"{BY_TASK}|{OF_EXACT}" if self._own_cores else BY_TASK
        unset = f"{VARIABLE}|(SLURM|SRUN)_({names})(_HET_GROUP_.)?"
        variables = super().environment(mark).items()
        return {name: value for name, value in variables if not re.fullmatch(unset, name)}

    def start_worker(self, index: int) -> None:
        # If the step ended, and not the worker, the node may be down. But if all workers are on the
        # head's node, the head listens on this machine only.
        if index in self._words and "task 0: " not in self._said(index) and not self._is_alone:
            self._places[index] = self._next_place(self._places[index])
        super().start_worker(index)

    def _next_place(self, here: str) -> str:
        """Return the next node that has room for a worker, or ``here``."""
        free = self._allocation.free
        nodes = list(free)
        at = nodes.index(here)
        for node in nodes[at + 1 :] + nodes[:at]:
            if free[node] >= self._own_cores * (self._places.count(node) + 1):
                return node
        return here

    @contextmanager
    def outputs(self, index: int) -> Iterator[list[int]]:
        # These are of srun itself. The worker's output goes to its log, see `command`.
        words = tempfile.TemporaryFile()  # noqa: SIM115
        yield [words.fileno()] * 2
        self._words[index] = words  # srun has started

    def pending(self, index: int) -> str | None:
        said = self._said(index)
        if "tasks started" in said:
            return None
        return (said.splitlines() or ["srun has said nothing yet"])[-1]

    def exit(self, index: int) -> Exit | None:
        ended = super().exit(index)
        if ended is None:
            return None
        errors = re.findall(r"^srun: error: (.*)", self._said(index), re.MULTILINE)
        return Exit("; ".join(errors) or f"srun: {ended.reason}", ended.by_signal)

    def kill(self, index: int) -> None:
        # srun then kills its task, if it reaches the node.
        self._processes[index].send_signal(signal.SIGTERM)
        self._patience[index] = time.monotonic() + PATIENCE_S

    def has_ended(self, index: int) -> bool:
        if super().has_ended(index):
            return True
        if time.monotonic() > self._patience[index]:
            # A worker that outlives its srun ends when it finds its link closed.
            kill_group(self._processes[index])
        return False

    def _said(self, index: int) -> str:
        return os.pread(self._words[index].fileno(), 2**16, 0).decode(errors="replace")


def _scontrol(*arguments: str) -> str:
    command = ["scontrol", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(
            f"cannot run scontrol ({error}): inside a container, Slurm's commands must be made "
            "visible in it"
        ) from None
    if result.returncode:
        raise StartupError(f"{shlex.join(command)}: {result.stderr.strip()}")
    return result.stdout
