"""The head without processes, sockets or a wall clock: when it counts workers as lost, which
workers it serves in between, and what it reports.
"""

import re

import numpy as np
import pytest

from clusterenv_runtime import DeadlineError, EnvError, Exit, StartupError, WorkerDiedError
from clusterenv_runtime.head.requests import to_exception
from clusterenv_runtime.head.supervisor import KILL_S, LOOK_S, NOTICE_S, REASON_S, SOON_S
from clusterenv_runtime.head.worker import Process, State, Worker
from clusterenv_runtime.wire.protocol import Built, Call, Collect, Error, Pull, Reply, Step

from .simulated import SIGKILL, STARTUP_S, Processes, Simulation, a_part, opens

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
            simulation.pool.ask(simulation.workers[1], Call("name"))
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
    assert len(simulation.recovery.restarts) == number
    if how == "cut off":
        # Some answers came while lost workers were not replaced yet.
        assert any(state in (State.LOST, State.KILLED) for _, state in answers)


def test_a_link_that_breaks_before_its_process_ends_is_reported_with_the_processes_reason():
    simulation = Simulation(1)
    first = simulation.launcher.of[0]
    first.cut_off = True
    exchange = simulation.network.exchange

    def ends_later(outbox, seconds):
        if (
            simulation.workers[0].process.state == State.LOST
            and simulation.network.now > REASON_S / 2
        ):
            first.exit = SIGKILL
        return exchange(outbox, seconds)

    simulation.network.exchange = ends_later
    simulation.wait(5)
    assert "died: killed by SIGKILL" in simulation.recovery.restarts[0]["reason"]


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
    assert len(simulation.recovery.restarts) == 1
    simulation.wait(1)
    assert "did not come up" in simulation.recovery.restarts[1]["reason"]


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
        simulation.pool.start(2)
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
        simulation.pool.start(2)


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
    (restart,) = simulation.recovery.restarts
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
    (restart,) = simulation.recovery.restarts
    assert re.search(r"\(its last message came [123] s ago\)", restart["reason"])


def test_only_unanswered_requests_of_a_lost_worker_are_sent_to_its_replacement():
    simulation = Simulation(1)
    first, (worker,) = simulation.launcher.of[0], simulation.workers
    first.stopped = True
    seqs = [simulation.pool.ask(worker, Call(name)) for name in ("answered", "lost", "lost too")]
    simulation.network.deliver(first.identity, seqs[0], Reply("from the first"))  # its last message
    first.die()
    answers = [request.response.value for request in simulation.pool.gather(seqs)]
    assert answers == ["from the first", 0, 0]
    assert [
        request.name for request in simulation.launcher.of[0].heard if isinstance(request, Call)
    ] == [
        "lost",
        "lost too",
    ]
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
            assert simulation.call(message=Step()) == [0, 1, 2, 3]
            simulation.network.now += 0.1
    assert len(simulation.recovery.restarts) == 200


def test_a_death_by_signal_before_hello_is_repaired():
    class DiesOnce(Processes):
        def start_worker(self, index):
            self.greets = index in self.started_at or index != 1
            super().start_worker(index)
            if not self.greets:
                self.of[index].die()

    simulation = Simulation(3, launcher=DiesOnce)
    assert simulation.call() == [0, 1, 2]
    assert [restart["worker"] for restart in simulation.recovery.restarts] == [1]


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
        simulation.pool.start(3)
    assert STARTUP_S < simulation.network.now < STARTUP_S + 2 * LOOK_S


def test_a_late_worker_is_lost_if_enough_others_have_started():
    class SecondIsLate(Processes):
        def start_worker(self, index):
            self.greets = index == 0
            super().start_worker(index)

    simulation = Simulation(2, launcher=SecondIsLate, start=False)
    simulation.pool.start(1)
    simulation.wait(STARTUP_S + 1)
    (restart,) = simulation.recovery.restarts
    assert restart["worker"] == 1 and "did not come up" in restart["reason"]
    assert simulation.launcher.killed[0][0] == 1


def test_a_late_worker_has_the_whole_startup_timeout_to_build():
    simulation = Simulation(1, launcher=Silent, start=False)
    network, exchange = simulation.network, simulation.network.exchange

    def greets_late(outbox, seconds):
        if network.now > 50 and not process:
            process.append(simulation.launcher.of[0])
            process[0].stopped = True
            process[0].greet()
        return exchange(outbox, seconds)

    process, network.exchange = [], greets_late
    with pytest.raises(StartupError, match="did not come up"):
        simulation.pool.start(1)
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
    network, exchange, times = (
        simulation.network,
        simulation.network.exchange,
        iter(range(1, built + 1)),
    )

    def tells(outbox, seconds):
        if network.now > 50 * told[0] and (number := next(times, None)):
            told[0] = number + 1
            network.deliver(simulation.launcher.of[0].identity, None, Built())
        return exchange(outbox, seconds)

    told, network.exchange = [1], tells
    with pytest.raises(
        StartupError, match="did not come up or build the next environment within 60 s"
    ):
        simulation.pool.start(1)
    last = 50 * built
    assert last + STARTUP_S < network.now < last + STARTUP_S + 2


