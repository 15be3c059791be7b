"""A real Slurm cluster for the tests in this folder. Without Slurm, these tests are skipped, or
fail if REQUIRE_ALL=1.
"""

import pytest

from ..machine import do_without, refusal_of_namespaces
from . import lab


def cluster(networked):
    if reason := lab.obstacle(networked):
        refusal = refusal_of_namespaces("net", "uts", "mnt") if networked else None
        do_without(f"no Slurm cluster: {reason}", refusal)
    with lab.start(networked=networked) as slurm:
        yield slurm


@pytest.fixture(scope="session")
def slurm():
    """Start three nodes that share this machine's loopback."""
    yield from cluster(networked=False)


@pytest.fixture(scope="session")
def slurm_networked():
    """Start three nodes with a network namespace and an address each."""
    yield from cluster(networked=True)
