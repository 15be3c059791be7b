"""The progress of a run: a line that changes on a terminal, and twenty lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from rich import progress
from rich.console import Console

FIRST_WORD_S = 5.0  # seconds before a slow operation is first reported
TOLD = "clusterenv_runtime.env", "clusterenv_runtime.head.pool.waits"  # loggers


def say(text: str) -> None:
    """Print a line if possible: a full disk or a lost terminal must not end a run."""
    with suppress(OSError):
        try:
            print(text, flush=True)
        except UnicodeEncodeError:  # the output's encoding lacks a character of a file's name
            sys.stdout.buffer.write(os.fsencode(f"{text}\n"))
            sys.stdout.buffer.flush()


def start_of(args: Any, directory: str) -> str:
    """Return a description of a run."""
    device = "a GPU" if args.cuda and torch.cuda.is_available() else "the CPU"
    envs = f"{args.num_envs} environments on {args.num_workers} workers"
    return f"{directory}: {envs}, {args.total_timesteps:,} steps in all; learning on {device}"


def changes_of(args: Any, before: dict[str, Any], step: int) -> str:
    """Return where a run resumes, and how its flags differ from those ``before``."""
    changes = [
        f"{name} {value} -> {getattr(args, name)}"
        for name, value in before.items()
        if name != "resume" and value != getattr(args, name)
    ]
    return "; ".join([f"resuming at step {step:,}", *changes])


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


class _Telling(logging.Handler):
    """Passes on log messages, for example how long the workers took to start."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


class Progress:
    """Shows the progress of a run, unless ``is_quiet``. `close` ends it."""

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
        tells = [] if is_quiet else [say, self.tell]
        self._handlers = [
            (logging.getLogger(name), _Telling(tell))
            for name, tell in zip(TOLD, tells, strict=False)
        ]
        for log, handler in self._handlers:
            log.setLevel(logging.INFO)
            log.addHandler(handler)

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
        self.bar.start()

    def show(self, iteration: int, status: str) -> None:
        self.expect("")
        self.bar.update(self._task, completed=iteration, status=status)
        if self._prints and iteration * 20 // self._number > self._printed:
            self._printed = iteration * 20 // self._number
            say(status)

    def end(self) -> None:
        """End the bar. An evaluation may follow."""
        self.bar.stop()
        self.expect("evaluating")

    def close(self) -> None:
        self.bar.stop()
        for log, handler in self._handlers:
            log.removeHandler(handler)
