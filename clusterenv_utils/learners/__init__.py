"""Several learners of one run: the processes that `torchrun` starts, and their common run."""

from .run import LearnersRun

__all__ = ["LearnersRun"]
