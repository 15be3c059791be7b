"""All workers as one pool: requests, messages, waiting, and the replacement of dead processes.

A request is numbered and kept until its response comes. A process sends `Hello`, and gets the
orders that make it a worker, then all requests that the process before it had not answered, in the
same order and with the same ``seq``. It answers each once, and may pull weights before that.
"""

import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from .. import messages
from ..errors import (
    EnvError,
    Interrupted,
    ProtocolError,
    StartupError,
    WorkerDiedError,
    one_line,
)
from ..launchers import Launcher
from ..messages import Message, Part
from ..options import ClusterOptions
from ..pickling import load_exception, space_form, to_frames
from .recovery import Recovery, Request
from .transport import Received, Transport
from .workers import CONNECTED, State, Worker

logger = logging.getLogger(__name__)
waits = logging.getLogger(f"{__name__}.waits")  # its lines are progress
SAY_S = 5.0  # how often a long wait is logged
PING_S = 1.0  # how often the head checks that it can reach its workers
LEAVE_S = 3.0  # how long a process may take to end once its environments are closed


class Pool(Recovery):
    """The workers of one head. The pool works only in the thread that waits, and while it waits.

    Args:
        workers: all workers.
        launcher: starts and kills the processes, and knows how they ended.
        options: the options of the `ClusterEnv`.
        transport: the head's socket.
        allowed, learners: see `ClusterEnv`.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        launcher: Launcher,
        options: ClusterOptions,
        transport: Transport,
        allowed: tuple[type, ...] = (),
        learners: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(workers, launcher, options, learners, clock)
        self.is_closed = False
        self.pid = os.getpid()  # of the process that made this pool
        self.interrupt: Interrupted | None = None  # the error that the next wait raises
        self.environments: dict[str, Any] = {}  # what the first worker says, `WorkerEnvs.describe`
        self._transport = transport
        self._allowed = allowed
        self._next_ping = 0.0
        self._inbox = deque[Received]()
        self._by_identity: dict[bytes, Worker] = {}  # includes former processes
        self._seqs = itertools.count(1)
        self.answered: dict[int, Request] = {}  # by seq, in the order of the responses
        # Errors that the user has not seen yet, with their texts.
        self.errors: list[tuple[str, messages.Error]] = []
        self.to_reset = set[int]()  # workers whose environments need a reset after an error

    def start(self) -> None:
        """Start all workers, and wait until they have built their environments.

        Raises:
            StartupError, WorkerDiedError: a worker does not come up.
            Exception: an environment raised it, with an `EnvError` as its cause.
        """
        options, transport = self._options, self._transport
        # Read these versions from files now. By the time a worker says hello, strangers may have
        # used up the number of files that this process may open.
        messages.shared_versions()
        try:
            self._launcher.prepare(
                len(self.workers),
                options.worker_flags(self._launcher, transport.address, transport.key_file),
                transport.directory,
                fork=options.worker_start == "fork",
                preload=options.worker_preload.split(),
                startup_timeout=options.startup_timeout,
            )
            self.start_all()
            self._wait(lambda: self.errors or not self.all_must_start)
        except BaseException:
            self.close(timeout=0)
            raise

    def ask(self, worker: Worker, message: Message) -> int:
        """Make a request to a worker, and return its ``seq``.

        Raises:
            WorkerDiedError: the worker is gone and will not be replaced.
        """
        self.require(worker)
        seq = next(self._seqs)
        self.outstanding[seq] = Request(seq, worker, message)
        self.post(worker, message, seq)
        return seq

    def require(self, *workers: Worker) -> None:
        """Raise WorkerDiedError if one of these workers is gone and will not be replaced."""
        for worker in workers:
            if worker.process.state == State.ENDED:
                raise WorkerDiedError(f"{self.describe(worker)} is gone")

    def post(self, worker: Worker, message: Message, seq: int | None = None) -> None:
        """Send a message if the worker is connected. Otherwise it comes with its orders."""
        if worker.process.state in CONNECTED:
            frames = to_frames((seq, message))
            if not self._transport.send(worker.process.identity, frames):
                self.lose(worker)

    def settle(self, seqs: Collection[int], timeout: float | None = None) -> None:
        """Wait until all of these requests have a response.

        Raises:
            multiprocessing.TimeoutError: ``timeout`` seconds have passed.
            Interrupted: the wait was interrupted.
            WorkerDiedError: a worker is gone and will not be replaced.
            Exception: an environment raised it, with an `EnvError` as its cause.
        """
        # The last request is as a rule the last to be answered.
        self._wait(lambda: self.outstanding.keys().isdisjoint(reversed(seqs)), timeout)

    def gather(self, seqs: Collection[int], timeout: float | None = None) -> list[Request]:
        """Wait until all of these requests have a response, see `settle`, and return them.

        If this raises an error, the requests are given up.
        """
        try:
            self.settle(seqs, timeout)
            if not self.answered.keys() >= set(seqs):
                self.require(*self.workers)  # one has ended with its requests
            return [self.answered.pop(seq) for seq in seqs]
        except BaseException:
            self.forget(seqs)
            raise

    def first(self, seqs: Collection[int]) -> Request:
        """Wait for a response to any of these requests. Return the first that has one."""

        def found() -> list[int]:
            return [seq for seq in self.answered if seq in seqs][:1]

        self.wait_until(found, seqs)
        return self.answered.pop(*found())

    def wait_until(self, done: Callable[[], Any], seqs: Collection[int]) -> None:
        """Serve the workers until ``done`` holds, an error comes, or all ``seqs`` have a response.

        Messages are handled once even if ``done`` already holds, because a worker may be waiting
        for weights. This method raises the errors of `settle`.
        """
        self._wait(lambda: done() or self.errors or self.outstanding.keys().isdisjoint(seqs))
        if not done():
            self.require(*self.workers)

    def forget(self, seqs: Iterable[int]) -> None:
        """Give up these requests: drop their responses, and errors that do not end anything."""
        for seq in seqs:
            self.outstanding.pop(seq, None)
            self.answered.pop(seq, None)

    def end(self, worker: Worker, because: str) -> None:
        """End a worker, whose outstanding requests get no response then."""
        super().end(worker, because)
        self.forget([request.seq for request in self._requests_of(worker)])

    def raise_errors(self) -> None:
        """Raise the last error that the user has not seen, and log the others."""
        if not self.errors:
            return
        (*others, (text, error)), self.errors = self.errors, []
        for other, its_error in others:
            if (its_error.kind, its_error.text) != (error.kind, error.text):
                logger.error("%s", other)
        cause = EnvError(text)
        exception = None
        if error.exception is not None:
            exception = load_exception(error.exception, self._allowed)
        if exception is None:
            raise cause
        raise exception from cause

    # Waiting.
    def _wait(self, done: Callable[[], Any], timeout: float | None = None) -> None:
        """Serve and supervise workers until ``done`` holds, then raise the errors that came."""
        began = self.clock()
        deadline = math.inf if timeout is None else began + timeout
        next_notice = began + SAY_S
        with self.closing_on_ctrl_c():
            while True:
                until = -math.inf if done() else min(deadline, self.next_look)
                self._serve(max(until - self.clock(), 0))
                now = self.clock()
                if now >= self.next_look:
                    self._supervise(now)
                self._raise_interrupt()
                if done():
                    break
                if now >= next_notice:
                    next_notice += SAY_S
                    waits.info("waiting for %d of %d workers", len(self._late), len(self.workers))
                if now >= deadline:
                    names = ", ".join(map(self.describe, self._late))
                    raise multiprocessing.TimeoutError(f"no response in {timeout} s from {names}")
        self.raise_errors()

    @contextlib.contextmanager
    def closing_on_ctrl_c(self) -> Iterator[None]:
        """Close the pool if Ctrl-C comes in the block, whose work would then be half done."""
        try:
            yield
        except KeyboardInterrupt:
            self.close(LEAVE_S)
            raise

    def _raise_interrupt(self) -> None:
        if (error := self.interrupt) is not None:
            self.interrupt = None
            raise error

    @property
    def _late(self) -> list[Worker]:
        """The workers that are not ready, or have not answered a request."""
        busy = {request.worker.index for request in self.outstanding.values()}
        return [
            worker
            for worker in self.workers
            if worker.index in busy or worker.process.state not in (State.READY, State.ENDED)
        ]

    def _serve(self, seconds: float) -> None:
        self._inbox += self._transport.receive(0 if self._inbox else seconds)
        while self._inbox:
            self._handle(*self._inbox.popleft())

    def _supervise(self, now: float) -> None:
        if now > self._next_ping:
            self._next_ping = now + PING_S
            for worker in self.workers:
                is_connected = worker.process.state in CONNECTED
                if is_connected and not self._transport.has_pulse(worker.process.identity):
                    self.lose(worker)
        for worker, reason in self.look():
            # A scheduler that ends a job may signal the head and its workers at the same time.
            self._raise_interrupt()
            if worker.process.identity is not None:
                self._transport.forget(worker.process.identity)
            try:
                if not os.path.exists(self._transport.directory):
                    raise WorkerDiedError(
                        f"{reason}; no replacement can connect, because "
                        f"{self._transport.directory} was removed"
                    )
                self.replace(worker, reason)
            except WorkerDiedError:
                self.end(worker, "lost")
                raise
            self._note_loss(worker, reason)

    def close(self, timeout: float) -> None:
        """Close every worker within about ``timeout`` seconds, by force if necessary.

        Safe to call twice.
        """
        if self.is_closed or os.getpid() != self.pid:  # this is a fork of the head
            return
        self.is_closed = True
        deadline = self.clock() + timeout
        with contextlib.ExitStack() as in_the_end:  # even if Ctrl-C is pressed repeatedly
            in_the_end.callback(self._transport.close)
            in_the_end.callback(
                lambda: self._launcher.stop(min(max(deadline - self.clock(), 0), LEAVE_S))
            )
            connected = [each for each in self.workers if each.process.state in CONNECTED]
            for worker in connected:
                self.post(worker, messages.Close())
            # The socket stays open until the workers have left: a worker whose link breaks before
            # it has read `Close` ends as if the head had failed.
            while connected and self.clock() < deadline:
                self._transport.receive(max(0.01, len(connected) / 10_000))
                connected = [
                    worker
                    for worker in connected
                    if self._transport.send(worker.process.identity, messages.PING)
                ]

    # Messages from workers.
    def _handle(self, identity: bytes, frames: list[Any]) -> None:
        worker = self._by_identity.get(identity)
        if worker is None:
            return self._meet(identity, frames)
        process = worker.process
        is_current = identity == process.identity and process.state != State.ENDED
        if not is_current or len(frames) == 1:  # a repeated hello
            return None
        process.heard = self.clock()
        try:
            seq, message = messages.read_worker(frames, self._allowed)
        except ProtocolError as error:
            self._refuse(worker, f"sent a {error}")
        match message:
            case messages.Built():
                self.note_built(process)
            case messages.Pull() if self.store.weights:
                # Also for a request that was given up, because the worker waits anyway.
                self.post(worker, self.store.pull(worker.copy, message.version), seq)
            case messages.Error():
                self._take_error(worker, seq, message)
            case messages.Reply() if process.state == State.BUILDING:  # to `Setup`
                self._take_built(worker, message.value)
            case messages.Reply() | Part():
                self._take_response(worker, seq, message)

    def _meet(self, identity: bytes, frames: list[Any]) -> None:
        """Send a new process its orders if it says hello. Drop the message of a stranger."""
        try:
            hello = messages.read_hello(frames)
        except ProtocolError as error:
            return self._transport.drop(f"a stranger's message: {error}")
        is_index = 0 <= hello.index < len(self.workers)
        worker = self.workers[hello.index] if is_index else None
        if worker is None or worker.process.state != State.STARTING:
            return self._transport.drop(
                f"a hello from {hello.host}, pid {hello.pid}: no worker {hello.index} is expected"
            )
        self._by_identity[identity] = worker
        self.note_hello(worker, identity, hello.host, hello.pid)
        if (mismatch := messages.mismatch(hello)) is not None:
            self._refuse(worker, mismatch, StartupError)
        for message in self._orders(worker):
            self.post(worker, message)
        for request in self._requests_of(worker):
            self.post(worker, request.message, request.seq)

    def _take_error(self, worker: Worker, seq: int | None, error: messages.Error) -> None:
        if seq in self.outstanding or error.ends:
            where = "" if error.env is None else f"environment {error.env} on "
            text = f"{where}{self.describe(worker)} raised {error.kind}: {error.text}"
            self.errors.append((f"{text}\n\n{error.traceback}", error))
            self.forget([seq])
        else:
            self._transport.drop(f"an error of worker {worker.index}, not waited for: {error.text}")
        if error.fatal:  # nothing is left to reset
            self.to_reset.discard(worker.index)
            self.end(worker, "shut down after its error")
        elif error.ends:  # none of its other requests will be answered
            self.to_reset.add(worker.index)
            self.forget([request.seq for request in self._requests_of(worker)])

    def _take_response(self, worker: Worker, seq: int | None, response: Any) -> None:
        request, process = self.outstanding.get(seq), worker.process
        if request is None:
            return  # it was given up, or is one of the orders
        asked = request.message
        try:
            if isinstance(asked, messages.Collect):
                space = self.environments["observation_space"]
                response.check(space, asked.num_steps, worker.num_envs)
            else:
                response, request.dropped = response.value, response.dropped
        except Exception as error:  # a worker may send anything
            self._refuse(worker, f"sent a wrong response: {one_line(error)}")
        # A step may only show the end of lost episodes, or reset environments that have ended.
        has_stepped = isinstance(asked, messages.Collect | messages.Evaluate) or (
            isinstance(asked, messages.Step) and not process.is_cut_off and not worker.ended.all()
        )
        if has_stepped:
            worker.losses = 0
        if isinstance(asked, messages.Step | messages.Collect):
            process.is_cut_off = False
        request.response, request.process = response, process
        del self.outstanding[seq]
        self.answered[seq] = request

    def _take_built(self, worker: Worker, built: Any) -> None:
        """Take what a worker says about its environments. They must match the other workers'."""
        names, ours = ("observation_space", "action_space"), self.environments or built
        try:
            if not self.environments:
                self.store.act_in(*(built[name] for name in names))
            texts = [
                f"an environment's {name} is {built[name]}, another's is {ours[name]}"
                for name in names
                if space_form(built[name]) != space_form(ours[name])
            ]
        except Exception as error:  # a worker may send anything
            self._refuse(worker, f"sent wrong spaces: {one_line(error)}")
        if texts:
            self._refuse(worker, f"differs: {texts[0]}; all must be alike", RuntimeError)
        self.environments = ours
        self.note_ready(worker)

    def _refuse(
        self, worker: Worker, text: str, kind: type[RuntimeError] = ProtocolError
    ) -> NoReturn:
        """End a worker whose messages are wrong, and the call under way."""
        error = kind(f"{self.describe(worker)} {text}")
        self.post(worker, messages.Close())
        self.end(worker, "shut down by the head")
        raise error

    def note_seen(self, request: Request, seen: Any, ended: np.ndarray) -> None:
        """Note what the user now sees of a worker's environments.

        If the process that responded is gone, the next step truncates these episodes.
        """
        worker = request.worker
        worker.seen, worker.ended = seen, ended
        if request.process_is_gone:
            self.post(worker, messages.CutOff(seen, ended))
