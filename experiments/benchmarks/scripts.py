"""Runs a script, ours or a peer's, in a temporary directory, and reads its measurements."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]


def call(command, directory, timeout=None, stop=None, **variables):
    """Run a command with these environment variables, and end all that it has started; return its
    output. The command is ended once ``stop`` returns True, which is called each second.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends this as Ctrl-C does
    # A pipe would stay open for as long as any process that was left behind.
    output = Path(directory, "output.txt")
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=directory, env={**os.environ, **variables}, start_new_session=True,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while stop and not stop() and process.poll() is None:
                time.sleep(1)
            is_over = stop and process.poll() is None
            code = 0 if is_over else process.wait(timeout)
            how = f"failed with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            how = f"had not ended after {timeout:g} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = output.read_text(errors="replace")
    if how:
        last = "\n".join(text.splitlines()[-15:])
        raise RuntimeError(f"{shlex.join(map(str, command))} {how}:\n{last}")
    return text


def import_path(directory):
    """Return a PYTHONPATH that begins with this directory, and goes on as this process's."""
    return os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])


def torchrun(number):
    """Return the arguments of Python, before a script, that start so many learners."""
    return "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)


def train(script, *flags, python=sys.executable, launcher=(), timeout=None, stop=None, **variables):
    """Run a training script; return a function from a tag to its scalars, and its summary if it
    leaves one.

    It is ended once ``stop`` returns True, which is called each second with its directory. Python
    runs ``launcher`` instead, which then runs the script: see `torchrun`.
    """
    script = Path(script).resolve()
    with tempfile.TemporaryDirectory() as directory:
        # A script of CleanRL's may import cleanrl_utils, which lies beside its folder.
        call(
            [str(python), *launcher, str(script), *flags],
            directory,
            timeout,
            stop and partial(stop, Path(directory)),
            PYTHONPATH=import_path(script.parent.parent),
            **variables,
        )
        (folder,) = Path(directory, "runs").iterdir()
        events = EventAccumulator(str(folder))
        events.Reload()
        summary = folder / "summary.json"
        return events.Scalars, json.loads(summary.read_text()) if summary.exists() else None


def run(script, *flags, **arguments):
    """Run a training script; return its last charts/SPS, and its summary if it leaves one."""
    scalars, summary = train(script, *flags, **arguments)
    return scalars("charts/SPS")[-1].value, summary


def steady(script, *flags, **arguments):
    """Run a training script; return its environment steps and seconds, without its first and its
    last iteration.

    The last iteration does not overlap with a next one. Without it, the rest is as in a run without
    an end. But with both --overlap and --compile the first of the remaining iterations finds its
    rollout ready, which is worth up to 2% in 25 iterations.
    """
    scalars, _ = train(script, *flags, **arguments)
    first, *_, last, _ = scalars("charts/SPS")
    return last.step - first.step, last.wall_time - first.wall_time


def measure(module, *arguments, python=sys.executable, timeout=None):
    """Run a module of benchmarks that ends with `work.report`; return its report."""
    with tempfile.TemporaryDirectory() as directory:
        # HOME: some peers leave their logs there.
        variables = {"PYTHONPATH": import_path(ROOT), "HOME": directory, "OMP_NUM_THREADS": "1"}
        text = call(
            [str(python), "-m", module, *map(str, arguments)], directory, timeout, **variables
        )
    (line,) = (line for line in text.splitlines() if line.startswith('{"steps"'))
    report = json.loads(line)
    return report["steps"], report["seconds"]
