"""A cluster's requirements of this machine: Slurm's programs, free ports, and a network namespace
for each node.
"""

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

from ..patience import PATIENCE

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "openmpi-bin")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "setpriv", "nsenter")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class LabError(RuntimeError):
    """The cluster, or a job in it, did not reach the expected state."""


def obstacle(networked: bool = False) -> str | None:
    """Return why no cluster can be started here and how to change that, or None if one can."""
    if missing := [program for program in PROGRAMS if not shutil.which(program, path=PATH)]:
        return (
            f"no {', '.join(missing)} here; on Debian or Ubuntu, as root: python3 -m "
            f"tests.slurm.lab install"
        )
    if networked and os.geteuid() != 0:
        return "network namespaces need root"
    if (
        networked
        and run("unshare", "--net", "--uts", "--mount", "true", check=False).returncode != 0
    ):
        return "this machine does not let root make namespaces"
    return None


def install() -> None:
    """Install the missing packages with apt.

    Raises:
        LabError: packages are missing, and this process is not root or there is no apt.
    """
    if obstacle() is None and shutil.which("mpirun"):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise LabError(
            f"{obstacle()} (this is {'not root' if os.geteuid() else 'a machine without apt-get'})"
        )
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        run(
            "apt-get",
            "-q",
            *command,
            timeout=900,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
    if obstacle():
        raise LabError(f"apt-get installed {', '.join(PACKAGES)}, but there is {obstacle()}")


def run(*command: str, check: bool = True, **options) -> subprocess.CompletedProcess:
    """Run a command and capture its output.

    Raises:
        LabError: the command fails, and ``check`` is set; the message has its output.
    """
    options = {"env": {**os.environ, "PATH": PATH}, "timeout": PATIENCE, **options}
    result = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
    )
    if check and result.returncode != 0:
        words = (result.stderr or result.stdout)[-2000:]
        raise LabError(f"{' '.join(command)}: exit status {result.returncode}: {words}")
    return result


def wait_for(what: str, seconds: float, condition: Callable):
    """Poll until the condition is true, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise LabError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.05)
    return value


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def namespaces(nodes: int):
    """Give each node a network namespace behind one bridge. Yield the number that is part of the
    names and addresses.
    """
    for network in random.sample(range(512), 20):  # take the first number whose name is free
        if run("ip", "link", "add", f"lab{network}", "type", "bridge", check=False).returncode == 0:
            break
    else:
        raise LabError("cannot make a network bridge: ip link add lab0 type bridge says why")
    bridge, subnet = f"lab{network}", f"198.{18 + network // 256}.{network % 256}"
    names = [f"{bridge}node{i}" for i in range(1, nodes + 1)]
    try:
        run("ip", "addr", "add", f"{subnet}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for i, name in enumerate(names, 1):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", name, "master", bridge, "up")
            run("ip", "-n", name, "addr", "add", f"{subnet}.{10 + i}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        yield network
    finally:
        for name in names:
            run("ip", "link", "del", name, check=False)
            run("ip", "netns", "del", name, check=False)
        run("ip", "link", "del", bridge, check=False)
