"""The pool of workers, without processes: its interrupts, its closing, and the messages that it
accepts, refuses and sends.
"""

import errno
import logging
import math

import numpy as np
import pytest

from clusterenv_runtime import Exit, Interrupted, WorkerDiedError
from clusterenv_runtime.head.pool import PING_S
from clusterenv_runtime.head.supervisor import LOOK_S
from clusterenv_runtime.head.transport import MAX_HELLO, Received
from clusterenv_runtime.head.worker import State
from clusterenv_runtime.wire.protocol import (
    Call,
    Close,
    Collect,
    CutOff,
    Error,
    Ping,
    Pull,
    Reply,
    SetAttr,
    Step,
    Weights,
    encode,
)

from .simulated import CALL, STARTUP_S, Process, Processes, Simulation, a_part

# Gymnasium logs the exceptions of environments.
pytestmark = pytest.mark.filterwarnings("ignore:.*ERROR")


def sent(simulation, kind):
    """Return the identities of the workers to which messages of a kind have been sent."""
    return [out.identity for out in simulation.network.sent if isinstance(out.message, kind)]


def test_an_interrupted_wait_raises_and_the_next_goes_on():
    simulation = Simulation(2)
    seqs = simulation.never()
    simulation.pool.interrupt.request(Interrupted())
    with pytest.raises(Interrupted):
        simulation.pool.gather(seqs)
    assert simulation.call(1) == [1]


def test_an_interrupt_is_heeded_before_the_next_message_is_handled():
    simulation, read = Simulation(3), []
    for process in simulation.launcher.of.values():
        process.stopped = True
    seqs = [simulation.pool.ask(worker, Call("name")) for worker in simulation.workers]

    class Interrupting(Received):
        """A message that interrupts the pool when it is read for the first time."""

        def read(self, is_strange=False):
            read.append(self.identity)
            if len(read) == 1:
                simulation.pool.interrupt.request(Interrupted())
            return super().read(is_strange)

    for worker, seq in zip(simulation.workers, seqs, strict=True):
        message = encode((seq, Reply(worker.index)))
        simulation.network.inbox.append(Interrupting(worker.process.identity, [message]))
    with pytest.raises(Interrupted):
        simulation.pool.wait_until(lambda: False, seqs)
    assert read == [simulation.workers[0].process.identity]
    assert [request.response.value for request in simulation.pool.gather(seqs)] == [0, 1, 2]
    assert len(read) == 3  # no message is handled twice


def test_an_interrupt_takes_precedence_over_a_loss_at_the_same_time():
    """A scheduler that ends a job may signal head and workers at the same time."""

    class Ending(Processes):
        def has_ended(self, index):
            simulation.pool.interrupt.request(Interrupted())
            return super().has_ended(index)

    simulation = Simulation(2, launcher=Ending, max_restarts=0)
    simulation.launcher.of[1].die()
    with pytest.raises(Interrupted):
        simulation.call(1)
    assert not simulation.recovery.restarts and simulation.workers[1].losses == 0


def test_an_environment_that_raises_while_it_is_built_ends_the_start_at_once():
    class Raises(Processes):
        def start_worker(self, index):
            self.greets = index == 1
            super().start_worker(index)
            self.of[index].answer = Error(
                index, "builtins.ValueError", "on purpose", "", fatal=True
            )

    simulation = Simulation(2, launcher=Raises, start=False)
    with pytest.raises(ValueError, match="on purpose"):
        simulation.pool.start(2)
    assert simulation.network.now < 1


def test_a_process_that_ends_by_itself_at_the_start_is_replaced_if_fewer_workers_suffice():
    class EndsOnce(Processes):
        def start_worker(self, index):
            super().start_worker(index)
            if len(self.started_at[index]) == 1:
                self.of[index].die(Exit("exit code 9"))

    simulation = Simulation(2, launcher=EndsOnce, start=False)
    simulation.pool.start(1)
    assert (
        simulation.recovery.restarts and "exit code 9" in simulation.recovery.restarts[0]["reason"]
    )


def test_a_refused_worker_is_told_to_close():
    simulation = Simulation(1)
    identity = simulation.workers[0].process.identity
    simulation.network.deliver(identity, 1000, Reply(None))
    assert simulation.call() == [0]
    assert sent(simulation, Close) == [identity]


