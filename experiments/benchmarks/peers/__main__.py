"""PPO's training throughput with ClusterEnv and other libraries, each in its own virtualenv.

    python -m experiments.benchmarks.peers --venvs ~/peers

Makes the virtual environments in the given directory (7 GB; the versions are those for Python 3.11
on Linux). Then measures all systems in turn, ours included, `--rounds` times, on the same work and
in steady state, as in `experiments.benchmarks.throughput`. Appends every measurement to `--csv`,
and writes a table (.md) and a plot (.png) beside it, and README.md's picture (`four_bars`).
Measurements that are already in that file are not repeated; remove it to start again. A system that
fails, or cannot be installed, is named, and the others go on. `--rounds 0` only makes the virtual
environments. Takes about an hour on two cores, and 10 GB of memory for the 64 processes of
Stable-Baselines3.
"""

import csv
import itertools
import os
import re
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import work
from ..scripts import call, measure
from ..throughput import SYSTEMS, select, table
from . import four_bars
from .four_bars import read

HERE = Path(__file__).resolve().parent


class Peer(NamedTuple):
    venv: str
    """name of the virtual environment, which is made from requirements-VENV.txt"""
    package: str
    """name of the package in the requirements"""
    title: str
    """the library's name as its authors write it"""
    details: str
    """the label's text after title and version"""
    module: str
    """name of the module in this folder"""
    flags: tuple[str, ...] = ()
    """the module's arguments after the environment and the number of iterations"""

    @property
    def requirements(self):
        return HERE / f"requirements-{self.venv}.txt"

    @property
    def label(self):
        pattern = rf"^{re.escape(self.package)}==(\S+)"
        version = re.search(pattern, self.requirements.read_text(), re.MULTILINE)[1]
        return f"{self.title} {version}, {self.details}"

    def measure(self, venvs, env_id, iterations, timeout):
        python = venvs / self.venv / "bin" / "python"
        return measure(
            f"experiments.benchmarks.peers.{self.module}",
            env_id,
            iterations,
            *self.flags,
            python=python,
            timeout=timeout,
        )


PEERS = {
    "sb3-subproc": Peer(
        "sb3",
        "stable-baselines3",
        "Stable-Baselines3",
        "SubprocVecEnv, 64 processes",
        "sb3",
        ("subproc",),
    ),
    "sb3-dummy": Peer(
        "sb3",
        "stable-baselines3",
        "Stable-Baselines3",
        "DummyVecEnv, one process",
        "sb3",
        ("dummy",),
    ),
    "rllib": Peer("rllib", "ray[rllib]", "RLlib", "2 env runners", "rllib"),
    "sample-factory": Peer(
        "sample-factory", "sample-factory", "Sample Factory", "2 workers", "sample_factory"
    ),
    "torchrl": Peer("torchrl", "torchrl", "TorchRL", "2 collectors", "torchrl"),
    "envpool": Peer("envpool", "envpool", "EnvPool", "CleanRL-style loop", "envpool"),
}
FIELDS = ["env_id", "system", "round", "steps", "seconds"]
FAILURES = (RuntimeError, TimeoutError, ValueError)


@dataclass
class Args:
    venvs: Path
    """directory of the libraries' virtual environments; missing ones are made"""
    env_ids: tuple[str, ...] = ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5")
    """the environments"""
    only: tuple[str, ...] = ()
    """names of the systems to measure, for example `clusterenv sb3-dummy`; all by default"""
    rounds: int = 5
    """rounds; each measures all systems in turn"""
    iterations: int = 25
    """iterations per measurement, each of 8192 steps and one update"""
    csv: Path = HERE.parent / "results" / "peers.csv"
    """file of the measurements; the table and the plot go beside it"""
    timeout: float = 600
    """seconds after which a measurement is given up"""
    setup_timeout: float = 1800
    """seconds after which the setup of a virtual environment is given up"""


def set_up(peer, venvs, timeout):
    """Make a peer's virtual environment from its requirements, unless it exists."""
    folder, wanted = venvs / peer.venv, peer.requirements.read_text()
    done = folder / "installed.txt"
    if done.exists() and done.read_text() == wanted:
        return
    call([sys.executable, "-m", "venv", "--clear", folder], venvs, timeout)
    call(
        [folder / "bin" / "python", "-m", "pip", "install", "-r", peer.requirements], venvs, timeout
    )
    done.write_text(wanted)


