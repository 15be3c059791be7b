"""The evaluation of a script's policy: after training, and with --eval-interval also during it."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from clusterenv_runtime.env import ClusterEnv
from clusterenv_runtime.errors import Interrupted, one_line
from clusterenv_runtime.policy.base import Policy

from .arguments import ScriptArgs
from .checks import check
from .logs import Logs
from .model import save_model
from .progress import say

if TYPE_CHECKING:
    from .run import Run

logger = logging.getLogger(__name__)
FIRST_SEED = 100_000  # added to --seed, so that evaluations have other seeds than training
MOST_ROWS = 8  # the most environments on the worker that evaluates while others train
MOST_FILMED = 2_000  # the most steps of an episode, whose pictures are in memory until its end
LOOK_S = 0.2  # seconds between looks at an evaluation, and at signals in `finish`


def evaluate(args: Any, envs: ClusterEnv, policy: Policy) -> np.ndarray:
    """Have the workers play --eval-episodes episodes; return the returns, ``(eval_episodes,)``."""
    if not args.eval_episodes:
        return np.empty(0)
    workers = min(envs.num_workers, args.eval_episodes)
    plurals = "s" * (args.eval_episodes > 1), "s" * (workers > 1)
    say(f"evaluating {args.eval_episodes} episode{plurals[0]} on {workers} worker{plurals[1]}")
    return envs.evaluate(policy, args.eval_episodes, **_how(args)).returns


def _how(args: Any) -> dict[str, Any]:
    return {"seed": args.seed + FIRST_SEED, "deterministic": args.eval_deterministic}


def record_video(run: Run, policy: Policy, make_env: Callable[..., Any]) -> None:
    """With --eval-video, play one more episode on a separate worker, and save a video of it.

    The video is in the run's directory. ``make_env`` is the script's function.
    """
    args, directory = run.args, run.directory.path
    if not args.eval_video:
        return
    options = {**args.of_evaluation.options(), "log_dir": f"{directory}/workers/video"}
    film(args, make_env, policy, f"{directory}/evaluation.mp4", options, **_how(args))


def check_pictures(flag: str, envs: ClusterEnv, env_id: str) -> None:
    """Exit with a one-line error if a flag needs videos of environments that cannot be filmed."""
    modes = envs.metadata.get("render_modes", ())
    check("rgb_array" in modes, f"{flag}: {env_id} renders no pictures")


def film(
    args: Any,
    make_env: Callable[..., Any],
    policy: Policy,
    video: str,
    options: dict[str, Any],
    **how: Any,
) -> None:
    """Play an episode on a separate worker, and save a video of it, or exit with a one-line error.

    Args:
        args: the script's flags.
        make_env: the script's function; with ``capture_video`` its environment 0 records.
        policy: the policy that acts.
        video: the path of the video file.
        options: the options of the worker's `ClusterEnv`.
        how: options of `ClusterEnv.evaluate`.
    """
    folder = f"{video}.parts"
    name = os.path.relpath(folder, "videos")  # make_env records into videos/NAME
    env_fn = make_env(args.env_id, 0, True, name, **args.make_kwargs)
    try:
        with ClusterEnv([env_fn], **options) as envs:
            found = envs.evaluate(policy, 1, **how, max_steps=MOST_FILMED)
        recorded = f"{folder}/rl-video-episode-0.mp4"
        check(os.path.isfile(recorded), f"there is no {video}: make_env has recorded nothing")
        os.replace(recorded, video)
    except Interrupted:
        raise
    except Exception as error:  # an environment's own errors, too
        check(False, f"there is no {video}: {one_line(error)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"recorded {video}: return {found.returns[0]:.1f} in {found.lengths[0]} steps")


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
        logs: the logs, which get the returns, and whose directory gets the best model.
    """

    def __init__(
        self,
        args: ScriptArgs,
        envs: ClusterEnv,
        policy: Policy,
        model: torch.nn.Module,
        logs: Logs,
    ) -> None:
        self._args = args
        self._policy = policy
        self._model = model
        self._logs = logs
        evaluated = logs.curve.evaluations
        self._last = evaluated[-1][0] if evaluated else 0  # the step of the last evaluation
        self._weights: dict[str, Any] | None = None  # of the model under evaluation
        self._next_look = 0.0
        self._envs: ClusterEnv | None = None
        if args.eval_video:
            check_pictures("--eval-video", envs, args.env_id)
        if args.eval_interval is not None:
            self._envs = self._make_envs(envs)

    def _make_envs(self, envs: ClusterEnv) -> ClusterEnv:
        args, directory = self._args, self._logs.writer.log_dir
        rows = min(args.eval_episodes, MOST_ROWS, -(-envs.num_envs // envs.num_workers))
        made = envs.env_fns
        if isinstance(made, list):  # otherwise a worker makes any number
            made = made[args.capture_video :][-rows:]
            rows = len(made)
            check(rows, "--eval-interval with --capture-video needs a second environment")
        options = {**args.of_evaluation.options(), "log_dir": f"{directory}/workers/evaluation"}
        return ClusterEnv(made, num_envs=rows, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._envs is not None:
            self._envs.close()

    def go_on(self, step: int) -> None:
        """Collect returns that have arrived, and begin another evaluation if one is due."""
        if self._envs is None:
            return
        if time.monotonic() > self._next_look:  # some scripts' iterations take only a millisecond
            self._look()
            self._next_look = time.monotonic() + LOOK_S
        interval = self._args.eval_interval
        if self._weights is None and step // interval > self._last // interval:
            self._envs.evaluate_async(self._policy, self._args.eval_episodes, **_how(self._args))
            self._last = step
            self._weights = copy.deepcopy(self._model.state_dict())

    def finish(self, raise_if_interrupted: Callable[[], None]) -> bool:
        """Wait for the evaluation under way, and end the worker. Return whether there was one.

        The worker must end because `record_video` needs its port.
        """
        was_under_way = self._weights is not None
        while self._weights is not None:
            raise_if_interrupted()
            self._look(LOOK_S)
        self.__exit__()
        return was_under_way

    def _look(self, timeout: float = 0) -> None:
        if self._weights is None:
            return
        try:
            returns = self._envs.evaluate_wait(timeout).returns
        except multiprocessing.TimeoutError:
            return
        weights, self._weights = self._weights, None
        mean = float(returns.mean())
        best = self._logs.curve.best_return
        self._logs.curve.evaluations.append((self._last, mean))
        self._logs.writer.add_scalar("eval/return_mean", mean, self._last)
        say(f"evaluated step {self._last:,}: return {mean:.1f}" + ", the best yet" * (mean > best))
        if mean > best and self._args.save_model:
            try:
                directory = self._logs.writer.log_dir
                save_model(directory, weights, self._args, ".best")
            except OSError as error:
                text = "the best model so far, of step %d, is not saved: %s"
                logger.warning(text, self._last, error.strerror or error)