def test_an_unexpected_hello_is_dropped():
    simulation = Simulation(2)
    worker, first = simulation.workers[0], simulation.launcher.of[0]
    # One index has a worker already, the other does not exist.
    strangers = [Process(simulation.network, index) for index in (0, 2)]
    for stranger in strangers:
        stranger.greet()
    simulation.network.deliver(b"another", 1, Reply(None))
    assert simulation.call() == [0, 1]
    assert worker.process.identity == first.identity and simulation.network.dropped == 3
    assert not any(stranger.heard for stranger in strangers)


def test_workers_are_pinged_regularly():
    simulation = Simulation(1)
    before, seconds = len(sent(simulation, Ping)), 20
    simulation.wait(seconds)
    assert (
        seconds / (PING_S + LOOK_S) - 1
        <= len(sent(simulation, Ping)) - before
        <= seconds / PING_S + 1
    )


def test_only_a_strangers_messages_must_be_short():
    simulation = Simulation(1)
    (seq,), (worker,) = simulation.never(), simulation.workers
    for identity in (b"stranger", worker.process.identity):
        simulation.network.inbox.append(
            Received(identity, [encode((seq, Reply("long"))), bytes(MAX_HELLO)])
        )
    (served,) = simulation.pool.gather([seq])
    assert served.response.value == "long" and simulation.network.texts == [
        "a long message from a stranger"
    ]


def test_a_wait_sleeps_between_exchanges():
    simulation = Simulation(1)
    before = simulation.network.exchanges
    simulation.wait(10)
    assert simulation.network.exchanges - before < 10 / LOOK_S + 5
    before = simulation.network.now
    simulation.pool.wait_until(lambda: True, simulation.never())  # done already
    assert simulation.network.now - before < 0.01


def test_the_first_answer_is_returned_while_others_are_awaited():
    simulation = Simulation(2)
    seqs = [*simulation.never(), simulation.pool.ask(simulation.workers[1], Call("name"))]
    assert simulation.pool.first(seqs).response == Reply(1)


def test_the_first_error_is_raised_while_others_are_awaited():
    simulation = Simulation(2)
    simulation.launcher.of[1].answer = Error(
        1, "builtins.ValueError", "on purpose", "", fatal=False
    )
    seqs = [*simulation.never(), simulation.pool.ask(simulation.workers[1], Call("name"))]
    with pytest.raises(ValueError, match="on purpose"):
        simulation.pool.first(seqs)


def test_an_error_of_a_call_ends_its_request_alone():
    simulation = Simulation(1)
    (process,) = simulation.launcher.of.values()
    process.answer = Error(0, "builtins.ValueError", "on purpose", "", fatal=False)
    with pytest.raises(ValueError, match="on purpose"):
        simulation.call()
    process.answer = Reply(0)
    assert simulation.call() == [0] and not simulation.pool.failures.to_reset


def test_an_error_that_ends_episodes_ends_all_requests_of_its_worker():
    simulation = Simulation(1)
    seqs = simulation.never() + simulation.never()
    error = Error(0, "builtins.ValueError", "on purpose", "", fatal=False, ends_episodes=True)
    simulation.network.deliver(simulation.workers[0].process.identity, seqs[0], error)
    with pytest.raises(ValueError, match="on purpose"):
        simulation.pool.gather(seqs)
    assert simulation.pool.failures.to_reset


def test_a_given_up_request_raises_only_an_error_that_ends_episodes():
    simulation = Simulation(1)
    (process,), (worker,) = simulation.launcher.of.values(), simulation.workers
    seqs = simulation.never() + simulation.never()
    simulation.pool.forget(seqs)
    error = Error(0, "builtins.ValueError", "on purpose", "", fatal=False)
    simulation.network.deliver(process.identity, seqs[0], error)
    simulation.pool.wait_until(lambda: simulation.network.dropped, simulation.never())
    error = Error(0, "builtins.ValueError", "on purpose", "", fatal=False, ends_episodes=True)
    simulation.network.deliver(process.identity, seqs[1], error)
    with pytest.raises(ValueError, match="on purpose"):
        simulation.pool.wait_until(lambda: False, simulation.never())
    assert simulation.pool.failures.to_reset and worker.process.state == State.READY


@pytest.mark.parametrize(
    ("message", "is_given_up"), [(CALL, True), (CutOff(), True), (Step(), False)]
)
def test_a_worker_that_dies_each_time_before_it_has_stepped_is_given_up(message, is_given_up):
    simulation = Simulation(1, max_restarts=2)
    simulation.launcher.of[0].die()
    for _ in range(2):
        simulation.call(message=message)
        simulation.launcher.of[0].die()
    if is_given_up:
        with pytest.raises(WorkerDiedError, match="and so did 2 before it"):
            simulation.call()
    else:
        assert simulation.call() == [0]


