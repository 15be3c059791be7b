"""Adaptive Policy Synchronization: the versions at the head, and the worker's decision to pull.

The head measures, the worker decides. After each update the head evaluates its new policy on observations each worker
has just acted on, and sends it one number, its divergence, with the next request. If all are asked at once that is the
mean of all, so they pull at once, and a rollout is of one policy. Weights move only when a worker asks for them.
Source: *Adaptive Policy Synchronization for Scalable RL* (arXiv 2507.10990).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
from gymnasium import Space

from .protocol import Collect, Weights, frames
from .spaces import map_space

if TYPE_CHECKING:
    from .policy import Policy

SYNC_MODES = ("kl", "interval", "always", "never")
# States on which the divergence is measured: of each worker at most, and of all together, but for 16 of each at least.
KL_STATES, ALL_KL_STATES = 256, 8192


@dataclass(frozen=True)
class SyncRule:
    """When a worker pulls. Raises ValueError if the parts do not fit together."""

    mode: str = "kl"
    kl_threshold: float = 0.1
    interval: int | None = None
    max_lag: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in SYNC_MODES:
            raise ValueError(f"sync_mode must be one of {', '.join(SYNC_MODES)}, got {self.mode!r}")
        if not self.kl_threshold >= 0:  # also NaN
            raise ValueError(f"kl_threshold must be a number of nats >= 0, got {self.kl_threshold}")
        if self.mode == "interval" and self.interval is None:
            raise ValueError("sync_mode 'interval' needs sync_interval: pull every how many policy versions?")
        if self.interval is not None and self.interval < 1:
            raise ValueError(f"sync_interval must be at least 1, got {self.interval}")
        if self.max_lag is not None and self.max_lag < 0:
            raise ValueError(f"max_policy_lag must be at least 0, got {self.max_lag}")

    def wants_pull(self, held: int, request: Collect) -> bool:
        """Whether a worker holding version ``held`` (0: none) pulls before it acts on ``request``."""
        lag = request.version - held
        if held == 0 or (self.max_lag is not None and lag > self.max_lag):
            return True
        if self.mode == "kl":  # NaN pulls too
            return lag > 0 and held == request.behavior and not request.divergence <= self.kl_threshold
        return self.mode == "always" and lag > 0 or self.mode == "interval" and lag >= self.interval


@functools.cache
def sampled_states(num_states: int, most: int = KL_STATES) -> np.ndarray:
    """Indices of the evenly spread states the divergence is measured on, the same at worker and head."""
    return np.linspace(0, num_states - 1, min(num_states, most)).astype(np.int64)


class PolicyStore:
    """The head's side of APS: the published version, who pulled it, and how far each worker has diverged."""

    def __init__(self, num_workers: int, space: Space) -> None:
        self._space, self._most = space, min(KL_STATES, max(ALL_KL_STATES // num_workers, 16))
        self.version = 0  # +1 at each publish
        self.structure, self._since = b"", 0  # cloudpickle of the policy without its weights, its first version
        self.pulls = np.zeros(num_workers, np.int64)  # cumulative, per worker
        self.bytes_sent = 0  # cumulative weight bytes, all workers
        self.divergence = np.full(num_workers, math.inf)  # nats, per worker; inf until a worker has acted
        self.held = [0] * num_workers  # the version last sent to each worker; 0 for none of this structure
        self.behavior = [0] * num_workers  # the version each worker acted on when last heard of; 0 for unknown
        self._measured = [0] * num_workers  # the version whose divergence is known; 0 for none
        # (observations, parameters) of what each worker has seen lately under that version, oldest first.
        self._recent: list[list[tuple[Any, np.ndarray]]] = [[] for _ in range(num_workers)]
        self._policy: Policy | None = None

    def publish(self, policy: Policy) -> bool:
        """Make the current weights of ``policy`` the next version and measure every worker's divergence from them.

        Return whether ``structure`` has changed, so that the workers must be told.
        """
        self.version += 1
        old = self.structure
        if policy is not self._policy:
            self._policy, self.structure = policy, cloudpickle.dumps(policy.structure())
        changed = self.structure != old  # a new wrapper around the same module is not a new structure
        if changed:
            self._since = self.version
            self.held, self.behavior = [0] * len(self.held), [0] * len(self.held)
        # A copy on the learner's device; it becomes bytes only when the first worker pulls this version.
        self._flat, self._bytes = policy.flat_weights(), None
        self.divergence[:] = math.inf
        self._measured = list(self.behavior)
        known = [worker for worker, version in enumerate(self.behavior) if version]
        if known:
            recent = [self._join(self._recent[worker]) for worker in known]
            self.divergence[known] = policy.divergence(*zip(*recent, strict=True))
        return changed

    def _join(self, recent: list[tuple[Any, np.ndarray]]) -> tuple[Any, np.ndarray]:
        def join(*leaves: np.ndarray) -> np.ndarray:
            return np.concatenate(leaves)[-self._most :]

        seen, params = zip(*recent, strict=True)
        return map_space(join, self._space, *seen), join(*params)

    def lost(self, worker: int) -> None:
        """Forget what a worker held: another process comes in its place."""
        self.held[worker] = self.behavior[worker] = self._measured[worker] = 0
        self.divergence[worker] = math.inf

    def acted(self, worker: int, part: dict[str, Any]) -> None:
        """Keep some of what ``worker`` saw in its part of a rollout, and its policy's distribution parameters there."""
        if part["version"] < self._since:
            return  # another structure
        chosen = sampled_states(len(part["params"]), self._most)
        states = sampled_states(part["rewards"].size)[chosen]

        def choose(leaf: np.ndarray) -> np.ndarray:
            return leaf.reshape(-1, *leaf.shape[2:])[states]  # a copy: the user may write to what this is a view of

        recent = self._recent[worker]
        if part["version"] != self.behavior[worker]:  # else the same policy: more of the same
            recent.clear()
        recent.append((map_space(choose, self._space, part["observations"]), part["params"][chosen]))
        while sum(len(params) for _, params in recent[1:]) >= self._most:
            del recent[0]
        self.behavior[worker] = part["version"]

    @property
    def epsilon(self) -> float:
        """The policy's, where it has one, now."""
        return float(getattr(self._policy, "epsilon", 0.0))

    def mean_divergence(self, workers: Iterable[int]) -> float:
        """Return the mean divergence, in nats, of those that have acted; inf if none has."""
        known = [self.divergence[worker] for worker in workers if self._measured[worker]]
        return float(np.mean(known)) if known else math.inf

    def request(self, worker: int, num_steps: int, divergence: float) -> Collect:
        return Collect(0, int(num_steps), self.version, self._measured[worker], divergence, self.epsilon)

    def state_dict(self) -> dict[str, Any]:
        return {"policy_version": self.version, "pulls": self.pulls.tolist(), "sync_bytes": self.bytes_sent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__init__(len(self.held), self._space)
        self.version, self.bytes_sent = state["policy_version"], state["sync_bytes"]
        self.pulls[:] = state["pulls"]

    def answer(self, worker: int) -> list[Any]:
        """Return the frames that answer a pull."""
        if self._bytes is None:
            self._bytes = self._flat.cpu().numpy().data
        self.pulls[worker] += 1
        self.bytes_sent += self._bytes.nbytes
        self.held[worker] = self.version
        return frames(Weights(self.version), self._bytes)
