"""Who of several learners is there still: each leaves word in their common store, and looks for
that of the others.
"""

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

from ...errors import printable

BEAT_S = 0.25  # how often a learner leaves word
SILENCE_S = 5.0  # without word from a learner, or from the store, until it counts as dead
# in which a learner must begin to end when another is dead; then it is ended wherever it hangs
END_S = 3.0
SAVE_S = 60.0  # in which it must have ended
DONE, INTERRUPTED = "is done", "was interrupted"


class Place(msgspec.Struct):
    """Where a learner runs."""

    host: str
    pid: int
    # of the pid, on the machine as it is booted now; empty if that cannot be found out
    namespace: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def here(cls) -> Place:
        namespace = ""
        with suppress(OSError):  # no Linux
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(socket.gethostname(), os.getpid(), namespace)

    def lives(self, here: Place) -> bool | None:
        """Whether its process is there; None if that cannot be seen from ``here``."""
        is_near = self.namespace != "" and self.namespace == here.namespace
        return os.path.exists(f"/proc/{self.pid}") if is_near else None


class Watch:
    """Watches over the other learners, in threads of its own.

    Time is counted in rounds: whoever is stopped together with the others misses none of them.

    Args:
        store: what all learners share.
        rank, world_size: which learner this is, and of how many.
        places: where all learners run, see `Place`.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, places: list[Place]) -> None:
        self._store, self._rank, self._places = store, rank, places
        self._others = [other for other in range(world_size) if other != rank]
        self.left: dict[int, str] = {}  # who of the others has left, and why
        self.store_is_lost = self._is_ending = False
        # A thread calls it when a learner has left before it was done.
        self.end: Callable[[], None] = lambda: None
        self.patience = END_S  # seconds, END_S or SAVE_S
        self._rounds = 0  # in which all have been looked after
        self._over = threading.Event()
        loops = self._listen, self._act
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    @property
    def culprit(self) -> str | None:
        """Who has died or failed, in words."""
        for other, why in self.left.items():
            if why not in (DONE, INTERRUPTED):
                return printable(f"learner {other} ({self._places[other]}) {why}")
        gone = "torchrun is gone, or its machine, and with it the learners' store"
        return gone if self.store_is_lost else None

    @property
    def speaks(self) -> bool:
        """Whether this is the first of those that are left, who tells the user."""
        return all(map(self._is_lost, range(self._rank)))

    def _is_lost(self, other: int) -> bool:
        if self.store_is_lost and other not in self.left:
            return not self._places[other].lives(self._places[self._rank])
        return self.left.get(other, DONE) not in (DONE, INTERRUPTED)

    def begin_to_end(self) -> None:
        """Tell the others to end, too; and be patient with this one, which does not hang."""
        self.patience = SAVE_S
        self._tell("ending", "yes")

    def leave(self, why: str) -> None:
        """Tell the others that this learner has ended."""
        self._tell(f"left/{self._rank}", why)

    def _tell(self, key: str, text: str) -> None:
        if not self.store_is_lost:
            with suppress(RuntimeError):  # it is lost: the others see that, too
                self._store.set(key, text)

    def wait_for_others(self) -> None:
        """Return when all others have left, in words or by their silence."""
        deadline = time.monotonic() + SILENCE_S + 2 * BEAT_S
        while (
            len(self.left) < len(self._others)
            and not self.store_is_lost
            and time.monotonic() < deadline
        ):
            time.sleep(BEAT_S / 5)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=2 * BEAT_S)  # a store that does not answer may hold it for minutes

    def _listen(self) -> None:
        """Leave word, and look for that of the others, round after round."""
        # the last word of each learner, and for how many rounds it has been the last
        heard = dict.fromkeys(self._others, (b"", 0))
        try:
            store = self._store.clone()  # with a connection of its own: nothing holds it up
            while not self._over.wait(BEAT_S):
                self._is_ending = store.check(["ending"])
                store.set(f"beat/{self._rank}", str(self._rounds))
                for other in self._others:
                    if other not in self.left:
                        heard[other] = self._look_after(store, other, *heard[other])
                self._rounds += 1
        except RuntimeError:
            self.store_is_lost = True

    def _look_after(
        self, store: dist.Store, other: int, word: bytes, rounds: int
    ) -> tuple[bytes, int]:
        # This is asked first: a learner leaves word, and then ends.
        lives = self._places[other].lives(self._places[self._rank])
        if store.check([f"left/{other}"]):
            self.left[other] = store.get(f"left/{other}").decode(errors="replace")
        elif lives is False:
            self.left[other] = "has died"
        elif store.check([f"beat/{other}"]) and (beat := store.get(f"beat/{other}")) != word:
            return beat, 0
        elif rounds * BEAT_S > SILENCE_S:
            self.left[other] = f"has died, or has been silent for {SILENCE_S:g} s"
        return word, rounds + 1

    def _act(self) -> None:
        """Have this learner end when another has, and end it if it does not."""
        rounds, still, told_at = 0, 0, None
        while not self._over.wait(BEAT_S):
            still = still + 1 if rounds == self._rounds else 0
            rounds = self._rounds
            self.store_is_lost = self.store_is_lost or still * BEAT_S > SILENCE_S
            is_over = (
                self._is_ending
                or self.store_is_lost
                or any(why != DONE for why in self.left.values())
            )
            if is_over and told_at is None:
                told_at = time.monotonic()
                self.end()
            if told_at is not None and time.monotonic() > told_at + self.patience:
                if self.speaks:
                    text = self.culprit or "the other learners have left"
                    print(f"error: {text}", file=sys.stderr, flush=True)
                os._exit(1)
