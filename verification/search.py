"""A search of all states that the model of the protocol can reach.

    python -m verification.search                 # about a minute
    python -m verification.search --large         # more states: two minutes, and 3 GB of memory
    python -m verification.search --bugs          # finds bugs that it puts into the model

In addition to the model's own checks, this checks that from every state the run can come to its end
without further luck, good or bad. So there is no deadlock, and nobody waits forever.
"""

import argparse
import sys
import time
from array import array
from typing import NamedTuple

from .bugs import BUGS, model_with
from .model import Event, Model
from .state import Violation

MAX_RESTARTS = 1
# The events that may happen, in any order: the user's calls, and the number of faults. Then the
# number of states that result.
PROGRAMS = [
    ({"publish": 1, "structure": 1, "send": 2}, 1, 663_712),
    ({"publish": 2, "rollout": 2, "interrupt": 1}, 1, 168_238),
    ({"step": 2, "interrupt": 1}, 2, 583_506),
]
LARGE = [({"publish": 2, "send": 2}, 1, 388_952), ({"publish": 2, "send": 3}, 1, 3_398_170)]
# The settings that find the bugs, with one worker.
SMALL = [
    ({"step": 3, "interrupt": 1}, 1),
    ({"publish": 1, "rollout": 1, "step": 2}, 1),
    ({"step": 2, "interrupt": 1}, 2),
    ({"publish": 1, "rollout": 2, "interrupt": 1}, 2),
    ({"publish": 1, "structure": 1, "send": 3}, 2),
]


class Result(NamedTuple):
    """The result of a search."""

    states: int
    transitions: int
    seconds: float
    problem: str  # empty for none
    events: list[Event]  # the events that lead to the problem


def search(model: Model) -> Result:
    """Visit every reachable state, nearest first, until one breaks a rule. Then find dead ends."""
    start, transitions = time.perf_counter(), 0
    numbers, states = {model.first: 0}, [model.first]
    # For each state, the state and the event from which it was first reached.
    parents, events = (
        array("l", [-1]),
        list[Event]([()]),
    )
    sources, targets = array("l"), array("l")  # of all transitions without bad luck

    def result(problem: str = "", last: int = 0) -> Result:
        path = []
        while last > 0:
            path.append(events[last])
            last = parents[last]
        return Result(len(states), transitions, time.perf_counter() - start, problem, path[::-1])

    for number, state in enumerate(states):  # the list grows during the loop
        try:
            for event, after, is_bad_luck in model.successors(state):
                transitions += 1
                target = numbers.setdefault(after, len(states))
                if target == len(states):
                    states.append(after)
                    parents.append(number)
                    events.append(event)
                if not is_bad_luck:
                    sources.append(number)
                    targets.append(target)
        except Violation as violation:
            return result(str(violation), number)
    dead_end = first_without_way([state.over for state in states], sources, targets)
    return (
        result()
        if dead_end is None
        else result(f"there is no way to the end from {states[dead_end]}", dead_end)
    )


def first_without_way(is_end: list[bool], sources: array, targets: array) -> int | None:
    """Return the number of the first state from which no end can be reached, or None."""
    into: list[list[int]] = [[] for _ in is_end]
    for source, target in zip(sources, targets, strict=True):
        into[target].append(source)
    reaches, todo = list(is_end), [number for number, is_one in enumerate(is_end) if is_one]
    while todo:
        for source in into[todo.pop()]:
            if not reaches[source]:
                reaches[source] = True
                todo.append(source)
    return next((number for number, does in enumerate(reaches) if not does), None)


def find(bug: str) -> Result:
    """Search the model with a bug, in one setting after another until the bug is found.

    Return the last result.
    """
    for calls, faults in SMALL:
        result = search(model_with(bug)(1, calls, faults, MAX_RESTARTS))
        if result.problem:
            break
    return result


def main():
    parser = argparse.ArgumentParser(description="Search all states of the protocol's model.")
    parser.add_argument("--large", action="store_true", help="search more states")
    parser.add_argument(
        "--bugs", action="store_true", help="put bugs into the model, and find them"
    )
    args = parser.parse_args()
    failed = False
    if args.bugs:
        for bug in BUGS:
            result = find(bug)
            failed |= not result.problem
            found = f"found after {len(result.events)} events" if result.problem else "NOT FOUND"
            print(f"{bug}: {found}, {result.states:,} states, {result.seconds:.1f} s", flush=True)
    else:
        for calls, faults, _ in LARGE if args.large else PROGRAMS:
            result = search(Model(2, calls, faults, MAX_RESTARTS))
            failed |= bool(result.problem)
            setting = ", ".join(f"{number} {call}" for call, number in calls.items())
            count = (
                f"{result.states:,} states, {result.transitions:,} transitions, "
                f"{result.seconds:.0f} s"
            )
            print(f"{setting}, {faults} faults: {count}{': ' * failed}{result.problem}", flush=True)
            for number, event in enumerate(result.events, 1):
                print(f"{number:4}", *event)
    sys.exit(failed)


if __name__ == "__main__":
    main()
