"""How far a run is: a line that changes on a terminal, and elsewhere twenty lines."""

from __future__ import annotations

import logging
import math
import sys
from contextlib import suppress
from typing import Any

import torch
from rich import progress
from rich.console import Console

from ..errors import print_line


def say(text: str) -> None:
    """Print a line if it can be written: a full disk, or a lost terminal, ends no run."""
    with suppress(OSError):
        print_line(text)


class _Saying(logging.Handler):
    """Prints what is logged, such as how long the workers took to start."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def start_of(args: Any, directory: str, saved: dict[str, Any]) -> str:
    """Return what a run is, and if it goes on from ``saved``, where and with which other flags."""
    texts = [f"{directory}: {args.num_envs} environments on {args.num_workers} workers"]
    size = getattr(args, "batch_size", 0) or getattr(args, "chunk_size", 0)
    number = getattr(args, "num_iterations", 0)
    if number and size:
        texts.append(f"{number:,} iterations of {size:,} steps, {number * size:,} in all")
    device = "a GPU" if args.cuda and torch.cuda.is_available() else "the CPU"
    text = f"{', '.join(texts)}; learning on {device}"
    if not saved:
        return text
    changes = [
        f"{name} {before} -> {getattr(args, name)}"
        for name, before in saved["args"].items()
        if name != "resume" and before != getattr(args, name)
    ]
    return "; ".join([f"{text}\nresuming at step {saved['global_step']:,}", *changes])


def status_of(
    step: int, sps: int, mean_return: float, kl: float, pulls: float, versions: int
) -> str:
    """Return the line that says how far a run is."""
    mean = f"{mean_return:.1f}" if math.isfinite(mean_return) else "of no episode yet"
    measured = f"{kl:.3f} nats" if math.isfinite(kl) else "not measured yet"
    pulled = f"pulled {pulls:g} of {versions} versions"
    return f"step {step:,} SPS {sps} return {mean} KL {measured}, {pulled}"


class Progress:
    """Shows how far a run is, unless it ``is_quiet``."""

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
        if not is_quiet:
            starts = logging.getLogger("clusterenv_runtime.head.start")
            starts.setLevel(logging.INFO)
            starts.handlers = [_Saying()]

    def begin(self, number: int, done: int) -> None:
        """Begin with so many iterations ``done``, of a ``number``."""
        self._task = self.bar.add_task("train", total=number, completed=done, status="starting")
        self._number = number
        self._printed = done * 20 // number

    def show(self, iteration: int, status: str) -> None:
        self.bar.update(self._task, completed=iteration, status=status)
        if self._prints and iteration * 20 // self._number > self._printed:
            self._printed = iteration * 20 // self._number
            say(status)
