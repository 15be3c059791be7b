"""The harness of the training scripts: flags, checkpoints, signals, logs, and the summary.

A training loop of your own needs none of it.
"""

from .arguments import ScriptArgs, parse
from .checkpoint import Counters
from .cuda_graph import CudaGraph
from .errors import ScriptError, check
from .evaluation import evaluate
from .replay import FrameReplayBuffer, device_with_room
from .run import Run

__all__ = [
    "Counters", "CudaGraph", "FrameReplayBuffer", "Run", "ScriptArgs", "ScriptError", "check",
    "device_with_room", "evaluate", "parse",
]  # fmt: skip
