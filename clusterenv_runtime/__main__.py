"""The information that a bug report needs: ``python -m clusterenv_runtime --version``."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import zmq

from . import __version__
from .launchers import names

PACKAGES = "gymnasium", "numpy", "torch", "cloudpickle", "msgspec", "pyzmq", "ray", "envpool"


def report() -> str:
    """Return the versions of this package and its dependencies, the machine, and the launchers."""
    lines = [f"clusterenv-runtime {__version__}", f"Python {sys.version.split()[0]}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    lines.append(f"libzmq {zmq.zmq_version()}, CURVE {'yes' if zmq.has('curve') else 'no'}")
    lines.append(f"{platform.platform()}, {os.cpu_count()} CPUs, {processor()}")
    lines.append(f"launchers {', '.join(names())}")
    return "\n".join(lines)


def processor() -> str:
    """Return the processor's model, or its architecture where Linux does not report a model."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(
        prog="clusterenv_runtime", description="Print the information that a bug report needs."
    )
    parser.add_argument("--version", action="store_true", help="print this information (default)")
    parser.parse_args()
    print(report())


if __name__ == "__main__":
    main()
