"""Short runs of `tests.chaos`: training ends, and every requested transition is delivered once and
complete, whatever was hit.
"""

import contextlib

import pytest

from experiments.figures.network import Network, why_no_namespaces

from .chaos import train
from .machine import do_without, refusal_of_namespaces


@pytest.mark.long
@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_clusterenv.py", "--total-timesteps 40960 --eval-episodes 2"),
        ("dqn_clusterenv.py", "--total-timesteps 50000 --eval-episodes 2 --learning-starts 1000"),
    ],
)
def test_training_under_fire(tmp_path, script, flags):
    reason = why_no_namespaces()
    with contextlib.nullcontext() if reason else Network(4) as network:
        summary, report, faults = train(
            script, flags, 4, tmp_path, network, interval=1, timeout=600
        )
    asked = int(flags.split()[1])
    assert asked - 2048 < summary["global_step"] == report["transitions"] <= asked
    if "transitions_inserted" in summary:
        assert summary["transitions_inserted"] == summary["global_step"]
    assert len(faults) == 4 and len(report["restarts"]) >= 2
    # A worker that is stopped while it starts is lost after 60 s, and may then be hit again.
    assert report["longest"] < 240
    if reason:
        refusal = refusal_of_namespaces("net")
        do_without(f"passed, but no link was cut: {reason}", refusal)
