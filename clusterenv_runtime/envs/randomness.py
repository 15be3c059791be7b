"""The global generators of `random`, NumPy and torch, for environments that draw from them."""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np


def seed_globals(*numbers: int) -> None:
    """Seed the global generators; that of torch, if torch is loaded. Policies do not draw there."""
    first, second, third = np.random.SeedSequence(numbers, spawn_key=(0,)).generate_state(3)
    random.seed(int(first))
    np.random.seed(second)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int(third))


def number_of_globals() -> int:
    """Return a number of 62 bits that follows from the states of the global generators."""
    _, keys, *others = np.random.get_state()
    states = [str(random.getstate()).encode(), keys.tobytes(), str(others).encode()]
    if torch := sys.modules.get("torch"):
        states.append(torch.get_rng_state().numpy().tobytes())
    return int.from_bytes(hashlib.sha256(b"".join(states)).digest()[:8]) >> 2
