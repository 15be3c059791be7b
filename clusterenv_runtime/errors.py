"""The runtime's exceptions.

Misuse of the vector API raises Gymnasium's own errors instead.
"""


class ClusterEnvError(RuntimeError):
    """Base class of the runtime's exceptions."""


class StartupError(ClusterEnvError):
    """The head or a worker cannot start.

    The head cannot listen, or cannot use its launcher or its keys; or a worker does not come up in
    time, or does not match the head.
    """


class WorkerDiedError(ClusterEnvError):
    """A worker's process has ended, or its link has closed, and no replacement takes its place."""


class ProtocolError(ClusterEnvError):
    """A message does not have the form that :mod:`clusterenv_runtime.messages` describes.

    It ends the run if a worker has sent it.
    """


class Interrupted(ClusterEnvError):
    """`ClusterEnv.interrupt` ended a wait for workers.

    The scripts also raise this error to stop a run, for example on a signal.
    """


class EnvError(ClusterEnvError):
    """An environment or a policy raised an exception on a worker.

    The error message names the environment, the worker and its log, and holds the remote traceback.
    This error is the ``__cause__`` of the exception that the head raises. That exception has the
    environment's class if this process has imported it, or otherwise the nearest base class that
    this process has imported. If there is none but `Exception`, the head raises this error itself.
    """


class EnvRaised(Exception):
    """On a worker: the environment of this row raised this exception's cause, or is to blame."""


def one_line(error: BaseException) -> str:
    """Return an error's class name and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
