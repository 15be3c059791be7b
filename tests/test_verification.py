"""The protocol's model and the simulation: nothing breaks them, and they notice mistakes."""

import subprocess
import sys
from pathlib import Path

import pytest

from verification import mutations
from verification.bugs import BUGS
from verification.model import Model
from verification.search import MAX_RESTARTS, PROGRAMS, find, search

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
@pytest.mark.parametrize(("calls", "faults", "states"), PROGRAMS)
def test_no_order_of_events_breaks_the_protocol(calls, faults, states):
    result = search(Model(2, calls, faults, MAX_RESTARTS))
    assert (result.problem, result.states) == ("", states), result.events


def test_the_programs_have_more_than_a_million_states():
    assert sum(states for *_, states in PROGRAMS) > 1_000_000


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_model_is_found(bug):
    assert find(bug).problem


def simulate(*flags, timeout=1200):
    command = [sys.executable, "-m", "verification.simulate", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_no_schedule_breaks_the_runtime():
    result = simulate("--schedules", "100")
    assert result.returncode == 0 and "100 schedules" in result.stdout, (
        result.stdout + result.stderr
    )


@pytest.mark.long
def test_a_seed_always_gives_the_same_run():
    first, second = (simulate("--seed", "3", "--trace") for _ in range(2))
    events = [line for line in first.stdout.splitlines() if "schedules in" not in line]
    assert len(events) > 10 and events == [
        line for line in second.stdout.splitlines() if "schedules in" not in line
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", list(mutations.MUTATIONS)[:4])
def test_a_mistake_in_the_runtime_is_found(name):
    is_found, text = mutations.find(name, 3000)
    assert is_found, text
