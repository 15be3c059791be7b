"""Several learners of one run: the processes that `torchrun` starts, each with workers of its own.

They hold the same networks and draw the same random numbers. Each collects from its share of the
environments, learns from its share of each minibatch, and their gradients are averaged. What they
tell each other goes by torch.distributed and its store. Neither is encrypted, nor asks who is
there: several machines must be in a network that you trust.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...errors import LearnerLostError, one_line
from .exchange import Exchange
from .watch import DONE, INTERRUPTED, SAVE_S, Place, Watch

ARRIVAL_S = 120.0  # in which all learners must have come as far as the first
SIOCGIFADDR = 0x8915  # asks Linux for an interface's address


def interface_towards(hosts: Iterable[str], loopback: bool = True) -> str | None:
    """Return the network interface that leads to the first of these hosts for which that can be
    found out, if any.

    Without ``loopback`` that is none: a machine's own name often stands for it, and leads nowhere
    else.
    """
    for host in hosts:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((host, 9))  # sends nothing, but asks the kernel for its route
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    request = struct.pack("256s", name.encode())
                    address = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
                    if address == own and (loopback or not own.startswith("127.")):
                        return name
    return None


class Learners(Exchange):
    """The learners of a run, of which this process is one; without `torchrun` the only one."""

    def __init__(self, rank: int = 0, world_size: int = 1, store: dist.Store | None = None) -> None:
        super().__init__(rank, world_size)
        self._run_store = store
        # What torchrun's restarts have in common, and what is of this one alone.
        self._store = None if store is None else dist.PrefixStore(f"attempt {self.restarts}", store)
        self.watch: Watch | None = None  # once they have met
        self._has_left = False
        self._exit_code: int | None = None  # with which it ends if it leaves before it is done

    @classmethod
    def of_torchrun(cls) -> Learners:
        """Return the learners that torchrun has started, or the only one.

        Raises:
            LearnerLostError: torchrun's store is out of reach.
        """
        variables = os.environ
        if "TORCHELASTIC_RUN_ID" not in variables:
            return cls()
        rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        hosts = rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        timeout = timedelta(seconds=ARRIVAL_S)
        try:
            store = dist.TCPStore(address, port, world_size, hosts, timeout, wait_for_workers=False)
        except RuntimeError as error:
            text = f"no store of torchrun at {address}:{port}"
            raise LearnerLostError(f"{text}: {one_line(error)}") from None
        return cls(rank, world_size, store)

    @property
    def command(self) -> list[str]:
        """What starts as many learners, before the script and its flags."""
        variables = os.environ
        if self._run_store is None:
            return ["python"]
        number = variables["GROUP_WORLD_SIZE"]
        nodes = [] if number == "1" else ["--nnodes", number]
        return ["torchrun", *nodes, "--nproc-per-node", variables["LOCAL_WORLD_SIZE"]]

    @property
    def restarts(self) -> int:
        """How many times torchrun has restarted the learners."""
        if self._run_store is None:
            return 0
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    # Meeting and parting.
    def meet(self, facts: dict[str, Any], cuda: bool) -> None:
        """Wait for the others, and see that they have the same ``facts``, such as flags.

        Raises:
            LearnerLostError: they have not, or do not come.
        """
        if self.world_size == 1:
            return
        texts = {name: repr(value) for name, value in facts.items()}
        first = json.loads(self.tell("facts", json.dumps(texts)))
        for name in sorted(texts.keys() | first.keys()):
            if texts.get(name) != first.get(name):
                own = f"learner {self.rank} has {name} {texts.get(name)}"
                other = f"learner 0 has {first.get(name)}"
                raise LearnerLostError(f"{own}, {other}: all must have the same")
        self._store.set(f"place/{self.rank}", msgspec.json.encode(Place.here()))
        places = [
            msgspec.json.decode(self._await(f"place/{rank}"), type=Place)
            for rank in range(self.world_size)
        ]
        self._exit_code = 1
        atexit.register(self._exit_at_once)
        self.watch = Watch(self._store, self.rank, self.world_size, places)
        elsewhere = [place.host for place in places if place.host != places[self.rank].host]
        # By itself Gloo takes the interface of the name that this machine gives itself.
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            hosts = [os.environ["MASTER_ADDR"], *elsewhere]
            if name := interface_towards(hosts, loopback=not elsewhere):
                os.environ["GLOO_SOCKET_IFNAME"] = name
        backend = "gloo"
        if cuda and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.world_size,
                timeout=timedelta(seconds=ARRIVAL_S),
            )  # fmt: skip
        except RuntimeError as error:
            text = f"learner {self.rank} does not reach the others"
            raise LearnerLostError(f"{text}: {one_line(error)}") from None
        # From here on the watch sees who is lost, and who is only late is waited for.
        dist.distributed_c10d._set_pg_timeout(timedelta(days=1))

    def begin_to_end(self) -> None:
        """Have the others end, too."""
        if self.watch is not None:
            self.watch.begin_to_end()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Have this one be given time to end if the others end in this block."""
        if self.watch is None:
            yield
            return
        before, self.watch.patience = self.watch.patience, SAVE_S
        try:
            yield
        finally:
            self.watch.patience = before

    def leave(self, why: str) -> None:
        """Tell the others why this one ends, if it has not yet, and do not watch them any more."""
        if self.watch is None or self._has_left:
            return
        self._has_left = True
        self.watch.leave(why)
        self.watch.close()
        if why == DONE:
            self._exit_code = None
            dist.destroy_process_group()

    def part(self, code: int) -> tuple[str | None, int]:
        """Leave before the end, interrupted; return who of the others has failed, if that is why,
        and the exit code.
        """
        if self.watch is None:
            return None, code
        if not self._has_left:
            self._has_left = True
            self.watch.leave(INTERRUPTED)
            self.watch.wait_for_others()
            self.watch.close()
        self._exit_code = code if self.watch.culprit is None else 1
        return self.watch.culprit, self._exit_code

    def _exit_at_once(self) -> None:
        """End this process, after all else that is to be done at its exit: Gloo would wait for who
        is lost.
        """
        if self._exit_code is not None:
            self.leave("has failed")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code)

    @property
    def speaks(self) -> bool:
        """Whether this one tells the user, as the first of those that have not failed."""
        return self.rank == 0 if self.watch is None else self.watch.speaks

    # Words, by torchrun's store.
    def note_run(self, name: str) -> None:
        """Note the run's name for the case that torchrun starts all anew."""
        if self._run_store is not None and self.rank == 0:
            self._run_store.set("run", name)

    def run_before(self) -> str | None:
        """Return the name of the run that they trained before torchrun started them anew, if it
        did.
        """
        if not self.restarts or not self._run_store.check(["run"]):
            return None
        return self._run_store.get("run").decode()

    def tell(self, name: str, text: str) -> str:
        """Return the first learner's ``text``, once it has told it."""
        if self.world_size == 1:
            return text
        if self.rank == 0:
            self._store.set(name, text)
        return self._await(name).decode()

    def _await(self, name: str) -> bytes:
        try:
            self._store.wait([name], timedelta(seconds=ARRIVAL_S))
            return self._store.get(name)
        except RuntimeError as error:
            text = f"learner {self.rank} has waited {ARRIVAL_S:g} s for the others"
            gone = f"{text}, or torchrun's store is gone"
            raise LearnerLostError(f"{gone}: {one_line(error)}") from None
