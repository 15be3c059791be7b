"""One family of exceptions, and functions that write texts for the user.

Misuse of the vector API raises Gymnasium's own errors instead.
"""

import os
import sys


class ClusterEnvError(RuntimeError):
    """Base class of everything the runtime raises by itself."""


class StartupError(ClusterEnvError):
    """The head cannot listen or use its launcher or keys, or a worker does not come up or does not
    match the head.
    """


class WorkerDiedError(ClusterEnvError):
    """A worker is gone: its process ended, or its link to the head is closed."""


class DeadlineError(ClusterEnvError):
    """Workers have not answered in the time given; the text names them."""


class ProtocolError(ClusterEnvError):
    """A message is not of the form :mod:`clusterenv_runtime.wire.protocol` describes."""


class Interrupted(ClusterEnvError):
    """`ClusterEnv.interrupt` was called, and the head was waiting for workers. Scripts raise it on
    signals, too.
    """


class CheckpointError(ClusterEnvError):
    """There is no run, or no checkpoint, or only damaged ones, or one cannot be saved; the text
    says which.
    """


class RunLockedError(ClusterEnvError):
    """Another process trains the run; the text says which."""


class LearnerLostError(ClusterEnvError):
    """Another learner of the run has died, does not come, or is silent."""


class EnvError(ClusterEnvError):
    """An environment raised on a worker; the text names env, worker and log and holds the remote
    traceback.

    This is the ``__cause__`` of the exception that is raised: the environment's own, if its class
    is imported in this process, or else one of the nearest base class that is. If there is none
    but `Exception`, this is raised itself.
    """


class EnvRaised(Exception):
    """On a worker: environment ``env`` of it raised this exception's cause, or is to blame."""

    def __init__(self, env: int) -> None:
        super().__init__(env)
        self.env = env


def printable(text: str, most: int = 1000, keeps: str = "\t") -> str:
    """Return the first characters of a peer's text in one line, with those escaped that a terminal
    would obey, except those in ``keeps``.
    """
    text = text if len(text) <= most else f"{text[:most]} [...]"
    return "".join(
        char if char.isprintable() or char in keeps else repr(char)[1:-1] for char in text
    )


def one_line(error: BaseException) -> str:
    """Return the name of an error and the first line of its text, escaped by `printable`."""
    return f"{type(error).__name__}: {printable(str(error).strip().partition(chr(10))[0])}"


def print_line(text: str) -> None:
    """Print a line, also to an output whose encoding lacks some of its characters.

    Raises:
        OSError: it cannot be written.
    """
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        sys.stdout.buffer.write(os.fsencode(f"{text}\n"))
        sys.stdout.buffer.flush()
