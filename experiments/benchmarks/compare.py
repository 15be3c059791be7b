"""Two ways to run a script, compared over several seeds: returns, pulls and time.

    python -m experiments.benchmarks.compare --script dqn_clusterenv.py --flags="--sync-mode always"
    python -m experiments.benchmarks.compare --script ppo_clusterenv.py --flags=--no-overlap
    python -m experiments.benchmarks.compare --learners 2 \
        --script scripts/ppo_multilearner_clusterenv.py

Runs the script as it is, and with `--flags` or several learners, in turn for each seed. Both get
the flags of `--common`. For each way, prints the interquartile means over the seeds of the return
of the last 100 episodes and of the final evaluation, the mean number of pulls, and the median time.
Then prints the differences of the returns with 95% bootstrap intervals over the seeds, which are
paired.
"""

import shlex
import statistics
from dataclasses import dataclass

import numpy as np
import tyro

from experiments.figures.claims import difference
from tools.plot import interval, iqm

from .scripts import ROOT, run, torchrun


@dataclass
class Args:
    script: str
    """path of the script in the repository"""
    flags: str = ""
    """flags of the second way, in one string"""
    learners: int = 1
    """learners of the second way"""
    common: str = ""
    """flags of both ways, in one string"""
    seeds: int = 5
    """number of seeds, from 1; fewer than 5 give no interval"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    several = [f"{args.learners} learners"] * (args.learners > 1)
    other = " ".join([*several, *shlex.split(args.flags)])
    if not other:
        raise SystemExit("the second way needs --flags or --learners")
    launcher = {"launcher": torchrun(args.learners), "OMP_NUM_THREADS": "1"} if several else {}
    ways = {"as it is": ([], {}), other: (shlex.split(args.flags), launcher)}
    summaries = {way: [] for way in ways}
    for seed in range(1, args.seeds + 1):
        for way, (flags, options) in ways.items():
            common = shlex.split(args.common)
            _, summary = run(ROOT / args.script, *common, *flags, "--seed", str(seed), **options)
            summaries[way].append(summary)
            print(
                f"seed {seed} {way}: return {summary['mean_return_100']:.1f}, evaluation "
                f"{summary['eval_return_mean']:.1f}, {summary['pulls_per_worker']:g} pulls, "
                f"{summary['wall_seconds']:.0f} s",
                flush=True,
            )

    def column(way, key):
        return np.array([summary[key] for summary in summaries[way]])

    for way in ways:
        print(
            f"{way}: return {iqm(column(way, 'mean_return_100')):.1f}, evaluation "
            f"{iqm(column(way, 'eval_return_mean')):.1f} (IQM of {args.seeds} seeds), "
            f"{column(way, 'pulls_per_worker').mean():.1f} pulls (mean), "
            f"{statistics.median(column(way, 'wall_seconds')):.0f} s (median)"
        )
    for key in ("mean_return_100", "eval_return_mean"):
        samples = [column(way, key) for way in ways]
        value, low, high = interval(difference, *samples, resamples=10000)
        print(f"{key}, as it is minus {other}: {value:.1f} [{low:.1f}, {high:.1f}]")
