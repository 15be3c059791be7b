"""Where a script's learner computes, and the seeds of its random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.distributions import Distribution


def seeded_device(args: Any) -> torch.device:
    """Seed all random numbers, and return the learner's device: a GPU if there is one and --cuda.

    From here on torch's distributions take their arguments unchecked: a check would wait for the
    GPU. The workers, who act, check theirs.
    """
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    Distribution.set_default_validate_args(False)
    return torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
