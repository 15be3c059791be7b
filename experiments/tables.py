"""The results of finished runs, and the tables that they go to."""

import csv
import json
from pathlib import Path
from typing import Any


def result_of(directory: Path) -> dict[str, Any]:
    """Return a run's summary, machine and directory; nothing if the run has not finished."""
    try:
        return dict(json.loads((directory / "result.json").read_text()))
    except (OSError, ValueError):
        return {}


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a table, of which other processes see all or nothing."""
    temporary = path.with_name(f".{path.name}")
    with open(temporary, "w", newline="") as file:
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)
