"""Running scripts in processes that are forked from one with torch and other slow modules imported.

These imports take longer than many runs. For this reason the scripts' fork servers are forked from
there, too.
"""

import atexit
import functools
import io
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

from clusterenv_runtime.launchers import fork_server

PRELOADED = [
    "gymnasium",
    "matplotlib.figure",
    "rich.progress",
    "torch.utils.tensorboard",
    "tyro",
    "zmq",
]
PRELOADED += ["torch._dynamo"]  # imported by the first optimizer


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run(script, directory, flags, variables):
    """Run a script to its end as ``subprocess.run`` does, with its output as text."""
    with tempfile.TemporaryDirectory() as outputs:
        paths = [os.path.join(outputs, name) for name in ("stdout", "stderr")]
        process = _context().Process(
            target=_main, args=(str(script), str(directory), list(flags), variables, *paths)
        )
        process.start()
        process.join()
        stdout, stderr = (Path(path).read_text() if os.path.exists(path) else "" for path in paths)
    return subprocess.CompletedProcess([script, *flags], process.exitcode, stdout, stderr)


class ForkServer:
    """A process that waits, and becomes the script's fork server, so that no new Python starts.

    It is forked before the script has threads or sockets. This class has the part of the interface
    of `subprocess.Popen` that `launchers.fork_server` uses.
    """

    def __init__(self):
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._link.close()
            try:
                self._be_one(theirs)
            finally:
                os._exit(1)
        theirs.close()

    def _be_one(self, link):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        data, files, _, _ = socket.recv_fds(link, 2**20, 1)
        if not data:
            os._exit(0)  # the script has not forked any workers
        link.close()
        os.setpgid(0, 0)
        os.dup2(*files, 0)
        os.close(*files)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        code, variables = json.loads(data)
        os.environ.clear()
        os.environ.update(variables)
        sys.modules["torch"].set_num_threads(int(variables["OMP_NUM_THREADS"]))
        sys.argv = ["-c"]
        exec(code, {"__name__": "__main__"})
        threading._shutdown()
        atexit._run_exitfuncs()

    def start(self, command, env, stdin, **_):
        data = json.dumps([command[-1], dict(env)]).encode()
        socket.send_fds(self._link, [data], [stdin])
        self._link.close()
        return self

    def wait(self):
        os.waitpid(self.pid, 0)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


def _prepare_fork_server():
    """Let the script's first fork server be a process that exists already."""
    servers = [ForkServer()]

    def start(*args, **kwargs):
        start = servers.pop().start if servers else subprocess.Popen
        return start(*args, **kwargs)

    fork_server.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})


def _main(script, directory, flags, variables, stdout, stderr):
    """Act as ``python SCRIPT``, from the interpreter's start to its exit."""
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [script, *flags]
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [
        os.path.dirname(script),
        *map(os.path.abspath, paths),
        *(path for path in sys.path if path),
    ]
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8")
        for number in (1, 2)
    )
    code = 0
    try:
        _prepare_fork_server()
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
