"""Watch a run: its workers, and the curve of its return.

    python -m clusterenv_utils.watch runs/NAME

Show the `Status` that the run writes each second. End when the run ends.
"""

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clusterenv_runtime.errors import printable

from .checks import check, one_line_for
from .curve import on_grid
from .directory import check_exists, holder_of
from .output import until_pipe_closes
from .status import FILE, Status

LOOK_S = 0.5
HEIGHT = 8  # lines of the curve
BLOCKS = " ▁▂▃▄▅▆▇█"
GOING_ON = "starting", "training", "evaluating"


@dataclass
class Args:
    """Watch a run: its workers, and the curve of its return."""

    run: tyro.conf.Positional[str]
    """the run's directory, `runs/NAME`"""
    json: bool = False
    """print the current status as one line of JSON, and exit"""


def look(directory: str) -> Status:
    """Return a run's status. If it has none and does not run, exit with a one-line error."""
    who = "another process"
    with suppress(OSError):  # without locks, the run counts as alive
        who = holder_of(directory)  # first, so that an ended run's status is its last
    status = Status("starting")
    path = f"{directory}/{FILE}"
    if os.path.exists(path):
        reads = one_line_for(OSError, msgspec.DecodeError, text=f"{path} cannot be read")
        with reads, open(path, "rb") as file:
            status = msgspec.json.decode(file.read(), type=Status)
    else:
        check(who, f"{directory} has no {FILE}, and no script of ours trains it")
    if who and status.state not in GOING_ON:
        with suppress(OSError):
            if os.stat(f"{directory}/lock").st_mtime > status.time:
                status.state = "starting"  # the run is resumed, and loads its checkpoint
    if status.state in GOING_ON and not who:
        status.state = "gone"
        with suppress(OSError), open(f"{directory}/lock", "rb") as file:
            status.reason = file.read(1000).decode(errors="replace")
    return status


def last_word(directory: str, status: Status) -> str:
    """Return a line that says how a run has ended."""
    how = {
        "finished": "has finished",
        "interrupted": "was interrupted",
        "failed": f"has failed: {status.reason}",
        "gone": f"has stopped: {status.reason} is gone, without a message",
    }
    return printable(f"{directory} {how[status.state]}, at step {status.global_step:,}")


def view(directory: str, status: Status, width: int) -> Group:
    """Return what a terminal shows of a run."""
    done = f"step {status.global_step:,} of {status.total_timesteps:,}"
    age = max(time.time() - status.time, 0) if status.time else 0
    mean = "of no episode yet" if status.mean_return is None else f"{status.mean_return:.1f}"
    parts = [
        f"{directory}: {status.state}", done, f"{status.seconds:.0f} s", f"SPS {status.sps:.0f}",
        f"return {mean}", f"policy version {status.policy_version}",
    ]  # fmt: skip
    if age > 5 and status.state in GOING_ON:
        parts.append(f"last heard of {age:.0f} s ago")
    return Group(Text(printable(", ".join(parts))), *curve(status, width), workers(status))


def curve(status: Status, width: int) -> list[Text]:
    """Return the lines of the mean return's curve; none without a finished episode."""
    known = [(step, value) for step, value in status.points if value is not None]
    if not known:
        return []
    steps, returns = np.array(known).T
    low, high = returns.min(), returns.max()
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    columns = max(width - margin - 1, 10)
    end = max(status.total_timesteps, steps[-1])
    grid = np.linspace(0, end, columns + 1)[1:]
    values = on_grid(steps, returns, grid)
    values[np.searchsorted(grid, steps[-1]) + 1 :] = np.nan
    share = np.nan_to_num((values - low) / max(high - low, 1e-9), nan=-1)
    eighths = np.where(share < 0, 0, 1 + share * (8 * HEIGHT - 1)).astype(int)
    lines = []
    for row, label in enumerate(labels):
        full = np.clip(eighths - 8 * (HEIGHT - 1 - row), 0, 8)
        blocks = "".join(BLOCKS[number] for number in full)
        lines.append(Text(f"{label:>{margin}} {blocks}", no_wrap=True))
    return lines


def workers(status: Status) -> Table:
    """Return the table of the workers."""
    table = Table(box=None)
    names = "host", "version", "lag", "KL", "pulls", "SPS", "waiting", "restarts"
    table.add_column("worker", justify="right")
    for name in names:
        table.add_column(name, justify="left" if name == "host" else "right")
    for index, worker in enumerate(status.workers):
        known = worker.divergence is not None
        words = [
            f"{index}", printable(worker.host), f"{worker.version}", f"{worker.lag}",
            f"{worker.divergence:.4f}" if known else "", f"{worker.pulls}",
            f"{worker.sps:,.0f}", f"{worker.waiting:.0%}", f"{worker.restarts}",
        ]  # fmt: skip
        table.add_row(*map(Text, words))
    return table


def main() -> None:
    args = tyro.cli(Args)
    check_exists(args.run)
    status = look(args.run)
    if args.json:
        with until_pipe_closes():
            print(msgspec.json.encode(status).decode())
        return
    sys.stdout.reconfigure(errors="replace")
    console = Console()
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(view(args.run, status, console.width), refresh=True)
            if status.state not in GOING_ON:
                break
            time.sleep(LOOK_S)
            status = look(args.run)
    if not console.is_terminal:
        print()  # because the last line has no end yet
    if status.state not in GOING_ON:
        console.print(Text(last_word(args.run, status)))
        sys.exit(status.state in ("failed", "gone"))


if __name__ == "__main__":
    main()
