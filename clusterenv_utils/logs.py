"""The logs of a run: TensorBoard's, which resume after a full disk, and those of W&B."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.utils.tensorboard import SummaryWriter

from clusterenv_runtime.errors import one_line

from .checks import check, one_line_for
from .curve import LearningCurve
from .summary import as_json

logger = logging.getLogger(__name__)
FLUSH_S = 10  # seconds between flushes, after which other programs can read the logs


class Logs:
    """The logs of a run, and its learning curve.

    If the logs cannot be started, exit with a one-line error.

    Args:
        directory: the run's directory.
        args: the script's arguments, to be logged.
        step: the number of steps that the run has done.
        is_new: whether the run is new. Otherwise logs after ``step`` no longer count.
        wandb_id: the run's id in W&B, if it has one.
    """

    def __init__(
        self, directory: str, args: Any, step: int, is_new: bool, wandb_id: str | None
    ) -> None:
        self.curve = LearningCurve()
        name = os.path.relpath(directory, "runs")
        self.wandb = start_wandb(args, name, wandb_id) if args.track else None
        with one_line_for(OSError, text=f"cannot write to {directory}"):
            self.writer = open_logs(directory, step if is_new else step + 1)
        table = "\n".join([f"|{key}|{value}|" for key, value in vars(args).items()])
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", step)

    @property
    def wandb_id(self) -> str | None:
        return self.wandb.id if self.wandb else None

    def add_group(self, group: str, scalars: dict[str, torch.Tensor | float], step: int) -> None:
        """Log scalars as ``group/name``: numbers, and tensors with one copy from their device."""
        tensors = {name: each for name, each in scalars.items() if isinstance(each, torch.Tensor)}
        values = torch.stack([*tensors.values()]).tolist() if tensors else []
        for name, value in {**scalars, **dict(zip(tensors, values, strict=True))}.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)

    def add_times(self, collect_start: float, learn_start: float, step: int) -> None:
        """Log how long an iteration waited for its batch, and how long it has learned since."""
        self.writer.add_scalar("time/collect", learn_start - collect_start, step)
        self.writer.add_scalar("time/learn", time.monotonic() - learn_start, step)

    def add_summary(self, summary: dict[str, Any]) -> None:
        """Send the run's summary to W&B, if W&B tracks the run."""
        if self.wandb:
            self.wandb.summary.update(msgspec.json.decode(as_json(summary)))


def open_logs(directory: str, purge_step: int) -> SummaryWriter:
    """Return a writer of logs to ``directory``. Logs there from ``purge_step`` on no longer count.

    Raises:
        OSError: the directory cannot be written. Later, `EventFiles` only warns of such an error.
    """
    writer = SummaryWriter(directory, purge_step=purge_step, flush_secs=FLUSH_S)
    writer.file_writer.event_writer = EventFiles(writer.file_writer.event_writer)
    return writer


@contextmanager
def _in_one_line() -> Iterator[Any]:
    """Import W&B. Exit with a one-line error if this block raises one of W&B's own errors."""
    import wandb

    try:
        yield wandb
    except wandb.Error as error:
        says = one_line(error).rstrip(".")
        check(False, f"--track: {says}; without an account, WANDB_MODE=offline logs into files")


def log_in() -> None:
    """Log in to Weights & Biases, which asks for the key on a terminal.

    If that fails, exit with a one-line error.
    """
    if os.environ.get("WANDB_MODE", "online") == "online":
        with _in_one_line() as wandb:
            wandb.login()


def start_wandb(args: Any, name: str, id: str | None) -> Any:
    """Return the run ``name`` in Weights & Biases, or exit with a one-line error.

    If a run has that ``id`` already, it continues. Videos are not uploaded, because W&B's patch of
    `RecordVideo` does not support Gymnasium 1.
    """
    with _in_one_line() as wandb:
        run = wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, name=name, id=id,
            config=vars(args), save_code=True, sync_tensorboard=True, resume="allow",
        )  # fmt: skip
    wandb.define_metric("*", step_metric="global_step")
    return run


class EventFiles:
    """Replaces a `SummaryWriter`'s event file, and warns where that one would raise.

    Events that cannot be written are lost. TensorBoard's own file raises its first error again on
    every call. Here, each `flush` after an error tries to begin a new file.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._begin = type(file)
        self._directory = file.get_logdir()

    def get_logdir(self) -> str:
        return self._directory

    def add_event(self, event: Any) -> None:
        if self._file is not None:
            self._attempt(self._file.add_event, event)

    def flush(self) -> None:
        self._attempt(self._begin_again if self._file is None else self._file.flush)

    def close(self) -> None:
        if self._file is not None:
            self._attempt(self._file.close)

    def _begin_again(self) -> None:
        # An event file that cannot be begun would stay, empty. So try a temporary file first.
        with tempfile.TemporaryFile(dir=self._directory) as probe:
            probe.write(bytes(2**16))
        self._file = self._begin(self._directory)

    def _attempt(self, write: Callable[..., None], *args: Any) -> None:
        try:
            write(*args)
        except OSError as error:
            if self._file is not None:
                text = "no TensorBoard logs in %s until the next checkpoint: %s"
                logger.warning(text, self._directory, error.strerror or error)
            self._file = None


def _report(args: Any, usual: Callable[[Any], None] = threading.excepthook) -> None:
    # TensorBoard raises the errors of its threads in the thread that logs, too.
    if not type(args.thread).__module__.startswith("tensorboard."):
        usual(args)


threading.excepthook = _report
