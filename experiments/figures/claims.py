"""The table of claims, in claims.csv and claims.md: each setting against others, seed by seed."""

import csv
import functools

from tools.plot import interval, iqm

from .tasks import ALWAYS

COLUMNS = {
    "return": "mean_return_100",
    "eval": "eval_return_mean",
    "training": "training_return",
}  # {name in claims.csv: column of a run}
HELD_OUT = 6  # the first seed of headline_*.yaml
HEADER = (
    "| | against | seeds | pulls | bytes | last 100 episodes | evaluation | all of training |\n"
    + "|---" * 8
    + "|\n"
)
CLAIM = (
    "| {task}: {setting} | {against} | {which} | {pulls:.1f} instead of {pulls_against:.1f} | "
    "{times_fewer_bytes:.1f} times fewer | {return:.1f}: "
    "{return_difference:+.1f} ({return_low:.1f} to {return_high:.1f}) | {eval:.1f}: "
    "{eval_difference:+.1f} "
    "({eval_low:.1f} to {eval_high:.1f}) | {training:.1f}: {training_difference:+.1f} "
    "({training_low:.1f} to "
    "{training_high:.1f}) |\n"
)


def difference(a, b, axis=0):
    return iqm(a, axis) - iqm(b, axis)


def matched(task, setting, others):
    """Return another setting, but not always, with about as many pulls on the same seeds, or None.

    Of several, this is the one that shares the most seeds, and of those the closest.
    """
    near = []
    for other in others:
        if other != ALWAYS and (seeds := task.shared(setting, other)):
            a, b = (task.column(key, "pulls_per_worker", seeds).mean() for key in (setting, other))
            if (ratio := max(a / b, b / a)) < 1.25:
                near.append((-len(seeds), ratio, other))
    return min(near)[-1] if near else None


@functools.cache
def claims(task):
    """Compare settings seed by seed. Return the rows of the table.

    Each setting is compared with always, and a `kl` setting also with a fixed interval of about as
    many pulls. A variant, for example the plain objective, is also compared with its original, with
    about as many pulls and at the same threshold. Where there are held-out seeds, they are compared
    once more alone, because no setting was chosen for its result on them.
    """
    rows, first = [], task.settings("kl", next(iter(task.variants()), None))
    for setting in sorted(task.runs):
        fair, others = None, [ALWAYS]
        if setting.mode == "kl":
            fair = matched(task, setting, task.settings("interval"))
            others.append(fair)
            if setting not in first:
                others += [
                    matched(task, setting, first),
                    *(key for key in first if key.value == setting.value),
                ]
        pairs = [
            (key, task.shared(setting, key))
            for key in dict.fromkeys(others)
            if key not in (None, setting)
        ]
        held_out = [(other, [seed for seed in seeds if seed >= HELD_OUT]) for other, seeds in pairs]
        for other, seeds in pairs + [pair for pair in held_out if pair not in pairs]:
            if not seeds:
                continue
            row = {
                "task": task.title,
                "setting": str(setting),
                "against": str(other),
                "matched": other == fair,
            }
            pulls, fewer = (
                task.column(key, "pulls_per_worker", seeds).mean() for key in (other, setting)
            )
            sent, less = (task.column(key, "sync_bytes", seeds).mean() for key in (other, setting))
            row |= {
                "seeds": len(seeds),
                "held_out": seeds[0] >= HELD_OUT,
                "pulls": fewer,
                "pulls_against": pulls,
                "times_fewer_pulls": pulls / fewer,
                "bytes": less,
                "times_fewer_bytes": sent / less,
            }
            for name, column in COLUMNS.items():
                samples = [task.column(key, column, seeds) for key in (setting, other)]
                values = [*map(iqm, samples), *interval(difference, *samples, resamples=10000)]
                keys = name, f"{name}_against", f"{name}_difference", f"{name}_low", f"{name}_high"
                row |= dict(zip(keys, map(float, values), strict=True))
            rows.append(row)
    return rows


def write(rows, results):
    """Write claims.csv, and claims.md, its readable form."""
    with open(results / "claims.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows(
            [f"{x:.6g}" if isinstance(x, float) else x for x in row.values()] for row in rows
        )
    lines = [
        CLAIM.format(**row, which=str(row["seeds"]) + ", held out" * row["held_out"])
        for row in rows
    ]
    (results / "claims.md").write_text(HEADER + "".join(lines).replace(" (nan to nan)", ""))
