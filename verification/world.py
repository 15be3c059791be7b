"""A simulated world for the real head and the real workers: a clock, links and processes.

A seed decides everything that is random. Workers are greenlets of this process. One at a time has
the turn, so a seed always gives the same run. Time passes only here, from one event to the next.
"""

from __future__ import annotations

import heapq
import itertools
import random
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import greenlet

from clusterenv_runtime import messages
from clusterenv_runtime.head.transport import Received
from clusterenv_runtime.launchers import Exit
from clusterenv_runtime.pickling import from_frames
from clusterenv_runtime.worker import worker as workers
from clusterenv_runtime.worker.connection import HELLO_S, End
from clusterenv_runtime.worker.worker import Worker

workers.LOOK_S = 0.0  # an acting worker looks before each step, whatever the clock says

KILLED = Exit("killed by SIGKILL", by_signal=True)
FOREVER = 1e4  # simulated seconds, after which a wait counts as a hang


class Hang(AssertionError):
    """The head waits forever."""


class Gone(End):
    """An exception that ends a process, whatever it was doing."""


class World:
    """A clock, the coming events with their times, and the processes.

    Args:
        seed: the seed of everything random.
        silence: seconds after which a silent link is closed.
    """

    def __init__(self, seed: int, silence: float) -> None:
        self.random, self.now, self.silence = random.Random(seed), 0.0, silence
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.processes: dict[bytes, Process] = {}  # by the identity of their connection
        self.running: Process | None = None  # the process that has the turn; None for the head
        self.arrived: list[Received] = []  # messages at the head that it has not read
        self.crashes: list[str] = []  # errors in the workers' own code
        self.trace: list[str] | None = None  # the events; None if they are not traced

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.3f} {text}")

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Call a function at this time."""
        heapq.heappush(self._events, (time, next(self._order), do))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Call a function after ``seconds``."""
        self.at(self.now + seconds, do)

    def delay(self) -> float:
        """Return the random delay of a message, in seconds."""
        return self.random.choice((0.001, 0.001, 0.01, 0.1)) * self.random.random()

    def run(self, until: float, done: Callable[[], Any]) -> None:
        """Run the events until this time, or until ``done`` holds."""
        while not done() and self._events and self._events[0][0] <= until:
            time, _, do = heapq.heappop(self._events)
            self.now = max(self.now, time)
            do()
        if not done():
            self.now = max(self.now, until)
        if self.now > FOREVER:
            raise Hang(f"the head still waits after {FOREVER:g} s")

    def pass_time(self, seconds: float) -> None:
        """Run the events of the next seconds."""
        self.run(self.now + seconds, lambda: False)

    def deliver(self, process: Process, frames: list[bytes], name: str) -> None:
        """Let a message arrive at the head."""
        self.note(f"the head gets {name} of {process.name}")
        self.message_arrives()
        self.arrived.append((process.identity, [memoryview(bytearray(each)) for each in frames]))

    def message_arrives(self) -> None:
        """Note that a message has come to either end."""

    def end(self) -> None:
        """End all remaining processes."""
        for process in self.processes.values():
            process.die()


