"""The pool of workers, without processes: its interrupts, its closing, and the messages that it
accepts, refuses and sends.
"""

import errno
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from clusterenv_runtime import Interrupted, WorkerDiedError
from clusterenv_runtime.head.pool import LEAVE_S
from clusterenv_runtime.head.workers import State
from clusterenv_runtime.messages import MAX_HELLO, Close, CutOff, Reply

from .simulated import CALL, STEP, Process, Processes, Simulation, an_error


def sent(simulation, kind):
    """Return the identities of the workers to which messages of a kind have been sent."""
    return [to for to, _, message in simulation.network.sent if isinstance(message, kind)]


def test_an_interrupt_loses_no_message(monkeypatch):
    simulation = Simulation(3)
    seqs, handle = simulation.ask(), simulation.pool._handle

    def interrupted(*message):
        simulation.pool.interrupt = Interrupted()
        handle(*message)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(simulation.pool, "_handle", interrupted)
        simulation.pool.wait_until(lambda: False, seqs)
    assert simulation.gather(seqs) == [0, 1, 2]


def test_an_interrupt_takes_precedence_over_a_loss_at_the_same_time():
    """A scheduler that ends a job may signal head and workers at the same time."""

    class Ending(Processes):
        def has_ended(self, index):
            simulation.pool.interrupt = Interrupted()
            return super().has_ended(index)

    simulation = Simulation(2, launcher=Ending, max_restarts=0)
    simulation.launcher.of[1].die()
    with pytest.raises(Interrupted):
        simulation.call(1)
    assert not simulation.pool.restarts and simulation.workers[1].losses == 0


# Ctrl-C.


@pytest.mark.parametrize("during", ["receive", "handle", "look"])
def test_ctrl_c_amid_a_wait_closes_the_pool(monkeypatch, during):
    simulation = Simulation(2)
    place, name = {
        "receive": (simulation.network, "receive"),
        "handle": (simulation.pool, "_handle"),
        "look": (simulation.pool, "look"),
    }[during]

    def press(*_):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(place, name, press)
    simulation.ask(1)
    with pytest.raises(KeyboardInterrupt):
        simulation.wait(1)
    assert simulation.pool.is_closed and simulation.network.is_closed
    assert len(sent(simulation, Close)) == 2 and simulation.network.now < 2 * LEAVE_S


def test_ctrl_c_between_calls_raises_at_once_and_closes_nothing():
    simulation = Simulation(1)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert simulation.call(0) == [0]


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_during_close_leaves_nothing_open(monkeypatch, presses):
    simulation, left = Simulation(1), [None] * presses
    receive, stop, stopped = simulation.network.receive, simulation.launcher.stop, []

    def pressed(function, *args):
        if left:
            left.pop()
            signal.raise_signal(signal.SIGINT)
        return function(*args)

    def press_in_stop(timeout):
        stopped.append(timeout)
        pressed(stop, timeout)

    monkeypatch.setattr(simulation.network, "receive", lambda *args: pressed(receive, *args))
    monkeypatch.setattr(simulation.launcher, "stop", press_in_stop)
    with pytest.raises(KeyboardInterrupt):
        simulation.pool.close(timeout=3600)
    assert len(stopped) == 1 and simulation.network.is_closed and simulation.network.now < 1


def test_the_programs_own_handler_is_kept():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append("here"))
    simulation = Simulation(1)
    signal.raise_signal(signal.SIGINT)
    assert simulation.call() == [0]
    simulation.pool.close(timeout=1)
    assert heard == ["here"]


def test_another_thread_can_wait():
    simulation = Simulation(1)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(simulation.call, 0).result() == [0]


# Messages.


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


def test_only_a_strangers_messages_must_be_short():
    simulation = Simulation(1)
    (seq,), (worker,) = simulation.never(), simulation.workers
    long = "x" * MAX_HELLO
    simulation.network.inbox.append((b"stranger", [long.encode() + b"x"]))
    simulation.network.deliver(worker.process.identity, seq, Reply(long))
    assert simulation.gather([seq]) == [long]
    assert simulation.network.texts == ["a stranger's message: no hello: it is too long"]


