"""The harness of our training scripts: flags, checks, checkpoints, signals, logs, and summary.

A loop of your own needs nothing of it.
"""

from .arguments import ScriptArgs, parse
from .checkpoint import Counters
from .checks import (
    check,
    check_batches,
    check_chunks,
    check_compiler,
    check_discrete,
    check_memory,
    check_vectors,
)
from .environments import by_backend, evaluate, read_spaces
from .run import Run

__all__ = [
    "Counters", "Run", "ScriptArgs", "by_backend", "check", "check_batches", "check_chunks",
    "check_compiler", "check_discrete", "check_memory", "check_vectors", "evaluate", "parse",
    "read_spaces",
]  # fmt: skip
