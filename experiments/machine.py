"""What a result depends on besides its parameters: versions, and the kind of machine."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def here() -> dict[str, Any]:
    """Return versions and machine. Nothing in it identifies the machine's owner."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "gymnasium", "pyzmq", "envpool"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with suppress(OSError):  # git is not installed
        done = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True)
        versions |= {"commit": done.stdout.strip()} if done.stdout else {}
    return {"versions": versions, "machine": f"{processor()}, {os.cpu_count()} cores"}


def processor() -> str:
    """Return the processor's model, or its architecture where Linux does not report a model."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
