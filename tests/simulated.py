"""Simulated workers for tests of the head, without processes, sockets or a wall clock."""

import itertools
from dataclasses import replace

from gymnasium import spaces

from clusterenv_runtime import Exit, Launcher
from clusterenv_runtime.head.pool import Pool
from clusterenv_runtime.head.workers import Worker
from clusterenv_runtime.messages import (
    PING,
    PROTOCOL_VERSION,
    Call,
    Close,
    Error,
    Hello,
    Ping,
    Reply,
    Reset,
    Setup,
    Step,
    hello_frames,
    shared_versions,
    worker_frames,
)
from clusterenv_runtime.options import ClusterOptions
from clusterenv_runtime.pickling import from_frames, pack_exception

from . import test_parts

SPACE, ACTIONS = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)
BUILT = {"observation_space": SPACE, "action_space": ACTIONS}
STARTUP_S, SILENCE_S = 60.0, 30.0
CALL, STEP = Call("name", b""), Step(None)
SIGKILL = Exit("killed by SIGKILL", by_signal=True)


def an_error(text="on purpose", env=0, **how):
    """Return a worker's message about a ValueError."""
    exception = pack_exception(ValueError(text), ())
    fields = {"traceback": "Traceback", "fatal": False, "exception": exception, **how}
    return Error(env, "builtins.ValueError", text, **fields)


def a_part(**fields):
    """Return the part of one step in one environment."""
    return replace(test_parts.a_part(SPACE, num_steps=1, num_envs=1), **fields)


class Network:
    """A transport with its own clock. A message to a worker goes to its `Process`, which may
    respond.
    """

    address, key_file, directory, dropped = "ipc://nowhere", None, "/", 0

    def __init__(self):
        self.now, self.inbox, self.processes, self.is_closed = 0.0, [], {}, False
        self.sent = []  # (identity, seq, message)
        self.receives, self.texts, self.forgotten = 0, [], []

    def clock(self):
        return self.now

    def send(self, identity, frames):
        seq, message = from_frames([bytearray(frame) for frame in frames])
        self.sent.append((identity, seq, message))
        return self.processes[identity].hear(seq, message)

    def receive(self, seconds):
        self.receives += 1
        self.now += 1e-3 if self.inbox else max(seconds, 1e-3)  # time passes for a busy head, too
        received, self.inbox = self.inbox, []
        return received

    def deliver(self, identity, seq, message):
        frames = [bytearray(frame) for frame in worker_frames(seq, message, ())]
        self.inbox.append((identity, frames))

    def has_pulse(self, identity):
        return self.send(identity, PING)

    def forget(self, identity):
        self.forgotten.append(identity)

    def drop(self, text):
        self.dropped += 1
        self.texts.append(text)

    def close(self):
        self.is_closed = True


class Process:
    """A worker's process, which says hello and responds at once, unless it is ``stopped`` or
    ``cut_off``.

    It responds with its index, or with any other ``answer`` that is set. If it ``leaves``, it ends
    when it is asked to close.
    """

    numbers = itertools.count()

    def __init__(self, network, index):
        self.network, self.index, self.identity = network, index, b"%d" % next(self.numbers)
        self.stopped, self.cut_off, self.leaves, self.exit = False, False, False, None
        self.built, self.answer, self.heard = Reply(BUILT), Reply(index), []
        network.processes[self.identity] = self

    def greet(self, protocol=PROTOCOL_VERSION):
        hello = Hello(protocol, self.index, "host", 1000 + self.index, shared_versions())
        self.network.inbox.append((self.identity, hello_frames(hello)))

    def hear(self, seq, message):
        """Take a message. Return whether the link is open."""
        if self.cut_off:
            return False
        if not isinstance(message, Ping):
            self.heard.append(message)
        if not self.stopped and isinstance(message, Setup | Call | Step | Reset):
            answer = self.built if isinstance(message, Setup) else self.answer
            self.network.deliver(self.identity, seq, answer)
        if self.leaves and isinstance(message, Close):
            self.die(Exit("exit code 0"))
        return True

    def heard_of(self, *kinds):
        return [message for message in self.heard if isinstance(message, kinds)]

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


class Simulation:
    """A pool of ``number`` workers with ``size`` environments each, on a `Network`."""

    def __init__(self, number, max_restarts=3, launcher=Processes, start=True, size=1):
        self.network = Network()
        self.launcher = launcher(self.network)
        self.workers = [
            Worker(index, slice(size * index, size * (index + 1)), 0, b"setup", [])
            for index in range(number)
        ]
        options = ClusterOptions(
            startup_timeout=STARTUP_S, worker_timeout=SILENCE_S, max_worker_restarts=max_restarts
        )
        clock = self.network.clock
        self.pool = Pool(self.workers, self.launcher, options, self.network, clock=clock)
        self.store = self.pool.store
        if start:
            self.pool.start()

    def ask(self, *indices, message=CALL):
        """Make a request to these workers, or to all."""
        asked = [self.workers[index] for index in indices] if indices else self.workers
        return [self.pool.ask(worker, message) for worker in asked]

    def gather(self, seqs, timeout=None):
        """Return the values of the replies to these requests."""
        return [request.response for request in self.pool.gather(seqs, timeout)]

    def call(self, *indices, timeout=None, message=CALL):
        """Make a request to these workers, or to all, and return the values of their replies."""
        return self.gather(self.ask(*indices, message=message), timeout)

    def wait(self, seconds):
        """Handle the workers' messages for this many seconds."""
        end = self.network.now + seconds
        self.wait_until(lambda: self.network.now >= end)

    def wait_until(self, done):
        self.pool.wait_until(done, self.never())

    def never(self):
        """Return a request that is never answered."""
        self.launcher.of[0].stopped = True
        return self.ask(0)
