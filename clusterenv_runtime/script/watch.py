"""Who of several learners is there still: each leaves word in their common store, and looks for that of the others."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch.distributed as dist

BEAT_S = 0.25  # how often a learner leaves word
SILENCE_S = 5.0  # without word of a learner, until it counts as dead
END_S = 3.0  # in which a learner must begin to end when another is dead; then it is ended wherever it hangs
SAVE_S = 60.0  # in which it must have ended
DONE, INTERRUPTED = "is done", "was interrupted"


class Place(msgspec.Struct):
    """Where a learner runs."""

    host: str
    pid: int
    namespace: str  # of the pid, on the machine as it is booted now

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def here(cls) -> Place:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(socket.gethostname(), os.getpid(), f"{boot} {os.readlink('/proc/self/ns/pid')}")

    def is_seen_dead(self, here: Place) -> bool:
        """Whether its process is one of those that can be seen from ``here``, and is no more."""
        return self.namespace == here.namespace and not os.path.exists(f"/proc/{self.pid}")


class Watch:
    """Watches over the other learners, in a thread.

    Args:
        store: what all learners share.
        rank, world_size: which learner this is, and of how many.
        places: where all learners run, see `Place`.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, places: list[Place]) -> None:
        self._store, self._rank, self._places = store, rank, places
        self._others = [other for other in range(world_size) if other != rank]
        self.left: dict[int, str] = {}  # who of the others has left, and why
        self.end: Callable[[], None] = lambda: None  # called, in the thread, when one has left before it was done
        self.patience = END_S  # seconds, see these two
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def culprit(self) -> str | None:
        """Who has died or failed, in words."""
        for other, why in self.left.items():
            if why not in (DONE, INTERRUPTED):
                return f"learner {other} ({self._places[other]}) {why}"
        return None

    @property
    def speaks(self) -> bool:
        """Whether this is the first of those that are left, who tells the user."""
        before = (self.left.get(other) for other in range(self._rank))
        return all(why not in (None, DONE, INTERRUPTED) for why in before)

    def begin_to_end(self) -> None:
        """Tell the others to end, too; and be patient with this one, which does not hang."""
        self.patience = SAVE_S
        with suppress(RuntimeError):  # the store has ended: the others see that, too
            self._store.set("ending", "yes")

    def leave(self, why: str) -> None:
        """Tell the others that this learner has ended."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", why)

    def wait_for_others(self) -> None:
        """Return when all others have left, in words or by their silence."""
        deadline = time.monotonic() + SILENCE_S + 2 * BEAT_S
        while len(self.left) < len(self._others) and time.monotonic() < deadline:
            time.sleep(BEAT_S / 5)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        heard, number, has_told = dict.fromkeys(self._others, (b"", time.monotonic())), 0, False
        store, told_at = self._store.clone(), float("inf")  # with a connection of its own: nothing holds it up
        while not self._over.wait(BEAT_S):
            number, is_ending = number + 1, False
            try:
                is_ending = store.check(["ending"])
                store.set(f"beat/{self._rank}", str(number))
                for other in self._others:
                    if other not in self.left:
                        self._look_after(store, other, heard)
            except RuntimeError:
                self.left.setdefault(0, "has gone, or the torchrun on its machine, with all that they leave word in")
            if not has_told and (is_ending or any(why != DONE for why in self.left.values())):
                has_told, told_at = True, time.monotonic()
                self.end()
            if time.monotonic() > told_at + self.patience:
                print(f"error: {self.culprit or 'the other learners have left'}", file=sys.stderr, flush=True)
                os._exit(1)

    def _look_after(self, store: dist.Store, other: int, heard: dict[int, tuple[bytes, float]]) -> None:
        if store.check([f"left/{other}"]):
            self.left[other] = store.get(f"left/{other}").decode()
        elif self._places[other].is_seen_dead(self._places[self._rank]):
            self.left[other] = "has died"
        elif store.check([f"beat/{other}"]) and (beat := store.get(f"beat/{other}")) != heard[other][0]:
            heard[other] = beat, time.monotonic()
        elif time.monotonic() > heard[other][1] + SILENCE_S:
            self.left[other] = f"has died, or has been silent for {SILENCE_S:g} s"