def test_a_step_gives_a_worker_all_its_restarts_again():
    simulation = Simulation(1, max_restarts=2)
    (worker,) = simulation.workers
    for _ in range(2):
        for _ in range(2):
            simulation.launcher.of[0].die()
            simulation.pool.wait_until(
                lambda: worker.process.state == State.READY, simulation.never()
            )
        simulation.launcher.of[0].stopped = False
        assert simulation.call(message=Step()) == [0]


def test_a_part_shows_that_a_worker_can_step():
    simulation = Simulation(1, max_restarts=1)
    (worker,) = simulation.workers
    for _ in range(5):
        simulation.launcher.of[0].die()
        seq = simulation.pool.ask(worker, Collect(1, 1, 0, 0.0, []))
        simulation.pool.wait_until(
            lambda seq=seq: worker.process.state == State.READY and seq in worker.process.asked,
            [seq],
        )
        simulation.network.deliver(worker.process.identity, seq, a_part(2.0))
        simulation.pool.gather([seq])
    assert worker.waited == 10


def test_only_the_answer_to_its_setup_makes_a_worker_ready():
    simulation = Simulation(1)
    simulation.recovery.attributes["name"] = ["value"]
    (worker,), seqs = simulation.workers, simulation.never()
    simulation.launcher.of[0].die()
    start_worker = simulation.launcher.start_worker

    def starts_one_that_waits(index):
        start_worker(index)
        simulation.launcher.of[index].stopped = True

    simulation.launcher.start_worker = starts_one_that_waits
    simulation.pool.wait_until(
        lambda: any(isinstance(asked, SetAttr) for asked in worker.process.asked.values()), seqs
    )
    (set_attr,) = [seq for seq, asked in worker.process.asked.items() if isinstance(asked, SetAttr)]
    simulation.network.deliver(worker.process.identity, set_attr, Reply(None))
    simulation.wait(1)
    assert worker.process.state == State.BUILDING
    simulation.network.deliver(worker.process.identity, worker.process.building, Reply(None))
    simulation.wait(1)
    assert worker.process.state == State.READY


def test_a_worker_that_held_something_may_pull_twice(monkeypatch):
    simulation = Simulation(1)
    (worker,), store = simulation.workers, simulation.store
    store.version = 9
    monkeypatch.setattr(store, "pull", lambda copy, held: (Weights(9, 0, held, 1, []), ()))
    seq = simulation.pool.ask(worker, Collect(1, 9, 0, 0.0, []))
    for held in (3, 0):
        simulation.network.deliver(worker.process.identity, seq, Pull(held))
        simulation.wait(1)
    sent_weights = [out for out in simulation.network.sent if isinstance(out.message, Weights)]
    assert [(out.seq, out.message.checksum) for out in sent_weights] == [(seq, 3), (seq, 0)]
    assert not simulation.recovery.restarts


@pytest.mark.parametrize(("timeout", "leave"), [(0, False), (3, False), (3, True)])
def test_closing_tells_all_workers_and_leaves_the_rest_of_the_time_to_the_launcher(
    timeout, leave, monkeypatch
):
    simulation, given = Simulation(2), []
    for process in simulation.launcher.of.values():
        process.leaves = leave
    monkeypatch.setattr(simulation.launcher, "stop", given.append)
    simulation.pool.close(timeout)
    assert set(sent(simulation, Close)) == {
        worker.process.identity for worker in simulation.workers
    }
    assert given == [pytest.approx(timeout if leave else 0, abs=0.1)]
    simulation.pool.close(timeout)  # a second time, as a finalizer does
    assert len(given) == 1


def test_a_worker_that_is_given_up_is_named():
    simulation = Simulation(2, max_restarts=0)
    simulation.launcher.of[1].die()
    with pytest.raises(WorkerDiedError, match=r"^worker 1 .*died: killed by SIGKILL$"):
        simulation.call(1)
    assert [worker.process.state for worker in simulation.workers] == [State.READY, State.ENDED]


# Replacements that the system refuses to start.


class Refusing(Processes):
    """Processes of a system that refuses to start a replacement of worker 1 for some time."""

    until = math.inf

    def __init__(self, network):
        super().__init__(network)
        self.attempts = []

    def start_worker(self, index):
        if index == 1 and index in self.started_at:
            self.attempts.append(self.network.now)
            if self.network.now < self.until:
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        super().start_worker(index)


