"""Workers on a Ray cluster.

Each worker has a Ray actor, which takes the worker's resources and starts the worker's process on a
node.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import StartupError, one_line
from ..launchers.base import Exit, Launcher
from ..launchers.local import LocalLauncher
from ..wire.security import WorkerKeys, read_key_file, write_key_file

if TYPE_CHECKING:
    import ray

PATIENCE_S = 3.0  # seconds that a node has to end a worker before Ray kills the worker's actor
POLL_S = 0.1
CONNECT_S = 5.0  # seconds that a connection to RAY_ADDRESS may take


def check_address(address: str) -> None:
    """Raise StartupError if nothing listens at an address: Ray would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as error:
            raise StartupError(
                f"cannot reach Ray at RAY_ADDRESS={address}: {error.strerror or error}"
            ) from None


class Agent:
    """A Ray actor on a worker's node, which starts and ends the worker's process."""

    def __init__(self, index: int, flags: list[str], keys: WorkerKeys | None, prefix: str) -> None:
        self._index, self._directory = index, tempfile.TemporaryDirectory(prefix="clusterenv-")
        if keys is not None:
            write_key_file(file := f"{self._directory.name}/key", keys)
            flags = [*flags, "--key-file", file]
        self._launcher, self._may_end = LocalLauncher(prefix=prefix), threading.Event()
        self._launcher.may_fork = False  # for one worker, forking would share nothing
        self._launcher.prepare(index + 1, flags, self._directory.name)
        self._launcher.start_worker(index)

    def begun(self) -> None:
        """Return once Ray has placed the actor, whose constructor starts the process."""

    def run(self) -> Exit:
        """Return how the process ended, once all processes that it started have also ended."""
        while (exit := self._launcher.exit(self._index)) is None and not self._may_end.wait(POLL_S):
            pass
        self._launcher.stop(0)
        self._directory.cleanup()
        return exit or Exit("killed", by_signal=True)

    def kill(self) -> None:
        """End the process by force."""
        self._launcher.kill(self._index)
        self._may_end.set()


class RayLauncher(Launcher):
    """Starts workers as actors of the Ray cluster that this process is in.

    If this process is in no cluster, Ray starts one on this machine. `resources` are the resources
    of an actor, by default one CPU. Ray sends the workers' output to the output of this process.

    Raises:
        StartupError: Ray is not installed, or nothing listens at RAY_ADDRESS.
    """

    name = "ray"
    directory = None  # the keys travel in Ray's own messages

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        super().__init__(log_dir, prefix)
        if importlib.util.find_spec("ray") is None:
            raise StartupError("the launcher ray needs Ray: pip install 'clusterenv-runtime[ray]'")
        check_address(os.environ.get("RAY_ADDRESS", ""))
        self._prefix, self._has_begun_ray = prefix, False
        self._keys: WorkerKeys | None = None
        self._actors: dict[int, Any] = {}
        self._begun: dict[int, ray.ObjectRef] = {}
        self._runs: dict[int, ray.ObjectRef] = {}
        # The times (`time.monotonic`) until which killed workers may end by themselves.
        self._patience: dict[int, float] = {}

    def check_resources(self, resources: Mapping[str, float], num_workers: int) -> None:
        pass  # an autoscaler may add nodes

    def address(self, num_workers: int) -> str:
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    def command(self, index: int) -> list[str]:
        return [*self.prefix, "python", *self.arguments(index)]

    def start(self) -> None:
        import ray

        if not ray.is_initialized():
            try:
                ray.init(logging_level="error")
            except Exception as error:
                raise StartupError(f"cannot reach Ray: {one_line(error)}") from None
            self._has_begun_ray = True
        if "--key-file" in self.flags:  # other nodes do not see this file
            at = self.flags.index("--key-file")
            self._keys = read_key_file(self.flags[at + 1])
            self.flags = [*self.flags[:at], *self.flags[at + 2 :]]
        super().start()

    def start_worker(self, index: int) -> None:
        import ray

        resources = self._needs
        options = {
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
        }
        if "memory" in resources:
            options["memory"] = resources.pop("memory")
        # An actor must answer `kill` while it is in `run`.
        remote = ray.remote(Agent).options(max_concurrency=3, **options)
        actor = remote.remote(index, self.flags, self._keys, self._prefix)
        self._actors[index] = actor
        self._begun[index], self._runs[index] = actor.begun.remote(), actor.run.remote()

    @property
    def _needs(self) -> dict[str, float]:
        """The resources of each worker's actor."""
        return {"CPU": 1, **self.resources}

    def pending(self, index: int) -> str | None:
        needs = " ".join(f"{name}={number:g}" for name, number in self._needs.items())
        return None if _is_done(self._begun[index]) else f"Ray has no place for it yet ({needs})"

    def exit(self, index: int) -> Exit | None:
        import ray

        if not _is_done(self._runs[index]):
            return None
        try:
            ended: Exit = ray.get(self._runs[index])
            return ended
        except ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            says = [line for line in lines if line.startswith("The actor is dead")] or lines[-1:]
            return Exit(f"Ray: {''.join(says[:1])[:200]}", by_signal=self._has_run(index))

    def _has_run(self, index: int) -> bool:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._begun[index])
            return True
        return False

    def kill(self, index: int) -> None:
        self._actors[index].kill.remote()
        self._patience[index] = time.monotonic() + PATIENCE_S

    def has_ended(self, index: int) -> bool:
        import ray

        if _is_done(self._runs[index]):
            return True
        if time.monotonic() > self._patience[index]:
            # The node does not answer. A worker on it ends when it finds its link closed.
            ray.kill(self._actors[index])
        return False

    def stop(self, timeout: float) -> None:
        import ray

        if not ray.is_initialized():
            return
        runs = list(self._runs.values())
        for seconds, end in (
            (timeout, self.kill),
            (PATIENCE_S, lambda index: ray.kill(self._actors[index])),
        ):
            ray.wait(runs, num_returns=len(runs), timeout=seconds)
            for index, run in self._runs.items():
                if not _is_done(run):
                    end(index)
        self._actors.clear()
        if self._has_begun_ray:
            ray.shutdown()


def _is_done(ref: ray.ObjectRef) -> bool:
    import ray

    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])
