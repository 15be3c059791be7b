"""The cluster for the other tests in this folder behaves like a real cluster, and leaves nothing
behind.
"""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ..patience import PATIENCE
from . import conftest, lab, machine

ROOT = Path(__file__).resolve().parents[2]


def sleeping(slurm, node=None):
    found = []
    for pid in slurm.processes(node):
        with suppress(OSError):  # the process has ended in between
            found += [pid] * (Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
    return found


LISTEN = """
import socket, sys
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        server.accept()[0].sendall(b"hello")
"""
ASK = """
import socket, sys
address, port, seconds = sys.argv[1:]
print(socket.create_connection((address, int(port)), float(seconds)).recv(5).decode())
"""


def test_a_networked_node_is_reached_under_its_own_address_until_its_link_is_cut(
    slurm_networked, tmp_path
):
    slurm = slurm_networked
    assert len({slurm.head, *slurm.address.values()}) == 4
    job = slurm.submit(
        "--nodelist=node2", "--output=port", f"--wrap={sys.executable} -c '{LISTEN}'", cwd=tmp_path
    )
    slurm.wait(job, "RUNNING")
    port = lab.wait_for(
        "the port",
        PATIENCE,
        lambda: (tmp_path / "port").exists() and (tmp_path / "port").read_text(),
    )

    def ask(*place, node="node2", seconds=60):
        command = [sys.executable, "-c", ASK, slurm.address[node], port.strip(), str(seconds)]
        return slurm.run(*place, *command, check=False)

    assert ask().stdout == "hello\n"  # from this machine
    assert ask("srun", "--nodelist=node1").stdout == "hello\n"
    assert "refused" in ask(node="node3").stderr
    slurm.cut("node2")
    assert re.search("timed out|No route", ask(seconds=2).stderr)
    slurm.heal("node2")
    assert (
        lab.wait_for("node2 to be reached again", PATIENCE, lambda: ask(seconds=10).stdout)
        == "hello\n"
    )
    slurm.run("scancel", job)


@pytest.mark.parametrize("networked", [False, True])
def test_nothing_is_left_behind(networked, request):
    # Skips the test where no cluster can be started.
    request.getfixturevalue("slurm_networked" if networked else "slurm")
    before = traces()
    with lab.start(networked=networked) as slurm:
        # One task leaves its session and its parent, and one loses its environment variables. Only
        # in a namespace does the lab find a task that has done both.
        for escape in ["setsid --fork", "env -i", *["env -i setsid --fork"] * networked]:
            slurm.submit("--output=/dev/null", f"--wrap=srun {escape} sleep 3600")
        sleeps = 3 if networked else 2
        lab.wait_for("the tasks", PATIENCE, lambda: len(sleeping(slurm)) == sleeps)
        pids, directory = slurm.processes(), slurm.directory
        assert len(pids) > 12 and directory.exists()
        assert traces() != before if networked else traces()[0] == before[0]
    assert not directory.exists() and traces() == before
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)


def traces():
    """Return the names of this machine's network interfaces and of the lab's network namespaces."""
    names = {path.name for path in Path("/run/netns").glob("lab*")}
    return {path.name for path in Path("/sys/class/net").iterdir()}, names


def test_without_slurm_tests_are_skipped_or_fail_as_asked(monkeypatch):
    monkeypatch.setattr(machine, "PROGRAMS", ("no-such-slurmctld",))
    reason = (
        "no no-such-slurmctld here; on Debian or Ubuntu, as root: python3 -m tests.slurm.lab "
        "install"
    )
    monkeypatch.delenv("REQUIRE_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match=reason):
        next(conftest.cluster(networked=False))
    monkeypatch.setenv("REQUIRE_ALL", "1")
    with pytest.raises(pytest.fail.Exception, match=reason):
        next(conftest.cluster(networked=False))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(lab.LabError, match="not root"):
        machine.install()


def test_the_command_line_gives_a_cluster_for_one_command(slurm):
    command = [sys.executable, "-m", "tests.slurm.lab", "srun", "-N3", "bash", "-c"]
    command.append("echo here; exit 4")
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 4 and result.stdout == "here\n" * 3
