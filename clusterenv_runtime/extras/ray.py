"""Workers on a Ray cluster: one actor for each, which takes what a worker needs, and starts it on
its node.
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

PATIENCE_S = 3.0  # for a node to end a worker, before Ray takes the actor away
POLL_S = 0.1
CONNECT_S = 5.0  # in which what listens at RAY_ADDRESS must answer


def check_address(address: str) -> None:
    """Raise if nothing listens there: Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as error:
            raise StartupError(
                f"cannot reach Ray at RAY_ADDRESS={address}: {error.strerror or error}"
            ) from None


class Agent:
    """What runs on a worker's node, in an actor: it starts the worker's process, and ends it."""

    def __init__(self, index: int, flags: list[str], keys: WorkerKeys | None, prefix: str) -> None:
        self._index, self._directory = index, tempfile.TemporaryDirectory(prefix="clusterenv-")
        if keys is not None:
            write_key_file(file := f"{self._directory.name}/key", keys)
            flags = [*flags, "--key-file", file]
        self._launcher, self._may_end = LocalLauncher(prefix=prefix), threading.Event()
        self._launcher.prepare(index + 1, flags, self._directory.name)
        self._launcher.start_worker(index)

    def begun(self) -> None:
        """There is a place for it, and the process has been started."""

    def run(self) -> Exit:
        """Return how the process ended, with all that it had started."""
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
    """Workers as actors of the Ray cluster that this process is in or, if it is in none, of one on
    this machine.

    `resources` are an actor's, a CPU by default. What the workers print goes to this process's
    output, as Ray has it.

    Raises:
        StartupError: Ray is not installed, or nothing listens at RAY_ADDRESS.
    """

    name = "ray"
    directory = None  # keys travel in Ray's own messages

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        super().__init__(log_dir, prefix)
        if importlib.util.find_spec("ray") is None:
            raise StartupError("the launcher ray needs Ray: pip install 'clusterenv[ray]'")
        check_address(os.environ.get("RAY_ADDRESS", ""))
        self._prefix, self._has_begun_ray = prefix, False
        self._keys: WorkerKeys | None = None
        self._actors: dict[int, Any] = {}
        self._begun: dict[int, ray.ObjectRef] = {}
        self._runs: dict[int, ray.ObjectRef] = {}
        self._patience: dict[
            int, float
        ] = {}  # until when a killed one may end by itself, by `time.monotonic`

    def check_resources(self, resources: Mapping[str, float], num_workers: int) -> None:
        pass  # what is not there may come, as a node of an autoscaler

    def address(self, num_workers: int) -> str:
        from ray.util import get_node_ip_address

        return get_node_ip_address()

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
        if "--key-file" in self.flags:  # which other nodes do not see
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
        actor = ray.remote(Agent).options(
            max_concurrency=3, **options
        )  # for `kill` while it is in `run`
        self._actors[index] = actor = actor.remote(index, self.flags, self._keys, self._prefix)
        self._begun[index], self._runs[index] = actor.begun.remote(), actor.run.remote()

    @property
    def _needs(self) -> dict[str, float]:
        """What the actor of a worker takes."""
        return {"CPU": 1, **self.resources}

    def pending(self, index: int) -> str | None:
        needs = " ".join(f"{name}={number:g}" for name, number in self._needs.items())
        return None if _is_done(self._begun[index]) else f"Ray has no place for it yet ({needs})"

    def exit(self, index: int) -> Exit | None:
        import ray

        if not _is_done(self._runs[index]):
            return None
        try:
            return ray.get(self._runs[index])
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
            ray.kill(
                self._actors[index]
            )  # on a node that does not answer; a worker there finds its link closed
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
