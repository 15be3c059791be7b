"""One family of exceptions, and how texts reach the user.

Misuse of the vector API raises Gymnasium's own errors instead.
"""

import os
import sys


class ClusterEnvError(RuntimeError):
    """Base class of everything the runtime raises by itself."""


class StartupError(ClusterEnvError):
    """The head cannot listen, its launcher or keys cannot be used, or a worker does not come up or
    match the head.
    """


class WorkerDiedError(ClusterEnvError):
    """A worker is gone: its process ended, or its link to the head is closed."""


class DeadlineError(ClusterEnvError):
    """Workers have not answered in the time given; the text names them."""


class ProtocolError(ClusterEnvError):
    """A message is not of the form :mod:`clusterenv_runtime.wire.protocol` describes."""


class Interrupted(ClusterEnvError):
    """`ClusterEnv.interrupt` was called: raised where the head waits for workers. Scripts raise it
    on signals, too.
    """


class CheckpointError(ClusterEnvError):
    """There is no run, no checkpoint, or none that is whole; the text says which."""


class RunLockedError(ClusterEnvError):
    """Another process trains the run; the text says which."""


class LearnerLostError(ClusterEnvError):
    """Another learner of the run has died, does not come, or is not like this one; the text says
    which.
    """


class EnvError(ClusterEnvError):
    """An environment raised on a worker; the text names env, worker and log and holds the remote
    traceback.

    Where the original exception is one of Python's or Gymnasium's, that one is raised and this is
    its ``__cause__``.
    """


def printable(text: str, most: int = 1000, keeps: str = "\t") -> str:
    """Escape in the first of a peer's words what a terminal would obey, but for what is in
    ``keeps``; no line ends.
    """
    text = text if len(text) <= most else f"{text[:most]} [...]"
    return "".join(
        char if char.isprintable() or char in keeps else repr(char)[1:-1] for char in text
    )


def one_line(error: BaseException) -> str:
    """Return what an error is and the first line of what it says, as `printable` escapes it."""
    return f"{type(error).__name__}: {printable(str(error).strip().partition(chr(10))[0])}"


def print_line(text: str) -> None:
    """Print a line, also to an output whose encoding lacks some of it, such as a name in a path.

    Raises:
        OSError: it cannot be written.
    """
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        sys.stdout.buffer.write(os.fsencode(f"{text}\n"))
        sys.stdout.buffer.flush()
