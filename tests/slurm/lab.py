"""A real Slurm cluster on this machine, for tests. Its nodes share the loopback, or have a network
each.

    python3 -m tests.slurm.lab install                # Debian's packages; as root, once
    python3 -m tests.slurm.lab srun -N3 hostname      # a cluster for as long as this command runs
    python3 -m tests.slurm.lab --networked bash       # each node in its own network; as root

It needs only Slurm and the standard library: no systemd, and no cgroups. Everything is in a
temporary directory, on free ports, and is gone when the command ends. There is no accounting
(`sacct`) and no limit on memory or cores.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..patience import PATIENCE
from .machine import PATH, LabError, free_ports, install, namespaces, obstacle, run, wait_for

# cred_expire is how long a requeued job must wait, and GraceTime how long a preemption takes.
# KillWait and SlurmdTimeout are so long that nothing looks stuck or lost on a busy machine. The
# cores are declared but do not exist. The partition urgent preempts the partition lab.
CONF = """\
ClusterName=lab
SlurmctldHost={controller}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=300
KillWait=60
TreeWidth=65533
GresTypes=gpu
{nodes} CPUs={cpus} RealMemory=2000 Gres=gpu:1 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES PriorityTier=1 GraceTime=15
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A running cluster, see `start`.

    Attributes:
        nodes: the names of the nodes.
        address: the IPv4 address of each node, by name.
        head: the IPv4 address of this machine, as the nodes see it.
        env: the environment variables with which Slurm's commands talk to this cluster.
    """

    def __init__(self, nodes: int, cpus: int, network: int | None, directory: Path):
        self.nodes = [f"node{i}" for i in range(1, nodes + 1)]
        self.directory, self.network = directory, network
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(directory / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}
        ports = free_ports(nodes + 1)
        if network is None:
            self.head, self.address = "127.0.0.1", dict.fromkeys(self.nodes, "127.0.0.1")
            controller, where = "localhost(127.0.0.1)", "NodeHostname=localhost NodeAddr=127.0.0.1"
            where += f" Port={','.join(map(str, ports[1:]))}"
        else:
            # 198.18.0.0/15 is reserved for tests of networks, so nothing real has these addresses
            subnet = f"198.{18 + network // 256}.{network % 256}"
            self.head = f"{subnet}.1"
            self.address = {node: f"{subnet}.{10 + i}" for i, node in enumerate(self.nodes, 1)}
            controller = f"{socket.gethostname().split('.')[0]}({self.head})"
            where = (
                f"NodeHostname=node[1-{nodes}] NodeAddr={subnet}.[11-{10 + nodes}] Port={ports[1]}"
            )
        user = run("id", "-un").stdout.strip()
        names = f"NodeName=node[1-{nodes}] {where}"
        where = {"controller": controller, "port": ports[0], "directory": directory}
        text = CONF.format(**where, user=user, nodes=names, cpus=cpus)
        (directory / "slurm.conf").write_text(text)
        # Without this line, slurmd would look for cgroups itself, and fail.
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # Like the cores, the GPUs are declared but do not exist.
        (directory / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (directory / "state").mkdir(mode=0o700)
        (directory / "munge").mkdir(mode=0o755)
        hosts = [f"127.0.0.1 localhost\n{self.head} {socket.gethostname()}\n"]
        hosts += [f"{address} {node}\n" for node, address in self.address.items()]
        (directory / "hosts").write_text("".join(hosts))
        for node in self.nodes:
            (directory / f"spool.{node}").mkdir()

    def link(self, node: str) -> str:
        """Return the name of a node's namespace and of its network interface on this machine."""
        return f"lab{self.network}{node}"

    def processes(self) -> set[int]:
        """Return the pids of daemons, steps, tasks, and the processes that these have started."""
        conf, parents, found = self.env["SLURM_CONF"].encode(), {}, set()
        # A shell that only talks to the cluster does not have these variables.
        names = {b"LAB_NODE", b"SLURMD_NODENAME"}
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended in between, or is another user's
                state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
                words = (directory / "environ").read_bytes().split(b"\0")
                environ = dict(word.partition(b"=")[::2] for word in words)
                if state != "Z":
                    parents[int(directory.name)] = int(parent)
                    if environ.keys() & names and environ.get(b"SLURM_CONF") == conf:
                        found.add(int(directory.name))
        while new := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= new
        if self.network is not None:
            for node in self.nodes:
                pids = run("ip", "netns", "pids", self.link(node), check=False).stdout
                found |= set(map(int, pids.split()))
        return found

    def kill(self) -> None:
        """Kill every process of this cluster, and check that they are gone."""

        def all_gone():
            pids = self.processes()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in self.daemons.values():
                daemon.poll()  # so that it does not stay a zombie
            return not pids

        wait_for("the processes of the cluster to end", PATIENCE, all_gone)

    def spawn(self, name: str, *command: str, **env: str) -> None:
        with open(self.directory / "daemons.log", "ab") as log:
            self.daemons[name] = subprocess.Popen(
                # so that a killed pytest leaves no daemon behind
                ["setpriv", "--pdeathsig", "KILL", *command], cwd="/",
                env={**self.env, "LAB_NODE": "", **env}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def spawn_node(self, node: str) -> None:
        slurmd = f"slurmd -D -N {node} -f {self.env['SLURM_CONF']}"
        if self.network is None:
            return self.spawn(node, *slurmd.split(), LAB_NODE=node)
        # nsenter, because `ip netns exec` hides /sys/fs/cgroup, without which slurmd does not start
        script = f"mount --bind {self.directory}/hosts /etc/hosts; hostname {node}; exec {slurmd}"
        enter = f"nsenter --net=/run/netns/{self.link(node)} unshare --uts --mount sh -c"
        return self.spawn(node, *enter.split(), script, LAB_NODE=node)

    def start(self) -> None:
        munge = self.directory / "munge"
        (munge / "key").touch(mode=0o600)
        (munge / "key").write_bytes(os.urandom(1024))
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "seed", "log")]
        self.spawn("munged", "munged", "--foreground", f"--socket={munge}/socket", *files)
        self.await_daemons("munged", (munge / "socket").exists)
        self.spawn("slurmctld", "slurmctld", "-D", "-f", self.env["SLURM_CONF"])
        self.await_daemons(
            "slurmctld", lambda: "is UP" in self.run("scontrol", "ping", check=False).stdout
        )
        for node in self.nodes:
            self.spawn_node(node)
        self.await_daemons("all nodes to be idle", lambda: set(self.states().values()) == {"idle"})

    def await_daemons(self, what: str, condition: Callable) -> None:
        def check():
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    logs = (self.directory / "daemons.log").read_text(errors="replace")
                    raise LabError(f"{name} ended with status {daemon.returncode}: {logs[-2000:]}")
            return condition()

        wait_for(what, PATIENCE, check)

    def run(self, *command: str, **options) -> subprocess.CompletedProcess:
        """Run a command that talks to this cluster, see `machine.run`."""
        return run(*command, **{"env": self.env, **options})

    def states(self) -> dict[str, str]:
        """Return the state of each node: idle, mix, alloc, down, ..."""
        return dict(
            line.split()
            for line in self.run("sinfo", "-h", "-N", "-o", "%N %t").stdout.splitlines()
        )

    def submit(self, *arguments: str, **options) -> str:
        """Run sbatch with these arguments, and return the job's id."""
        return self.run("sbatch", "--parsable", *arguments, **options).stdout.split(";")[0].strip()

    def jobs(self, job: str) -> list[dict[str, str]]:
        """Return what Slurm knows about a job: one dictionary for each task of an array, or for
        each part of a heterogeneous job.
        """
        lines = self.run("scontrol", "-o", "show", "job", job).stdout.splitlines()
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines if line]

    def wait(self, job: str, *states: str, seconds: float = PATIENCE) -> list[dict[str, str]]:
        """Wait until all parts of a job are in one of these states, by default COMPLETED.

        Raises:
            LabError: the time is up, or the job has ended in another state.
        """
        wanted = set(states or ["COMPLETED"])
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        says = ", ".join(sorted(wanted))

        def reached():
            parts = self.jobs(job)
            now = {part["JobState"] for part in parts}
            if now & ends - wanted:
                raise LabError(f"job {job} is {', '.join(sorted(now))}, not {says}: {parts}")
            return now <= wanted and parts

        return wait_for(f"job {job} to be {says}", seconds, reached)

    def cut(self, node: str) -> None:
        """Cut the link of a node with its own network: packets vanish, connections stay open."""
        run("ip", "link", "set", self.link(node), "down")

    def heal(self, node: str) -> None:
        """Undo `cut`."""
        run("ip", "link", "set", self.link(node), "up")


