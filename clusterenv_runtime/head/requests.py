"""What workers were asked, and have not answered or not been heard on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..protocol import Message


@dataclass
class Request:
    """A message to one worker that wants an answer."""

    seq: int
    worker: int
    message: Message
    buffers: tuple[Any, ...]


class Requests:
    """Numbers requests; keeps each until it is answered, and the answer until it is taken."""

    def __init__(self) -> None:
        self._last = 0
        self._outstanding: dict[int, Request] = {}  # by seq, oldest first
        # By seq, frames of what nobody has taken yet, oldest first. They are decoded again when taken: thousands,
        # held decoded, are so many objects that Python's garbage collector takes more time than all the rest.
        self._answers: dict[int, tuple[Request, list[Any]]] = {}

    def next_seq(self) -> int:
        """Return a fresh number."""
        self._last += 1
        return self._last

    def add(self, worker: int, message: Message, buffers: tuple[Any, ...]) -> Request:
        """Number a request, and keep it."""
        seq = self.next_seq()
        self._outstanding[seq] = request = Request(seq, worker, message, buffers)
        return request

    def is_outstanding(self, seq: int | None, worker: int) -> bool:
        """Say whether this worker has this to answer."""
        request = self._outstanding.get(seq)
        return request is not None and request.worker == worker

    def answer(self, seq: int, frames: list[Any]) -> None:
        """Keep the answer to a request that is outstanding."""
        self._answers[seq] = self._outstanding.pop(seq), frames

    def take(self, seq: int) -> tuple[Request, list[Any]]:
        """Return an answered request and the frames of its answer, which are kept no longer."""
        return self._answers.pop(seq)

    def forget(self, seqs: Iterable[int]) -> None:
        """Neither wait for these any more, nor keep their answers."""
        for seq in seqs:
            self._outstanding.pop(seq, None)
            self._answers.pop(seq, None)

    def forget_worker(self, worker: int) -> None:
        """Wait no more for anything of this worker."""
        self._outstanding = {seq: request for seq, request in self._outstanding.items() if request.worker != worker}

    def of(self, worker: int) -> list[Request]:
        """Return what this worker has not answered, oldest first."""
        return [request for request in self._outstanding.values() if request.worker == worker]

    def workers(self, seqs: Iterable[int]) -> list[int]:
        """Return which workers have not answered these, in order."""
        return sorted({self._outstanding[seq].worker for seq in seqs if seq in self._outstanding})

    def first_answered(self, seqs: Collection[int]) -> int | None:
        """Return the first of these to be answered, or None if none is."""
        # One is looked up; of many, the first answer is almost always one.
        some, others = (seqs, self._answers) if len(seqs) == 1 else (self._answers, seqs)
        return next((seq for seq in some if seq in others), None)

    def watch(self, seqs: Iterable[int]) -> Callable[[], bool]:
        """Return a function that says whether none of these is outstanding; asking it often costs little."""
        rest: Iterator[int] = iter(seqs)
        seq: int | None = None

        def are_settled() -> bool:
            nonlocal seq
            while seq not in self._outstanding:  # what has been answered is not asked again
                if (seq := next(rest, None)) is None:
                    return True
            return False

        return are_settled