def test_a_refused_replacement_is_tried_again_after_growing_pauses(caplog):
    simulation = Simulation(2, launcher=Refusing, max_restarts=1)
    launcher, network = simulation.launcher, simulation.network
    launcher.until = network.now + 20
    launcher.of[1].die()
    seq = simulation.pool.ask(simulation.workers[1], Call("name"))
    answered = []

    def one_more():
        if len(answered) < 10_000:
            answered.append(network.now)
            simulation.pool.ask(simulation.workers[0], Call("name"))  # and it answers
        return network.now > launcher.until - 1

    simulation.pool.wait_until(one_more, [seq])
    assert max(np.diff(answered)) < LOOK_S  # the other worker was served all the time
    assert [request.response.value for request in simulation.pool.gather([seq])] == [1]
    pauses, promised = np.diff(launcher.attempts), np.array([1, 2, 4, 4, 4, 4, 4])
    assert len(pauses) == len(promised)
    assert np.all(promised <= pauses) and np.all(pauses <= promised + LOOK_S + 0.01)
    (restart,) = simulation.recovery.restarts
    assert "died: killed by SIGKILL" in restart["reason"]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    loss, refusal = (record.getMessage() for record in warnings)
    assert loss.startswith("worker 1 ") and loss.endswith("replacement 1 of this worker")
    assert refusal.startswith("worker 1 cannot be started, trying again for up to 60 s: ")
    assert refusal.endswith(": [Errno 11] Resource temporarily unavailable")


def test_the_pauses_start_over_with_the_next_shortage(caplog):
    simulation = Simulation(2, launcher=Refusing)
    launcher, network = simulation.launcher, simulation.network
    for _ in range(2):
        launcher.until = network.now + 2.5
        launcher.of[1].die()
        assert simulation.call() == [0, 1]
        first, second, third = launcher.attempts
        assert 1 <= second - first < 1.3 and 2 <= third - second < 2.3
        launcher.attempts.clear()
    assert caplog.text.count("worker 1 cannot be started") == 2  # once for each shortage


def test_a_lasting_shortage_ends_the_run_with_its_reason():
    simulation = Simulation(2, launcher=Refusing)
    simulation.network.now += 30  # the time before the loss does not count
    simulation.launcher.of[1].die()
    text = r"^worker 1 \(no hello yet, environments 1 to 1\) could not be started for 6\d s: "
    text += r"\[Errno 11\] Resource temporarily unavailable$"
    with pytest.raises(WorkerDiedError, match=text):
        simulation.call()
    attempts = simulation.launcher.attempts
    assert STARTUP_S <= attempts[-1] - attempts[0] < STARTUP_S + 4.5
    assert simulation.network.now - attempts[-1] < 0.01  # no pause after the last attempt
    with pytest.raises(WorkerDiedError, match=r"^worker 1 \(no hello yet, .*, lost\) is gone$"):
        simulation.call(1)
    assert simulation.call(0) == [0]


@pytest.mark.parametrize("attempt", [1, 2, 3, 4])
def test_an_interrupt_between_two_attempts_is_heeded_at_once(attempt):
    class Interrupting(Refusing):
        def start_worker(self, index):
            if index in self.started_at and len(self.attempts) == attempt - 1:
                simulation.pool.interrupt.request(KeyboardInterrupt())
            super().start_worker(index)

    simulation = Simulation(2, launcher=Interrupting)
    simulation.launcher.until = simulation.network.now + 10
    simulation.launcher.of[1].die()
    with pytest.raises(KeyboardInterrupt):
        simulation.call(1)
    attempts = simulation.launcher.attempts
    assert len(attempts) == attempt and simulation.network.now - attempts[-1] < LOOK_S
    assert simulation.call() == [0, 1]


def test_a_shortage_while_all_must_start_is_waited_out():
    class DiesFirst(Refusing):
        """The first process of worker 1 is killed before its hello."""

        def start_worker(self, index):
            self.greets = index == 0 or index in self.started_at
            super().start_worker(index)
            if not self.greets:
                self.of[index].die()

    simulation = Simulation(2, launcher=DiesFirst, start=False)
    simulation.launcher.until = 5.0
    simulation.pool.start(2)
    assert simulation.call() == [0, 1] and 5 <= simulation.network.now < 10
