"""Where the time of an iteration goes: CPU milliseconds of the head and of a worker, by what they are spent on.

    pip install py-spy; python -m benchmarks.budget
    python -m benchmarks.budget --flags="--overlap --compile"

Trains with ppo_clusterenv.py, on the work of `benchmarks/work.py`, under py-spy, which samples the stacks of all
processes and leaves out those that wait. Start-up is left out, and of the head whatever does not run Python.
"""

import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

from . import work
from .scripts import ROOT, call

RATE = 100  # samples per second
SCRIPT = ROOT / "ppo_clusterenv.py"
# Sections of the training loop, by the text that the first line of each has in it.
SECTIONS = {
    "save_if_due()": "checkpoints, learning rate",
    "rollout = envs.rollout(": "rollout",
    "global_step += args.batch_size": "tensors",
    "# bootstrap value if not done": "values and advantages",
    "# Optimizing the policy": "update",
    "y_pred, y_true": "logging",
}
# Finer: the section or function, a pattern for a frame, what it is. The first that fits counts.
HEAD = (
    ("update", r"(zero_grad|step) \(torch/optim", "update: Adam"),
    ("update", r"clip_grad_norm_", "update: gradient clipping"),
    ("update", r"backward", "update: backward"),
    ("update", r"ppo_loss", "update: loss"),
    ("update", r"", "update: shuffling, minibatches"),
    ("rollout", r"publish \(clusterenv_runtime/sync", "rollout: publish, divergence"),
    ("rollout", r"join \(clusterenv_runtime/rollout", "rollout: join the workers' parts"),
    ("rollout", r"", "rollout: messages"),
)
WORKER = (
    (r"forward \(torch/nn/modules/container|_call_impl", "policy: forward"),
    (r"(act|finish|noise|to_tensor) \(clusterenv_runtime/policy", "policy: noise, sampling, log-probs"),
    (r"step \((?!clusterenv_runtime)", "environments: step"),
    (r"reset \((?!clusterenv_runtime)", "environments: reset"),
    (r"collect", "bookkeeping of steps"),
    (r"_answer|_receive|_handle|run", "messages"),
)


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """the environment"""
    flags: str = ""
    """flags of ppo_clusterenv.py, in one string"""
    iterations: int = 60
    """iterations, of 8192 steps and one update"""


def sections():
    """Return the first line of each section of the training loop, and its name, last first."""
    lines = SCRIPT.read_text().splitlines()
    found = []
    for text, name in SECTIONS.items():
        (number,) = (number for number, line in enumerate(lines, 1) if text in line and line.startswith(" " * 12))
        found.append((number, name))
    return found[::-1]


def of_head(frames, starts):
    """Return what a stack of the head is part of, or None if that is not the training loop."""
    module = [re.fullmatch(rf"<module> \({SCRIPT.name}:(\d+)\)", frame) for frame in frames]
    lines = [int(match[1]) for match in module if match]
    section = next((name for start, name in starts if lines and lines[0] >= start), None)
    if section == "logging" and any("evaluate" in frame or "savefig" in frame for frame in frames):
        return None
    stack = "; ".join(frames)
    return next((name for part, pattern, name in HEAD if part == section and re.search(pattern, stack)), section)


def of_worker(frames):
    stack = "; ".join(frames)
    if "worker.py" not in stack or "_handle" in stack and "collect" not in stack:
        return None  # importing, or building environments
    return next((name for pattern, name in WORKER if re.search(pattern, stack)), None)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if shutil.which("py-spy") is None:
        sys.exit("error: there is no py-spy on the PATH: pip install py-spy")
    starts, head, worker = sections(), Counter(), Counter()
    train = [
        sys.executable, str(SCRIPT), "--env-id", args.env_id, *work.FLAGS,
        "--total-timesteps", str(args.iterations * work.BATCH_SIZE), *shlex.split(args.flags),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        spy = shlex.split(f"py-spy record --nonblocking --subprocesses --rate {RATE} --format raw --output stacks --")
        call([*spy, *train], directory, OMP_NUM_THREADS="1")
        lines = Path(directory, "stacks").read_text().splitlines()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames, of_a_worker = stack.split(";"), "clusterenv_runtime.worker" in stack
        if name := of_worker(frames) if of_a_worker else of_head(frames, starts):
            (worker if of_a_worker else head)[name] += int(count)
    for title, found, processes in (("head", head, 1), ("each worker", worker, work.NUM_WORKERS)):
        print(f"{title}, CPU ms per iteration of {work.BATCH_SIZE} steps:")
        for name, count in found.most_common():
            print(f"  {count / RATE / args.iterations / processes * 1e3:6.1f}  {name}")
