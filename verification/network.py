"""The head's side of a simulated world, in place of the head's transport and launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterenv_runtime import messages
from clusterenv_runtime.head.transport import Received
from clusterenv_runtime.launchers import Exit, Launcher

from .world import Process, World


class Network:
    """The head's `Transport`."""

    address, key_file, directory = "simulated", None, "/"

    def __init__(self, world: World) -> None:
        self._world, self.dropped = world, 0

    def send(self, identity: bytes, frames: Sequence[Any]) -> bool:
        """Do as `Transport.send`."""
        process = self._world.processes[identity]
        if not process.is_closed:
            process.post([bytes(frame) for frame in frames])
        return not process.is_closed

    def receive(self, seconds: float) -> list[Received]:
        """Do as `Transport.receive`. Simulated time passes while it waits."""
        world = self._world
        # At least a millisecond passes, because the head's own work takes time, too.
        world.run(world.now + max(seconds, 0.001), lambda: world.arrived)
        received, world.arrived = world.arrived, []
        return received

    def has_pulse(self, identity: bytes) -> bool:
        """Do as `Transport.has_pulse`, without a second connection."""
        return self.send(identity, messages.PING)

    def forget(self, identity: bytes) -> None:
        """Do nothing: there is no state to forget."""

    def drop(self, text: str) -> None:
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
