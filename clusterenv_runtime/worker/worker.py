"""A worker: it is handed its environments, and answers requests, one after another."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..envs.registry import load_registry
from ..policy.sync import SyncRule
from ..wire import protocol
from ..wire.codec import pack
from ..wire.part import fault_of
from .connection import Connection, End
from .one_by_one import EnvRaised, EnvsOneByOne

if TYPE_CHECKING:
    from ..policy.actor import Actor

MAX_TEXT_BYTES = (
    2**16
)  # of each of an error's three texts, which must fit in a frame, `codec.MAX_FRAME`


def build_environments(registry: dict[str, bytes | str], **arguments: Any) -> Any:
    """Build a worker's rows as a `blueprint.Blueprint` says, with what the user has registered at
    the head.
    """
    load_registry(registry)
    env_fns = arguments["env_fns"]
    return env_fns.build(**arguments) if callable(env_fns) else EnvsOneByOne(**arguments)


class Worker:
    """Environments, and what acts in them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # What came while weights were awaited.
        self._later: deque[tuple[int | None, protocol.Request, list[Any]]] = deque()
        self._envs: Any = None  # what `build_environments` returns
        self._first_row, self._rule = 0, SyncRule()
        self._actor: Actor | None = None
        self._failed = False  # whether an environment has raised since all were reset

    def run(self) -> None:
        """Answer requests until the head says that it is enough, or one has failed."""
        with contextlib.suppress(End):
            while True:
                self._answer(
                    *(self._later.popleft() if self._later else self._connection.receive())
                )

    def close(self) -> None:
        """Close the environments."""
        if self._envs is not None:
            self._envs.close()

    def _answer(self, seq: int | None, request: protocol.Request, buffers: list[Any]) -> None:
        if isinstance(request, protocol.Reset) and not request.partial:
            self._failed = False
        if self._failed and isinstance(
            request, protocol.Reset | protocol.Step | protocol.CutOff | protocol.Collect
        ):
            return  # it was asked before the head knew, and has been given up
        out, dropped = (
            list[Any](),
            list[str](),
        )  # the answer's buffers, and infos that cannot be sent
        try:
            if isinstance(request, protocol.Collect):
                answer = self._collect(seq, request, out)
            else:
                value = pack(self._handle(request, buffers), out)
                infos, self._envs.infos = self._envs.infos, []
                infos = pack(infos, out, dropped)
                answer = protocol.Reply(
                    value, infos, list(dict.fromkeys(dropped))[: protocol.MAX_DROPPED]
                )
            self._connection.send(seq, answer, *out)
        except End:
            raise
        except BaseException as error:
            # Environments that were not built cannot go on, nor can a policy that was not loaded.
            # Those that were reset or stepped can, once they are reset.
            fatal = isinstance(request, protocol.Setup | protocol.Structure)
            ends_episodes = not fatal and not isinstance(request, protocol.Call | protocol.SetAttr)
            if ends_episodes:
                self._failed, self._envs.infos = True, []
            self._connection.send(seq, self._describe(error, fatal, ends_episodes))
            if fatal:
                raise End from error

    def _describe(self, error: BaseException, fatal: bool, ends_episodes: bool) -> protocol.Error:
        env = None
        if isinstance(error, EnvRaised):
            env, error = self._first_row + error.env, error.__cause__
        return protocol.Error(
            env=env,
            kind=_text(lambda: f"{type(error).__module__}.{type(error).__qualname__}"),
            message=_text(lambda: error.args[0] if len(error.args) == 1 else error),
            traceback=_text(lambda: "".join(traceback.format_exception(error))),
            fatal=fatal,
            ends_episodes=ends_episodes,
        )

    def _handle(self, request: protocol.Request, buffers: list[Any]) -> Any:
        match request:
            case protocol.Setup():
                paths = map(os.fsdecode, request.sys_path)
                sys.path.extend(path for path in paths if path not in sys.path)
                self._first_row = request.first_row
                self._rule = pickle.loads(buffers[1])
                built = partial(self._connection.send, None, protocol.Built())
                self._envs = build_environments(built=built, **pickle.loads(buffers[0]))
                self._connection.settle()
            case protocol.Reset():
                return self._reset(*pickle.loads(buffers[0]))
            case protocol.Step():
                if self._actor is not None:
                    self._actor.state = None  # nobody remembers what the head does
                return self._envs.step(pickle.loads(buffers[0]))[:4]
            case protocol.CutOff():
                return self._envs.cut_off(*pickle.loads(buffers[0]))
            case protocol.Call():
                args, kwargs = pickle.loads(buffers[0])
                return self._envs.call(request.name, *args, **kwargs)
            case protocol.SetAttr():
                self._envs.set_attr(request.name, pickle.loads(buffers[0]))
            case protocol.Structure():
                self._load_structure(buffers[0])
        return None

    def _reset(self, seeds: list[int | None], options: dict[str, Any] | None, mask: Any) -> Any:
        if mask is not None:
            options = {**options, "reset_mask": mask}
        if seeds[0] is not None:
            _seed_globals([seeds[0], self._first_row])
        observations, _ = self._envs.reset(seed=seeds, options=options)
        self._connection.waited = 0.0  # from here on the head may have work
        return observations

    def _load_structure(self, structure: Any) -> None:
        from ..policy.actor import (
            Actor,
        )  # brings torch, which a worker that only steps does not need

        if self._actor is None:
            import torch

            torch.set_num_threads(1)  # workers share their machine with other workers
            self._actor = Actor()
        self._actor.load_structure(pickle.loads(structure))

    def _collect(self, seq: int | None, request: protocol.Collect, out: list[Any]) -> protocol.Part:
        if self._rule.wants_pull(self._actor.version, request):
            self._pull(seq)
        self._actor.prepare(request, range(self._first_row, self._first_row + self._envs.num_envs))
        waited, self._connection.waited = self._connection.waited, 0.0
        part = self._envs.collect(self._actor, request.num_steps)
        if (fault := fault_of(part, self._envs.single_action_space, self._actor.given)) is not None:
            raise ValueError(fault)
        return protocol.Part(part.pack(out), waited)

    def _pull(self, seq: int | None) -> None:
        self._connection.send(seq, protocol.Pull(self._actor.version))
        while True:
            other, message, buffers = self._connection.receive()
            if isinstance(message, protocol.Weights):
                break
            if isinstance(message, protocol.Structure):  # the weights to come are its
                self._answer(other, message, buffers)
            else:
                self._later.append((other, message, buffers))
        self._actor.load_weights(message, buffers)
        if not self._actor.version:  # they did not fit what is held: all of them, then
            self._pull(seq)


def _seed_globals(seed: list[int]) -> None:
    """Seed the random numbers that environments may draw beside their own; no policy draws them."""
    first, second = np.random.SeedSequence(seed, spawn_key=(0,)).generate_state(2)
    random.seed(int(first))
    np.random.seed(second)


def _text(make: Callable[[], Any]) -> str:
    """Return a text about an error so that it can be sent, whatever the error's own code does."""
    try:
        data = str(make()).encode(errors="backslashreplace")  # lone surrogates cannot be sent
    except BaseException:  # an error that raises while it is described is reported all the same
        return "<exception str() failed>"
    if len(data) > MAX_TEXT_BYTES:
        half = MAX_TEXT_BYTES // 2
        data = data[:half] + b"\n[...]\n" + data[-half:]
    return data.decode(errors="ignore")  # the cut may have gone through a character
