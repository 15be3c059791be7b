"""The returns of a script, compared with those of CleanRL's, over steps and over seconds.

    python -m experiments.benchmarks.returns --script scripts/sac_clusterenv.py \
        --cleanrl path/to/cleanrl/cleanrl/sac_continuous_action.py --env-id HalfCheetah-v5

CleanRL is not part of this repository: clone https://github.com/vwxyzjn/cleanrl and pass the path
of its script. The two scripts train at the same time on the same machine, each with one thread for
its networks, one seed after another, and otherwise with their own defaults. A run that is in
--output is not repeated. Prints the table and draws the figure of tools/plot.py.
"""

import shlex
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

from tools.plot import RETURNS, LoggedRun, draw_figure, make_table

from .scripts import ROOT, call, import_path


@dataclass
class Args:
    script: str
    """path of the script in the repository"""
    cleanrl: Path
    """path of CleanRL's script"""
    env_id: str
    """the environment"""
    total_timesteps: int = 100_000
    """environment steps of each run"""
    seeds: int = 3
    """number of seeds, from 1"""
    flags: str = ""
    """further flags of our script, in one string"""
    output: Path = Path("runs/returns")
    """directory for a folder per run"""
    plot: Path = Path("returns.png")
    """file for the figure"""


def kept(directory: Path, command: list[str]) -> str:
    """Return the directory of a run's logs. If it is not there, train."""
    if not directory.exists():
        part = directory.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        call([sys.executable, *command], part, PYTHONPATH=import_path(ROOT), OMP_NUM_THREADS="1")
        part.rename(directory)
    (logs,) = (directory / "runs").iterdir()
    return str(logs)


def main() -> None:
    args = tyro.cli(Args)
    wrapper = str(ROOT / "experiments/benchmarks/cleanrl.py")
    commands = {
        Path(args.script).name: [str(ROOT / args.script), *shlex.split(args.flags)],
        f"CleanRL's {args.cleanrl.name}": [wrapper, str(args.cleanrl.resolve())],
    }
    settings: dict[str, list[LoggedRun]] = {name: [] for name in commands}
    task = f"{args.env_id.replace('/', '-')}-{args.total_timesteps}"
    common = ["--env-id", args.env_id, "--total-timesteps", str(args.total_timesteps)]
    with ProcessPoolExecutor(len(commands)) as pool:
        for seed in range(1, args.seeds + 1):
            both = {}
            for name, command in commands.items():
                directory = args.output.resolve() / f"{task}-{name.split()[-1]}-{seed}"
                both[name] = pool.submit(kept, directory, [*command, *common, f"--seed={seed}"])
            for name, logs in both.items():
                settings[name].append(LoggedRun(logs.result()))
            print(f"seed {seed} is done", flush=True)
    tags = {run: RETURNS[0] for runs in settings.values() for run in runs}
    table = make_table(settings, tags)
    print(table)
    figure, _ = draw_figure(settings, tags, table, smooth=1)
    figure.savefig(args.plot, dpi=150)


if __name__ == "__main__":
    main()
