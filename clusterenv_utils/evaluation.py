"""The evaluation of a script's policy: after training, and with --eval-interval also during it."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from clusterenv_runtime import ClusterEnv, Policy

from .arguments import ScriptArgs
from .checkpoint import save_model
from .errors import check
from .logs import LearningCurve
from .progress import say

logger = logging.getLogger(__name__)
FIRST_SEED = 100_000  # added to --seed, so that evaluations have other seeds than training
MOST_ROWS = 8  # the most environments on the worker that evaluates while others train
LOOK_S = 0.2  # seconds between looks at an evaluation, and at signals in `finish`


def evaluate(args: ScriptArgs, envs: ClusterEnv, policy: Policy) -> np.ndarray:
    """Have the workers play --eval-episodes episodes; return the returns, ``(eval_episodes,)``."""
    if not args.eval_episodes:
        return np.empty(0)
    say(f"evaluating {args.eval_episodes} episodes")
    return envs.evaluate(policy, args.eval_episodes, **_how(args)).returns


def _how(args: ScriptArgs) -> dict[str, Any]:
    return {"seed": args.seed + FIRST_SEED, "deterministic": args.eval_deterministic}


class Evaluations:
    """Evaluates the policy every --eval-interval steps during training, on a separate worker.

    Without an interval it never does. At most one evaluation is under way: one that is due waits
    for the previous one.

    Args:
        args: the script's flags.
        envs: the training environments; the last of their functions also make the worker's
            environments.
        policy: the policy to evaluate.
        model: the model to save when its policy is the best so far.
        curve: the learning curve, which gets the mean returns.
        writer: the writer of the run's logs, which gets them, too, and whose directory gets the
            best model.
    """

    def __init__(
        self,
        args: ScriptArgs,
        envs: ClusterEnv,
        policy: Policy,
        model: torch.nn.Module,
        curve: LearningCurve,
        writer: Any,
    ) -> None:
        self._args, self._policy, self._model = args, policy, model
        self._curve, self._writer = curve, writer
        self._last = curve.evaluations[-1][0] if curve.evaluations else 0  # its step
        self._weights: dict[str, Any] | None = None  # of the model under evaluation
        self._next_look = 0.0
        self._envs = None if args.eval_interval is None else self._make_envs(envs)

    def _make_envs(self, envs: ClusterEnv) -> ClusterEnv:
        args = self._args
        rows = min(args.eval_episodes, MOST_ROWS, -(-envs.num_envs // envs.num_workers))
        made = envs.env_fns
        if not callable(made):  # otherwise a worker makes any number
            made = list(made)[args.capture_video :][-rows:]
            rows = len(made)
            check(rows, "--eval-interval with --capture-video needs a second environment")
        log_dir = f"{self._writer.log_dir}/workers/evaluation"
        return ClusterEnv(made, num_envs=rows, **args.of_evaluation.options(), log_dir=log_dir)

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()

    def go_on(self, step: int) -> None:
        """Collect returns that have arrived, and begin another evaluation if one is due."""
        interval = self._args.eval_interval
        if self._envs is None or interval is None:
            return
        if time.monotonic() > self._next_look:  # some scripts' iterations take only a millisecond
            self._look()
            self._next_look = time.monotonic() + LOOK_S
        if self._weights is None and step // interval > self._last // interval:
            self._envs.evaluate_async(self._policy, self._args.eval_episodes, **_how(self._args))
            self._last = step
            self._weights = copy.deepcopy(self._model.state_dict())

    def finish(self, raise_if_interrupted: Callable[[], None]) -> bool:
        """Wait for the evaluation under way, and end the worker. Return whether there was one."""
        was_under_way = self._weights is not None
        while self._weights is not None:
            raise_if_interrupted()
            self._look(LOOK_S)
        self.close()
        return was_under_way

    def _look(self, timeout: float = 0) -> None:
        if self._weights is None or self._envs is None:
            return
        try:
            returns = self._envs.evaluate_wait(timeout).returns
        except multiprocessing.TimeoutError:
            return
        weights, self._weights = self._weights, None
        mean = float(returns.mean())
        before = self._curve.best_return
        self._curve.evaluations.append((self._last, mean))
        self._writer.add_scalar("eval/return_mean", mean, self._last)
        best = max(mean, before)
        say(f"evaluated step {self._last:,}: return {mean:.1f}, the best so far {best:.1f}")
        if mean > before and self._args.save_model:
            try:
                save_model(self._writer.log_dir, weights, self._args, ".best")
            except OSError as error:
                text = "the best model so far, of step %d, is not saved: %s"
                logger.warning(text, self._last, error.strerror or error)
