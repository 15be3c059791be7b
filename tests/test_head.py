"""The head without processes, sockets or a wall clock: when it counts workers as lost, which
workers it serves in between, and what it reports.
"""

import re

import numpy as np
import pytest

from clusterenv_runtime import DeadlineError, EnvError, Exit, StartupError, WorkerDiedError
from clusterenv_runtime.head.workers import (
    KILL_S,
    LOOK_S,
    NOTICE_S,
    REASON_S,
    SOON_S,
    State,
    Worker,
)
from clusterenv_runtime.messages import Built, Call, Collect, Reply

from .simulated import SIGKILL, STARTUP_S, STEP, Processes, Simulation, an_error

# Gymnasium logs the exceptions of environments.
pytestmark = pytest.mark.filterwarnings("ignore:.*ERROR")


def test_all_workers_start_and_answer():
    simulation = Simulation(5)
    assert {worker.process.state for worker in simulation.workers} == {State.READY}
    assert simulation.call() == [0, 1, 2, 3, 4]


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


def test_a_worker_that_is_asked_and_has_died_is_replaced_at_once():
    simulation = Simulation(1)
    simulation.wait(LOOK_S / 2)
    simulation.launcher.of[0].die()
    start = simulation.network.now
    assert simulation.call() == [0]
    assert simulation.network.now - start < LOOK_S / 2


def test_a_replacement_has_as_long_to_start_as_the_first():
    simulation = Simulation(2)
    simulation.launcher.greets = False
    simulation.launcher.of[1].die()
    simulation.wait(STARTUP_S)
    assert len(simulation.pool.restarts) == 1
    simulation.wait(1)
    assert "did not come up" in simulation.pool.restarts[1]["reason"]


def test_waiting_for_a_scheduler_has_no_time_limit_and_its_reason_is_logged(caplog):
    class Queued(Processes):
        def pending(self, index):
            return "Resources" if self.network.now < 10 * NOTICE_S and index == 1 else None

        def start_worker(self, index):
            self.greets = index == 0
            super().start_worker(index)

    simulation = Simulation(2, launcher=Queued, start=False)
    with pytest.raises(
        StartupError, match=r"^worker 1 \(no hello yet, environments 1 to 1\) did not come up"
    ):
        simulation.pool.start()
    assert STARTUP_S - LOOK_S <= simulation.network.now - 10 * NOTICE_S < STARTUP_S + LOOK_S
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert set(said) == {"still waiting for worker 1 to be started: Resources"} and len(said) == 9


def test_a_process_that_the_system_refuses_ends_the_start():
    class Full(Processes):
        def start_worker(self, index):
            if index == 1:
                raise OSError("Cannot allocate memory")
            super().start_worker(index)

    simulation = Simulation(2, launcher=Full, start=False)
    with pytest.raises(StartupError, match="^cannot start the workers: Cannot allocate memory$"):
        simulation.pool.start()


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


def test_an_idle_worker_is_replaced_while_another_is_awaited():
    simulation = Simulation(2)
    identity = simulation.workers[1].process.identity
    simulation.launcher.of[1].die()
    simulation.wait(1)
    assert simulation.network.forgotten == [identity]
    (restart,) = simulation.pool.restarts
    assert restart["worker"] == 1 and "died: killed by SIGKILL" in restart["reason"]
    assert simulation.workers[1].process.state == State.READY
    assert simulation.call(1) == [1]


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


@pytest.mark.parametrize("before", [1, 2])
def test_a_process_that_is_killed_again_and_again_before_hello_ends_the_start(before):
    class Dies(Processes):
        greets = False

        def start_worker(self, index):
            super().start_worker(index)
            self.of[index].die()

    with pytest.raises(
        WorkerDiedError, match=rf"died: killed by SIGKILL \(and so did {before} before it"
    ):
        Simulation(1, max_restarts=before, launcher=Dies)


class Silent(Processes):
    greets = False


def test_workers_that_say_nothing_are_named_together():
    simulation = Simulation(3, launcher=Silent, start=False)
    text = f"worker 0 .*, worker 1 .*, worker 2 .* did not come up .* within {STARTUP_S:g} s$"
    with pytest.raises(StartupError, match=text):
        simulation.pool.start()
    assert STARTUP_S < simulation.network.now < STARTUP_S + 2 * LOOK_S


def test_a_late_worker_has_the_whole_startup_timeout_to_build():
    simulation = Simulation(1, launcher=Silent, start=False)
    network, receive = simulation.network, simulation.network.receive

    def greets_late(seconds):
        if network.now > 50 and not process:
            process.append(simulation.launcher.of[0])
            process[0].stopped = True
            process[0].greet()
        return receive(seconds)

    process, network.receive = [], greets_late
    with pytest.raises(StartupError, match="did not come up"):
        simulation.pool.start()
    assert 50 + STARTUP_S < network.now < 50 + STARTUP_S + 2 * LOOK_S + 0.1


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


def test_a_worker_of_another_version_is_refused_at_the_start_and_lost_later():
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
    assert simulation.gather(seqs) == [0]
    assert "speaks protocol 1" in simulation.pool.restarts[-1]["reason"]


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


