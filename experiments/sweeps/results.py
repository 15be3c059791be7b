"""The table and the plot of the configurations that have finished."""

import csv

from matplotlib.figure import Figure

from .attempts import first_of, replace, result_of
from .checks import check, is_number
from .configurations import label
from .estimates import iqm


def plot(rows, metric, output):
    """Plot the metric against each swept parameter: every configuration is a point."""
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
        few = len(settings) <= 12  # then evenly spaced, and each with the mean of its middle half
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
            middle = [iqm([y for x, y in points if x == setting]) for setting in settings]
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


def collect(sweep, flats, output):
    """Write results.csv and results.png of the configurations that have finished, each once."""
    metric, rows, table = sweep["metric"]["name"], [], []
    different = first_of(sweep, flats, output)
    for directory, index in different.items():
        flat = flats[index]
        if not (result := result_of(directory)):
            continue
        scalars = {
            key: value
            for key, value in result["summary"].items()
            if not isinstance(value, dict | list)
        }
        known = (
            f"its summary has: "
            f"{', '.join(key for key, value in scalars.items() if is_number(value))}"
        )
        check(
            is_number(scalars.get(metric)),
            f"the run in {directory} has no metric {metric}; {known}",
        )
        rows.append((flat, scalars[metric]))
        parameters = {".".join(path): value for path, value in flat.items()}
        attempt = str(directory / result["attempt"])
        table.append(
            {"index": index, **parameters, **{**scalars, **parameters}, "directory": attempt}
        )
    check(rows, f"no configuration of {output} has finished")

    def write(path):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for row in table for key in row))
            writer.writeheader()
            writer.writerows(table)

    replace(output / "results.csv", write)
    replace(output / "results.png", lambda path: plot(rows, metric, path))
    flat, best = (max if sweep["metric"]["goal"] == "maximize" else min)(
        rows, key=lambda row: row[1]
    )
    print(
        f"{len(rows)} of {len(different)} have finished; best {metric} {best:.4g}: "
        f"{label(sweep, flat)}"
    )
    print(f"see {output}/results.csv and results.png")
