"""The worker, which builds its environments and answers the head's requests in order."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
import traceback
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import messages
from ..errors import EnvRaised
from ..messages import Message, Part, Reply
from ..pickling import NotSendable, pack_exception, sendable
from ..policy.sync import SyncRule
from ..setup import loads, register
from .connection import Connection, End
from .envs import WorkerEnvs

if TYPE_CHECKING:
    from ..policy.actor import Actor

LOOK_S = 0.1  # seconds between looks for messages while a worker acts
# After an error in one of these requests, the environments must be reset. After an error in `Setup`
# or `Structure`, the worker ends.
IN_EPISODES = (
    messages.Reset | messages.Step | messages.CutOff | messages.Collect | messages.Evaluate
)
EVALUATED_STEPS = 32  # steps that an evaluation takes at once in each environment


class Worker:
    """A worker's environments, and the policy that acts in them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # Requests that arrived while the worker acted or waited for weights.
        self._later: deque[tuple[int | None, Message]] = deque()
        self._envs: WorkerEnvs | None = None
        self._rows = range(0)
        self._rule = SyncRule()
        self._allowed: tuple[type, ...] = ()  # classes of values that the head reads
        self._actor: Actor | None = None
        self._has_failed = False  # whether a request failed since the last full reset
        self._next_look = 0.0  # the time of the next look for messages while acting

    def run(self) -> None:
        """Answer requests until the head sends `Close` or an error ends the worker."""
        with contextlib.suppress(End):
            while True:
                message = self._later.popleft() if self._later else self._connection.receive()
                self._answer(*message)

    def close(self) -> None:
        """Close the environments, and wait for the threads that they have started."""
        try:
            if self._envs is not None:
                self._envs.close()
        finally:
            for thread in threading.enumerate():  # they may still write files
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()

    def _answer(self, seq: int | None, message: Message) -> None:
        if isinstance(message, messages.Reset) and message.mask is None:
            self._has_failed = False
        if self._has_failed and isinstance(message, IN_EPISODES):
            return  # the head has given up this request
        try:
            self._send(seq, self._handle(seq, message))
        except End:
            raise
        except BaseException as error:
            is_fatal = isinstance(message, messages.Setup | messages.Structure)
            ends_episodes = isinstance(message, IN_EPISODES)
            self._has_failed |= ends_episodes
            self._send(seq, self._describe(error, is_fatal, ends_episodes))
            if is_fatal:
                raise End from error

    def _send(self, seq: int | None, message: Message) -> None:
        """Send a message, without the infos that the head would not read."""
        try:
            self._connection.send(seq, message, self._allowed)
        except NotSendable:
            value = getattr(message, "value", None)
            if not isinstance(value, dict) or "infos" not in value:
                raise
            infos, dropped = sendable(value["infos"], self._allowed)
            reply = Reply({**value, "infos": infos}, dropped)
            self._connection.send(seq, reply, self._allowed)

    def _describe(self, error: BaseException, fatal: bool, ends_episodes: bool) -> messages.Error:
        env = None
        if isinstance(error, EnvRaised):
            env, error = error.args[0], error.__cause__
        described = traceback.TracebackException.from_exception(error)
        return messages.Error(
            env=env,
            kind=f"{type(error).__module__}.{type(error).__qualname__}",
            text=str(described),  # also of an exception whose own code raises
            traceback="".join(described.format()),
            fatal=fatal,
            ends_episodes=ends_episodes,
            exception=pack_exception(error, self._allowed),
        )

    def _handle(self, seq: int | None, message: Message) -> Reply | Part:
        """Do what a message asks for, and return the response."""
        match message:
            case messages.Collect():
                return self._collect(seq, message)
            case messages.Setup():
                return Reply(self._set_up(message))
            case messages.Reset():
                observations, infos = self._envs.reset(
                    message.seeds, pickle.loads(message.options), message.mask
                )
                self._connection.waited = 0.0  # only waits for later requests count
                return Reply({"arrays": (observations,), "infos": infos})
            case messages.Step():
                if self._actor is not None:
                    self._actor.state = None  # a policy remembers none of the head's steps
                *arrays, infos = self._envs.step(message.actions)
                return Reply({"arrays": tuple(arrays), "infos": infos})
            case messages.CutOff():
                self._envs.cut_off(message.seen, message.ended)
            case messages.Call():
                args, kwargs = pickle.loads(message.arguments)
                return Reply(self._envs.vector.call(message.name, *args, **kwargs))
            case messages.SetAttr():
                self._envs.vector.set_attr(message.name, pickle.loads(message.values))
            case messages.Structure():
                self._load_structure(message.pickled)
            case messages.Evaluate():
                return Reply(self._evaluate(message))
        return Reply(None)

    def _set_up(self, message: messages.Setup) -> dict[str, Any]:
        self._rule = message.rule
        registry = message.process.take()
        env_fns, num_envs, modes, self._allowed = loads(message.environments, message.arrays)
        self._rows = range(message.first_row, message.first_row + num_envs)
        self._envs = WorkerEnvs(
            env_fns,
            self._rows,
            *modes,
            seed=message.seed,
            register=partial(register, registry),
            after_each=partial(self._send, None, messages.Built()),
        )
        self._connection.settle()
        told = self._envs.describe()
        told["metadata"], _ = sendable(told["metadata"], self._allowed)
        return told

    def _load_structure(self, pickled: bytes) -> None:
        if self._actor is None:
            self._actor = self._new_actor()
        self._actor.load_structure(pickle.loads(pickled))

    def _new_actor(self, takes_mode: bool = False) -> Actor:
        """Import torch, which a worker that only steps does not need."""
        import torch
        from torch.distributions import Distribution

        from ..policy.actor import Actor

        Distribution.set_default_validate_args(False)  # `envs` checks what comes of NaN
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # the machine's other cores are for other workers
        return Actor(self._take_in, takes_mode)

    def _collect(self, seq: int | None, request: messages.Collect) -> Part:
        if self._rule.wants_pull(self._actor.version, request):
            self._pull(seq)
        waited, self._connection.waited = self._connection.waited, 0.0
        part = self._envs.collect(self._actor, request)
        part.waited = waited
        return part

    def _evaluate(self, request: messages.Evaluate) -> tuple[np.ndarray, ...]:
        """Play episodes with an actor that shares nothing with the one for training."""
        actor = self._new_actor(request.deterministic)
        actor.load(pickle.loads(request.structure), request.weights)
        self._envs.reset([request.seed + row for row in self._rows])
        numbers, seed = request.numbers, request.seed % 2**62
        steps = min(EVALUATED_STEPS, request.max_steps)
        next_steps = partial(messages.Collect, steps, 0, 0, 0.0, numbers, seed=seed)
        found: list[list[tuple[float, int, bool]]] = [[] for _ in self._rows]
        wanted = list(request.episodes)
        for chunk in itertools.count():
            if [*map(len, found)] == wanted:
                break
            part = self._envs.collect(actor, next_steps(rollout=chunk))
            ends = part.episodes % len(found), part.episodic_returns, part.episodic_lengths
            for row, value, length in zip(*(column.tolist() for column in ends), strict=True):
                if len(found[row]) < wanted[row]:
                    found[row].append((value, length, True))
            for row, (value, length) in enumerate(self._envs.under_way()):
                if length >= request.max_steps and len(found[row]) < wanted[row]:
                    found[row].append((value, length, False))
                    wanted[row] = len(found[row])
        self._envs.reset(request.seeds)
        return tuple(map(np.array, zip(*itertools.chain(*found), strict=True)))

    def _take_in(self) -> None:
        """Keep messages that arrive while this worker acts. `Close` ends it between two steps."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        while (message := self._connection.receive(waits=False)) is not None:
            self._later.append(message)

    def _pull(self, seq: int | None) -> None:
        """Pull weights. If a difference does not fit the weights held here, pull all weights."""
        came, self._later = self._later, deque()
        for message in came:
            self._put_off(*message)
        while True:
            self._send(seq, messages.Pull(self._actor.version))
            while not isinstance((message := self._connection.receive())[1], messages.Weights):
                self._put_off(*message)
            self._actor.load_weights(message[1])
            if self._actor.version:
                return

    def _put_off(self, seq: int | None, message: Message) -> None:
        """Keep a message that arrives while another request is being answered."""
        if isinstance(message, messages.Structure):  # the weights that follow have this structure
            self._answer(seq, message)
        else:
            self._later.append((seq, message))
