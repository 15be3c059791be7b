"""How long tests wait, for machines of any load. A test gives expected events a long time. An event
that it must not wait for takes even longer. A behavior that only a short timeout shows is tried
once more with a longer one.
"""

import contextlib
import os
import select
import signal
import time

# seconds: at least ten times what anything here takes on an idle machine, and less than a test may
PATIENCE = 300.0
HOUR = 3600.0  # seconds: an event that a test must not wait for takes so long


@contextlib.contextmanager
def at_most(seconds=PATIENCE):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def wait_until(condition, seconds=PATIENCE):
    """Poll until the condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain"
        time.sleep(0.01)


def assert_ended(pids, seconds=PATIENCE):
    """Wait until processes, ours or not, have ended; with 0 seconds they must have ended before."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, *_ = select.select([process], [], [], max(deadline - time.monotonic(), 0))
        os.close(process)
        assert ended, f"process {pid} still runs"


def kill(pid):
    """End a process, and wait until it has ended."""
    os.kill(pid, signal.SIGKILL)
    assert_ended([pid])


def with_more_time(check, *arguments):
    """Call ``check`` with each of these timeouts in turn, shorter ones first, until it passes.

    A busy machine breaks the short one: it loses a worker when it leaves its link without a core
    for so long. A real mistake fails with the long one, too.
    """
    import pytest  # workers import this module, and do not need pytest

    for argument in arguments[:-1]:
        try:
            return check(argument)
        except (Exception, pytest.fail.Exception) as error:
            print(f"with {argument} it failed: {error!r}")
    return check(arguments[-1])
