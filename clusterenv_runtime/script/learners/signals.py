"""Signals of several learners: one that ends, or is lost, ends the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...env import ClusterEnv
from ...errors import Interrupted, LearnerLostError, one_line
from ..signals import PREEMPTED, Signals, ignore_signals, not_saved
from .learners import Learners


class LearnersSignals(Signals):
    """The signals of one of several learners. It also ends when another has, and says which."""

    def __init__(self, learners: Learners) -> None:
        super().__init__()
        self._learners = learners

    def interrupt(self) -> None:
        """Do as if a scheduler had told this process to end; the learners' watch calls it."""
        if self.code is None:
            self.code = PREEMPTED
        if self._envs is not None:
            self._envs.interrupt()

    def end(self, then: str = "", why: Exception | None = None) -> None:
        """Say which learner was lost, if any was, or that all were interrupted; exit."""
        culprit, code = self._learners.part(self.code or 1)
        error = culprit or (why if self.code is None else None)
        if self._learners.speaks:
            print(f"error: {error}{then}" if error else f"interrupted{then}", file=sys.stderr)
        sys.exit(code)

    @contextmanager
    def saving(self, envs: ClusterEnv, save: Callable[[], None], to_go_on: str) -> Iterator[None]:
        """Have a signal or another learner's end end this block where nothing is half done.

        That is also in a wait for other learners. During an update there is nothing to save.
        """
        self._envs = envs
        learners = self._learners
        from_before = f"; to go on from the checkpoint before, if there is one: {to_go_on}"
        try:
            yield
        except Interrupted as why:
            ignore_signals()
            learners.begin_to_end()
            try:
                save()
            except OSError as error:
                learners.part(1)
                sys.exit(not_saved(error, to_go_on))
            self.end(f"; to go on: {to_go_on}" if learners.rank == 0 else from_before, why)
        except LearnerLostError as error:  # during an update
            ignore_signals()
            learners.begin_to_end()
            culprit, _ = learners.part(1)
            sys.exit(f"error: {culprit or error}{from_before}" if learners.speaks else 1)
        except BaseException as error:
            ignore_signals()  # torchrun, which ends the others, would end this one's last words
            learners.leave(f"has failed: {one_line(error)}")
            raise
        finally:
            self._envs = None
