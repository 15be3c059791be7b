"""Requirements of tests that a machine may lack.

If one is missing, the test is skipped. With REQUIRE_ALL=1, as in .ci/run, the test fails, because
everything is installed there, and nobody would notice a test that never runs. If the kernel refuses
a system call, the test is skipped everywhere.
"""

import os
import shutil
import subprocess
import sys

import pytest

# Linux's flags CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID and CLONE_NEWNET.
NAMESPACES = {"mnt": 0x20000, "uts": 0x4000000, "pid": 0x20000000, "net": 0x40000000}
UNSHARE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os._exit(libc.unshare(int(sys.argv[1])) and ctypes.get_errno())
"""


def do_without(what, refusal=None):
    """Skip this test because something is missing. With REQUIRE_ALL=1, fail it instead.

    If the kernel refuses a system call, for the reason ``refusal``, the test is always skipped.
    """
    if refusal is not None:
        pytest.skip(f"{what}; the kernel says: {refusal}")
    (pytest.fail if os.environ.get("REQUIRE_ALL") == "1" else pytest.skip)(what)


def refusal_of_namespaces(*kinds):
    """Return why the kernel refuses new namespaces of these kinds, or None if it does not."""
    flags = sum(NAMESPACES[kind] for kind in kinds)
    code = subprocess.run([sys.executable, "-c", UNSHARE, str(flags)]).returncode
    return os.strerror(code) if code else None


def process_namespace():
    """Return the prefix of a command that runs it as the first process of a new pid namespace.

    Without such namespaces, skip or fail this test.
    """
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None:
        do_without("there is no command unshare (package util-linux)")
    result = subprocess.run([*container, "true"], capture_output=True, text=True)
    if result.returncode:
        do_without(f"no process namespaces: {result.stderr.strip()}", refusal_of_namespaces("pid"))
    return container
