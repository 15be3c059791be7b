"""Several learners of one run: the processes that `torchrun` starts, each with workers of its own.

They hold the same networks and draw the same random numbers. Each collects from its share of the environments, learns
from its share of each minibatch, and their gradients are summed. What they tell each other goes by torch.distributed
and its store. Neither is encrypted, nor asks who is there: several machines must be in a network that you trust.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import itertools
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ..env import ClusterEnv
from ..errors import Interrupted, LearnerLostError, one_line
from .watch import DONE, INTERRUPTED, SAVE_S, Place, Watch

ARRIVAL_S = 120.0  # in which all learners must have come as far as the first
STATE_S = 10.0  # in which they must have handed in what a checkpoint holds of them
SIOCGIFADDR = 0x8915  # asks Linux for an interface's address
POLL_S = 0.0005  # between looks whether the others have arrived
OF_WORKERS = "pulls", "generators", "waiting_seconds"  # lists in a ClusterEnv's state, of a value a worker
GRACE_S = 0.1  # more for what all may have begun, before an interrupt has its way
LONG_GRACE_S = 2.0  # more for what all have begun


def interface_towards(hosts: Iterable[str], loopback: bool = True) -> str | None:
    """Return the network interface that leads to the first of these hosts for which that can be found out, if any.

    Without ``loopback`` that is none: a machine's own name often stands for it, and leads nowhere else.
    """
    for host in hosts:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing, but asks the kernel for its route
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    request = struct.pack("256s", name.encode())
                    address = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
                    if address == own and (loopback or not own.startswith("127.")):
                        return name
    return None


class Share(NamedTuple):
    """What of a minibatch is one learner's."""

    start: int  # its first sample, of those that `Learners.share` returns
    end: int
    weight: float  # its part of the whole minibatch
    moments: tuple[torch.Tensor, torch.Tensor] | None  # mean and deviation of the whole one's advantages


