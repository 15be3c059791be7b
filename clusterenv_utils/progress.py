"""The progress of a run: a line that changes on a terminal, and twenty lines elsewhere."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from rich import progress
from rich.console import Console

from .output import print_line

FIRST_WORD_S = 5.0  # seconds before a slow operation is first reported


def say(text: str) -> None:
    """Print a line if possible: a full disk or a lost terminal must not end a run."""
    with suppress(OSError):
        print_line(text)


class _Telling(logging.Handler):
    """Passes on log messages, for example how long the workers took to start."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


def size_of(args: Any) -> int:
    """Return the number of steps in an iteration, or 0 if the script does not define it."""
    # DQN's batch_size is that of its batches from the replay buffer.
    return getattr(args, "chunk_size", 0) or getattr(args, "batch_size", 0)


def start_of(args: Any, directory: str, saved: dict[str, Any]) -> str:
    """Return a description of a run, with the step and changed flags if it resumes ``saved``."""
    number = getattr(args, "num_iterations", 0)
    plurals = ["s" * (each > 1) for each in (args.num_envs, args.num_workers, number)]
    envs = f"{args.num_envs} environment{plurals[0]}"
    texts = [f"{directory}: {envs} on {args.num_workers} worker{plurals[1]}"]
    size = size_of(args)
    if number and size:
        iterations = f"{number:,} iteration{plurals[2]}"
        texts.append(f"{iterations} of {size:,} steps, {number * size:,} in all")
    device = "a GPU" if args.cuda and torch.cuda.is_available() else "the CPU"
    text = f"{', '.join(texts)}; learning on {device}"
    if not saved:
        return text
    changes = [
        f"{name} {before} -> {getattr(args, name)}"
        for name, before in saved["args"].items()
        if name != "resume" and before != getattr(args, name)
    ]
    step, total = saved["global_step"], saved["args"]["total_timesteps"]
    if getattr(args, "anneal_lr", False) and total != args.total_timesteps:
        before = saved["args"]["learning_rate"] * max(1 - step / total, 0)
        now = args.learning_rate * (1 - step / args.total_timesteps)
        changes.append(f"the annealed learning rate {before:.3g} -> {now:.3g}")
    return "; ".join([f"{text}\nresuming at step {step:,}", *changes])


def status_of(
    step: int, sps: int, mean_return: float, kl: float, pulls: float, versions: int
) -> str:
    """Return the line that describes the progress of a run."""
    mean = f"{mean_return:.1f}" if math.isfinite(mean_return) else "of no episode yet"
    measured = f"{kl:.3f} nats" if math.isfinite(kl) else "not measured yet"
    pulled = f"pulled {pulls:g} of {versions} versions"
    return f"step {step:,} SPS {sps} return {mean} KL {measured}, {pulled}"


def end_of(summary: dict[str, Any], directory: str) -> str:
    """Return two lines that describe the result of a run."""
    pulls = f"{summary['pulls_per_worker']:g} pulls a worker"
    steps = f"{summary['global_step']:,} steps in {summary['wall_seconds']:.0f} s; {pulls}"
    mean = summary["eval_return_mean"]
    also = "" if mean is None else f", in the evaluation {mean:.1f}"
    return f"{steps}\nmean return {summary['mean_return_100']:.1f}{also}; see {directory}"


class Progress:
    """Shows the progress of a run, unless ``is_quiet``."""

    def __init__(self, is_quiet: bool = False) -> None:
        console = Console(quiet=is_quiet or not sys.stdout.isatty())
        columns = (
            progress.TextColumn("{task.fields[status]}"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
        )
        self.bar = progress.Progress(*columns, console=console)
        self._prints = not is_quiet and (not console.is_terminal or console.is_dumb_terminal)
        self._number = self._printed = 0
        self._is_quiet = is_quiet
        self.expect("starting")
        if not is_quiet:
            for name, tell in ("env", say), ("head.pool.waits", self.tell):
                log = logging.getLogger(f"clusterenv_runtime.{name}")
                log.setLevel(logging.INFO)
                log.handlers = [_Telling(tell)]

    def expect(self, what: str) -> None:
        """Set the operation that `tell` reports on, until the next `show`."""
        self._expected = what
        self._since = time.monotonic()
        self._next_word = FIRST_WORD_S

    def tell(self, text: str) -> None:
        """Report on the expected operation once it has taken 5 s.

        In plain output, report again only each time it has taken twice as long.
        """
        seconds = time.monotonic() - self._since
        if self._is_quiet or not self._expected or seconds < self._next_word:
            return
        line = f"{self._expected} ({seconds:.0f} s so far): {text}"
        if self._prints or not self.bar.live.is_started:
            self._next_word *= 2
            say(line)
        else:
            self.bar.update(self._task, status=line)

    def begin(self, number: int, done: int) -> None:
        """Begin the bar, with ``done`` of ``number`` iterations done."""
        self._task = self.bar.add_task("train", total=number, completed=done, status="starting")
        self._number = number
        self._printed = done * 20 // number
        self.expect("collecting the first rollout")

    def end(self) -> None:
        """End the bar. An evaluation may follow."""
        self.bar.stop()
        self.expect("evaluating")

    def show(self, iteration: int, status: str) -> None:
        self.expect("")
        self.bar.update(self._task, completed=iteration, status=status)
        if self._prints and iteration * 20 // self._number > self._printed:
            self._printed = iteration * 20 // self._number
            say(status)
