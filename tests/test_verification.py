"""The model of the protocol: that no order of events breaks it, and that the search would notice."""

from array import array

import pytest

from verification.bugs import BUGS
from verification.model import Model
from verification.search import MAX_RESTARTS, PROGRAMS, find, first_without_way, search


@pytest.mark.parametrize(("calls", "faults", "states"), PROGRAMS)
def test_no_order_of_events_breaks_the_protocol(calls, faults, states):
    result = search(Model(2, calls, faults, MAX_RESTARTS))
    assert (result.problem, result.states) == ("", states), result.events


def test_these_are_more_than_a_million_states():
    assert sum(states for *_, states in PROGRAMS) > 1_000_000


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_model_is_found(bug):
    assert find(bug).problem


def test_a_state_from_which_there_is_no_way_to_the_end():
    # 0 -> 1 -> 2, 1 -> 3, and 3 -> 4 -> 3.
    sources, targets = array("l", [0, 1, 1, 3, 4]), array("l", [1, 2, 3, 4, 3])
    assert first_without_way([False, False, True, False, False], sources, targets) == 3
    assert first_without_way([False, False, True, False, True], sources, targets) is None
