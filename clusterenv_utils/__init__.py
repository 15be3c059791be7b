"""The harness of the training scripts: flags, checks, checkpoints, signals, logs, and the summary.

A training loop of your own needs none of it.
"""

from .arguments import ScriptArgs, parse
from .checkpoint import Counters
from .checks import (
    check,
    check_batches,
    check_chunks,
    check_discrete,
    check_game,
    check_stacks,
    check_stream,
    check_vectors,
)
from .cuda_graph import CudaGraph
from .device import seeded_device
from .environments import by_backend, env_setup
from .evaluation import evaluate, record_video
from .replay import ReplayBuffer, replay_device
from .run import Run
from .stream import stream

__all__ = [
    "Counters", "CudaGraph", "ReplayBuffer", "Run", "ScriptArgs", "by_backend", "check",
    "check_batches", "check_chunks", "check_discrete", "check_game", "check_stacks",
    "check_stream", "check_vectors", "env_setup", "evaluate", "parse", "record_video",
    "replay_device", "seeded_device", "stream",
]  # fmt: skip
