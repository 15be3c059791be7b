"""Running the training scripts as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent


def environment(**extra):
    return {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_SILENT": "true", **extra}


def run(script, directory, *flags, timeout=100, **extra):
    command = [sys.executable, str(ROOT / script), *flags]
    return subprocess.run(
        command, cwd=directory, env=environment(**extra), capture_output=True, text=True, timeout=timeout
    )


def train(script, directory, *flags, **extra):
    """Run to the end; return the run's folder and its summary."""
    result = run(script, directory, *flags, **extra)
    assert result.returncode == 0, result.stderr
    (folder,) = Path(directory, "runs").iterdir()
    return folder, json.loads((folder / "summary.json").read_text())


def scalars(folder, tag):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars(tag)]


def workers_of(pid):
    """Pids of the worker processes that a head has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child) for child in children if b"clusterenv_runtime.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_and_await_training(script, directory, *flags):
    """Start a long run; return its process and its workers' pids once it trains."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *flags],
        cwd=directory, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step"):
            break
    return process, workers_of(process.pid)
