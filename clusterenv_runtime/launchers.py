"""Launchers start worker processes, say whether they live, and stop them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class LocalLauncher:
    """Workers as subprocesses of this Python. With ``log_dir`` their output goes to ``log_dir/worker-I.log``."""

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._flags: list[str] = []

    @property
    def started(self) -> bool:
        """Whether this launcher has workers already; one launcher serves one ClusterEnv."""
        return bool(self._processes)

    def start(self, num_workers: int, flags: list[str]) -> None:
        """Start workers 0 to ``num_workers - 1`` with these flags of `clusterenv_runtime.worker`."""
        self._flags = [*flags, "--head-pid", str(os.getpid())]
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        for index in range(num_workers):
            self.restart(index)

    def command(self, index: int) -> list[str]:
        """Return the command of a worker."""
        return [sys.executable, "-m", "clusterenv_runtime.worker", "--index", str(index), *self._flags]

    def restart(self, index: int) -> None:
        """Start a worker, in place of one that is killed if it still runs."""
        if index in self._processes:
            self.kill(index)
        package_parent = str(Path(__file__).resolve().parent.parent)
        paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
        # One BLAS thread each: a worker's cores are its environments'.
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        log = None if self._log_dir is None else open(self.log(index), "ab")  # noqa: SIM115
        try:
            # A session of its own, so that Ctrl-C reaches the head alone, which then stops its workers in order.
            self._processes[index] = subprocess.Popen(
                self.command(index), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        finally:
            if log is not None:
                log.close()

    def log(self, index: int) -> str | None:
        """Return the path of a worker's log, or None if its output goes to this process's."""
        return None if self._log_dir is None else str(self._log_dir / f"worker-{index}.log")

    def exit_reason(self, index: int) -> str | None:
        """Return how a worker's process ended, or None while it runs."""
        code = self._processes[index].poll()
        if code is None:
            return None
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"

    def kill(self, index: int) -> None:
        """End a worker's process at once."""
        self._processes[index].kill()
        self._processes[index].wait()

    def stop(self, timeout: float) -> None:
        """Give the workers ``timeout`` seconds to exit by themselves, then terminate them, then kill them."""
        deadline = time.monotonic() + timeout
        for end, stop in ((deadline, None), (deadline + 1, "terminate"), (deadline + 6, "kill")):
            for process in self._processes.values():
                if stop is not None and process.poll() is None:
                    getattr(process, stop)()
            for process in self._processes.values():
                try:
                    process.wait(max(end - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    break
            else:
                return
