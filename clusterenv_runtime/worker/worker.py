"""The worker, which builds its environments and answers the head's requests in order."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..envs.blueprint import EnvFns, LayoutOf, Told
from ..envs.large import open_shared
from ..envs.script import load_registry
from ..errors import EnvRaised
from ..policy.sync import SyncRule
from ..wire import protocol
from ..wire.buffers import to_buffers
from ..wire.codec import name_of, pack
from ..wire.exceptions import MAX_BYTES, pack_exception
from ..wire.part import RolloutPart, check_part, pack_part
from ..wire.protocol import (
    Collect,
    CutOff,
    Evaluate,
    Reset,
    SetAttr,
    Setup,
    Step,
    Structure,
    Weights,
)
from .connection import Connection, End
from .one_by_one import EnvsOneByOne, seed_globals
from .transitions import Scores

if TYPE_CHECKING:
    from ..policy.actor import Actor

LOOK_S = 0.1  # seconds between looks for messages while a worker acts
# After an error in one of these requests, the environments must be reset. After an error in `Setup`
# or `Structure`, the worker ends.
IN_EPISODES = Reset | Step | CutOff | Collect | Evaluate
EVALUATED_STEPS = 32  # steps that an evaluation takes at once in each environment


def build_environments(
    env_fns: EnvFns,
    num_envs: int,
    layout_of: LayoutOf,
    registry: dict[str, bytes | str],
    built: Callable[[], None] = lambda: None,
    first_row: int = 0,
    seed: int = 0,
) -> Any:
    """Build a worker's environments.

    The first four arguments come from `Blueprint.setup`; the others are those of `EnvsOneByOne`.
    """
    load_registry(registry)
    if hasattr(env_fns, "build"):
        seed_globals(seed, first_row)
        return env_fns.build(layout_of, num_envs)
    return EnvsOneByOne(env_fns, layout_of, built, first_row, seed)


def tell(envs: Any) -> Told:
    """Return what the head must know about environments that `build_environments` returned."""
    layout = envs.layout
    spaces = layout.single_observation_space, layout.single_action_space
    return *spaces, dict(envs.metadata), envs.render_mode, envs.spaces


class Worker:
    """A worker's environments, and the policy that acts in them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # Requests that arrived while the worker acted or waited for weights.
        self._later: deque[tuple[int | None, protocol.FromHead, list[Any]]] = deque()
        self._envs: Any = None  # what `build_environments` returned
        self._first_row, self._rule = 0, SyncRule()
        self._actor: Actor | None = None
        self._has_failed = False  # whether a request failed since the last full reset
        self._next_look = 0.0  # the time of the next look for messages while acting
        # The seeds of the reset that must follow an evaluation; otherwise None.
        self._next_seeds: list[int] | None = None

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
            threading._shutdown()  # Python calls it at exit; threads may still write files

    def _answer(self, seq: int | None, request: protocol.FromHead, buffers: list[Any]) -> None:
        if isinstance(request, Reset) and not request.partial:
            self._has_failed, self._next_seeds = False, None
        if self._has_failed and isinstance(request, IN_EPISODES):
            return  # the head has given up this request
        try:
            if isinstance(request, Collect):
                answer, out = self._collect(seq, request)
            else:
                answer, out = self._reply(request, buffers)
            self._connection.send(seq, answer, *out)
        except End:
            raise
        except BaseException as error:
            is_fatal = isinstance(request, Setup | Structure)
            ends_episodes = isinstance(request, IN_EPISODES)
            if ends_episodes:
                self._has_failed, self._envs.infos = True, []
            self._connection.send(seq, self._describe(error, is_fatal, ends_episodes))
            if is_fatal:
                raise End from error

    def _describe(self, error: BaseException, fatal: bool, ends_episodes: bool) -> protocol.Error:
        env = None
        if isinstance(error, EnvRaised):
            env, error = self._first_row + error.env, error.__cause__
        kind, *bases = [_text(partial(name_of, each)) for each in type(error).__mro__]
        content, arrays, is_whole = pack_exception(error)
        # KeyError shows the repr of its key.
        says_key = type(error).__str__ is KeyError.__str__ and len(error.args) == 1
        return protocol.Error(
            env=env,
            kind=kind,
            message=_text(lambda: error.args[0] if says_key else error),
            traceback=_text(lambda: "".join(traceback.format_exception(error))),
            fatal=fatal,
            ends_episodes=ends_episodes,
            bases=bases,
            content=content,
            arrays=arrays,
            is_whole=is_whole,
        )

    def _reply(
        self, request: protocol.FromHead, buffers: list[Any]
    ) -> tuple[protocol.Reply, list[Any]]:
        """Execute a request. Return the reply and its buffers."""
        arrays: list[np.ndarray] = []
        dropped: list[str] = []  # keys of infos and metadata that cannot be sent
        value = self._handle(request, buffers)
        value = pack(value, arrays, dropped if isinstance(request, Setup) else None)
        infos, self._envs.infos = self._envs.infos, []
        packed = pack(infos, arrays, dropped)
        names = list(dict.fromkeys(dropped))[: protocol.MAX_DROPPED]
        return protocol.Reply(value, packed, names), to_buffers(arrays)

    def _handle(self, request: protocol.FromHead, buffers: list[Any]) -> Any:
        match request:
            case Setup():
                return self._set_up(request, *buffers)
            case Reset():
                observations = self._reset(*pickle.loads(buffers[0]))
                self._connection.waited = 0.0  # only waits for later requests count
                return observations
            case Step():
                if self._actor is not None:
                    self._actor.state = None  # a policy remembers none of the head's steps
                return self._envs.step(pickle.loads(buffers[0]))
            case CutOff():
                return self._envs.cut_off(*pickle.loads(buffers[0]))
            case protocol.Call():
                args, kwargs = pickle.loads(buffers[0])
                return self._envs.call(request.name, *args, **kwargs)
            case SetAttr():
                self._envs.set_attr(request.name, pickle.loads(buffers[0]))
            case Structure():
                self._load_structure(buffers[0])
            case Evaluate():
                return self._evaluate(request, *buffers)
        return None

    def _set_up(
        self, request: Setup, environments: Any, rule: Any, likeness: Any, *arrays: Any
    ) -> Told:
        self._first_row, self._rule = request.first_row, pickle.loads(rule)
        likeness = pickle.loads(likeness)
        likeness.take()
        # Modules are imported without the head's warning filters, because the head may have set
        # these after it imported the modules. Buffers are writable, because environments may write
        # to their arrays.
        buffers = open_shared(*arrays) if request.shares_memory else map(bytearray, arrays)
        *arguments, of_script = pickle.loads(environments, buffers=buffers)
        vars(sys.modules["__main__"]).update(of_script)
        likeness.filter_warnings()
        built = partial(self._connection.send, None, protocol.Built())
        arguments += built, request.first_row, request.seed
        self._envs = build_environments(*arguments)
        self._connection.settle()
        return tell(self._envs)

    def _reset(
        self, seeds: list[int | None], options: dict[str, Any] | None = None, mask: Any = None
    ) -> Any:
        if seeds[0] is not None:
            seed_globals(seeds[0], self._first_row)
        only = () if mask is None else (mask,)  # environments that step together accept no mask
        return self._envs.reset(seeds, options, *only)

    def _load_structure(self, structure: Any) -> None:
        _import_torch()
        from ..policy.actor import Actor

        if self._actor is None:
            self._actor = Actor()
        self._actor.load_structure(pickle.loads(structure))

    def _collect(self, seq: int | None, request: Collect) -> tuple[protocol.Part, list[Any]]:
        if self._rule.wants_pull(self._actor.version, request):
            self._pull(seq)
        waited, self._connection.waited = self._connection.waited, 0.0
        if self._next_seeds is not None:
            self._reset(self._next_seeds)
            self._next_seeds = None
        return pack_part(self._act(self._actor, request), waited)

    def _act(self, actor: Actor, request: Collect) -> RolloutPart:
        """Act and step as a request asks."""
        actor.prepare(request, self._rows)
        actor.before_step = self._take_in
        part = self._envs.collect(actor, request.num_steps)
        given = part.actions if actor.is_identity else actor.given
        check_part(part, self._envs.layout.single_action_space, given)
        return part

    def _evaluate(self, request: Evaluate, structure: Any, *weights: Any) -> tuple[np.ndarray, ...]:
        """Play episodes with an actor that shares nothing with the one for training."""
        _import_torch()
        from ..policy.actor import Actor

        actor = Actor(request.deterministic)
        actor.load(pickle.loads(structure), weights)
        self._next_seeds = request.seeds
        self._reset([request.seed + row for row in self._rows])
        scores = Scores(request.episodes, request.max_steps)
        numbers, seed = request.numbers, request.seed
        for chunk in itertools.count():
            collect = Collect(EVALUATED_STEPS, 0, 0, 0.0, numbers, seed=seed, rollout=chunk)
            scores.add(self._act(actor, collect))
            if scores.are_complete:
                return scores.arrays()

    def _take_in(self) -> None:
        """Keep messages that arrive while this worker acts. `Close` ends it between two steps."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        while (message := self._connection.receive(waits=False)) is not None:
            self._later.append(message)

    @property
    def _rows(self) -> range:
        return range(self._first_row, self._first_row + self._envs.num_envs)

    def _pull(self, seq: int | None) -> None:
        """Pull weights. If a difference does not fit the weights held here, pull all weights."""
        came, self._later = self._later, deque()
        for message in came:
            self._put_off(*message)
        while True:
            self._connection.send(seq, protocol.Pull(self._actor.version))
            self._actor.load_weights(*self._wait_for_weights())
            if self._actor.version:
                return

    def _wait_for_weights(self) -> tuple[Weights, list[Any]]:
        while True:
            seq, message, buffers = self._connection.receive()
            if isinstance(message, Weights):
                return message, buffers
            self._put_off(seq, message, buffers)

    def _put_off(self, seq: int | None, message: protocol.FromHead, buffers: list[Any]) -> None:
        """Keep a message that arrives while another request is being answered."""
        if isinstance(message, Structure):  # the weights that follow have this structure
            self._answer(seq, message, buffers)
        else:
            self._later.append((seq, message, buffers))


def _import_torch() -> None:
    """Import torch, which a worker that only steps does not need."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the machine's other cores are for other workers


def _text(make: Callable[[], Any]) -> str:
    """Return text about an error in a form that can be sent, even if the error's code raises."""
    try:
        data = str(make()).encode(errors="backslashreplace")  # lone surrogates cannot be sent
    except BaseException:  # the error raises while it is described
        return "<exception str() failed>"
    if len(data) > MAX_BYTES:
        half = MAX_BYTES // 2
        data = data[:half] + b"\n[...]\n" + data[-half:]
    return data.decode(errors="ignore")  # the cut may have split a character
