"""The head without processes, sockets or a wall clock: when it counts workers as lost, which
workers it serves in between, and what it reports.
"""

import re

import numpy as np
import pytest

from clusterenv_runtime import Exit, StartupError, WorkerDiedError
from clusterenv_runtime.head.workers import KILL_S, LOOK_S, REASON_S, SOON_S, State
from clusterenv_runtime.messages import Built, Call, Reply

from .simulated import SIGKILL, STARTUP_S, STEP, Processes, Simulation, an_error

# Gymnasium logs the exceptions of environments.
pytestmark = pytest.mark.filterwarnings("ignore:.*ERROR")


@pytest.mark.parametrize("number", [1, 3, 100])
@pytest.mark.parametrize("how", ["died", "cut off"])
def test_many_lost_workers_take_as_long_as_one(number, how):
    """This includes workers that no call waits for. The others are served in between."""
    simulation = Simulation(number + 2)
    processes = dict(simulation.launcher.of)
    lost = list(range(2, number + 2))
    for index in lost:
        if how == "died":
            processes[index].die()
        else:
            processes[index].cut_off = True
    start, answers = simulation.network.now, []
    waiting = simulation.never()

    def one_more():
        if len(answers) < 10_000:  # worker 1 keeps answering
            answers.append((simulation.network.now, simulation.workers[2].process.state))
            simulation.ask(1)
        return simulation.launcher.started_at.keys() >= set(lost) and all(
            len(simulation.launcher.started_at[index]) == 2
            and simulation.workers[index].process.state == State.READY
            for index in lost
        )

    simulation.pool.wait_until(one_more, waiting)
    took = simulation.network.now - start
    # A ping fails after one second.
    assert took <= 1 + LOOK_S + 0.1 + (REASON_S if how == "cut off" else 0)
    # All are replaced at the same time.
    assert len({simulation.launcher.started_at[index][1] for index in lost}) == 1
    assert len(simulation.pool.restarts) == number
    if how == "cut off":
        # Some answers came while lost workers were not replaced yet.
        assert any(state in (State.LOST, State.KILLED) for _, state in answers)


def test_a_link_that_breaks_before_its_process_ends_is_reported_with_the_processes_reason():
    simulation = Simulation(1)
    first = simulation.launcher.of[0]
    first.cut_off = True
    receive = simulation.network.receive

    def ends_later(seconds):
        if (
            simulation.workers[0].process.state == State.LOST
            and simulation.network.now > REASON_S / 2
        ):
            first.exit = SIGKILL
        return receive(seconds)

    simulation.network.receive = ends_later
    simulation.wait(5)
    assert "died: killed by SIGKILL" in simulation.pool.restarts[0]["reason"]


def test_a_replacement_has_as_long_to_start_as_the_first():
    simulation = Simulation(2)
    simulation.launcher.greets = False
    simulation.launcher.of[1].die()
    simulation.wait(STARTUP_S)
    assert len(simulation.pool.restarts) == 1
    simulation.wait(1)
    assert "did not come up" in simulation.pool.restarts[1]["reason"]


def test_a_killed_process_is_replaced_when_it_is_gone():
    class Lingers(Processes):
        def kill(self, index):
            self.killed.append((index, self.network.now))

        def has_ended(self, index):
            return self.network.now > self.killed[0][1] + 1

    simulation = Simulation(1, launcher=Lingers)
    simulation.launcher.of[0].cut_off = True
    assert simulation.call() == [0]
    assert 1 <= simulation.launcher.started_at[0][1] - simulation.launcher.killed[0][1] < 1.1


def test_the_reason_of_a_cut_off_worker_says_when_its_last_message_came():
    simulation = Simulation(2)
    for _ in range(5):
        simulation.network.now += 100
        simulation.call()
    simulation.launcher.of[1].cut_off = True
    simulation.wait(10)
    (restart,) = simulation.pool.restarts
    assert re.search(r"\(its last message came [123] s ago\)", restart["reason"])


def test_only_unanswered_requests_of_a_lost_worker_are_sent_to_its_replacement():
    simulation = Simulation(1)
    first, (worker,) = simulation.launcher.of[0], simulation.workers
    first.stopped = True
    seqs = [
        simulation.pool.ask(worker, Call(name, b"")) for name in ("answered", "lost", "lost too")
    ]
    simulation.network.deliver(first.identity, seqs[0], Reply("from the first"))  # its last message
    first.die()
    answers = simulation.gather(seqs)
    assert answers == ["from the first", 0, 0]
    heard = simulation.launcher.of[0].heard_of(Call)
    assert [request.name for request in heard] == ["lost", "lost too"]
    simulation.network.deliver(first.identity, seqs[1], Reply("too late"))
    assert simulation.call() == [0] and simulation.network.dropped == 0


