"""Tests that this machine cannot run: they are skipped, or fail if nothing may be missing."""

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
def test_a_missing_feature_fails_a_test_only_if_required_and_not_refused_by_the_kernel(
    monkeypatch, required, refusal, outcome
):
    monkeypatch.setenv("REQUIRE_ALL", required)
    with pytest.raises(outcome.Exception, match=f"^no wings.*{refusal or ''}"):
        do_without("no wings", refusal)


def test_a_kernel_that_refuses_namespaces_is_detected():
    """The kernel does not grant namespaces to processes without this capability."""
    code = "from tests.machine import refusal_of_namespaces; print(refusal_of_namespaces('net'))"
    command = [*(WITHOUT_PRIVILEGES if os.geteuid() == 0 else []), sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "Operation not permitted\n", result.stderr
