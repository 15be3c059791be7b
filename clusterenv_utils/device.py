"""The device of a script's learner, and the seeds of its random numbers."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch.distributions import Distribution


def seeded_device(args: Any, threads: int | None = None) -> torch.device:
    """Seed all random number generators, and return the learner's device.

    The device is a GPU if there is one and --cuda is on. A GPU multiplies matrices in
    TensorFloat-32. From here on torch's distributions do not validate their arguments, because
    validation would wait for the GPU. The workers, which act, still validate theirs.

    Args:
        args: the script's flags.
        threads: the most threads that torch uses here, unless --torch-threads or the variable
            OMP_NUM_THREADS sets their number; None leaves the number to torch.
    """
    if "OMP_NUM_THREADS" in os.environ:
        threads = None
    if threads is not None:
        threads = min(threads, torch.get_num_threads())
    threads = args.torch_threads or threads
    if threads is not None:
        torch.set_num_threads(threads)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    Distribution.set_default_validate_args(False)
    if not torch.cuda.is_available() or not args.cuda:
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda")
