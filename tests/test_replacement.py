"""The orders that make a process a given worker, without processes."""

import pickle
import random

import cloudpickle
import numpy as np
import pytest

from clusterenv_runtime import Launcher
from clusterenv_runtime.envs.large import LARGE, LargeArrays
from clusterenv_runtime.envs.likeness import Likeness
from clusterenv_runtime.head.recovery import Recovery, number_of_globals
from clusterenv_runtime.head.requests import Request
from clusterenv_runtime.head.worker import Episodes, Worker
from clusterenv_runtime.policy.sync import SyncRule
from clusterenv_runtime.wire.protocol import (
    Call,
    Collect,
    CutOff,
    Reset,
    SetAttr,
    Setup,
    Step,
    Structure,
)

from .nets import store_in
from .simulated import ACTIONS, SPACE

RESET, PARTIAL, CALL = Reset(), Reset(partial=True), Call("name")
COLLECT = Collect(5, 1, 0, 0.0, [])


def large_arrays():
    arrays = []
    LargeArrays().collector(arrays)(pickle.PickleBuffer(bytes(LARGE)))
    return arrays


class Told:
    """Two workers with two environments each, and their `Recovery`."""

    def __init__(self):
        self.workers = [
            Worker(index, slice(2 * index, 2 * index + 2), b"setup", large_arrays())
            for index in (0, 1)
        ]
        for worker in self.workers:
            worker.episodes = Episodes.begun(np.zeros((2, 1), np.float32), 2)
        self.worker = self.workers[1]
        copies = [worker.copy for worker in self.workers]
        self.store = store_in(copies, SPACE, ACTIONS)
        self.likeness = Likeness.of_this_process(Launcher())
        self.recovery = Recovery(SyncRule(), self.store, self.likeness)
        self.seeds = [5, None, 7, None]

    def reset(self, options=None):
        self.recovery.reset(self.workers, self.seeds, options)

    def unanswered(self, *messages):
        return [
            Request(seq, self.worker, message, (b"of it",), None)
            for seq, message in enumerate(messages, 10)
        ]

    def orders(self, *messages):
        """Return the orders for a process that becomes worker 1 and must answer these requests."""
        return self.recovery.orders(self.worker, self.unanswered(*messages))

    def lose(self, *messages):
        self.recovery.lost(self.worker, "worker 1 died", self.unanswered(*messages))


@pytest.fixture
def told():
    told = Told()
    yield told
    told.recovery.close()


def test_the_first_process_builds_its_environments_and_no_more():
    random.seed("generators of no other ClusterEnv that is open")
    told = Told()
    ((seq, setup, (environments, rule, likeness, array)),) = told.orders()
    assert (seq, setup) == (None, Setup(2, number_of_globals()))
    assert (environments, array) == (b"setup", bytes(LARGE))
    assert (pickle.loads(rule), pickle.loads(likeness)) == (SyncRule(), told.likeness)
    told.recovery.close()


def test_a_process_gets_the_structure_then_attributes_then_the_reset_then_the_requests(told):
    told.store.structure = b"structure"
    told.recovery.attributes["name"] = [b"of worker 0", b"of worker 1"]
    told.seeds = [5, 6, 7, 8]
    told.reset({"option": 1})
    _, structure, attribute, reset, call = told.orders(CALL)
    assert structure == (None, Structure(), (b"structure",))
    assert attribute == (None, SetAttr("name"), (b"of worker 1",))
    assert not RESET.partial and reset == (
        None,
        RESET,
        (cloudpickle.dumps(([7, 8], {"option": 1}, None)),),
    )
    assert call == (10, CALL, (b"of it",))


@pytest.mark.parametrize(
    ("asked", "own"), [([], True), ([CALL], True), ([PARTIAL], True), ([CALL, RESET], False)]
)
def test_a_process_is_reset_with_fresh_seeds_unless_all_are_being_reset(told, asked, own):
    told.reset()
    told.lose(*asked)
    orders = told.orders(*asked)
    resets = [buffers for seq, message, buffers in orders if message == RESET and seq is None]
    assert len(resets) == own
    seeds = told.recovery.restarts[0]["seeds"]
    assert seeds == told.worker.seeds
    assert (seeds == [7, None]) == (not own) and seeds[1] is None
    if own:  # a random seed where the user gave none
        sent, _, _ = cloudpickle.loads(resets[0][0])
        assert sent[0] == seeds[0] and sent[1] is not None


