"""Run each command of benchmarks/results.md once at a commit: `make results`.

    python -m experiments.results --cleanrl path/to/cleanrl --venvs build/peers
    python -m experiments.results --only startup recovery

The output of a command goes to `experiments/benchmarks/results/NAME.txt`, below the command itself,
the commit, the processor and the date. Its tables and plots go beside that file. A command that has
finished at this commit is skipped, so an interrupted run goes on where it was. The commit is the
last one that changed the runtime, the scripts, the benchmarks or the packages. Nothing else should
run on the machine, because most commands measure time. Run `pip install envpool stable-baselines3`
first.
"""

import importlib.util
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.machine import here

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "experiments/benchmarks/results"
CODE = ("clusterenv_runtime", "clusterenv_utils", "scripts", ":(glob)*.py",
        "experiments/benchmarks/**.py", "requirements.txt")  # fmt: skip
BENCHMARK = "-m experiments.benchmarks"
COMMANDS = {  # by name, roughly from short to long
    "collection": f"{BENCHMARK}.collection",
    "collection_cartpole": f"{BENCHMARK}.collection --env-id CartPole-v1",
    "rows": f"{BENCHMARK}.rows",
    "recovery": f"{BENCHMARK}.recovery",
    "straggler": f"{BENCHMARK}.straggler",
    "straggler_ten": f"{BENCHMARK}.straggler --num-workers 10 --delay 0.01 --seconds 8",
    "make_train": "ppo_clusterenv.py",
    "transport": f"{BENCHMARK}.transport",
    "steps": f"{BENCHMARK}.steps --rounds 3",
    "publications_sac": f"{BENCHMARK}.publications --frequencies 10 20 50",
    "publications_sac_utd": (
        f"{BENCHMARK}.publications --frequencies 10 20 --flags='--env-id HalfCheetah-v5 "
        "--total-timesteps 12000 --learning-starts 2000 --utd 0.125'"
    ),
    "publications_dqn": (
        f"{BENCHMARK}.publications --script dqn_clusterenv.py --lag 800 --frequencies 20 40 "
        "--flags='--total-timesteps 50000'"
    ),
    "straggler_ppo": f"{BENCHMARK}.straggler --ppo --delay 0.008 --seconds 10 --rounds 2",
    "straggler_sac": (
        f"{BENCHMARK}.straggler --sac --num-workers 10 --delay 0.04 --seconds 40 --rounds 3"
    ),
    "ppo_cleanrl": f"{BENCHMARK}.training --rounds 5 --cleanrl {{cleanrl}}/cleanrl/ppo.py",
    "dqn_cleanrl": (
        f"{BENCHMARK}.dqn --cleanrl {{cleanrl}}/cleanrl/dqn.py "
        "--cleanrl-python {venvs}/cleanrl/bin/python"
    ),
    "sac_cleanrl": f"{BENCHMARK}.sac --cleanrl {{cleanrl}}/cleanrl/sac_continuous_action.py",
    "learners": (
        f"{BENCHMARK}.learners --widths 64 256 512 --rounds 2 --plot {{folder}}/learners.png"
    ),
    "scale": f"{BENCHMARK}.scale --workers 1 100 1000 --modes send/recv --out {{folder}}",
    "startup": f"{BENCHMARK}.startup",
    "peers": (
        f"{BENCHMARK}.peers --rounds 2 --iterations 12 --venvs {{venvs}} --csv {{folder}}/peers.csv"
    ),
    "time_to_solve": (
        f"{BENCHMARK}.time_to_solve --env-id LunarLander-v3 "
        "--ways='--no-overlap,--overlap,--stream' --common='--total-timesteps 500000' "
        "--output {folder}/time_to_solve --plot {folder}/time_to_solve.png"
    ),
    "sac_returns": (
        f"{BENCHMARK}.returns --script scripts/sac_clusterenv.py --env-id HalfCheetah-v5 "
        "--cleanrl {cleanrl}/cleanrl/sac_continuous_action.py --output {folder} "
        "--plot {folder}/sac_returns.png"
    ),
    "chaos_ppo": "-m tests.chaos --flags='--total-timesteps 800000'",
}
PACKAGES = {"startup": "stable_baselines3", "peers": "envpool"}  # packages to compare with


@dataclass
class Args:
    """The commands to run, and the paths of other projects."""

    only: tuple[str, ...] = tuple(COMMANDS)
    """names of the commands to run"""
    cleanrl: str = ""
    """a clone of CleanRL; without it, the commands that need it are left out"""
    venvs: str = ""
    """directory of other libraries' virtual environments; without it, the commands that need them
    are left out
    """


def main() -> None:
    args = tyro.cli(Args)
    unknown = set(args.only) - set(COMMANDS)
    if unknown:
        sys.exit(f"error: no such result: {', '.join(sorted(unknown))}")
    paths = {"cleanrl": args.cleanrl, "venvs": args.venvs}
    paths = {name: path and str(Path(path).absolute()) for name, path in paths.items()}
    failed = []
    for number, name in enumerate(args.only, 1):
        print(f"[{number} of {len(args.only)}] {name}: ", end="", flush=True)
        says = measure(name, paths)
        print(says, flush=True)
        failed += [name] * says.startswith("failed")
    sys.exit(f"error: failed: {', '.join(failed)}" if failed else 0)


def measure(name: str, paths: dict[str, str]) -> str:
    """Run a command unless its result exists. Return the outcome."""
    command = COMMANDS[name]
    missing = [path for path, value in paths.items() if f"{{{path}}}" in command and not value]
    if missing:
        return f"left out: needs --{missing[0]}"
    if name in PACKAGES and not importlib.util.find_spec(PACKAGES[name]):
        return f"left out: needs the package {PACKAGES[name]}"
    commit = commit_of_code()
    file = OUTPUT / f"{name}.txt"
    if file.exists() and f"commit {commit}," in file.read_text().split("\n\n")[0]:
        return "already there"
    start = time.monotonic()
    folder = ROOT / "build/results" / commit
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{name}.txt"
    with part.open("w") as output:
        result = subprocess.run(
            f"{sys.executable} {command.format(folder=folder.relative_to(ROOT), **paths)}",
            shell=True, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    seconds = time.monotonic() - start
    if result.returncode:
        return f"failed after {seconds:.0f} s, see {part.relative_to(ROOT)}"
    shown = command.format(folder="build/results", cleanrl="CLEANRL", venvs="VENVS")
    file.write_text(f"$ python {shown}\n{facts(commit, seconds)}\n\n{part.read_text()}")
    for drawn in folder.iterdir():
        if drawn.suffix in (".csv", ".md", ".png"):
            shutil.copy(drawn, OUTPUT)
    return f"{seconds:.0f} s"


def commit_of_code() -> str:
    """Return the last commit that changed code, with "-dirty" if the code has changed since."""
    commit = git("log", "-1", "--format=%h", "--", *CODE)
    return commit + "-dirty" * bool(git("status", "--porcelain", "--", *CODE))


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def facts(commit: str, seconds: float) -> str:
    """Return a line that says where and when a command ran."""
    known = here()
    python, torch = (known["versions"][name] for name in ("python", "torch"))
    where = f"{known['machine']}, Python {python}, torch {torch}"
    return f"commit {commit}, {where}, {time.strftime('%Y-%m-%d')}, {seconds:.0f} s"


if __name__ == "__main__":
    main()