def test_random_kills_do_not_reach_the_limit_of_restarts_while_there_are_steps():
    """Every 2 seconds, one of four workers is killed, whatever it is doing. To start a worker
    takes one or two looks of the head, and so does a step.
    """
    simulation, rng = Simulation(4, max_restarts=2), np.random.default_rng(1)
    for _ in range(200):
        simulation.launcher.of[int(rng.integers(4))].die()
        end = simulation.network.now + 2
        while simulation.network.now < end:
            assert simulation.call(message=STEP) == [0, 1, 2, 3]
            simulation.network.now += 0.1
    assert len(simulation.pool.restarts) == 200


def test_a_death_by_signal_before_hello_is_repaired():
    class DiesOnce(Processes):
        def start_worker(self, index):
            self.greets = index in self.started_at or index != 1
            super().start_worker(index)
            if not self.greets:
                self.of[index].die()

    simulation = Simulation(3, launcher=DiesOnce)
    assert simulation.call() == [0, 1, 2]
    assert [restart["worker"] for restart in simulation.pool.restarts] == [1]


def test_a_process_that_ends_by_itself_before_hello_ends_the_start():
    class Ends(Processes):
        def start_worker(self, index):
            super().start_worker(index)
            if index == 1:
                self.of[index].die(Exit("exit code 9"))

    with pytest.raises(WorkerDiedError, match="^worker 1 .* died: exit code 9$"):
        Simulation(2, launcher=Ends)


class Builds(Processes):
    """Workers that build their environments one after the other, and report only that."""

    def start_worker(self, index):
        super().start_worker(index)
        self.of[index].stopped = True


@pytest.mark.parametrize("built", [1, 4])
def test_a_worker_that_builds_one_environment_after_the_other_is_not_late(built):
    simulation = Simulation(1, launcher=Builds, start=False)
    simulation.workers[0].num_envs = 4
    network, receive = simulation.network, simulation.network.receive
    times = iter(range(1, built + 1))

    def reports(seconds):
        if network.now > 50 * last[0] and (number := next(times, None)):
            last[0] = number + 1
            network.deliver(simulation.launcher.of[0].identity, None, Built())
        return receive(seconds)

    last, network.receive = [1], reports
    with pytest.raises(
        StartupError, match="did not come up or build the next environment within 60 s"
    ):
        simulation.pool.start()
    assert STARTUP_S < network.now - 50 * built < STARTUP_S + 2


def test_a_process_that_cannot_be_killed_is_given_up_in_time():
    class Immortal(Processes):
        def kill(self, index):
            self.killed.append((index, self.network.now))

    simulation = Simulation(2, launcher=Immortal)
    simulation.launcher.of[1].cut_off = True
    start, before = simulation.network.now, simulation.network.receives
    simulation.wait(1 + REASON_S + KILL_S + 1)
    assert len(simulation.pool.restarts) == 1
    # The pool waits for its end without busy polling.
    assert simulation.network.receives - before < 1.1 * (REASON_S + KILL_S) / SOON_S
    assert simulation.launcher.started_at[1][1] - start <= 1 + REASON_S + KILL_S + 3 * LOOK_S


def test_a_worker_of_another_version_ends_the_run():
    class Old(Processes):
        greets = False

        def start_worker(self, index):
            super().start_worker(index)
            self.of[index].greet(protocol=1)

    simulation = Simulation(1, launcher=Old, start=False)
    with pytest.raises(StartupError, match="speaks protocol 1, the head"):
        simulation.pool.start()

    simulation = Simulation(1)
    simulation.launcher.greets = False
    simulation.launcher.of[0].die()
    seqs = simulation.ask(0)
    simulation.pool.wait_until(lambda: len(simulation.launcher.started_at[0]) == 2, seqs)
    simulation.launcher.greets = True
    simulation.launcher.of[0].greet(protocol=1)
    with pytest.raises(StartupError, match="speaks protocol 1, the head"):
        simulation.gather(seqs)


def test_an_error_ends_its_worker_and_is_raised_once_the_others_have_answered():
    simulation = Simulation(3)
    simulation.launcher.of[1].stopped = True
    seqs = simulation.ask()
    error = an_error(env=1, fatal=True)
    simulation.network.deliver(simulation.launcher.of[1].identity, seqs[1], error)
    simulation.launcher.of[1].die(Exit("exit code 0"))
    with pytest.raises(ValueError, match="^on purpose$"):
        simulation.pool.gather(seqs)
    assert simulation.workers[1].process.state == State.ENDED and not simulation.pool.restarts
    assert not simulation.pool.to_reset  # none of its environments is left to reset
    assert simulation.call(0, 2) == [0, 2]
    with pytest.raises(WorkerDiedError, match="worker 1 .*shut down after its error.* is gone"):
        simulation.call(1)


def raised(*errors):
    """Return what the user gets for these errors, one of each worker."""
    simulation = Simulation(len(errors))
    for process, error in zip(simulation.launcher.of.values(), errors, strict=True):
        process.answer = error
    with pytest.raises(Exception) as caught:
        simulation.call()
    return caught.value


def test_the_last_of_several_errors_is_raised_and_the_others_are_logged(caplog):
    assert str(raised(an_error("first"), an_error("second"))) == "second"
    (message,) = caplog.messages
    assert message.startswith("environment 0 on worker 0 ") and "ValueError: first" in message
