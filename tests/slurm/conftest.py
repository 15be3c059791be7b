"""A real Slurm cluster for the tests of this folder; without one they are skipped, or fail if REQUIRE_SLURM=1."""

import os

import pytest

from . import lab


def do_without(what):
    """Skip a test for what is missing, or fail if nothing may be."""
    (pytest.fail if os.environ.get("REQUIRE_SLURM") == "1" else pytest.skip)(what)


def cluster(networked):
    if reason := lab.obstacle(networked):
        do_without(f"no Slurm cluster: {reason}")
    with lab.start(networked=networked) as slurm:
        yield slurm


@pytest.fixture(scope="session")
def slurm():
    """Three nodes that share this machine's loopback."""
    yield from cluster(networked=False)


@pytest.fixture(scope="session")
def slurm_networked():
    """Three nodes with a network namespace and an address each."""
    yield from cluster(networked=True)
