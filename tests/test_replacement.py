"""The orders that make a process a given worker, and what its losses change, without processes."""

import cloudpickle
import numpy as np
import pytest

from clusterenv_runtime.messages import Collect, CutOff, Reset, SetAttr, Setup, Structure

from .simulated import CALL, Simulation

NOTHING = cloudpickle.dumps(None)
RESET = Reset([None, None], NOTHING)
PARTIAL = Reset([None, None], NOTHING, np.array([True, False]))


@pytest.fixture
def simulation():
    """Return two workers with two environments each."""
    return Simulation(2, size=2)


def reset(simulation, seeds=(5, None, 7, None), options=NOTHING):
    simulation.pool.note_reset(list(seeds), options)


def replaced(simulation, *requests, index=1):
    """Lose a worker that must answer these requests. Return what its replacement hears."""
    simulation.launcher.of[index].stopped = True
    seqs = [simulation.ask(index, message=message)[0] for message in requests]
    simulation.launcher.of[index].die()
    number = len(simulation.pool.restarts)
    simulation.pool.wait_until(lambda: len(simulation.pool.restarts) > number, simulation.ask(0))
    simulation.gather(seqs)
    simulation.call(index)
    return simulation.launcher.of[index].heard[:-1]


def noise_of(simulation):
    state = simulation.pool.state_dict()
    return {name: state[name] for name in ("seed", "rollouts", "restarts")}


def test_a_process_gets_the_structure_then_attributes_then_the_reset_then_the_requests(simulation):
    simulation.store.structure = b"structure"
    simulation.pool.attributes["name"] = [b"of worker 0", b"of worker 1"]
    options = cloudpickle.dumps({"option": 1})
    reset(simulation, [5, 6, 7, 8], options)
    setup, structure, attribute, begin, call = replaced(simulation, CALL)
    assert type(setup) is Setup and call == CALL
    assert structure == Structure(b"structure")
    assert attribute == SetAttr("name", b"of worker 1")
    assert begin == Reset(simulation.workers[1].seeds, options)


@pytest.mark.parametrize(
    ("asked", "own"), [([], True), ([CALL], True), ([PARTIAL], True), ([CALL, RESET], False)]
)
def test_a_process_is_reset_with_fresh_seeds_unless_all_are_being_reset(simulation, asked, own):
    reset(simulation)
    heard = replaced(simulation, *asked)
    assert len(heard) == 1 + own + len(asked)
    seeds = simulation.pool.restarts[0]["seeds"]
    assert seeds == simulation.workers[1].seeds
    assert (seeds == [7, None]) == (not own) and seeds[1] is None
    if own:  # a random seed where the user gave none
        assert heard[1].seeds[0] == seeds[0] and heard[1].seeds[1] is not None


def test_seeds_differ_after_each_loss_and_for_each_worker(simulation):
    def drawn_by(simulation):
        reset(simulation, [5, 6, 5, 6])
        for _ in range(2):
            for worker in simulation.workers:
                replaced(simulation, index=worker.index)
                yield worker.seeds

    drawn = list(drawn_by(simulation))
    assert len(set(map(tuple, drawn))) == 4 and all(len(set(seeds)) == 2 for seeds in drawn)
    assert list(drawn_by(Simulation(2, size=2))) == drawn


def test_losses_are_logged_and_counted_for_each_worker(simulation, caplog):
    replaced(simulation)  # before the first reset
    reset(simulation)
    replaced(simulation, index=0)
    simulation.workers[1].copy.held = 3
    replaced(simulation)
    reasons = [restart["reason"] for restart in simulation.pool.restarts]
    assert [record.getMessage() for record in caplog.records] == [
        f"{reason}; another is started, replacement {number} of this worker"
        for reason, number in zip(reasons, (1, 1, 2), strict=True)
    ]
    assert [restart["worker"] for restart in simulation.pool.restarts] == [1, 0, 1]
    assert simulation.pool.restarts[0]["seeds"] is None and simulation.workers[1].copy.held == 0


def cut_off(heard):
    return [(each.seen.tolist(), each.ended.tolist()) for each in heard if type(each) is CutOff]


def test_a_replacement_continues_with_what_the_user_saw_last(simulation):
    worker = simulation.workers[1]
    reset(simulation)
    worker.seen, worker.ended = np.zeros((2, 1)), np.array([True, False])
    heard = replaced(simulation, PARTIAL)
    assert [type(each) for each in heard] == [Setup, Reset, CutOff, Reset]
    assert cut_off(heard) == [([[0], [0]], [True, False])]
    # The user's own reset begins all episodes.
    assert cut_off(replaced(simulation, RESET)) == []


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_the_user_sees_of_a_process_that_is_gone_by_now_is_cut_off(simulation, is_gone):
    worker, seqs = simulation.workers[1], simulation.ask(1)
    reset(simulation)
    (request,) = simulation.pool.gather(seqs)
    if is_gone:
        replaced(simulation)
    simulation.pool.note_seen(request, np.ones((2, 1)), np.array([False, True]))
    simulation.call(1)
    heard = simulation.launcher.of[1].heard
    assert cut_off(heard) == [([[1], [1]], [False, True])] * is_gone
    assert worker.seen.tolist() == [[1], [1]] and worker.ended.tolist() == [False, True]


def test_a_users_reset_seeds_the_noise_again_unless_its_seed_was_just_loaded(simulation):
    simulation.workers[0].rollouts, simulation.workers[1].rollouts = 5, 7
    reset(simulation)
    assert noise_of(simulation) == {"seed": 5, "rollouts": 0, "restarts": []}
    state = {"seed": 8, "rollouts": 7, "restarts": [{"worker": 1}]}
    simulation.pool.load_state_dict(simulation.pool.state_dict() | state)
    for _ in range(2):  # the first one may have failed
        reset(simulation)
        assert noise_of(simulation) == state
    assert [worker.asked_rollouts for worker in simulation.workers] == [7, 7]
    simulation.pool.seed_noise(simulation.workers[1], Collect(5, 1, 0, 0.0, []))
    reset(simulation)
    assert noise_of(simulation) == {"seed": 5, "rollouts": 0, "restarts": [{"worker": 1}]}
