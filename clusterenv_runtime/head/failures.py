"""Errors that workers report, as the exceptions that the user gets."""

from __future__ import annotations

import builtins

import gymnasium as gym

from ..errors import EnvError, printable
from ..wire.codec import MAX_FRAME
from ..wire.protocol import Error

FOR_ITERATION = (
    StopIteration,
    StopAsyncIteration,
)  # raised anew they would end a loop or a generator of the user's


def to_exception(errors: list[tuple[str, Error]]) -> Exception:
    """Return what to raise for errors of workers that are described by texts: the last, with its
    `EnvError` as cause.

    All are logged in the words of Gymnasium's AsyncVectorEnv, where a worker is one environment,
    and ends. Here it ends only if its error is fatal; else a reset goes on.
    """
    for _, error in errors:
        if error.ends and error.env is not None:
            gym.logger.error(
                f"Received the following error from Worker-{error.env} - Shutting it down"
            )
            gym.logger.error("%s", _lines(error.traceback))
    worker, error = errors[-1]
    if error.ends and error.env is not None:
        gym.logger.error("Raising the last exception back to the main process.")
    which = "the policy or an environment" if error.env is None else f"environment {error.env}"
    text = f"{printable(error.kind)}: {_lines(error.message)}\n\n{_lines(error.traceback)}"
    env_error = EnvError(f"{which} on {worker} raised {text}")
    exception = _local_exception(error)
    if exception is None:
        return env_error
    exception.__cause__ = env_error
    return exception


def _lines(text: str) -> str:
    return printable(text, MAX_FRAME, keeps="\n\t")


def _local_exception(error: Error) -> Exception | None:
    """Make the exception a worker names, if it is one of Python's or Gymnasium's that takes one
    text.
    """
    module, _, name = error.kind.rpartition(".")
    kind = getattr({"builtins": builtins, "gymnasium.error": gym.error}.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(
        kind, FOR_ITERATION
    ):
        return None
    try:
        return kind(_lines(error.message))
    except TypeError:  # UnicodeDecodeError and the like want more
        return None
