"""The script that runs a module of this package with the `sys.path` of its parent process.

With ``-m``, the current directory would come before the standard library. With PYTHONPATH, so would
this package's folder, also in the simulators that environments start.
"""

import json
import os
import runpy
import sys

PATH = "CLUSTERENV_PATH"  # the variable that holds `sys.path`, in JSON

if __name__ == "__main__":
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.environ.pop(PATH, None)
    sys.path[:] = [*sys.path[1:], folder] if path is None else json.loads(path)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