def test_seeds_differ_after_each_loss_and_for_each_worker(told):
    told.seeds = [5, 6, 5, 6]
    told.reset()
    drawn = []
    for worker in told.workers * 2:
        told.recovery.lost(worker, "died", [])
        drawn.append(worker.seeds)
    assert len(set(map(tuple, drawn))) == 4 and all(len(set(seeds)) == 2 for seeds in drawn)
    again = Told()
    again.seeds = told.seeds
    again.reset()
    again.recovery.lost(again.workers[0], "died", [])
    assert again.workers[0].seeds == drawn[0]


def test_losses_are_logged_and_counted_for_each_worker(told, caplog):
    told.lose()  # before the first reset
    told.reset()
    told.recovery.lost(told.workers[0], "worker 0 died", [])
    told.worker.copy.held = 3
    told.lose()
    assert [record.getMessage() for record in caplog.records] == [
        "worker 1 died; another is started, replacement 1 of this worker",
        "worker 0 died; another is started, replacement 1 of this worker",
        "worker 1 died; another is started, replacement 2 of this worker",
    ]
    assert [(restart["worker"], restart["reason"]) for restart in told.recovery.restarts] == [
        (1, "worker 1 died"), (0, "worker 0 died"), (1, "worker 1 died"),
    ]  # fmt: skip
    assert told.recovery.restarts[0]["seeds"] is None and told.worker.copy.held == 0


def test_steps_that_a_lost_process_did_not_answer_say_that_its_episodes_are_cut_off(told):
    told.reset()
    told.worker.episodes.ended = np.array([True, False])
    told.lose(Step())
    (_, _, _), (_, reset, _), (seq, message, buffers) = told.orders(Step())
    assert (reset, seq, message) == (RESET, 10, CutOff())
    seen, cut = cloudpickle.loads(buffers[0])
    assert seen.tolist() == [[0], [0]] and cut.tolist() == [False, True]
    told.reset()  # by the user, who then knows of the loss
    *_, step = told.orders(Step())
    assert step == (10, Step(), (b"of it",))
    assert not told.worker.episodes.ended.any()


def test_before_a_reset_no_episode_can_be_lost(told):
    told.lose()
    assert told.worker.episodes.cut is None and told.worker.seeds is None
    assert [type(message) for _, message, _ in told.orders()] == [Setup]


def test_a_users_reset_seeds_the_noise_again_unless_its_seed_was_just_loaded(told):
    for worker in told.workers:
        worker.rollouts = 5
    told.workers[1].rollouts = 7
    told.reset()
    assert told.recovery.state_dict(told.workers) == {"seed": 5, "rollouts": 0, "restarts": []}
    state = {"seed": 8, "rollouts": 7, "restarts": [{"worker": 1}]}
    told.recovery.load_state_dict(told.workers, state)
    for _ in range(2):  # the first one may have failed
        told.reset()
        assert told.recovery.state_dict(told.workers) == state
    assert [worker.rollouts for worker in told.workers] == [7, 7]
    told.recovery.seed_noise(told.worker, Collect(5, 1, 0, 0.0, []))
    told.reset()
    assert told.recovery.state_dict(told.workers) == {
        "seed": 5,
        "rollouts": 0,
        "restarts": [{"worker": 1}],
    }


def test_a_reset_without_a_seed_goes_on_with_the_noise(told):
    told.workers[0].rollouts, before = 5, told.recovery.seed
    told.recovery.reset(told.workers, [None] * 4, None)
    assert told.recovery.state_dict(told.workers) == {"seed": before, "rollouts": 5, "restarts": []}


def rows(*values):
    return np.array(values, np.float32)[:, None]


def test_a_partial_reset_begins_the_episodes_of_its_rows():
    episodes = Episodes(rows(1, 2), np.array([True, True]))
    assert episodes.saw_reset(SPACE, rows(0, 2), np.array([True, False])).tolist() == [[0], [2]]
    assert episodes.ended.tolist() == [False, True] and episodes.cut is None
    assert episodes.seen.tolist() == [[0], [2]]


def test_a_partial_reset_after_a_loss_settles_its_rows_and_shows_nothing_new_of_others():
    episodes = Episodes.begun(rows(1, 2), 2)
    episodes.lost()
    assert episodes.cut.tolist() == [True, True]
    # The replacement has begun both episodes.
    assert episodes.saw_reset(SPACE, rows(5, 6), np.array([True, False])).tolist() == [[5], [2]]
    assert episodes.cut.tolist() == [False, True] and episodes.seen.tolist() == [[5], [2]]
    assert episodes.saw_reset(SPACE, rows(7, 8), np.array([False, True])).tolist() == [[7], [8]]
    assert episodes.cut is None and episodes.step("actions")[0] == Step()
