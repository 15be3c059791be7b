"""A user of the simulated world, who makes random calls and checks their results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import torch
from gymnasium.error import ResetNeeded

import clusterenv_runtime
from clusterenv_runtime import (
    CategoricalPolicy,
    ClusterEnv,
    Interrupted,
    Rollout,
    WorkerDiedError,
)
from clusterenv_runtime.head.workers import State

from .ledger import Ledger
from .policy import Net
from .schedule import Schedule

PACKAGE = os.path.dirname(clusterenv_runtime.__file__)
CALLS = ["rollout"] * 5 + [
    "overlap",
    "send",
    "send",
    "recv",
    "recv",
    "stream",
    "step",
    "step",
    "reset",
    "reset_some",
    "publish",
    "structure",
    "evaluate",
    "set_mark",
    "get_mark",
]


class Wrong(AssertionError):
    """The runtime has broken a promise."""


def press_ctrl_c() -> None:
    """Raise what Python raises anywhere in the main thread."""
    raise KeyboardInterrupt


def _after_calls(number: int, world: Schedule, do: Callable[[], None]) -> Callable[..., None]:
    """Return a profiler that calls ``do`` once the head has called this many of its functions."""

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal number
        code = frame.f_code
        # Python ignores what a generator raises that is closed.
        is_right = PACKAGE in code.co_filename and code.co_name != "<genexpr>"
        if event == "call" and world.running is None and is_right:
            number -= 1
            if number < 0:
                sys.setprofile(None)
                do()

    return count


class User:
    """A user who makes random calls and checks their results."""

    def __init__(self, world: Schedule, envs: ClusterEnv) -> None:
        self.world, self.envs = world, envs
        self.ledger = Ledger(world.num_envs)
        self.rows = [
            np.arange(worker.rows.start, worker.rows.stop) for worker in envs._pool.workers
        ]
        self.everything = np.arange(world.num_envs)
        self.make_policy(0)
        self.ahead: int | None = None  # steps of the requested overlapped rollout, if any
        self.sent = 0
        self.mark: int | None = 0  # of all environments; None if it is not known
        self.is_unsure = False  # whether an evaluation was given up that workers may still play
        # The share of calls that are interrupted.
        self.impatience = world.random.choice((0.1, 0.1, 0.1, 0.6))

    def make_policy(self, unused: int) -> None:
        self.policy = CategoricalPolicy(Net(unused))

    def learn(self) -> None:
        """Change the policy a little."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=self.world.generator), alpha=0.001
                )

    def run(self) -> None:
        """Reset, and make some calls."""
        draw = self.world.random
        self.call("reset")
        for _ in range(draw.randint(1, 7)):
            # If an interrupt came before the user got the error, requests are still outstanding.
            self.reset_if_necessary()
            self.call(draw.choice([name for name in CALLS if self.may(name)]))
            # While the user learns, the head handles no messages.
            self.world.pass_time(draw.choice((0.0, 0.0, 0.5, 5.0)))
        while self.sent:
            self.call("recv")
        self.reset_if_necessary()
        self.check_leftovers()

    def reset_if_necessary(self) -> None:
        while self.envs._pool.to_reset or self.is_unsure:
            self.call("rollout" if self.ahead else "recv" if self.sent else "reset")

    def may(self, name: str) -> bool:
        """Return whether a call is allowed."""
        if name == "recv":
            return self.sent > 0
        if name == "stream":
            return self.ahead is None and self.sent == 0
        if name == "send":
            return (
                self.ahead is None
                and self.envs.policy_version > 0
                and self.sent < 2 * len(self.rows)
            )
        needs_reset = any(worker.evaluated for worker in self.envs._pool.workers)
        if name in ("evaluate", "step", "reset_some") and needs_reset:
            return False
        if self.ahead is not None:
            return name in ("rollout", "overlap", "publish", "evaluate", "set_mark")
        return self.sent == 0 or name in ("publish", "structure", "evaluate", "set_mark")

    def call(self, name: str) -> None:
        """Make one call, which may be interrupted."""
        world = self.world
        world.note(f"the user calls {name}")
        is_over = False
        if world.random.random() < self.impatience:
            interrupt = press_ctrl_c if world.random.random() < 0.1 else self.envs.interrupt
            seconds = world.random.choice((None, 0.0, 0.01, 0.5))
            if seconds is None:
                sys.setprofile(_after_calls(world.random.randrange(300), world, interrupt))
            else:
                world.after(seconds, lambda: None if is_over else interrupt())
        try:
            getattr(self, name)()
        except Interrupted:
            world.note("the user is interrupted")
            if name in ("rollout", "overlap", "step", "reset", "reset_some", "stream"):
                self.ledger.lose_track(self.everything)
                self.ahead = self.envs._overlapped
            # The interrupt came after `recv` had its chunk.
            if len(self.envs._granted) < self.sent:
                self.ledger.lose_track(self.everything)
                self.sent = len(self.envs._granted)
        except ValueError as error:
            if world.raises_at is None or "raised by an environment" not in str(error):
                raise
            world.note("the user is told that an environment has raised")
            # The next call must be a reset, which gives up all requests.
            self.ledger.lose_track(self.everything)
            self.ahead, self.sent = None, 0
        finally:
            is_over = True
            sys.setprofile(None)
            self.envs._pool.interrupt = None
        self.check_weights()

    def reset(self) -> None:
        observations, _ = self.envs.reset(seed=self.world.random.randrange(1000))
        self.ledger.reset(observations, np.ones(self.world.num_envs, bool))
        self.is_unsure = False

    def reset_some(self) -> None:
        draw = self.world.random
        mask = np.array([draw.random() < 0.5 for _ in self.everything])
        mask[draw.choice(self.everything)] = True
        seed, options = draw.choice((None, 7)), {"reset_mask": mask}
        self.ledger.reset(self.envs.reset(seed=seed, options=options)[0], mask)

    def evaluate(self) -> None:
        episodes = self.world.random.randint(1, 2 * self.world.num_envs)
        shares = np.diff(np.arange(self.world.num_envs + 1) * episodes // self.world.num_envs)
        self.is_unsure = True
        outstanding = list(self.envs._granted.values())
        evaluation = self.envs.evaluate(self.policy, episodes, seed=7)
        self.is_unsure = False
        self.ledger.evaluate(evaluation, shares)
        for worker, rows in enumerate(self.rows):
            for row in rows if shares[rows].any() else ():
                self.ledger.will_begin(row, outstanding.count(worker))

    def set_mark(self) -> None:
        mark, self.mark = self.world.random.randrange(1000), None
        self.envs.set_attr("mark", mark)
        self.mark = mark

    def get_mark(self) -> None:
        marks = set(self.envs.get_attr("mark"))
        if self.mark is not None and marks != {self.mark}:
            raise Wrong(f"the mark {self.mark} was set, and is {marks}")

    def step(self) -> None:
        actions = np.zeros(self.world.num_envs, np.int64)
        self.ledger.step(*self.envs.step(actions))

    def publish(self) -> None:
        self.learn()
        self.envs.publish(self.policy)

    def structure(self) -> None:
        self.make_policy(self.world.random.randint(0, 2))
        self.publish()

    def rollout(self, overlap: bool = False) -> None:
        self.learn()
        num_steps = self.ahead or self.world.random.randint(1, 4)
        rollout = self.envs.rollout(self.policy, num_steps, overlap=overlap)
        self.ahead = num_steps if overlap else None
        if len(rollout.rewards) != num_steps:
            raise Wrong(f"{num_steps} steps were asked for, {len(rollout.rewards)} came")
        self.check_rollout(rollout, self.everything)

    def overlap(self) -> None:
        self.rollout(overlap=True)

    def send(self) -> None:
        worker = self.world.random.choice((None, *range(len(self.rows))))
        before = len(self.envs._granted)
        try:
            self.envs.send(self.world.random.randint(1, 4), worker)
        finally:
            self.sent += len(self.envs._granted) - before

    def recv(self) -> None:
        worker, rollout = self.envs.recv()
        self.sent -= 1
        self.check_rollout(rollout, self.rows[worker])

    def stream(self) -> None:
        """Receive as many chunks as there are workers, whichever come first, as one rollout."""
        self.learn()
        num_steps, draw = self.world.random.randint(1, 4), self.world.random
        self.envs.publish(self.policy)
        chunks: list[Rollout] = []
        rows: list[np.ndarray] = []
        try:
            for _ in range(draw.randint(1, 2)):
                self.envs.send(num_steps)
            while len(chunks) < len(self.rows):
                worker, chunk = self.envs.recv()
                chunks.append(chunk)
                rows.append(self.rows[worker])
                self.envs.send(num_steps, worker)
        finally:
            self.sent = len(self.envs._granted)
        self.check_rollout(Rollout.concatenate(chunks), np.concatenate(rows))

    def check_rollout(self, rollout: Rollout, rows: np.ndarray) -> None:
        versions = rollout.policy_versions
        if (
            rollout.rows.tolist() != rows.tolist()
            or versions.min() < 1
            or versions.max() > self.envs.policy_version
        ):
            raise Wrong(f"rows {rollout.rows} came of versions {versions}; {rows} were asked for")
        self.ledger.rollout(rollout, rows)

    def takes_what_is_left(self) -> None:
        """Receive all requested rollouts after a worker was given up.

        Each call must return or raise an error, and none may hang.
        """
        while self.envs._granted and self.envs._overlapped is None:
            try:
                self.envs.recv()
            except (WorkerDiedError, ResetNeeded):  # ResetNeeded: an environment has raised, too
                break
            except ValueError as error:
                if "raised by an environment" not in str(error):
                    raise

    def check_leftovers(self) -> None:
        """Check that the head has nothing left over, and has always known what the workers hold."""
        pool = self.envs._pool
        left = [each.message for each in pool.outstanding.values()]
        if self.ahead is None and (left or pool.answered):
            raise Wrong(f"nobody takes {left} and the answers {list(pool.answered)}")
        if pool.store.mismatches:
            raise Wrong("a worker did not hold what the head believed")

    def check_weights(self) -> None:
        """Compare the weights of workers with those that the head believes they hold.

        Skip workers for which either is about to change.
        """
        for worker in self.envs._pool.workers:
            process, copy = self.world.processes.get(worker.process.identity), worker.copy
            if worker.process.state != State.READY or process.exit is not None or process.is_busy:
                continue
            if copy.weights is None:
                continue
            actor = process.worker._actor
            if actor.version != copy.held or not torch.equal(actor._held, copy.weights):
                raise Wrong(
                    f"{process.name} holds version {actor.version}, the head believes "
                    f"{copy.held}, or others"
                )
