"""The protocol between a head and its workers, as rules over an abstract state.

Each rule is a possible event: a message is read, a process dies, the user calls a method.
`Model.successors` returns all events that can happen in a state. `verification.search` tries every
order of them. The model leaves out time (an event with a deadline may happen at once, or late), the
content of observations, and the rounding of weights.

In addition to the checks of `search`, the model checks the following. The head sends no process
weights that the process cannot use, and a process holds the weights that the head believes it
holds. Each request is answered once, in turn, by the process that was asked, with weights of the
right structure. The user learns of each lost episode, and of no other. In the end nothing is left
over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .state import (
    BUILDING,
    ENDED,
    KILLED,
    LOST,
    READY,
    STARTING,
    Process,
    Request,
    State,
    Violation,
    Worker,
)

Event = tuple[Any, ...]  # an event, in words and values


def reads(process: Process, message: tuple) -> Process:
    """Take a message from the head. Handle it now, or later if the process waits for weights."""
    if process.stage != "pulling":
        return does(process._replace(stage="idle"), message)
    if message[0] == "structure":  # the next weights belong to it
        return does(process, message)
    if message[0] != "weights":
        return process._replace(later=(*process.later, message))
    _, version, base, structure = message
    if base not in ((), process.chain) or structure != process.structure:
        raise Violation(f"{message} came to {process}")
    process = process._replace(stage="idle", held=version, chain=(*base, version))
    return acts(process, process.request)


def does(process: Process, message: tuple) -> Process:
    """Handle a message from the head."""
    if message[0] in ("collect", "step", "reset"):
        if message[1].seq <= process.last:
            raise Violation(f"{message} came to {process}, which has done it")
        process = process._replace(last=message[1].seq)
    match message:
        case ("setup",):
            return process.says("built")
        case ("structure", structure):
            return process._replace(structure=structure, held=0, chain=())
        case ("cut",):  # if it has acted, the user will see that first
            return process._replace(cut=process.last == 0)
        case ("collect", request):
            lags = process.held < request.version
            if process.held and not (
                lags and request.diverged and process.held == request.behavior
            ):
                return acts(process, request)
            return process._replace(stage="pulling", request=request).says("pull", process.held)
        case ("step" | "reset" as kind, request):
            is_cut = process.cut and kind == "step"
            return process._replace(cut=False).says("stepped", request, is_cut)
    raise Violation(f"{message} came to {process}")


def acts(process: Process, request: Request) -> Process:
    """Collect a rollout with the weights that the process holds."""
    process = process._replace(request=None, cut=False)
    return process.says("part", request, process.held, process.structure)


class Model:
    """The rules of the protocol.

    Args:
        num_workers: the number of workers at the head.
        calls: how often the user may "publish", change the "structure", "send", "rollout", "step"
            and "interrupt".
        faults: how many times a process may die, raise an exception, be too slow, or survive a
            kill.
        max_restarts: how many processes of one worker may be lost in a row.
    """

    def __init__(
        self, num_workers: int, calls: dict[str, int], faults: int, max_restarts: int
    ) -> None:
        self.max_restarts = max_restarts
        processes = tuple(Process(worker, 1) for worker in range(num_workers))
        self.first = State((Worker(),) * num_workers, processes, tuple(calls.items()), faults)

    def successors(self, state: State) -> Iterator[tuple[Event, State, bool]]:
        """Yield each possible event, the state after it, and whether it is bad luck.

        Bad luck need not happen.
        """
        if state.over:
            return
        for index, process in enumerate(state.processes):
            name = process.worker, process.number
            if process.up:
                after = state.with_process(index, process._replace(up=process.up[1:]))
                yield (
                    ("head reads", *name, process.up[0]),
                    self.head_reads(after, process, process.up[0]),
                    False,
                )
            if process.stage == "new" and not process.up and not process.down:
                yield (
                    ("process greets again", *name),
                    state.with_process(index, process.says("hello")),
                    False,
                )
            if process.stage == "idle" and process.later:
                after = does(process._replace(later=process.later[1:]), process.later[0])
                yield (
                    ("process does what came before", *name),
                    state.with_process(index, after),
                    False,
                )
            elif process.stage != "dead" and process.down:
                after = reads(process._replace(down=process.down[1:]), process.down[0])
                yield (
                    ("process reads", *name, process.down[0]),
                    state.with_process(index, after),
                    False,
                )
        for index, worker in enumerate(state.workers):
            if after := self.look_after(state, index, worker):
                yield ("head looks after", index), after, False
        for event, after in self.user(state):
            yield event, after, False
        if state.waiting and (after := state.after("interrupt")):
            yield ("user interrupts",), self.give_up(after), True
        if state.faults:
            for event, after in self.misfortunes(state._replace(faults=state.faults - 1)):
                yield event, after, True

    # The head's rules.
    def head_reads(self, state: State, process: Process, message: tuple) -> State:
        """Handle one message from a process."""
        index, worker = process.worker, state.workers[process.worker]
        if message[0] == "hello":
            return self.greet(state, process) if worker.phase == STARTING else state
        if process.number != worker.greeted:  # a former process
            return state
        match message:
            case ("built",) if worker.phase == BUILDING:
                return state.with_worker(index, worker._replace(phase=READY))
            case ("pull", held) if worker.phase in (BUILDING, READY):
                if worker.chain and held != worker.held:
                    raise Violation(f"{process} does not hold what {worker} says")
                base, chain = worker.chain, (*worker.chain, state.version)
                state = state.with_worker(index, worker._replace(held=state.version, chain=chain))
                return state.post(index, ("weights", state.version, base, state.structure))
            case ("part" | "stepped", request, *_) if request in state.requests:
                if request != next(other for other in state.requests if other.worker == index):
                    raise Violation(f"{request} was answered before others of {state.requests}")
                requests = tuple(other for other in state.requests if other != request)
                answers = (*state.answers, (request, message, worker.number, process.number))
                if request.kind != "reset" and message[2] is not True:
                    state = state.with_worker(index, worker._replace(losses=0))
                return state._replace(requests=requests, answers=answers)
            case ("raised",):
                return self.end(state, index)
        return state

    def greet(self, state: State, process: Process) -> State:
        """Send a process its worker's setup, the policy's structure, and outstanding requests."""
        index = process.worker
        worker = state.workers[index]._replace(phase=BUILDING, greeted=process.number)
        state = state.with_worker(index, worker).post(index, ("setup",))
        if state.structure:
            state = state.post(index, ("structure", state.structure))
        if worker.seen:
            state = state.post(index, ("cut",))
        for request in state.requests:
            if request.worker == index:
                state = state.post(index, (request.kind, request))
        return state

    def look_after(self, state: State, index: int, worker: Worker) -> State | None:
        """Take a worker whose process or link is gone one step further.

        Return None if there is nothing to do.
        """
        living = {
            each.number for each in state.processes if each.worker == index and each.stage != "dead"
        }
        if worker.phase in (STARTING, BUILDING, READY):
            if worker.number in living and worker.greeted in (0, *living):
                return None
            return state.with_worker(index, worker._replace(phase=LOST))
        if worker.phase == LOST:
            processes = (  # messages that a dead process has sent may still arrive
                each.dead() if (each.worker, each.number) == (index, worker.number) else each
                for each in state.processes
            )
            return state.with_processes(processes).with_worker(index, worker._replace(phase=KILLED))
        return self.replace(state, index, worker) if worker.phase == KILLED else None

    def replace(self, state: State, index: int, worker: Worker) -> State:
        """Start a replacement of a lost process, unless too many were lost."""
        if worker.losses == self.max_restarts:
            return self.end(state, index)
        worker = worker._replace(
            phase=STARTING, number=worker.number + 1, greeted=0, losses=worker.losses + 1
        )
        worker = worker._replace(held=0, chain=(), behavior=0, measured=0)
        return state.with_worker(index, worker).with_processes(
            (*state.processes, Process(index, worker.number))
        )

    def end(self, state: State, index: int) -> State:
        """Give a worker up. Its requests are dropped, and the user gets an error."""
        state = state.with_worker(index, state.workers[index]._replace(phase=ENDED))
        requests = tuple(request for request in state.requests if request.worker != index)
        return state._replace(requests=requests, error=True)

    # The user's rules.
    def user(self, state: State) -> Iterator[tuple[Event, State]]:
        """Yield the user's options: go on when a call has its results, or call something."""
        if state.waiting:
            if state.error:
                yield ("user gets an error",), self.give_up(state)._replace(over=True)
            else:
                yield from self.returns(state, *state.waiting)
            return
        if after := state.after("publish"):
            yield ("user publishes",), self.publish(after, after.structure or 1)
        if state.structure and (after := state.after("structure")):
            yield ("user publishes another structure",), self.publish(after, after.structure + 1)
        if state.version and (after := state.after("send")):
            yield from self.sends(after)
        if state.granted:
            yield ("user calls recv",), state._replace(waiting=("recv", state.granted))
            return
        everyone = range(len(state.workers))
        if state.to_reset:
            asked, seqs = self.ask(state, everyone, "reset", False)
            yield ("user calls reset",), asked._replace(waiting=("reset", seqs))
            return
        if state.version and (after := state.after("rollout")):
            for diverged in (False, True):
                asked, seqs = self.ask(after, everyone, "collect", diverged)
                yield ("user calls rollout", diverged), asked._replace(waiting=("rollout", seqs))
        if after := state.after("step"):
            asked, seqs = self.ask(after, everyone, "step", False)
            yield ("user calls step",), asked._replace(waiting=("step", seqs))
        if state.requests or state.answers:
            raise Violation(f"nobody takes {state.requests} {state.answers}")
        yield ("user closes",), state._replace(over=True)

    def returns(
        self, state: State, call: str, awaited: Sequence[int]
    ) -> Iterator[tuple[Event, State]]:
        """Yield the return of a call that has its results: workers' weights, or responses to it."""
        if call == "send":
            lack = any(
                state.workers[i].phase == READY and state.workers[i].held != state.version
                for i in awaited
            )
            if not lack or not any(request.seq in state.granted for request in state.requests):
                yield ("send returns",), state._replace(waiting=())
            return
        answers = [answer for answer in state.answers if answer[0].seq in awaited]
        if call == "recv":
            answers = answers[:1]
        if answers and (call == "recv" or len(answers) == len(awaited)):
            for answer in answers:
                state = self.take(state, answer)
            state = state._replace(to_reset=state.to_reset and call != "reset")
            yield (call, "returns"), state._replace(waiting=())

    def sends(self, state: State) -> Iterator[tuple[Event, State]]:
        """Yield the results of asking each worker to collect, diverged or not."""
        for index in range(len(state.workers)):
            is_busy = any(
                request.worker == index
                for request in state.requests
                if request.seq in state.granted
            )
            for diverged in (False, True):
                asked, (seq,) = self.ask(state, [index], "collect", diverged)
                pulls = not is_busy and asked.requests[-1].diverged
                asked = asked._replace(
                    waiting=("send", (index,) * pulls), granted=(*state.granted, seq)
                )
                yield ("user calls send", index, diverged), asked

    def publish(self, state: State, structure: int) -> State:
        """Make other weights the next version, and measure the workers' divergence from them."""
        changed, workers = structure != state.structure, []
        for worker in state.workers:
            if changed:
                worker = worker._replace(held=0, chain=(), behavior=0)
            workers.append(worker._replace(measured=worker.behavior))
        state = state._replace(workers=tuple(workers), structures=(*state.structures, structure))
        for index in range(len(workers) if changed else 0):
            state = state.post(index, ("structure", structure))
        return state

    def ask(
        self, state: State, indices: Sequence[int], kind: str, diverged: bool
    ) -> tuple[State, tuple[int, ...]]:
        """Send a request to each of these workers, in order. Return the state and the seqs."""
        seqs = tuple(range(state.seq + 1, state.seq + 1 + len(indices)))
        diverged = diverged or not any(state.workers[index].measured for index in indices)
        for seq, index in zip(seqs, indices, strict=True):
            request, worker = Request(seq, index, kind), state.workers[index]
            if kind == "collect":
                request = Request(
                    seq, index, kind, state.version, worker.measured, diverged, state.structure
                )
            state = state.post(index, (kind, request))
            state = state._replace(requests=(*state.requests, request), seq=seq)
        return state, seqs

    def give_up(self, state: State) -> State:
        """End the current call by an exception. Requests of `send` remain outstanding."""
        call, seqs = state.waiting
        if call in ("rollout", "step", "reset"):
            state = state._replace(to_reset=state.to_reset or call == "step")
            requests = tuple(request for request in state.requests if request.seq not in seqs)
            answers = tuple(answer for answer in state.answers if answer[0].seq not in seqs)
            state = state._replace(requests=requests, answers=answers)
        return state._replace(waiting=())

    def take(self, state: State, answer: tuple) -> State:
        """Give a response to the user, and check that it belongs to the request."""
        request, message, number, greeted = answer
        worker = state.workers[request.worker]
        if message[0] == "part":
            _, _, version, structure = message
            if structure < request.structure or state.structures[version - 1] != structure:
                raise Violation(
                    f"{request} was answered by {message}; the versions' structures: "
                    f"{state.structures}"
                )
            if structure == state.structure:
                worker = worker._replace(behavior=version)
        elif request.kind == "step" and message[2] != (worker.seen not in (0, greeted)):
            raise Violation(
                f"{message} of process {greeted}, and the user has seen process {worker.seen}"
            )
        worker = worker._replace(seen=greeted)
        if number != worker.number:
            state = state.post(request.worker, ("cut",))
        answers = tuple(other for other in state.answers if other != answer)
        granted = tuple(seq for seq in state.granted if seq != request.seq)
        return state._replace(answers=answers, granted=granted).with_worker(request.worker, worker)

    # Faults.
    def misfortunes(self, state: State) -> Iterator[tuple[Event, State]]:
        """Yield the faults that can happen."""
        for index, process in enumerate(state.processes):
            name, worker = (process.worker, process.number), state.workers[process.worker]
            if process.stage == "dead":
                continue
            for sent in range(len(process.up) + 1):
                after = process._replace(up=process.up[:sent]).dead()
                yield ("process dies, having sent", *name, sent), state.with_process(index, after)
            if process.stage == "idle":
                yield (
                    ("process raises", *name),
                    state.with_process(index, process.says("raised").dead()),
                )
            if process.number == worker.number and worker.phase in (STARTING, BUILDING):
                yield (
                    ("process is too slow", *name),
                    state.with_worker(name[0], worker._replace(phase=LOST)),
                )
            if process.number == worker.number and worker.phase == LOST:
                yield (
                    ("process survives", *name),
                    state.with_worker(name[0], worker._replace(phase=KILLED)),
                )
