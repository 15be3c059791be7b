"""Runs a module of this package with the `sys.path` of the process that starts this one.

By ``-m`` the current directory would come before the standard library, and by PYTHONPATH so would
the folder of this package, also in the simulators that environments start.
"""

import json
import os
import runpy
import sys

PATH = "CLUSTERENV_PATH"  # the variable that has `sys.path`, in JSON

if __name__ == "__main__":
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.environ.pop(PATH, None)
    sys.path[:] = [*sys.path[1:], folder] if path is None else json.loads(path)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