def test_a_deadline_names_who_is_missing():
    simulation = Simulation(3)
    simulation.launcher.of[1].stopped = True
    start = simulation.network.now
    with pytest.raises(DeadlineError, match="^No response from worker 1 "):
        simulation.call(timeout=7)
    assert 7 <= simulation.network.now - start < 7.1


def test_closing_asks_first_and_ends_in_time():
    simulation = Simulation(2)
    start = simulation.network.now
    # The workers stay connected, because these do not leave when they are told to.
    simulation.pool.close(timeout=3)
    assert 3 <= simulation.network.now - start < 3.1 and simulation.network.is_closed
    simulation.pool.close(timeout=3)


def test_a_replacement_gets_the_same_requests_which_determine_its_noise():
    simulation = Simulation(1)
    (worker,), network = simulation.workers, simulation.network
    collects = [Collect(5, 1, 0, 0.0, [], rollout=number) for number in range(2)]
    seqs = [simulation.pool.ask(worker, collects[0])]
    simulation.launcher.greets = False
    simulation.launcher.of[0].die()
    first = worker.process
    simulation.pool.wait_until(lambda: worker.process is not first, seqs)
    seqs.append(simulation.pool.ask(worker, collects[1]))  # before the hello of the replacement
    simulation.launcher.of[0].greet()
    simulation.pool.wait_until(lambda: worker.process.state == State.READY, seqs)
    identity = worker.process.identity
    sent = [(seq, message) for to, seq, message in network.sent if to == identity and seq]
    assert sent == list(zip(seqs, collects, strict=True))


def raised(*errors):
    """Return what the user gets for these errors, one of each worker."""
    simulation = Simulation(len(errors))
    for process, error in zip(simulation.launcher.of.values(), errors, strict=True):
        process.answer = error
    with pytest.raises(Exception) as caught:
        simulation.call()
    return caught.value


def test_control_characters_in_the_text_about_a_workers_error_are_escaped():
    error = raised(an_error("\x1b[2J\nno\u202e", traceback="\x1b[2J\n\tin step"))
    text = str(error.__cause__)
    assert "raised builtins.ValueError: \\x1b[2J\nno\\u202e\n" in text
    assert text.endswith("\n\n\\x1b[2J\n\tin step")


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(
    ("env", "which"), [(4, "environment 4"), (None, "the policy or an environment")]
)
def test_the_cause_of_an_error_says_where_it_was_raised(env, ends, which):
    error = raised(an_error(env=env, ends_episodes=ends))
    assert type(error) is ValueError and str(error) == "on purpose"
    assert type(error.__cause__) is EnvError and str(error.__cause__) == (
        f"{which} on worker 0 (host, pid 1000, environments 0 to 0) raised builtins.ValueError: "
        "on purpose\n\nTraceback"
    )


@pytest.mark.parametrize("exception", [None, b"", b"no pickle"])
def test_an_exception_that_cannot_be_raised_as_it_was_is_an_env_error(exception):
    error = raised(an_error(exception=exception, fatal=True))
    assert type(error) is EnvError
    assert str(error).endswith("raised builtins.ValueError: on purpose\n\nTraceback")


def test_the_last_of_several_errors_is_raised_and_the_others_are_logged(caplog):
    assert str(raised(an_error("first"), an_error("second"))) == "second"
    (message,) = caplog.messages
    assert message.startswith("environment 0 on worker 0 ") and "ValueError: first" in message


def test_after_the_error_that_ends_it_a_worker_is_not_heard():
    simulation = Simulation(2)
    (seq,), first = simulation.never(), simulation.launcher.of[0]
    for _ in range(3):
        simulation.network.deliver(first.identity, seq, an_error(fatal=True))
    with pytest.raises(ValueError, match="on purpose"):
        simulation.call(1)
    simulation.network.deliver(first.identity, seq, an_error(fatal=True))
    assert simulation.call(1) == [1]


@pytest.mark.parametrize("answer", [Reply(None), an_error()], ids=["reply", "error"])
def test_an_answer_to_an_unknown_request_or_a_second_one_changes_nothing(answer):
    simulation = Simulation(1)
    identity = simulation.launcher.of[0].identity
    (seq,) = simulation.ask(0)
    for number in (seq, seq + 1000):
        simulation.network.deliver(identity, number, Reply(7))
        simulation.network.deliver(identity, number, answer)
    assert simulation.gather([seq]) == [0]  # its own answer came first
    assert simulation.call() == [0] and not simulation.pool.restarts


def test_a_worker_is_described_by_its_host_and_its_environments():
    simulation = Simulation(1)
    worker = Worker(3, slice(4, 6), offset=100)
    describe = simulation.pool.describe
    assert describe(worker) == "worker 3 (no hello yet, environments 104 to 105)"
    worker.process.host, worker.process.pid, worker.process.ended_because = "node7", 12, "lost"
    simulation.launcher.log = "a/log-{}".format
    assert describe(worker).endswith("(node7, pid 12, environments 104 to 105, lost, log a/log-3)")
