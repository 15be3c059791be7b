"""The pool of workers without processes: who interrupts it, whom it hears and refuses, what it sends, and its end."""

import pytest

from clusterenv_runtime import Exit, Interrupted, WorkerDiedError
from clusterenv_runtime.head.handle import State
from clusterenv_runtime.head.pool import PING_S
from clusterenv_runtime.head.supervisor import LOOK_S
from clusterenv_runtime.protocol import Call, Close, Error, Ping, Reply

from .simulated import Processes, Simulation


def sent(simulation, kind):
    """To whom messages of a kind have been sent."""
    return [out.identity for out in simulation.network.sent if isinstance(out.message, kind)]


def test_an_interrupted_wait_raises_and_the_next_goes_on():
    simulation = Simulation(2)
    seqs = simulation.never()
    simulation.pool.interrupted = True
    with pytest.raises(Interrupted):
        simulation.pool.gather(seqs)
    assert simulation.call(1) == [1]


def test_an_interrupt_is_heeded_before_the_next_message_is_handled(monkeypatch):
    simulation = Simulation(3)
    seqs = [simulation.pool.ask(worker, Call("name")) for worker in simulation.workers]
    handle, handled = simulation.pool._handle, []

    def interrupts(received):
        handled.append(received)
        simulation.pool.interrupted = True
        return handle(received)

    monkeypatch.setattr(simulation.pool, "_handle", interrupts)
    with pytest.raises(Interrupted):
        simulation.pool.wait_until(lambda: False, seqs)
    assert len(handled) == 1
    monkeypatch.undo()
    assert [served.message.value for served in simulation.pool.gather(seqs)] == [0, 1, 2]


def test_an_interrupt_comes_before_the_loss_that_comes_with_it():
    """A scheduler that ends a job may tell head and workers at once."""

    class Ending(Processes):
        def has_ended(self, index):
            simulation.pool.interrupted = True
            return super().has_ended(index)

    simulation = Simulation(2, launcher=Ending, max_restarts=0)
    simulation.launcher.of[1].die()
    with pytest.raises(Interrupted):
        simulation.call(1)
    assert not simulation.recovery.restarts and simulation.workers[1].losses == 0


@pytest.mark.filterwarnings("ignore:.*ERROR")
def test_an_environment_that_raises_while_it_is_built_ends_the_start_at_once():
    class Raises(Processes):
        def start_worker(self, index):
            self.greets = index == 1
            super().start_worker(index)
            self.of[index].answer = Error(index, "builtins.ValueError", "on purpose", "", fatal=True)

    simulation = Simulation(2, launcher=Raises, start=False)
    with pytest.raises(ValueError, match="on purpose"):
        simulation.pool.start(2)
    assert simulation.network.now < 1


def test_where_fewer_will_do_a_process_that_ends_by_itself_is_replaced_at_the_start_too():
    class EndsOnce(Processes):
        def start_worker(self, index):
            super().start_worker(index)
            if len(self.started_at[index]) == 1:
                self.of[index].die(Exit("exit code 9"))

    simulation = Simulation(2, launcher=EndsOnce, start=False)
    simulation.pool.start(1)
    assert simulation.recovery.restarts and "exit code 9" in simulation.recovery.restarts[0]["reason"]


def test_who_is_refused_is_told_to_close():
    simulation = Simulation(1)
    identity = simulation.workers[0].identity
    simulation.network.deliver(identity, 1000, Reply(None))
    assert simulation.call() == [0]
    assert sent(simulation, Close) == [identity]


def test_a_hello_of_nobody_who_is_awaited_is_dropped():
    simulation = Simulation(2)
    (worker, _), launcher = simulation.workers, simulation.launcher
    first = launcher.of[0]
    stranger = type(first)(simulation.network, 0)  # says that it is worker 0, which is there already
    stranger.greet()
    stranger = type(first)(simulation.network, 2)
    stranger.greet()
    assert simulation.call() == [0, 1]
    assert worker.identity == first.identity and simulation.network.dropped == 2
    assert not stranger.heard


def test_workers_are_pinged_once_in_a_while():
    simulation = Simulation(1)
    before, seconds = len(sent(simulation, Ping)), 20
    simulation.wait(seconds)
    assert seconds / (PING_S + LOOK_S) - 1 <= len(sent(simulation, Ping)) - before <= seconds / PING_S + 1


@pytest.mark.parametrize(("timeout", "leave"), [(0, False), (3, False), (3, True)])
def test_closing_tells_all_workers_and_leaves_the_rest_of_the_time_to_the_launcher(timeout, leave, monkeypatch):
    simulation, given = Simulation(2), []
    for process in simulation.launcher.of.values():
        process.leaves = leave
    monkeypatch.setattr(simulation.launcher, "stop", given.append)
    simulation.pool.close(timeout)
    assert set(sent(simulation, Close)) == {worker.identity for worker in simulation.workers}
    assert given == [pytest.approx(timeout if leave else 0, abs=0.1)]


def test_a_worker_that_is_given_up_is_named():
    simulation = Simulation(2, max_restarts=0)
    simulation.launcher.of[1].die()
    with pytest.raises(WorkerDiedError, match=r"^worker 1 .*died: killed by SIGKILL$"):
        simulation.call(1)
    assert [worker.state for worker in simulation.workers] == [State.READY, State.ENDED]
