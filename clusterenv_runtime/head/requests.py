"""Requests to workers, which are numbered and kept until a response comes, and workers' errors.

The kept requests are sent again to a replacement. An error comes in place of a response.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from gymnasium.error import ResetNeeded

from ..errors import EnvError, printable
from ..wire.buffers import MAX_FRAME
from ..wire.exceptions import remade
from ..wire.part import RolloutPart
from ..wire.protocol import Error, Message
from .responses import OpenedReply
from .worker import Process, Worker

logger = logging.getLogger(__name__)


@dataclass
class Request:
    """A message to one worker that asks for a response."""

    seq: int
    worker: Worker
    message: Message
    buffers: tuple[Any, ...]
    response: OpenedReply | RolloutPart | None = None
    process: Process | None = None  # the process that responded

    @property
    def process_is_gone(self) -> bool:
        """Whether the process that responded has been replaced since."""
        return self.process is not self.worker.process


class Requests:
    """Numbers requests. Keeps each until its response comes, and the response until it is taken."""

    def __init__(self) -> None:
        self.seqs = itertools.count(1)
        self.outstanding: dict[int, Request] = {}  # by seq, oldest first
        self.answered: dict[int, Request] = {}  # by seq, in the order of the responses

    def add(self, worker: Worker, message: Message, buffers: Any) -> int:
        """Keep a request, and return its number."""
        seq = next(self.seqs)
        self.outstanding[seq] = Request(seq, worker, message, buffers)
        return seq

    def answer(self, seq: int, response: OpenedReply | RolloutPart) -> None:
        """Keep the response to an outstanding request."""
        request = self.outstanding.pop(seq)
        request.response = response
        request.process = request.worker.process
        self.answered[seq] = request

    def forget(self, seqs: Iterable[int]) -> None:
        """Stop waiting for these requests, and drop their responses."""
        for seq in seqs:
            self.outstanding.pop(seq, None)
            self.answered.pop(seq, None)

    def forget_worker(self, worker: Worker) -> None:
        """Stop waiting for the responses of this worker."""
        for request in self.of(worker):
            del self.outstanding[request.seq]

    def of(self, worker: Worker) -> list[Request]:
        """Return the outstanding requests of this worker, oldest first."""
        return [request for request in self.outstanding.values() if request.worker is worker]

    def are_settled(self, seqs: Collection[int]) -> bool:
        """Return whether none of these requests is outstanding."""
        return self.outstanding.keys().isdisjoint(seqs)

    def first_answered(self, seqs: Collection[int]) -> int | None:
        """Return the first of these requests that was answered, or None if none was."""
        return next((seq for seq in self.answered if seq in seqs), None)


class Failures:
    """The errors of all workers, kept until the user is told and until environments are reset."""

    def __init__(self) -> None:
        # Errors that the user has not been told of yet, with the workers' descriptions.
        self.untold: list[tuple[str, Error]] = []
        self.to_reset = set[int]()  # workers whose environments need a reset

    def add(self, worker: int, description: str, error: Error) -> None:
        """Note an error of a worker."""
        self.untold.append((description, error))
        if error.fatal:
            self.to_reset.discard(worker)  # nothing is left to reset
        elif error.ends:
            self.to_reset.add(worker)

    @property
    def must_reset(self) -> bool:
        """Whether all environments must be reset, and the user knows why."""
        return bool(self.to_reset) and not self.untold

    def raise_untold(self) -> None:
        """Raise the errors that the user has not been told of, if there are any."""
        if errors := self.untold:
            self.untold = []
            raise to_exception(errors)


def reset_needed(method: str) -> ResetNeeded:
    """Return the error of a method that cannot run until `Failures.to_reset` is empty."""
    why = "because one has raised, or a step was given up"
    return ResetNeeded(f"Cannot call `{method}` before all environments are `reset`, {why}.")


def to_exception(errors: list[tuple[str, Error]]) -> Exception:
    """Return the last of these errors as an exception, with an `EnvError` as its cause.

    The others are logged.
    """
    *others, (worker, last) = errors
    for name, error in others:
        logger.error("%s", _described(name, error))
    cause = EnvError(_described(worker, last))
    names = [last.kind, *last.bases]
    exception = remade(names, _lines(last.message), last.content, last.arrays, last.is_whole)
    if exception is None:
        return cause
    exception.__cause__ = cause
    return exception


def _described(worker: str, error: Error) -> str:
    which = "the policy or an environment" if error.env is None else f"environment {error.env}"
    text = f"{printable(error.kind)}: {_lines(error.message)}\n\n{_lines(error.traceback)}"
    return f"{which} on {worker} raised {text}"


def _lines(text: str) -> str:
    return printable(text, MAX_FRAME, keeps="\n\t")