class Process:
    """A worker's process with its link to the head, in place of the worker's `Connection`."""

    def __init__(self, world: World, index: int, number: int) -> None:
        self.world, self.index, self.number = world, index, number
        self.name, self.identity = f"process {index}.{number}", b"%d.%d" % (index, number)
        self.waited = 0.0  # as in `Connection`
        self.exit: Exit | None = None
        # The link is cut, the process is stopped, the link is closed for good.
        self.is_cut = self.is_stopped = self.is_closed = False
        self.inbox: deque[list[bytes]] = deque()
        # The messages under way from and to the process, and the times at which the last arrive.
        self._up, self._down = deque[tuple[list[bytes], str]](), deque[list[bytes]]()
        self._up_at = self._down_at = 0.0
        self._held: list[Callable[[], None]] = []  # arrivals that wait until the link is healed
        # Whether a message wakes the process, and whether it has missed its turn while stopped.
        self._listens = self._is_due = False
        self.survives = False  # whether it survives a kill
        self.worker = Worker(self)
        self._greenlet = greenlet(self._run)

    # The process's own side.
    def _run(self) -> None:
        try:
            if self.exit is None:
                self._greet()
                self.worker.run()
        except Gone:
            pass
        except BaseException:
            self.world.crashes.append(f"{self.name} has crashed:\n{traceback.format_exc()}")
        if self.exit is None:
            self.exit = Exit("exit code 0")
            self._close_behind(len(self._up))

    def _greet(self) -> None:
        hello = messages.Hello(
            messages.PROTOCOL_VERSION, self.index, "host", 1, messages.shared_versions()
        )
        while not self.inbox:
            self._post_up(messages.hello_frames(hello), "Hello")
            self.world.after(HELLO_S, lambda: self.wake() if self._listens else None)
            self._pause(listens=True)

    def _pause(self, listens: bool) -> None:
        """Give up the turn until it comes back."""
        self._listens = listens
        self._greenlet.parent.switch()
        self._listens = False
        if self.exit is not None:
            raise Gone

    def sleep(self, seconds: float) -> None:
        """Let time pass while an environment works."""
        self.world.after(seconds, self.wake)
        self._pause(listens=False)

    def send(self, seq: int | None, message: messages.Message, allowed: tuple[type, ...]) -> None:
        """Send a message to the head."""
        name = f"{type(message).__name__} {seq}"
        frames = [bytes(frame) for frame in messages.worker_frames(seq, message, allowed)]
        self._post_up(frames, name)

    def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def _post_up(self, frames: list[bytes], name: str) -> None:
        self._up.append((frames, name))
        self._up_at = max(self._up_at, self.world.now + self.world.delay())
        self.world.at(self._up_at, self._arrives_up)

    def receive(self, waits: bool = True) -> tuple[int | None, messages.Message] | None:
        """Return the next message except pings. Without ``waits``, return None if none has come."""
        while waits or self.inbox:
            while not self.inbox:
                self._pause(listens=True)
            seq, message = from_frames(self.inbox.popleft())
            if isinstance(message, messages.Close):
                raise End
            if not isinstance(message, messages.Ping):
                return seq, message
        return None

    @property
    def is_busy(self) -> bool:
        """Whether the process has work, or messages are under way to or from it."""
        return not self._listens or bool(self.inbox or self._up or self._down)

    # The world's side.
    def turn(self) -> None:
        """Let the process work until it waits for something."""
        self.world.running = self
        self._greenlet.switch()
        self.world.running = None

    def wake(self) -> None:
        """Give the process the turn, now or when it goes on."""
        if self.is_stopped:
            self._is_due = True
        elif self.exit is None:
            self.turn()

    def _arrives_up(self) -> None:
        if self.is_cut:
            self._held.append(self._arrives_up)
        elif self._up:  # otherwise it died before it could send this
            message = self._up.popleft()
            if not self.is_closed:
                self.world.deliver(self, *message)

    def post(self, frames: list[bytes]) -> None:
        """Let a message from the head arrive some time later."""
        self._down.append(frames)
        self._down_at = max(self._down_at, self.world.now + self.world.delay())
        self.world.at(self._down_at, self._arrives_down)

    def _arrives_down(self) -> None:
        if self.is_cut:
            self._held.append(self._arrives_down)
        elif self.exit is None and not self.is_closed:
            self.inbox.append(self._down.popleft())
            self.world.message_arrives()
            if self._listens:
                self.wake()

    # Faults.
    def die(self, reason: Exit = KILLED) -> None:
        """End the process at once, with some of its last messages unsent."""
        if self.exit is None:
            self.world.note(f"{self.name} dies: {reason.reason}")
            self.exit = reason
            self._close_behind(self.world.random.randint(0, len(self._up)))
            self.turn()  # until it has ended

    def _close_behind(self, number: int) -> None:
        """Close the link after the first ``number`` messages under way. Drop the rest."""
        while len(self._up) > number:
            self._up.pop()
        self.world.at(max(self._up_at, self.world.now), self._close)

    def _close(self) -> None:
        self.is_closed = True

    def flood(self, number: int) -> None:
        """Send many errors in requests that nobody has made."""
        self.world.note(f"{self.name} floods the head with {number} messages")
        error = messages.Error(None, "ValueError", "flood", "", fatal=False)
        for _ in range(number if self.exit is None else 0):
            self._post_up(messages.worker_frames(10**9, error, ()), "an Error")

    def cut(self, seconds: float) -> None:
        """Cut the link for ``seconds``, or for good if the silence lasts too long."""
        self.world.note(f"{self.name} is cut off for {seconds:.2f} s")
        self.is_cut = True
        self._after(seconds, self._heal, self._notice_silence)

    def _after(self, seconds: float, over: Callable[[], None], silent: Callable[[], None]) -> None:
        """Call ``over`` after ``seconds``, or ``silent`` once the silence has lasted too long."""
        self.world.after(
            min(seconds, self.world.silence), silent if seconds >= self.world.silence else over
        )

    def _heal(self) -> None:
        self.is_cut = False
        held, self._held = self._held, []
        for arrives in held:
            arrives()

    def _notice_silence(self) -> None:
        self._up.clear()
        self._close()
        self.die(Exit("exit code 1"))

    def stop(self, seconds: float) -> None:
        """Stop the process for ``seconds``.

        If the silence lasts too long, the link is closed, and the process never goes on.
        """
        self.world.note(f"{self.name} is stopped for {seconds:.2f} s")
        self.is_stopped = True
        self._after(seconds, self._go_on, self._close)

    def _go_on(self) -> None:
        self.is_stopped, is_due = False, self._is_due
        self._is_due = False
        if is_due:
            self.wake()
