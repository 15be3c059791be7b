"""The logs of a run: TensorBoard's, which a full disk interrupts but does not end, and W&B's."""

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

from ..errors import one_line
from .checks import check, one_line_for
from .curve import LearningCurve
from .summary import as_json

logger = logging.getLogger(__name__)
FLUSH_S = 10  # after which what is logged can be read by others


class Logs:
    """The logs of a run, and its learning curve. If they cannot begin, exit with one line.

    Args:
        directory: the run's.
        args: the script's arguments, as they are to be logged.
        step: how many steps the run has done.
        is_new: whether it begins; else its logs after this step no longer count.
        wandb_id: by which W&B knows it, if W&B does.
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

    def add_group(self, group: str, scalars: dict[str, torch.Tensor], step: int) -> None:
        """Log float32 scalars as ``group/name``. They come from their device in one copy."""
        values = torch.stack([*scalars.values()]).tolist()
        for name, value in zip(scalars, values, strict=True):
            self.writer.add_scalar(f"{group}/{name}", value, step)

    def add_times(self, collect_start: float, learn_start: float, step: int) -> None:
        """Log how long an iteration waited for its batch, and since then learned from it."""
        self.writer.add_scalar("time/collect", learn_start - collect_start, step)
        self.writer.add_scalar("time/learn", time.monotonic() - learn_start, step)

    def add_summary(self, summary: dict[str, Any]) -> None:
        """Give W&B the summary of the run."""
        if self.wandb:
            self.wandb.summary.update(msgspec.json.decode(as_json(summary)))


def open_logs(directory: str, purge_step: int) -> SummaryWriter:
    """Return a writer of logs into ``directory``, in which those of this step and of later ones no
    longer count.

    Raises:
        OSError: nothing can be written there. Later on that is a warning, see `EventFiles`.
    """
    writer = SummaryWriter(directory, purge_step=purge_step, flush_secs=FLUSH_S)
    writer.file_writer.event_writer = EventFiles(writer.file_writer.event_writer)
    return writer


@contextmanager
def _in_one_line() -> Iterator[Any]:
    """Import W&B; exit with one line if it raises an error of its own."""
    import wandb

    try:
        yield wandb
    except wandb.Error as error:
        says = one_line(error).rstrip(".")
        check(False, f"--track: {says}; without an account, WANDB_MODE=offline logs into files")


def log_in() -> None:
    """Log in to Weights & Biases, or exit with one line; on a terminal it asks for the key."""
    if os.environ.get("WANDB_MODE", "online") == "online":
        with _in_one_line() as wandb:
            wandb.login()


def start_wandb(args: Any, name: str, id: str | None) -> Any:
    """Return the run ``name`` in Weights & Biases, which goes on if it has that ``id`` already; or
    exit with one line.

    Videos stay where they are: W&B's own patch of `RecordVideo` does not know that of Gymnasium 1.
    """
    with _in_one_line() as wandb:
        run = wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, name=name, id=id,
            config=vars(args), save_code=True, sync_tensorboard=True, resume="allow",
        )  # fmt: skip
    wandb.define_metric("*", step_metric="global_step")
    return run


class EventFiles:
    """In place of a `SummaryWriter`'s file of events: what cannot be written is lost, with a
    warning.

    TensorBoard's own raises its first error for ever. Here each `flush` tries to begin a new file
    after it.
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
        # A file that cannot be begun would stay, empty. So another one is tried before.
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
    # TensorBoard's threads raise their errors where one logs, as well.
    if not type(args.thread).__module__.startswith("tensorboard."):
        usual(args)


threading.excepthook = _report
