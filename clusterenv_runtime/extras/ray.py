"""Workers on a Ray cluster.

Each worker has a Ray actor, which takes the worker's resources and starts the worker's process on a
node.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from typing import Any

from ..errors import StartupError, one_line
from ..launchers.base import Exit, Launcher
from ..launchers.local import LocalLauncher
from ..security import WorkerKeys, read_key_file, write_key_file

try:
    import ray
except ModuleNotFoundError:
    ray = None

PATIENCE_S = 3.0  # seconds that a node has to end a worker before Ray kills the worker's actor
POLL_S = 0.1
CONNECT_S = 5.0  # seconds that a connection to RAY_ADDRESS may take


class Agent:
    """A Ray actor on a worker's node, which starts and ends the worker's process."""

    def __init__(self, index: int, flags: list[str], keys: WorkerKeys | None, prefix: str) -> None:
        self._index, self._directory = index, tempfile.TemporaryDirectory(prefix="clusterenv-")
        if keys is not None:
            write_key_file(file := f"{self._directory.name}/key", keys)
            flags = [*flags, "--key-file", file]  # in place of the head's file
        self._launcher = LocalLauncher(prefix=prefix)
        # For one worker, forking would share nothing.
        self._launcher.prepare(index + 1, flags, self._directory.name, fork=False)
        self._launcher.start_worker(index)

    def begun(self) -> None:
        """Return once Ray has placed the actor, whose constructor starts the process."""

    def run(self) -> Exit:
        """Return how the process ended, once all processes that it started have also ended."""
        while (exit := self._launcher.exit(self._index)) is None:
            time.sleep(POLL_S)
        self._launcher.stop(0)
        self._directory.cleanup()
        return exit

    def kill(self) -> None:
        """End the process by force."""
        self._launcher.kill(self._index)


class RayLauncher(Launcher):
    """Starts workers as actors of the Ray cluster that this process is in.

    If this process is in no cluster, Ray starts one on this machine. Ray sends the workers' output
    to the output of this process. The resources are those of an actor, for example
    "CPU=2 GPU=0.5"; the default is one CPU.

    Raises:
        StartupError: Ray is not installed.
        ValueError: the resources or the prefix are malformed.
    """

    name = "ray"
    directory = None  # the keys travel in Ray's own messages

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "", resources: str = ""
    ) -> None:
        super().__init__(log_dir, prefix)
        if ray is None:
            raise StartupError("the launcher ray needs Ray: pip install 'clusterenv-runtime[ray]'")
        pairs = re.findall(r"(?<!\S)([^\s=]+)=(\d+(?:\.\d+)?)(?!\S)", resources)
        if len(dict(pairs)) < len(resources.split()):
            raise ValueError(
                "worker_resources must be of the form NAME=NUMBER, as in CPU=2, each name once, "
                f"got {resources!r}"
            )
        self._needs = {"CPU": 1.0} | {name: float(number) for name, number in pairs}
        self._prefix, self._owns_ray = prefix, False
        # Each worker's actor, and the references to what its `begun` and its `run` return.
        self._actors: dict[int, Any] = {}
        self._begun: dict[int, Any] = {}
        self._runs: dict[int, Any] = {}
        # The times (`time.monotonic`) until which killed workers may end by themselves.
        self._patience: dict[int, float] = {}

    def address(self, num_workers: int) -> str:
        return str(ray.util.get_node_ip_address())

    def command(self, index: int) -> list[str]:
        return [*self.prefix, "python", *self.arguments(index)]

    def start(self) -> None:
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "")
            host, _, port = address.removeprefix("ray://").rpartition(":")
            try:
                if host and port.isdecimal():  # Ray would try for many minutes
                    socket.create_connection((host, int(port)), CONNECT_S).close()
                ray.init(logging_level="error")
            except Exception as error:
                raise StartupError(
                    f"cannot reach Ray (RAY_ADDRESS={address!r}): {one_line(error)}"
                ) from None
            self._owns_ray = True
        super().start()

    def start_worker(self, index: int) -> None:
        flags, others = self.flags, dict(self._needs)
        keys = (
            read_key_file(flags[flags.index("--key-file") + 1]) if "--key-file" in flags else None
        )
        remote = ray.remote(Agent).options(
            max_concurrency=3,  # an actor must answer `kill` while it is in `run`
            num_cpus=others.pop("CPU"),
            num_gpus=others.pop("GPU", 0),
            memory=others.pop("memory", None),
            resources=others,
        )
        self._actors[index] = actor = remote.remote(index, flags, keys, self._prefix)
        self._begun[index], self._runs[index] = actor.begun.remote(), actor.run.remote()

    def pending(self, index: int) -> str | None:
        needs = " ".join(f"{name}={number:g}" for name, number in self._needs.items())
        return None if _is_done(self._begun[index]) else f"Ray has no place for it yet ({needs})"

    def exit(self, index: int) -> Exit | None:
        if not _is_done(self._runs[index]):
            return None
        try:
            ended: Exit = ray.get(self._runs[index])
            return ended
        except ray.exceptions.RayActorError as error:
            says = str(error).strip().splitlines()[-1]
            return Exit(f"Ray: {says}", by_signal=not error.actor_init_failed)

    def kill(self, index: int) -> None:
        self._actors[index].kill.remote()
        self._patience[index] = time.monotonic() + PATIENCE_S

    def has_ended(self, index: int) -> bool:
        if _is_done(self._runs[index]):
            return True
        if time.monotonic() > self._patience[index]:
            # The node does not answer. A worker on it ends when it finds its link closed.
            ray.kill(self._actors[index])
        return False

    def stop(self, timeout: float) -> None:
        if not ray.is_initialized():
            return
        runs = list(self._runs.values())
        ray.wait(runs, num_returns=len(runs), timeout=timeout)
        for index, run in self._runs.items():
            if not _is_done(run):
                self.kill(index)
        ray.wait(runs, num_returns=len(runs), timeout=PATIENCE_S)
        for index in self._runs:
            self.has_ended(index)  # kills its actor if it has not
        self._actors.clear()
        if self._owns_ray:
            ray.shutdown()


def _is_done(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])
