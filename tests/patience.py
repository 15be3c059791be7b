"""Timeouts of tests that hold on machines of any load.

A test allows a long time for an expected event. An event that a test must not wait for takes even
longer. If a behavior shows only with a short timeout, the test tries longer timeouts, too.
"""

import contextlib
import os
import select
import signal
import time

# seconds: at least ten times what any event takes on an idle machine, and less than a test may take
PATIENCE = 300.0
HOUR = 3600.0  # seconds: the duration of an event that a test must not wait for


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
    """Wait until processes have ended, which need not be children of this one.

    With 0 seconds, they must have ended already.
    """
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
    """Kill a process and wait until it has ended."""
    os.kill(pid, signal.SIGKILL)
    assert_ended([pid])


def with_more_time(check, *arguments):
    """Call ``check`` with each of these timeouts in turn, shorter ones first, until it passes.

    On a busy machine a check may fail with a short timeout, for example because a worker gets no
    core for that long and counts as lost. A real mistake fails with the longest timeout, too.
    """
    import pytest  # not at the top, because workers import this module and do not need pytest

    for argument in arguments[:-1]:
        try:
            return check(argument)
        except (Exception, pytest.fail.Exception) as error:
            print(f"with {argument} it failed: {error!r}")
    return check(arguments[-1])
