"""Simulated workers for tests of the head, without processes, sockets or a wall clock."""

import itertools

import msgspec
from gymnasium import spaces

from clusterenv_runtime import Exit, Launcher
from clusterenv_runtime.envs.blueprint import EnvLayout
from clusterenv_runtime.envs.likeness import Likeness
from clusterenv_runtime.head.messenger import Messenger
from clusterenv_runtime.head.pool import WorkerPool
from clusterenv_runtime.head.recovery import Recovery
from clusterenv_runtime.head.supervisor import Supervisor
from clusterenv_runtime.head.transport import Received
from clusterenv_runtime.head.worker import Worker
from clusterenv_runtime.options import ClusterOptions
from clusterenv_runtime.policy.sync import SyncRule
from clusterenv_runtime.policy.versions import PolicyStore
from clusterenv_runtime.wire.protocol import (
    PROTOCOL_VERSION,
    Call,
    Close,
    CutOff,
    Hello,
    Part,
    Reply,
    Setup,
    Step,
    decode_from_head,
    encode,
    shared_versions,
)

SPACE, ACTIONS = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)
STARTUP_S, SILENCE_S = 60.0, 30.0
CALL = Call("name")
SIGKILL = Exit("killed by SIGKILL", by_signal=True)


class Network:
    """A transport with its own clock. A message to a worker goes to its `Process`, which may
    respond.
    """

    address, key_file, directory, dropped = "ipc://nowhere", None, "nowhere", 0

    def __init__(self):
        self.now, self.inbox, self.processes, self.closed = 0.0, [], {}, False
        self.sent, self.exchanges, self.texts, self.forgotten = [], 0, [], []

    def clock(self):
        return self.now

    def exchange(self, outbox, seconds):
        self.sent += outbox
        self.exchanges += 1
        closed = [
            out.identity
            for out in outbox
            if not self.processes[out.identity].hear(out.seq, out.message)
        ]
        if seconds is None:
            return [], closed
        # Time passes for a busy head, too.
        self.now += 1e-3 if self.inbox or closed else max(seconds, 1e-3)
        received, self.inbox = self.inbox, []
        return received, closed

    def deliver(self, identity, seq, message):
        self.inbox.append(Received(identity, [encode((seq, message))]))

    def forget(self, identity):
        self.forgotten.append(identity)

    def restore(self):
        pass

    def drop(self, identity, text):
        self.dropped += 1
        self.texts.append(text)

    def close(self):
        self.closed = True


class Process:
    """A worker's process, which says hello and responds at once, unless it is ``stopped`` or
    ``cut_off``.

    It responds with its index, or with any other ``answer`` that is set. If it ``leaves``, it ends
    when it is told to close.
    """

    numbers = itertools.count()

    def __init__(self, network, index):
        self.network, self.index, self.identity = network, index, b"%d" % next(self.numbers)
        self.stopped, self.cut_off, self.leaves, self.exit = False, False, False, None
        self.answer, self.heard = Reply(index), []
        network.processes[self.identity] = self

    def greet(self, protocol=PROTOCOL_VERSION):
        hello = Hello(protocol, self.index, "host", 1000 + self.index, shared_versions())
        self.network.deliver(self.identity, None, hello)

    def hear(self, seq, request):
        """Take a message as a worker decodes it. Return whether the link is open."""
        if self.cut_off:
            return False
        seq, request = decode_from_head(encode((seq, request)))
        self.heard.append(request)
        if not self.stopped and isinstance(request, Setup | Call | CutOff | Step):
            self.network.deliver(self.identity, seq, self.answer)
        if self.leaves and isinstance(request, Close):
            self.die(Exit("exit code 0"))
        return True

    def die(self, exit=SIGKILL):
        self.exit, self.cut_off = exit, True


class Processes(Launcher):
    """A launcher of these processes, which say hello as soon as they are started."""

    name, greets = "simulated", True

    def __init__(self, network):
        super().__init__()
        self.network, self.of, self.started_at, self.killed = network, {}, {}, []

    def start_worker(self, index):
        self.of[index] = Process(self.network, index)
        self.started_at.setdefault(index, []).append(self.network.now)
        if self.greets:
            self.of[index].greet()

    def exit(self, index):
        return self.of[index].exit

    def kill(self, index):
        self.killed.append((index, self.network.now))
        self.of[index].die()

    def has_ended(self, index):
        return self.of[index].exit is not None


def opens(asked, answer, *_):
    """Take any response as one to the request."""
    if isinstance(answer, Reply):
        answer.value = msgspec.msgpack.decode(answer.value)
    return answer


def a_part(waited=0.0):
    """Return the header of a part of a rollout, which `opens` accepts."""
    return Part(1, {}, 0, 0, [], {}, waited)


class AnyEnvs:
    """A blueprint that accepts whatever a worker reports about its environments."""

    layout = EnvLayout(SPACE, ACTIONS)

    def learn(self, told, rows):
        pass


class Simulation:
    """A pool of ``number`` workers with one environment each, on a `Network`.

    ``opener`` decodes their responses.
    """

    def __init__(self, number, max_restarts=3, launcher=Processes, start=True, opener=opens):
        self.network = Network()
        self.launcher = launcher(self.network)
        self.workers = [
            Worker(index, slice(index, index + 1), b"setup", []) for index in range(number)
        ]
        self.store = PolicyStore([worker.copy for worker in self.workers], rounds=True)
        likeness = Likeness.of_this_process(self.launcher)
        self.recovery = Recovery(SyncRule(), self.store, likeness)
        options = ClusterOptions(
            startup_timeout=STARTUP_S, worker_timeout=SILENCE_S, max_worker_restarts=max_restarts
        )
        clock = self.network.clock
        self.supervisor = Supervisor(self.workers, self.launcher, options, clock)
        parts = self.network, self.supervisor, self.recovery, self.store
        messenger = Messenger(*parts, AnyEnvs())
        messenger._open = opener
        self.pool = WorkerPool(messenger)
        self.launcher.prepare(number, [], "nowhere")
        if start:
            self.pool.start(number)

    def call(self, *indices, timeout=None, message=CALL):
        """Send a request to these workers, or to all, and return the values of their replies."""
        asked = [self.workers[index] for index in indices] if indices else self.workers
        seqs = [self.pool.ask(worker, message) for worker in asked]
        return [request.response.value for request in self.pool.gather(seqs, timeout)]

    def wait(self, seconds):
        """Handle the workers' messages for this many seconds."""
        end = self.network.now + seconds
        self.pool.wait_until(lambda: self.network.now >= end, self.never())

    def never(self):
        """Return a request that is never answered."""
        self.launcher.of[0].stopped = True
        return [self.pool.ask(self.workers[0], Call("name"))]
