"""Several learners of one run: the processes that `torchrun` starts, with a run that they share."""

from .run import LearnersRun

__all__ = ["LearnersRun"]