def append(path, *row):
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([FIELDS, row] if new else [row])


def plot(rates, systems, env_ids, path):
    figure = Figure(figsize=(9, 0.5 * len(systems) + 1), layout="constrained")
    panels = figure.subplots(1, len(env_ids), sharey=True, squeeze=False)[0]
    for axes, env_id in zip(panels, env_ids, strict=True):
        for row, name in enumerate(systems):
            if mine := rates.get((env_id, name)):
                median, color = (
                    np.median(mine),
                    "#0072B2" if name.startswith("clusterenv") else "#BBBBBB",
                )
                whiskers = [[median - min(mine)], [max(mine) - median]]
                hatch = "//" if name == "floor" else None
                axes.barh(
                    row,
                    median,
                    xerr=whiskers,
                    color=color,
                    edgecolor="white",
                    hatch=hatch,
                    capsize=3,
                )
                text, offset = (
                    f"{median / 1000:.1f}k",
                    {"xytext": (5, 0), "textcoords": "offset points"},
                )
                axes.annotate(text, (max(mine), row), va="center", **offset)
        axes.set(title=env_id, yticks=range(len(systems)))
        axes.set_yticklabels([label.replace(", ", "\n", 1) for label, _ in systems.values()])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()  # all axes share it
    figure.supxlabel(
        "environment steps per second, training included: median, slowest and fastest round",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    args = tyro.cli(Args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all started processes end
    venvs, failed = args.venvs.resolve(), set()
    venvs.mkdir(parents=True, exist_ok=True)
    everything = SYSTEMS | {
        name: (peer.label, partial(peer.measure, venvs)) for name, peer in PEERS.items()
    }
    systems = select(everything, args.only)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    ) as progress:

        def give_up(name, env_ids, error):
            failed.update((env_id, name) for env_id in env_ids)
            message = f"FAILED: {name} on {', '.join(env_ids)}: {error}"
            progress.console.print(message, markup=False, highlight=False, soft_wrap=True)

        chosen = {name: PEERS[name] for name in systems if name in PEERS}
        task = progress.add_task("", total=len({peer.venv for peer in chosen.values()}))
        for venv, names in itertools.groupby(chosen, key=lambda name: PEERS[name].venv):
            progress.update(task, description=f"setting up {venv}")
            names = list(names)
            try:
                set_up(PEERS[names[0]], venvs, args.setup_timeout)
            except FAILURES as error:
                for name in names:
                    give_up(name, args.env_ids, error)
            else:
                progress.console.print(f"{venv} is set up")
            progress.advance(task)
        progress.update(task, description="set up")

        todo = list(itertools.product(range(1, args.rounds + 1), args.env_ids, systems))
        task = progress.add_task("", total=len(todo))
        for number, env_id, name in todo:
            progress.update(task, description=f"round {number}, {env_id}, {name}")
            if (
                number not in read(args.csv).get((env_id, name), {})
                and (env_id, name) not in failed
            ):
                try:
                    steps, seconds = systems[name][1](env_id, args.iterations, args.timeout)
                except FAILURES as error:
                    give_up(name, [env_id], error)
                else:
                    append(args.csv, env_id, name, number, steps, round(seconds, 6))
                    progress.console.print(
                        f"{env_id}, {name}, round {number}: {steps / seconds:,.0f} steps/s"
                    )
            progress.advance(task)
        progress.update(task, description="measured")

    rates = {key: list(rounds.values()) for key, rounds in read(args.csv).items()}
    speed = {name: np.median(rates.get((args.env_ids[-1], name), 0)) for name in everything}
    shown = [name for name in everything if any((env_id, name) in rates for env_id in args.env_ids)]
    shown = {name: everything[name] for name in sorted(shown, key=speed.get, reverse=True)}
    if shown:
        most = max(len(rounds) for rounds in rates.values())
        text = table(rates, shown, args.env_ids)
        text += (
            f"\n\nMedian and range of {most} rounds on {os.cpu_count()} cores, {work.NUM_ENVS} "
            f"environments."
        )
        args.csv.with_suffix(".md").write_text(text + "\n")
        plot(rates, shown, args.env_ids, args.csv.with_suffix(".png"))
        four_bars.draw(rates, args.csv.with_name("four_bars.png"))
        print(text)
    if failed:
        sys.exit(
            "failed, see above: "
            + ", ".join(f"{name} on {env_id}" for env_id, name in sorted(failed))
        )
