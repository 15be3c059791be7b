"""The returns of SAC: `sac_clusterenv.py` compared with CleanRL's `sac_continuous_action.py`.

    python -m experiments.benchmarks.sac_returns --output runs/sac_returns \
        --cleanrl path/to/cleanrl/cleanrl/sac_continuous_action.py

CleanRL is not part of this repository: clone https://github.com/vwxyzjn/cleanrl and pass the path
of its script. The two scripts train at the same time on the same machine, each with one thread for
its networks, one seed after another. A run that is in --output is not repeated. For each seed,
prints the mean return of the episodes that ended within the last tenth of the steps, and the
seconds since the start of the process. Draws the returns over the steps and over the seconds.
"""

import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro

from .scripts import ROOT, train

OURS, THEIRS = "sac_clusterenv.py", "CleanRL's sac_continuous_action.py"


@dataclass
class Args:
    cleanrl: Path
    """path of CleanRL's sac_continuous_action.py"""
    output: Path
    """directory for a file per run, and for the plot"""
    env_id: str = "HalfCheetah-v5"
    """the environment"""
    total_timesteps: int = 100_000
    """environment steps of each run"""
    seeds: int = 3
    """number of seeds, from 1"""
    flags: str = ""
    """further flags of sac_clusterenv.py, in one string"""


def measure(args: Args, name: str, seed: int) -> list[tuple[float, float, float]]:
    """Train. Return the environment steps, the seconds and the return at the end of each episode.

    The seconds count from the start of the process. In our script's logs, the episodes that ended
    in the same chunk are one entry with their mean return.
    """
    start = time.time()
    flags = ["--env-id", args.env_id, "--seed", str(seed)]
    flags += ["--total-timesteps", str(args.total_timesteps)]
    if name == OURS:
        own = ["--eval-episodes", "0", *args.flags.split()]
        scalars, _ = train(ROOT / "scripts" / OURS, *flags, *own, OMP_NUM_THREADS="1")
        found = scalars("charts/episodic_return")
        return [(each.step, each.wall_time - start, each.value) for each in found]
    wrapper = ROOT / "experiments" / "benchmarks" / "cleanrl.py"
    _, summary = train(wrapper, str(args.cleanrl.resolve()), *flags, OMP_NUM_THREADS="1")
    return [(steps, when - start, returned) for steps, when, returned in summary["episodes"]]


def kept(args: Args, name: str, seed: int) -> np.ndarray:
    """Return a run's episodes from its file. If there is no file, train and write it."""
    kind = "ours" if name == OURS else "cleanrl"
    file = args.output / f"{args.env_id}-{args.total_timesteps}-{kind}-{seed}.json"
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_text(json.dumps(measure(args, name, seed)))
        part.rename(file)
    return np.array(json.loads(file.read_text()))


def last_return(curve: np.ndarray, total_timesteps: int) -> float:
    """Return the mean return of the episodes that ended within the last tenth of the steps."""
    return float(curve[curve[:, 0] > 0.9 * total_timesteps, 2].mean())


def draw(path: Path, runs: dict[str, list[np.ndarray]], env_id: str) -> None:
    """Draw each run's returns over its steps, and over its seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for axis, column, label in zip(
        axes, (0, 1), ("environment steps", "seconds since the start"), strict=True
    ):
        for color, (name, curves) in zip(("C0", "C1"), runs.items(), strict=True):
            for number, curve in enumerate(curves):
                of_first = {} if number else {"label": name}
                axis.plot(curve[:, column], curve[:, 2], color=color, linewidth=0.8, **of_first)
        axis.set(xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set(ylabel=f"return of an episode of {env_id}")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    args = tyro.cli(Args)
    args.output.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[np.ndarray]] = {OURS: [], THEIRS: []}
    with ProcessPoolExecutor(2) as pool:
        for seed in range(1, args.seeds + 1):
            both = [pool.submit(kept, args, name, seed) for name in runs]
            for (name, curves), future in zip(runs.items(), both, strict=True):
                curve = future.result()
                curves.append(curve)
                last = last_return(curve, args.total_timesteps)
                print(f"seed {seed}, {name}: {last:,.0f}, {curve[-1, 1]:,.0f} s", flush=True)
    for name, curves in runs.items():
        last = [last_return(curve, args.total_timesteps) for curve in curves]
        text = f"mean {np.mean(last):,.0f} ({min(last):,.0f} to {max(last):,.0f})"
        print(f"{name}: {text}, median {np.median([curve[-1, 1] for curve in curves]):,.0f} s")
    draw(args.output / f"sac_returns_{args.env_id}.png", runs, args.env_id)


if __name__ == "__main__":
    main()
