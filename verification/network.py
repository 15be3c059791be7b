"""The head's side of a simulated world, in place of the head's transport and launcher."""

from __future__ import annotations

from collections.abc import Iterable

from clusterenv_runtime.head.transport import Outgoing, Received
from clusterenv_runtime.launchers import Exit, Launcher
from clusterenv_runtime.wire import protocol

from .world import Process, World


class Network:
    """The head's `Transport`."""

    address, key_file, directory = "simulated", None, "nowhere"

    def __init__(self, world: World) -> None:
        self._world, self.dropped = world, 0

    def exchange(
        self, outbox: Iterable[Outgoing], seconds: float | None
    ) -> tuple[list[Received], list[bytes]]:
        """Do as `Transport.exchange`. Simulated time passes while it waits."""
        world, closed = self._world, []
        for out in outbox:
            process = world.processes[out.identity]
            if process.is_closed:
                closed.append(out.identity)
            else:
                process.asked.add(out.seq)
                process.post(
                    [bytes(frame) for frame in protocol.frames(out.seq, out.message, *out.buffers)]
                )
        if seconds is None:
            return [], closed
        # At least a millisecond passes, because the head's own work takes time, too.
        world.run(world.now + max(0 if closed else seconds, 0.001), lambda: world.arrived)
        received, world.arrived = world.arrived, []
        return received, closed

    def restore(self) -> None:
        """Do nothing: there is no directory."""

    def forget(self, identity: bytes) -> None:
        """Do nothing: there is no state to forget."""

    def drop(self, identity: bytes, text: str) -> None:
        self.dropped += 1
        self._world.note(f"dropped {text}")

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Processes(Launcher):
    """A `Launcher` of simulated processes."""

    name, remote = "simulated", False

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self._started, self.of = world, [], dict[int, Process]()

    def start_worker(self, index: int) -> None:
        """Start a process, which takes some time, or too long."""
        world = self._world
        self._started.append(index)
        process = self.of[index] = Process(world, index, self._started.count(index))
        world.processes[process.identity] = process
        world.after(world.random.choice((0.01, 0.1, 1.0)), process.wake)

    def exit(self, index: int) -> Exit | None:
        return self.of[index].exit

    def kill(self, index: int) -> None:
        process = self.of[index]
        if not process.survives:
            process.die()

    def has_ended(self, index: int) -> bool:
        return self.of[index].exit is not None

    def stop(self, timeout: float) -> None:
        self._world.run(
            self._world.now + timeout, lambda: all(each.exit for each in self.of.values())
        )
        for process in self.of.values():
            process.die()