def test_an_error_that_ends_episodes_ends_all_requests_of_its_worker():
    simulation = Simulation(1)
    seqs = simulation.never() + simulation.never()
    error = an_error(ends_episodes=True)
    simulation.network.deliver(simulation.workers[0].process.identity, seqs[0], error)
    with pytest.raises(ValueError, match="on purpose"):
        simulation.pool.gather(seqs)
    assert simulation.pool.to_reset == {0} and not simulation.pool.outstanding


def test_a_given_up_request_raises_only_an_error_that_ends_episodes():
    simulation = Simulation(1)
    (process,), (worker,) = simulation.launcher.of.values(), simulation.workers
    seqs = simulation.never() + simulation.never()
    simulation.pool.forget(seqs)
    simulation.network.deliver(process.identity, seqs[0], an_error())
    simulation.wait_until(lambda: simulation.network.dropped)
    simulation.network.deliver(process.identity, seqs[1], an_error(ends_episodes=True))
    with pytest.raises(ValueError, match="on purpose"):
        simulation.wait_until(lambda: False)
    assert simulation.pool.to_reset and worker.process.state == State.READY


# Losses in a row.


@pytest.mark.parametrize("is_cut_off", [False, True])
@pytest.mark.parametrize("message", [CALL, STEP])
def test_a_worker_that_dies_each_time_before_it_has_stepped_is_given_up(message, is_cut_off):
    simulation = Simulation(1, max_restarts=2)
    if is_cut_off:  # a step then only shows that the episodes are truncated
        simulation.pool.note_reset([None], b"")
        simulation.workers[0].seen = np.zeros((1, 1))
    simulation.launcher.of[0].die()
    for _ in range(2):
        simulation.call(message=message)
        assert bool(simulation.launcher.of[0].heard_of(CutOff)) == is_cut_off
        simulation.launcher.of[0].die()
    if message is CALL or is_cut_off:
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
            simulation.wait_until(lambda: worker.process.state == State.READY)
        simulation.launcher.of[0].stopped = False
        assert simulation.call(message=STEP) == [0]


def test_a_replacement_that_the_system_refuses_ends_the_run_with_the_reason():
    class Refusing(Processes):
        def start_worker(self, index):
            if index in self.started_at:
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            super().start_worker(index)

    simulation = Simulation(2, launcher=Refusing)
    simulation.launcher.of[1].die()
    text = r"^worker 1 .* died: killed by SIGKILL; no replacement can be started: \[Errno 11\] "
    with pytest.raises(WorkerDiedError, match=text):
        simulation.call()
    with pytest.raises(WorkerDiedError, match=r"^worker 1 \(.*, lost\) is gone$"):
        simulation.call(1)
    assert simulation.call(0) == [0]


def test_a_directory_that_was_removed_ends_the_run_at_the_next_loss(tmp_path):
    simulation = Simulation(1)
    simulation.network.directory = str(tmp_path / "gone")
    simulation.launcher.of[0].die()
    text = "SIGKILL; no replacement can connect, because .*gone was removed$"
    with pytest.raises(WorkerDiedError, match=text):
        simulation.call()


# Closing.


@pytest.mark.parametrize(("timeout", "leave"), [(0, False), (3, False), (3, True), (60, True)])
def test_closing_asks_all_workers_and_leaves_some_of_the_rest_of_the_time_to_the_launcher(
    timeout, leave, monkeypatch
):
    simulation, given = Simulation(2), []
    for process in simulation.launcher.of.values():
        process.leaves = leave
    start = simulation.network.now
    monkeypatch.setattr(simulation.launcher, "stop", given.append)
    simulation.pool.close(timeout)
    identities = {worker.process.identity for worker in simulation.workers}
    assert set(sent(simulation, Close)) == identities
    assert given == [pytest.approx(min(timeout, LEAVE_S) if leave else 0, abs=0.1)]
    assert simulation.network.now - start == pytest.approx(0 if leave else timeout, abs=0.1)
    simulation.pool.close(timeout)  # a second time, as a finalizer does
    assert len(given) == 1
