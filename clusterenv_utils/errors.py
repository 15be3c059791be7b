"""The errors that end a script with one line, which of them are made of others, and the line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import gymnasium as gym
import numpy as np

from clusterenv_runtime import (
    EnvError,
    Interrupted,
    ProtocolError,
    Rollout,
    StartupError,
    WorkerDiedError,
)
from clusterenv_runtime.arrays import not_finite
from clusterenv_runtime.errors import one_line

ATARI = "scripts/ppo_atari_clusterenv.py or scripts/dqn_atari_clusterenv.py"


class ScriptError(Exception):
    """A user's mistake, or a run that cannot go on; the message is one line.

    Control characters in it are escaped, because parts may come from a stranger's checkpoint.
    """

    def __init__(self, message: object) -> None:
        super().__init__(printable(str(message)))


class CheckpointError(ScriptError):
    """A run, checkpoint or model is missing or unusable, or cannot be saved."""


class RunLockedError(ScriptError):
    """Another process is training the run; the message names it."""


def printable(text: str) -> str:
    """Return a text in one line, with its unprintable characters escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def check(fine: Any, message: object) -> None:
    """Raise `ScriptError` with this message if something is not ``fine``."""
    if not fine:
        raise ScriptError(message)


@contextmanager
def one_line_for(*kinds: type[Exception], text: str = "") -> Iterator[None]:
    """Turn these errors in this block into a `ScriptError`: ``text``, and their message."""
    try:
        yield
    except kinds as error:
        says = (isinstance(error, OSError) and error.strerror) or error
        raise ScriptError(f"{text}: {says}" if text else says) from error


def print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error that ends the process: in one line if the message says enough."""
    if issubclass(kind, ScriptError | Interrupted | StartupError | WorkerDiedError | ProtocolError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


@contextmanager
def one_line_for_environments(args: Any) -> Iterator[None]:
    """Raise a `ScriptError` if environments cannot be made in this block because of flags.

    An environment's other errors are raised as they are.
    """
    module, colon, _ = args.env_id.rpartition(":")
    is_file = "/" in module or module.endswith(".py")
    says = "the part before the colon is a module, as in an import: my_env for the file my_env.py"
    check(not is_file, f"--env-id {args.env_id}: {says}")
    flags = [f"--env-kwargs {args.env_kwargs}"] if args.env_kwargs else []
    flags += ["--capture-video"] if args.capture_video else []
    try:
        yield
    except ModuleNotFoundError as error:
        where = "install it, or put it beside the script or into the current directory"
        text = f"{str(error).rstrip('.')}; --env-id {args.env_id}: {where}"
        raise ScriptError(text) from error
    except gym.error.Error as error:
        hint = ""
        is_unknown = isinstance(error, gym.error.UnregisteredEnv)
        if args.env_id.startswith("ALE/"):
            hint = f" Atari's games need ale-py, and {ATARI}"
        elif is_unknown and colon:
            hint = f" The module {module} registers no environment of this name"
        elif is_unknown:
            example = f"--env-id my_env:{args.env_id}"
            hint = f" If it is your own, name the module that registers it, too: {example}"
        raise ScriptError(f"{error}{hint}") from error
    except Exception as error:
        is_of_env = isinstance(error, EnvError) or isinstance(error.__cause__, EnvError)
        if not (flags and is_of_env):
            raise
        raise ScriptError(f"{' '.join(flags)}: {one_line(error)}") from error


def check_finite(rollout: Rollout) -> None:
    """Raise Interrupted if observations are not finite.

    Final observations of terminations do not count, because nothing follows them.
    """
    wrong = not_finite(rollout.observations, 2).any(0) | not_finite(rollout.next_observations, 1)
    steps, envs = np.nonzero(rollout.terminations | rollout.truncations)
    goes_on = ~rollout.terminations[steps, envs]
    wrong[envs[goes_on & not_finite(rollout.final_observations, 1)]] = True
    if wrong.any():
        rows = np.unique(rollout.rows[wrong]).tolist()
        raise Interrupted(f"environments {rows} gave observations that are not finite")