class Learners:
    """The learners of a run, of which this process is one; without `torchrun` the only one.

    Attributes:
        rank: which it is; the first, 0, writes logs and checkpoints, and evaluates.
        world_size: how many there are.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.world_size, self._run_store = rank, world_size, store
        # What torchrun's restarts have in common, and what is of this one alone.
        self._store = None if store is None else dist.PrefixStore(f"attempt {self.restarts}", store)
        self.watch: Watch | None = None  # once they have met
        self._has_left, self._exit_code = False, None  # the latter: with what it ends if it leaves before it is done
        self._flat = torch.empty(0)  # gradients; memory that is new each time would cost as much as to send it
        self.raise_if_interrupted: Callable[[], None] = lambda: None

    @classmethod
    @functools.cache
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
        try:
            store = dist.TCPStore(
                address, port, world_size, hosts, timedelta(seconds=ARRIVAL_S), wait_for_workers=False
            )
        except RuntimeError as error:
            raise LearnerLostError(f"no store of torchrun at {address}:{port}: {one_line(error)}") from None
        return cls(rank, world_size, store)

    @property
    def command(self) -> list[str]:
        """What starts as many learners, before the script and its flags."""
        variables = os.environ
        if self._run_store is None:
            return ["python"]
        nodes = [] if variables["GROUP_WORLD_SIZE"] == "1" else ["--nnodes", variables["GROUP_WORLD_SIZE"]]
        return ["torchrun", *nodes, "--nproc-per-node", variables["LOCAL_WORLD_SIZE"]]

    @property
    def restarts(self) -> int:
        """How many times torchrun has restarted the learners."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if self._run_store is not None else 0

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
                text = f"learner {self.rank} has {name} {texts.get(name)}, learner 0 has {first.get(name)}"
                raise LearnerLostError(f"{text}: all must have the same")
        self._store.set(f"place/{self.rank}", msgspec.json.encode(Place.here()))
        places = [msgspec.json.decode(self._await(f"place/{rank}"), type=Place) for rank in range(self.world_size)]
        self._exit_code = 1
        atexit.register(self._exit_at_once)
        self.watch = Watch(self._store, self.rank, self.world_size, places)
        elsewhere = [place.host for place in places if place.host != places[self.rank].host]
        if "GLOO_SOCKET_IFNAME" not in os.environ:  # by itself Gloo goes by what this machine calls itself
            name = interface_towards([os.environ["MASTER_ADDR"], *elsewhere], loopback=not elsewhere)
            os.environ |= {"GLOO_SOCKET_IFNAME": name} if name else {}
        backend = "gloo"
        if cuda and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.world_size,
                timeout=timedelta(seconds=ARRIVAL_S),
            )  # fmt: skip
        except RuntimeError as error:
            raise LearnerLostError(f"learner {self.rank} does not reach the others: {one_line(error)}") from None
        # From here on the watch sees who is lost, and who is only late is waited for.
        dist.distributed_c10d._set_pg_timeout(timedelta(days=1))

    def begin_to_end(self) -> None:
        """Have the others end, too, and hand in what the first saves."""
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
        """Leave before the end, interrupted; return who of the others has failed, if that is why, and the exit code."""
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
        """End this process, after all else that is to be done at its exit: Gloo would wait for who is lost."""
        if self._exit_code is not None:
            self.leave("has failed")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code)

    @property
    def speaks(self) -> bool:
        """Whether it is for this one to tell the user, as the first of those that have not failed."""
        return self.rank == 0 if self.watch is None else self.watch.speaks

    # Words, by torchrun's store.
    def note_run(self, name: str) -> None:
        """Note the run's name for the case that torchrun starts all anew."""
        if self._run_store is not None and self.rank == 0:
            self._run_store.set("run", name)

    def run_before(self) -> str | None:
        """Return the name of the run that they trained before torchrun started them anew, if it did."""
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
            text = f"learner {self.rank} has waited {ARRIVAL_S:g} s for the others, or torchrun's store is gone"
            raise LearnerLostError(f"{text}: {one_line(error)}") from None

    def hand_in(self, name: str, data: bytes) -> list[bytes | None]:
        """Give the first learner ``data``; to it, return what all have given by this name, None for who has died."""
        all_data: dict[int, bytes | None] = {self.rank: data}
        if self.world_size > 1 and not self.watch.store_is_lost:
            with contextlib.suppress(RuntimeError):  # the store is lost, with what has not been handed in yet
                if self.rank > 0:
                    self._store.set(f"{name}/{self.rank}", data)
                else:
                    self._collect(name, all_data)
        return [all_data.get(rank) for rank in range(self.world_size)] if self.rank == 0 else [data]

    def _collect(self, name: str, all_data: dict[int, bytes | None]) -> None:
        deadline = time.monotonic() + STATE_S
        while len(all_data) < self.world_size and time.monotonic() < deadline:
            for rank in set(range(self.world_size)) - all_data.keys():
                has_left, key = rank in self.watch.left, f"{name}/{rank}"  # in this order: it hands in, then leaves
                if self._store.check([key]):
                    all_data[rank] = self._store.get(key)
                    self._store.delete_key(key)
                elif has_left:
                    all_data[rank] = None
            time.sleep(POLL_S)

    # Numbers, where nothing is half done: a signal interrupts the wait.
    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of float64 ``values`` over all learners.

        Raises:
            Interrupted: this learner is to end, or another has.
        """
        return values if self.world_size == 1 else np.sum(self.gather(values), axis=0)

    def gather(self, values: np.ndarray) -> list[np.ndarray]:
        """Return all learners' float64 ``values``, which may be of different lengths. Raises as `sum`."""
        if self.world_size == 1:
            return [values]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self._all_gather(sizes, torch.tensor([values.size]), GRACE_S)
        most = int(max(sizes))
        padded = torch.zeros(most, dtype=torch.float64)
        padded[: values.size] = torch.as_tensor(values.reshape(-1))
        rows = [torch.empty(most, dtype=torch.float64) for _ in range(self.world_size)]
        self._all_gather(rows, padded, LONG_GRACE_S)
        return [row[: int(size)].numpy() for row, size in zip(rows, sizes, strict=True)]

    def _all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, grace: float) -> None:
        try:
            work, late = dist.all_gather(rows, own, async_op=True), None
            while not work.is_completed():
                try:
                    self.raise_if_interrupted()
                except Interrupted:
                    # If all have come already, the others go on, and so does this one: it ends after their update.
                    late = late or time.monotonic() + grace
                    if time.monotonic() > late:
                        raise
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, Interrupted):
                raise
            raise Interrupted(f"learner {self.rank} has lost the others: {one_line(error)}") from None

    # An update: what interrupts it, ends the run without saving.
    def rows(self, number: int) -> range:
        """Return which of a number of things in a row are this learner's; all have as many."""
        each = number // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def share(
        self, inds: np.ndarray, size: int, num_envs: int, advantages: torch.Tensor
    ) -> tuple[np.ndarray, Iterable[Share]]:
        """Divide the samples ``inds`` of the whole batch, in minibatches of ``size``, among the learners.

        Return which samples of its own batch are this learner's, and of each minibatch its share.

        Args:
            inds: permuted alike on all learners: ``step * num_envs + env``, which is of the learner that has this
                environment; or whole environments, ``env``.
            size: of a minibatch.
            num_envs: how many environments all learners have.
            advantages: ``(len(inds), ...)`` of all samples in order, see `whole`.
        """
        if self.world_size == 1:
            ends = range(size, len(inds) + 1, size)
            return inds, (Share(end - size, end, 1.0, None) for end in ends)
        steps, envs = np.divmod(inds, num_envs)
        rows = self.rows(num_envs)
        is_own = (envs >= rows.start) & (envs < rows.stop)
        own = (steps * len(rows) + envs - rows.start)[is_own]
        bounds = np.concatenate([[0], np.cumsum(is_own)[size - 1 :: size]]).tolist()
        shuffled = advantages[torch.as_tensor(inds, device=advantages.device)].view(len(inds) // size, -1)

        def shares() -> Iterator[Share]:
            for (start, end), minibatch in zip(itertools.pairwise(bounds), shuffled, strict=True):
                moments = minibatch.mean(), minibatch.std()
                first = min(start, len(own) - 1) if start == end else start  # where it has none: any, of no weight
                yield Share(first, max(end, first + 1), (end - start) / size, moments)

        return own, shares()

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``(num_steps, num_envs)`` of all learners' ``(num_steps, own_envs)``."""
        if self.world_size == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        self._update(dist.all_gather, parts, values.contiguous())
        return torch.cat(parts, dim=1)

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter], weight: float) -> None:
        """Make each gradient the sum of all learners', of this one times ``weight``; they travel as one flat tensor."""
        if self.world_size == 1:
            return
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        sizes = [parameter.numel() for parameter in parameters]
        if (sum(sizes), parameters[0].device) != (len(self._flat), self._flat.device):
            self._flat = torch.empty(sum(sizes), device=parameters[0].device)
        torch.cat([parameter.grad.reshape(-1) for parameter in parameters], out=self._flat).mul_(weight)
        self._update(dist.all_reduce, self._flat)
        for parameter, grad in zip(parameters, self._flat.split(sizes), strict=True):
            parameter.grad = grad.view_as(parameter)

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over all learners."""
        if self.world_size > 1:
            values = values.detach().clone()
            self._update(dist.all_reduce, values)
        return values

    def moments(self, values: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray, int]]:
        """Yield mean and variance over the first axis, and length, of each learner's float64 ``values``."""
        mean, var, number = values.mean(0), values.var(0), len(values)
        if self.world_size == 1:
            yield mean, var, number
            return
        own = torch.as_tensor(np.concatenate([[number], mean.reshape(-1), var.reshape(-1)]))
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        self._update(dist.all_gather, rows, own)
        for row in rows:
            means, variances = row[1:].numpy().reshape(2, *np.shape(mean))
            yield means, variances, int(row[0])

    def _update(self, collective: Callable[..., Any], *tensors: Any) -> None:
        try:
            collective(*tensors)
        except RuntimeError as error:
            raise LearnerLostError(f"learner {self.rank} has lost the others: {one_line(error)}") from None