def test_a_process_that_cannot_be_killed_is_given_up_in_time():
    class Immortal(Processes):
        def kill(self, index):
            self.killed.append((index, self.network.now))

    simulation = Simulation(2, launcher=Immortal)
    simulation.launcher.of[1].cut_off = True
    start, before = simulation.network.now, simulation.network.exchanges
    simulation.wait(1 + REASON_S + KILL_S + 1)
    assert len(simulation.recovery.restarts) == 1
    # The pool waits for its end without busy polling.
    assert simulation.network.exchanges - before < 1.1 * (REASON_S + KILL_S) / SOON_S
    assert simulation.launcher.started_at[1][1] - start <= 1 + REASON_S + KILL_S + 3 * LOOK_S


def test_a_worker_of_another_version_is_refused_at_the_start_and_lost_later():
    class Old(Processes):
        greets = False

        def start_worker(self, index):
            super().start_worker(index)
            self.of[index].greet(protocol=1)

    simulation = Simulation(1, launcher=Old, start=False)
    with pytest.raises(StartupError, match="speaks protocol 1, the head"):
        simulation.pool.start(1)

    simulation = Simulation(1)
    simulation.launcher.greets = False
    simulation.launcher.of[0].die()
    seq = simulation.pool.ask(simulation.workers[0], Call("name"))
    simulation.pool.wait_until(lambda: len(simulation.launcher.started_at[0]) == 2, [seq])
    simulation.launcher.greets = True
    simulation.launcher.of[0].greet(protocol=1)
    assert [request.response.value for request in simulation.pool.gather([seq])] == [0]
    assert "speaks protocol 1" in simulation.recovery.restarts[-1]["reason"]


def test_an_error_ends_its_worker_and_is_raised_once_the_others_have_answered():
    simulation = Simulation(3)
    simulation.launcher.of[1].stopped = True
    seqs = [simulation.pool.ask(worker, Call("name")) for worker in simulation.workers]
    error = Error(1, "builtins.ValueError", "on purpose", "Traceback", fatal=True)
    simulation.network.deliver(simulation.launcher.of[1].identity, seqs[1], error)
    simulation.launcher.of[1].die(Exit("exit code 0"))
    with pytest.raises(ValueError, match="^on purpose$"):
        simulation.pool.gather(seqs)
    assert simulation.workers[1].process.state == State.ENDED and not simulation.recovery.restarts
    assert not simulation.pool.failures.to_reset  # none of its environments is left to reset
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
    assert 3 <= simulation.network.now - start < 3.1 and simulation.network.closed
    simulation.pool.close(timeout=3)


def test_messages_that_an_exception_leaves_unhandled_are_handled_by_the_next_wait():
    times = iter(range(9))

    def interrupted(asked, answer, *_):
        if next(times) == 1:
            raise KeyboardInterrupt
        return opens(asked, answer)

    simulation = Simulation(3, opener=interrupted)
    seqs = [simulation.pool.ask(worker, Call("name")) for worker in simulation.workers]
    with pytest.raises(KeyboardInterrupt):
        simulation.pool.wait_until(lambda: False, seqs)
    before = simulation.network.now
    assert [request.response.value for request in simulation.pool.gather(seqs)] == [0, 1, 2]
    assert simulation.network.now - before < 0.1


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
    sent = [
        out
        for out in network.sent
        if out.identity == worker.process.identity and out.message in collects
    ]
    assert [(out.seq, out.message) for out in sent] == list(zip(seqs, collects, strict=True))


def test_control_characters_in_a_workers_error_are_escaped():
    error = to_exception(
        [
            (
                "worker 0",
                Error(0, "builtins.ValueError", "\x1b[2J\nno\u202e", "\x1b[2J\n\tin step", True),
            )
        ]
    )
    assert str(error) == "\\x1b[2J\nno\\u202e"
    assert str(error.__cause__).endswith("\n\n\\x1b[2J\n\tin step")


@pytest.mark.parametrize(
    ("env", "ends", "which"),
    [
        (4, True, "environment 4"),
        (4, False, "environment 4"),
        (None, True, "the policy or an environment"),
    ],
)
def test_the_cause_of_an_error_says_where_it_was_raised(env, ends, which):
    error = to_exception(
        [
            (
                "worker 2",
                Error(env, "builtins.ValueError", "text", "Traceback", False, ends_episodes=ends),
            )
        ]
    )
    assert type(error) is ValueError and str(error) == "text" and type(error.__cause__) is EnvError
    assert (
        str(error.__cause__) == f"{which} on worker 2 raised builtins.ValueError: text\n\nTraceback"
    )


