"""Errors that workers report: until the user is told, and until the environments are reset."""

from __future__ import annotations

import gymnasium as gym

from ..errors import EnvError, printable
from ..wire.buffers import MAX_FRAME
from ..wire.exceptions import remade
from ..wire.protocol import Error


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

    All are logged in the words of Gymnasium's AsyncVectorEnv. There a worker is one environment,
    and ends. Here a worker ends only if its error is fatal; else it goes on after a reset.
    """
    worker, last = errors[-1]
    for _, error in errors:
        if error.ends_episodes and error.env is not None:
            which = f"Worker-{error.env}"
            gym.logger.error(f"Received the following error from {which} - Shutting it down")
            gym.logger.error("%s", _lines(error.traceback))
            if error is last:
                gym.logger.error("Raising the last exception back to the main process.")
    which = "the policy or an environment" if last.env is None else f"environment {last.env}"
    text = f"{printable(last.kind)}: {_lines(last.message)}\n\n{_lines(last.traceback)}"
    env_error = EnvError(f"{which} on {worker} raised {text}")
    names = [last.kind, *last.bases]
    text = _lines(last.message)
    exception = remade(names, text, last.content, last.arrays, last.is_whole)
    if exception is None:
        return env_error
    exception.__cause__ = env_error
    return exception


def _lines(text: str) -> str:
    return printable(text, MAX_FRAME, keeps="\n\t")