@contextmanager
def start(nodes: int = 3, cpus: int = 4, networked: bool = False):
    """Start a cluster, yield it as a `Slurm` when all nodes are idle, and remove all of it at the
    end.

    Args:
        nodes: the number of nodes, which are called node1, node2, ...
        cpus: the number of cores that each node pretends to have.
        networked: whether each node has its own network namespace and address, and a link that can
            be cut. This needs root.

    Raises:
        LabError: the cluster cannot be started; the message says why.
    """
    if reason := obstacle(networked):
        raise LabError(reason)
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(temporary))
        directory.chmod(0o755)  # munged insists that everyone can reach its socket
        network = stack.enter_context(namespaces(nodes)) if networked else None
        slurm = Slurm(nodes, cpus, network, directory)
        stack.callback(slurm.kill)
        slurm.start()
        yield slurm


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A Slurm cluster on this machine for as long as a command runs."
    )
    parser.add_argument(
        "--networked", action="store_true", help="give each node its own network (needs root)"
    )
    parser.add_argument("--cores", type=int, default=4, help="number of cores of each node")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="the command to run, or `install` to install Slurm",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs every `finally`
    try:
        if args.command == ["install"]:
            return install()
        with start(cpus=args.cores, networked=args.networked) as slurm:
            status = subprocess.run(args.command or ["bash"], env=slurm.env).returncode
    except (LabError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {error}")
    sys.exit(status)


if __name__ == "__main__":
    main()
