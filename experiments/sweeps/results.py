"""The table and the plot of the finished configurations."""

import csv

from .attempts import first_of, replace, result_of
from .checks import check, is_number
from .configurations import label
from .metrics import best_of, value_of


def plot(rows, metric, output):
    """Plot the metric against each swept parameter: every configuration is a point."""
    # These imports take longer than all others.
    from matplotlib.figure import Figure
    from scipy.stats import trim_mean

    swept = {path for path in rows[0][0] if len({str(flat[path]) for flat, _ in rows}) > 1}
    # Seeds are repetitions, not a setting.
    swept = sorted(swept - {("seed",)} or swept or {next(iter(rows[0][0]))})
    figure = Figure(figsize=(4.5 * len(swept), 4), layout="constrained")
    for axes, path in zip(
        figure.subplots(1, len(swept), sharey=True, squeeze=False)[0], swept, strict=True
    ):
        numbers = all(is_number(flat[path]) for flat, _ in rows)
        points = [(flat[path] if numbers else str(flat[path]), result) for flat, result in rows]
        settings = sorted({x for x, _ in points})
        few = len(settings) <= 12  # then evenly spaced, each with the mean of its middle half
        place = {setting: i if few else setting for i, setting in enumerate(settings)}
        axes.plot(
            [place[x] for x, _ in points],
            [y for _, y in points],
            "o",
            color="#0072B2",
            alpha=0.6,
            label="a run",
        )
        if few:
            middle = [
                trim_mean([y for x, y in points if x == setting], 0.25) for setting in settings
            ]
            axes.plot(
                range(len(settings)),
                middle,
                "_",
                color="#D55E00",
                ms=24,
                mew=3,
                label="interquartile mean",
            )
            axes.set_xticks(range(len(settings)), [f"{x:.4g}" if numbers else x for x in settings])
            axes.set_xlim(-0.5, len(settings) - 0.5)
        elif settings[0] > 0 and settings[-1] > 20 * settings[0]:
            axes.set_xscale("log")
        axes.set(xlabel=".".join(path), ylabel=metric if path == swept[0] else "")
    axes.legend(frameon=False)
    figure.savefig(output, dpi=150, format="png")


def collect(sweep, plan, output):
    """Write results.csv and results.png, with each finished configuration once."""
    known = plan.known()
    different = first_of(sweep, known, output)
    table, measured = [], []
    for directory, index in different.items():
        flat = known[index]
        if not (result := result_of(directory)):
            continue
        value = value_of(sweep, directory, result)
        if value is None:
            print(f"left out: {directory} has no number as {sweep['metric']['name']}")
        else:
            measured.append((flat, value))
        scalars = {
            key: value
            for key, value in result["summary"].items()
            if not isinstance(value, dict | list)
        }
        parameters = {".".join(path): value for path, value in flat.items()}
        attempt = str(directory / result["attempt"])
        table.append(
            {"index": index, **parameters, **{**scalars, **parameters}, "directory": attempt}
        )
    check(table, f"no configuration of {output} has finished")

    def write(path):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for row in table for key in row))
            writer.writeheader()
            writer.writerows(table)

    replace(output / "results.csv", write)
    total = plan.number - len(known) + len(different)
    text = f"{len(table)} of {total} have finished"
    if not measured:
        return print(f"{text}; see {output}/results.csv")
    replace(output / "results.png", lambda path: plot(measured, sweep["metric"]["name"], path))
    flat, best = best_of(sweep, measured)
    print(f"{text}; best {sweep['metric']['name']} {best:.4g}: {label(sweep, flat)}")
    return print(f"see {output}/results.csv and results.png")
