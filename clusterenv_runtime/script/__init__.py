"""What our training scripts share, and other people's loops need not: flags, checkpoints, signals,
logs, summary.
"""

from .arguments import ScriptArgs, check, parse
from .checkpoint import Counters
from .environments import by_backend, evaluate, read_spaces
from .run import Run

__all__ = [
    "Counters",
    "Run",
    "ScriptArgs",
    "by_backend",
    "check",
    "evaluate",
    "parse",
    "read_spaces",
]
