"""Scripts in processes forked from one that has imported torch and other slow modules. That import
takes longer than many a run.
"""

import atexit
import functools
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

PRELOADED = [
    "gymnasium",
    "matplotlib.figure",
    "rich.progress",
    "torch.utils.tensorboard",
    "tyro",
    "zmq",
]
PRELOADED += ["torch._dynamo"]  # the first optimizer imports it


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run(script, directory, flags, variables):
    """Run a script to its end as ``subprocess.run`` does it, with its output as text."""
    with tempfile.TemporaryDirectory() as outputs:
        paths = [os.path.join(outputs, name) for name in ("stdout", "stderr")]
        process = _context().Process(
            target=_main, args=(str(script), str(directory), list(flags), variables, *paths)
        )
        process.start()
        process.join()
        stdout, stderr = (Path(path).read_text() if os.path.exists(path) else "" for path in paths)
    return subprocess.CompletedProcess([script, *flags], process.exitcode, stdout, stderr)


def _main(script, directory, flags, variables, stdout, stderr):
    """Be ``python SCRIPT``, from an interpreter's first line to its last."""
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
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