@pytest.mark.parametrize(
    "kind",
    [
        "builtins.StopIteration",
        "builtins.UnicodeDecodeError",
        "builtins.SystemExit",
        "builtins.len",
        "os.error",
        "x",
    ],
)
def test_an_exception_that_cannot_be_raised_as_it_was_is_an_env_error(kind):
    error = to_exception([("worker 2", Error(None, kind, "text", "Traceback", fatal=True))])
    assert type(error) is EnvError and str(error).endswith(f"raised {kind}: text\n\nTraceback")


def test_the_last_of_several_errors_is_raised_and_the_others_are_logged(caplog):
    errors = [
        ("worker", Error(None, f"builtins.{kind}", kind, "", True))
        for kind in ("ValueError", "KeyError")
    ]
    assert type(to_exception(errors)) is KeyError
    (message,) = caplog.messages
    assert message.startswith("the policy or an environment on worker raised builtins.ValueError")


def test_after_the_error_that_ends_it_a_worker_is_not_heard():
    simulation = Simulation(2)
    (seq,), first = simulation.never(), simulation.launcher.of[0]
    for _ in range(3):
        simulation.network.deliver(
            first.identity, seq, Error(0, "builtins.ValueError", "text", "", True)
        )
    with pytest.raises(ValueError, match="text"):
        simulation.call(1)
    simulation.network.deliver(
        first.identity, seq, Error(0, "builtins.ValueError", "text", "", True)
    )
    assert simulation.call(1) == [1]


@pytest.mark.parametrize(
    "answer", [Reply(None), a_part(), Error(0, "builtins.ValueError", "", "", False)]
)
def test_a_worker_that_answers_an_unknown_request_is_lost_before_its_response_is_opened(answer):
    simulation = Simulation(1)
    for seq in range(1000, 2000):
        simulation.network.deliver(simulation.launcher.of[0].identity, seq, answer)
    assert simulation.call() == [0]
    (restart,) = simulation.recovery.restarts
    assert "it answered a request that it was not sent, or did so twice" in restart["reason"]


def test_a_worker_that_answers_twice_is_lost():
    simulation = Simulation(1)
    identity = simulation.launcher.of[0].identity
    (seq,) = simulation.never()
    for _ in range(2):
        simulation.network.deliver(identity, seq, Reply(None))
    assert simulation.call() == [0]
    assert "or did so twice" in simulation.recovery.restarts[0]["reason"]


def test_a_worker_is_described_by_its_host_and_its_environments():
    worker = Worker(3, slice(4, 6), b"", [], offset=100)
    assert worker.describe() == "worker 3 (no hello yet, environments 104 to 105)"
    worker.process.host, worker.process.pid, worker.process.ended_because = "node7", 12, "lost"
    assert (
        worker.describe("a/log")
        == "worker 3 (node7, pid 12, environments 104 to 105, lost, log a/log)"
    )


@pytest.mark.parametrize("version", [0, 1, 10**6])
def test_a_worker_that_pulls_without_a_request_to_act_is_lost(version):
    simulation = Simulation(1)
    simulation.store.version = 1
    (seq,) = simulation.never()
    simulation.network.deliver(simulation.launcher.of[0].identity, seq, Pull(version))
    assert simulation.call() == [0]
    assert "pulled when no request allowed it" in simulation.recovery.restarts[0]["reason"]


@pytest.mark.parametrize(
    ("pulls", "may"),
    [
        ([0], True),
        ([3], True),
        ([3, 0], True),
        ([0, 0], False),
        ([3, 3], False),
        ([3, 0, 0], False),
        ([0, 3], False),
    ],
)
def test_a_second_pull_is_only_for_a_worker_that_held_something(pulls, may):
    # A difference may not fit the weights that it is added to, but all weights always fit.
    process, found = Process(), []
    process.asked[7] = Collect(1, 9, 0, 0.0, [])
    for held in pulls:
        found.append(process.may_pull(7, held, 9))
        process.pulled = 7, held
    assert found == [True] * (len(pulls) - 1) + [may]


def test_a_response_that_cannot_be_opened_costs_only_its_worker():
    opened = iter([RuntimeError("no"), None])

    def fails_once(asked, answer, *_):
        if error := next(opened):
            raise error
        return opens(asked, answer)

    simulation = Simulation(1, opener=fails_once)
    assert simulation.call() == [0]
    assert "its answer was wrong: no" in simulation.recovery.restarts[0]["reason"]
