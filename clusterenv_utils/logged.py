"""A run, read from its TensorBoard logs: one of ours, CleanRL's or Stable-Baselines3's."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .checks import one_line_for
from .directory import check_exists

FLAGS = "hyperparameters/text_summary"  # one text for each start or resume of the run


class Scalars(NamedTuple):
    """The scalars logged under one tag, in the order of steps. Arrays are ``(number,)``."""

    steps: np.ndarray
    seconds: np.ndarray  # since the run began, without the time between an end and its --resume
    values: np.ndarray


class LoggedRun:
    """A finished or unfinished run, as far as its logs are on disk.

    If there are no logs, exit with a one-line error.

    Args:
        directory: the directory of the logs.

    Attributes:
        name: the directory's name.
        flags: the script's flags, as text by name; empty for Stable-Baselines3, which logs none.
        tags: the names of the scalars.
        last_step, last_seconds: the largest step and time that are logged.
    """

    def __init__(self, directory: str) -> None:
        check_exists(directory)
        self.name = os.path.basename(os.path.abspath(directory))
        self._events = EventAccumulator(directory, size_guidance={"scalars": 0, "tensors": 0})
        self._events.Reload()
        kinds = self._events.Tags()
        self.tags: list[str] = sorted(kinds["scalars"])
        with one_line_for(ValueError, text=f"{directory} has no TensorBoard logs"):
            self._first = self._events.FirstEventTimestamp()
        texts = self._events.Tensors(FLAGS) if FLAGS in kinds["tensors"] else []
        self._starts = [text.wall_time for text in texts]
        table = texts[-1].tensor_proto.string_val[0].decode() if texts else ""
        self.flags = dict(re.findall(r"^\|(.*?)\|(.*)\|$", table, re.MULTILINE)[2:])
        events = [event for tag in self.tags for event in self._events.Scalars(tag)]
        self._times = np.array([event.wall_time for event in events])
        self.last_step = max((event.step for event in events), default=0)
        self.last_seconds = float(self._seconds(self._times).max(initial=0))

    def scalars(self, tag: str) -> Scalars:
        """Return the scalars logged under one of the tags."""
        events = self._events.Scalars(tag)
        times = np.array([event.wall_time for event in events])
        steps = np.array([event.step for event in events], np.float64)
        return Scalars(steps, self._seconds(times), np.array([event.value for event in events]))

    def _seconds(self, times: np.ndarray) -> np.ndarray:
        seconds = times - self._first
        heard = np.concatenate([self._times, self._starts])  # a part may have logged only its start
        for start in self._starts:
            later = times >= start
            # The time of the last event of the previous part.
            before = heard[heard < start].max(initial=self._first)
            seconds[later] -= start - before
        return seconds
