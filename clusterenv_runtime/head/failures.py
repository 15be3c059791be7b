"""Errors that workers report: until the user is told, and until the environments are reset."""

from __future__ import annotations

import logging

from ..errors import EnvError, printable
from ..wire.buffers import MAX_FRAME
from ..wire.exceptions import remade
from ..wire.protocol import Error

logger = logging.getLogger(__name__)


class Failures:
    """The errors of all workers."""

    def __init__(self) -> None:
        # the errors of which the user is not told yet, with the workers' descriptions
        self.untold: list[tuple[str, Error]] = []
        self.to_reset = set[int]()  # workers whose environments wait for a reset

    def add(self, worker: int, description: str, error: Error) -> None:
        """Note an error of a worker."""
        self.untold.append((description, error))
        if error.fatal:
            self.to_reset.discard(worker)  # nothing is left to reset
        elif error.ends:
            self.to_reset.add(worker)

    def raise_untold(self) -> None:
        """Raise the errors of which the user was not told, if there are any."""
        if errors := self.untold:
            self.untold = []
            raise to_exception(errors)


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