class AllWorkers:
    """The workers of all learners as if one had them, so that a checkpoint fits any number of learners."""

    def __init__(self, envs: ClusterEnv, learners: Learners) -> None:
        self._envs, self._learners, self._saves = envs, learners, itertools.count()
        self._others: list[dict[str, Any]] = []  # the last known state of each other learner's, for the first one

    def state_dict(self) -> dict[str, Any]:
        """Return to the first learner the state of all workers; those of one that has died as it was known last."""
        own, number = self._envs.state_dict(), self._envs.num_workers
        _, *others = self._learners.hand_in(f"workers {next(self._saves)}", msgspec.msgpack.encode(own))
        for rank, data in enumerate(others, 1):
            if data is not None:
                self._others[rank - 1 : rank] = [state := msgspec.msgpack.decode(data)]
                for restart in state["restarts"]:
                    restart["worker"] += rank * number
            elif len(self._others) < rank:
                nothing = {"pulls": [0] * number, "generators": [None] * number, "waiting_seconds": [0.0] * number}
                self._others.append({**nothing, "sync_bytes": 0, "restarts": []})
        return self.known()

    def known(self) -> dict[str, Any]:
        """Return the state of the own workers, and of others' as of the last `state_dict`."""
        own = self._envs.state_dict()
        states = [own, *self._others]
        lists = {name: [each for state in states for each in state[name]] for name in ("restarts", *OF_WORKERS)}
        return own | lists | {"sync_bytes": sum(state["sync_bytes"] for state in states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the own share of it; what is counted for all, the first learner takes."""
        number, each = self._learners.world_size, self._envs.num_workers
        if len(state["pulls"]) != number * each:
            raise ValueError(f"the state is of {len(state['pulls'])} workers, these are {number * each}")
        ranks = [{name: state[name][rank * each : (rank + 1) * each] for name in OF_WORKERS} for rank in range(number)]
        shares = [state | ranks[0], *(state | share | {"sync_bytes": 0, "restarts": []} for share in ranks[1:])]
        self._others = shares[1:] if self._learners.rank == 0 else []
        self._envs.load_state_dict(shares[self._learners.rank])
