"""A test that cannot run here is skipped, but not unnoticed where nothing may be missing."""

import os
import subprocess
import sys

import pytest

from .machine import do_without
from .scripts import ROOT

WITHOUT_PRIVILEGES = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]


@pytest.mark.parametrize(
    ("required", "refusal", "outcome"),
    [
        ("", None, pytest.skip),
        ("1", None, pytest.fail),
        ("1", "Operation not permitted", pytest.skip),
    ],
)
def test_what_is_missing_fails_a_test_only_where_it_is_required_and_the_kernel_has_it(
    monkeypatch, required, refusal, outcome
):
    monkeypatch.setenv("REQUIRE_ALL", required)
    with pytest.raises(outcome.Exception, match=f"^no wings.*{refusal or ''}"):
        do_without("no wings", refusal)


def test_the_kernel_is_asked_whether_it_makes_namespaces():
    """The kernel grants them to nobody without this capability."""
    code = "from tests.machine import refusal_of_namespaces; print(refusal_of_namespaces('net'))"
    command = [*(WITHOUT_PRIVILEGES if os.geteuid() == 0 else []), sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "Operation not permitted\n", result.stderr
