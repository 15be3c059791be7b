"""Runs a configuration in its directory: a subdirectory for each attempt, and result.json when one
has finished.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .configurations import fill_macros, label, nest


def directory_of(sweep, flat, output):
    what = json.dumps([sweep["program"], sweep["command"], nest(flat)], sort_keys=True, default=str)
    return output / hashlib.sha256(what.encode()).hexdigest()[:12]


def first_of(sweep, flats, output):
    """Give each configuration's directory its index; the first index if a random sweep has drawn it
    several times.
    """
    first = {}
    for index, flat in enumerate(flats):
        first.setdefault(directory_of(sweep, flat, output), index)
    return first


def result_of(directory):
    try:
        return json.loads((directory / "result.json").read_text())
    except (OSError, ValueError):
        return None


def replace(path, write):
    """Let `write` write a file and put it in place at once: another process sees all of it or
    nothing.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    write(temporary)
    temporary.replace(path)


def checkpoints(directory):
    """List the checkpoints of a configuration, those of the last attempt at the end."""
    return sorted(directory.glob("attempt-*/runs/*/checkpoint-*.pt"))


def open_log(attempt):
    """Open the log of an attempt; None if the attempt is still running, perhaps on another machine:
    it holds a lock on its log.
    """
    log = open(attempt / "log.txt", "ab")  # noqa: SIM115
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return log.close()
    except OSError:
        pass  # a file system without locks
    return log


def here():
    """Tell what a result depends on besides its parameters: the versions and the kind of machine,
    but not its owner.
    """
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "gymnasium", "pyzmq", "envpool"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    with contextlib.suppress(OSError):  # no git
        command = [
            "git",
            "-C",
            str(Path(__file__).parent),
            "describe",
            "--always",
            "--dirty",
            "--exclude=*",
        ]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        versions |= {"commit": commit} if commit else {}
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):  # only Linux has it
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    return {"versions": versions, "machine": f"{cpu}, {os.cpu_count()} cores"}


def stop(status):
    print("error: interrupted; what has finished is kept, start again to go on", file=sys.stderr)
    sys.exit(status)


def run(sweep, flat, directory):
    """Run one configuration, unless it has finished; return what went wrong, or None."""
    if result_of(directory):
        return print(f"{directory} has finished: {label(sweep, flat)}")
    macros = fill_macros(sweep, nest(flat))
    command = [part for word in map(str, sweep["command"]) for part in macros.get(word, [word])]
    attempt, log = directory / f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", None
    saved = checkpoints(directory)
    while saved and not log:  # the last attempt that no process runs
        last = saved.pop().parent
        if log := open_log(last.parents[1]):
            attempt, command = (
                last.parents[1],
                [*command, "--resume", str(last.relative_to(last.parents[1]))],
            )
    attempt.mkdir(parents=True, exist_ok=True)
    print(f"{attempt}: {label(sweep, flat)}", flush=True)
    with log or open_log(attempt) as log:
        # With "offline", --track, if it is in the command, needs no account.
        env = {
            "WANDB_MODE": "offline",
            **os.environ,
        }
        process = subprocess.Popen(
            command,
            cwd=attempt,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        # It saves; and Slurm kills the processes that its job's first process leaves.
        process.wait()
        status = 75
    if status == 75:
        stop(75 if checkpoints(directory) else 143)
    if status != 0:
        return f"ended with status {status}; see {attempt}/log.txt"
    try:
        (summary,) = attempt.glob("runs/*/summary.json")
        summary = json.loads(summary.read_text())
        result = {"parameters": nest(flat), "summary": summary, "attempt": attempt.name, **here()}
    except ValueError:
        return f"left no readable runs/*/summary.json; see {attempt}/log.txt"
    return replace(
        directory / "result.json",
        lambda path: path.write_text(json.dumps(result, indent=2, default=str)),
    )
