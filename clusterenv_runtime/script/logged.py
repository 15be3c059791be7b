"""A run as its TensorBoard logs tell of it: one of ours, CleanRL's or Stable-Baselines3's."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .checks import one_line_for
from .directory import check_exists

FLAGS = "hyperparameters/text_summary"  # a text for each time that the run was begun or resumed


class Scalars(NamedTuple):
    """What was logged under one tag, in the order of steps; arrays are ``(number,)``."""

    steps: np.ndarray
    seconds: np.ndarray  # since the start, without the time between an end and its --resume
    values: np.ndarray


class LoggedRun:
    """A run that has ended or is going on, as far as its logs are on disk; or exit with one line.

    Args:
        directory: where they are.

    Attributes:
        name: the directory's.
        flags: the script's, as texts by their names; of Stable-Baselines3 there are none.
        tags: the names of its scalars.
        last_step, last_seconds: as far as it has come.
    """

    def __init__(self, directory: str) -> None:
        check_exists(directory)
        self.name = os.path.basename(os.path.abspath(directory))
        self._events = EventAccumulator(directory, size_guidance={"scalars": 0, "tensors": 0})
        self._events.Reload()
        kinds = self._events.Tags()
        self.tags: list[str] = sorted(kinds["scalars"])
        with one_line_for(ValueError, text=f"{directory} has no logs of TensorBoard"):
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
        """Return what was logged under one of its tags."""
        events = self._events.Scalars(tag)
        times = np.array([event.wall_time for event in events])
        steps = np.array([event.step for event in events], np.float64)
        return Scalars(steps, self._seconds(times), np.array([event.value for event in events]))

    def _seconds(self, times: np.ndarray) -> np.ndarray:
        seconds = times - self._first
        heard = np.concatenate([self._times, self._starts])  # a part may have logged its start only
        for start in self._starts:
            later = times >= start
            # When the part before was last heard of.
            before = heard[heard < start].max(initial=self._first)
            seconds[later] -= start - before
        return seconds
