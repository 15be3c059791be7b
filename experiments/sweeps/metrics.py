"""The metric of a sweep: a number of the runs' summary.json, under any of its names."""

import math
import re
from pathlib import Path

from .checks import check, is_number

# The numbers in the summaries of all scripts, and their tags in TensorBoard. W&B knows a run's
# numbers by both names. docs/sweeps.md shows this table.
TAGS = {
    "eval_return_mean": "eval/return_mean",
    "eval_return_std": None,
    "mean_return_100": "charts/mean_return_100",
    "pulls_per_worker": "sync/pulls_per_worker",
    "sync_bytes": "sync/bytes",
    "sps": "charts/SPS",
    "global_step": None,
    "wall_seconds": None,
}
KEYS = {tag: key for key, tag in TAGS.items() if tag}


def key_of(name):
    """Return the key in summary.json of a metric under any of its names."""
    return KEYS.get(name, name)


def check_metric(path, sweep):
    """Check, before anything runs, that the runs of a sweep can have its metric."""
    name, key = sweep["metric"]["name"], key_of(sweep["metric"]["name"])
    # A script passes its own numbers to Run.finish, by keyword or in a dictionary.
    own = re.compile(rf"\b{re.escape(name)}=[^=]|[\"']{re.escape(name)}[\"']")
    text = Path(sweep["program"]).read_text(errors="replace")
    known = key in TAGS or "/" not in name and own.search(text)
    wanted = f"the metrics of all scripts: {', '.join([*TAGS, *KEYS])}"
    check(known, f"{path}: {sweep['program']} has no metric {name}; {wanted}")
    kind, keys = sweep["flat"].get(("eval_episodes",), ("", {}))
    values = keys.get("values", [keys.get("value")])
    check(
        not key.startswith("eval_return") or 0 not in values,
        f"{path}: metric {name} needs evaluations, and eval_episodes is 0",
    )


def value_of(sweep, directory, result):
    """Return the metric of a directory's result, or None if it is not finite.

    It is not finite, for example, after a training that diverged. If one run lacks the metric, all
    runs lack it, so the sweep exits with one line.
    """
    summary = result["summary"]
    name, key = sweep["metric"]["name"], key_of(sweep["metric"]["name"])
    has = ", ".join(key for key, value in summary.items() if is_number(value))
    check(key in summary, f"the run in {directory} has no metric {name}; its summary has: {has}")
    value = summary[key]
    return value if is_number(value) and math.isfinite(value) else None


def best_of(sweep, measured):
    """Return the best pair of configuration and metric."""
    best = max if sweep["metric"]["goal"] == "maximize" else min
    return best(measured, key=lambda each: each[1])
