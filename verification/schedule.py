"""A world in which a seed decides the times and kinds of faults."""

from __future__ import annotations

import functools

import torch

from .world import Process, World

SILENCE_S = 2.0
RULES = [
    {"sync_mode": "kl", "kl_threshold": 0.0},
    {"sync_mode": "kl", "kl_threshold": 0.05, "max_policy_lag": 3},
    {"sync_mode": "always"},
    {"sync_mode": "interval", "sync_interval": 2},
]


class Schedule(World):
    """A world with faults.

    Args:
        seed: decides all events.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, SILENCE_S)
        draw = self.random
        self.lives: dict[int, str] = {}  # {episode: the process that began it}
        # The numbers of the arriving messages after which a fault follows.
        self._faults = sorted(draw.sample(range(80), draw.choice((0, 1, 1, 2, 2, 3, 5))))
        self._arrivals = 0
        # The number of the step or reset that raises; None for none.
        self.raises_at = draw.randrange(200) if draw.random() < 0.1 else None
        self._steps = 0
        self.slowness = draw.choice((0.0, 0.0, 0.1, 0.5))  # the share of steps that take long
        self.num_workers = draw.randint(1, 3)
        self.num_envs = self.num_workers + draw.randint(0, 2)
        self.options = {
            **draw.choice(RULES),
            "weights": draw.choice(("difference", "difference", "float32")),
            "max_worker_restarts": draw.randint(0, 3),
        }
        self.generator = torch.Generator().manual_seed(seed)

    def begin_episode(self) -> int:
        """Return the number of a new episode."""
        self.lives[len(self.lives) + 1] = self.running.name if self.running else "the head"
        return len(self.lives)

    def work(self, row: int) -> None:
        """Take the time of an environment's step or reset, or raise."""
        if self.running is None:
            return
        self._steps += 1
        if self._steps == self.raises_at:
            self.note(f"environment {row} raises")
            raise ValueError("raised by an environment")
        if self.random.random() < self.slowness:
            self.running.sleep(self.random.choice((0.01, 0.3, 3.0)))

    def message_arrives(self) -> None:
        """Let a fault happen if its time has come."""
        self._arrivals += 1
        if self._faults and self._arrivals > self._faults[0]:
            del self._faults[0]
            process = self.random.choice(
                [each for each in self.processes.values() if each.exit is None] or [None]
            )
            if process is not None:
                self.after(
                    self.random.choice((0.0, 0.001, 0.02)), functools.partial(self.strike, process)
                )

    def strike(self, process: Process) -> None:
        """Let a random fault happen to a process."""
        draw, seconds = self.random, self.random.choice((0.1, 1.0, 3.0))
        kind = draw.choice(("die", "die", "cut", "stop", "survive", "flood"))
        if kind == "die":
            process.die()
        elif kind == "cut":
            process.cut(seconds)
        elif kind == "flood":
            process.flood(300)
        else:
            process.survives = kind == "survive"
            process.stop(seconds)
