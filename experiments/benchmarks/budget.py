"""The CPU milliseconds that the head and a worker spend in an iteration, by purpose.

    pip install py-spy; python -m experiments.benchmarks.budget
    python -m experiments.benchmarks.budget --flags="--overlap --compile"

Trains with ppo_clusterenv.py, on the work of `experiments/benchmarks/work.py`, under py-spy, which
samples the stacks of all processes and leaves out those that wait. The result leaves out the
start-up, and the head's threads that run no Python. The script's own work, outside the functions
that this module knows, is listed by line. Lines below 1% share one entry.
"""

import linecache
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
# The groups of the head's time. Each has a pattern for the frames of the functions that the script
# calls. The first pattern that matches counts.
HEAD = (
    (r"evaluate", None),  # after training
    (r"(?<!<module>) \(torch/_dynamo/convert_frame", "compiling, or loading compiled code"),
    (r"publish \(clusterenv_runtime", "rollout: publish, divergence"),
    (r"join \(clusterenv_runtime", "rollout: join the workers' parts"),
    (r"rollout \(clusterenv_runtime", "rollout: messages"),
    (r"save_if_due", "checkpoints"),
    (r"ppo_loss", "update: loss"),
    (r"backward \(torch", "update: backward"),
    (r"clip_grad_norm_|\(torch/nn/utils/clip_grad", "update: gradient clipping"),
    (r"(zero_grad|step|wrapper) \(torch/optim", "update: Adam"),
    (r"get_value|(forward|_call_impl) \(torch/nn|\(torch/distributions", "values, proximal policy"),
    (r"compile_wrapper \(torch/_dynamo", "calling compiled code"),
    (r"add_scalar|\(rich/", "logging"),
)
# Frames that count as the work of the script's own line: comprehensions, and operators' calls.
OWN = r"<\w+> \(" + re.escape(SCRIPT.name) + r"|\((numpy|torch/_tensor\.py)"
WORKER = (
    (r"forward \(torch/nn/modules/container|_call_impl", "policy: forward"),
    (
        r"(act|finish|noise|to_tensors) \(clusterenv_runtime/policy",
        "policy: noise, sampling, log-probs",
    ),
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
    """further flags of ppo_clusterenv.py, in one string"""
    iterations: int = 60
    """iterations, each of 8192 steps and one update"""


def of_head(frames):
    """Return the group of a stack of the head, or the number of the script's own line, or None."""
    for i, frame in enumerate(frames):
        if module := re.fullmatch(rf"<module> \({re.escape(SCRIPT.name)}:(\d+)\)", frame):
            called = frames[i + 1 :]
            own = int(module[1]) if all(re.search(OWN, frame) for frame in called) else None
            stack = "; ".join(called)
            return next((name for pattern, name in HEAD if re.search(pattern, stack)), own)
    return None


def of_worker(frames):
    stack = "; ".join(frames)
    if "clusterenv_runtime/worker" not in stack or "_handle" in stack and "collect" not in stack:
        return None  # importing, or building environments
    return next((name for pattern, name in WORKER if re.search(pattern, stack)), None)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if shutil.which("py-spy") is None:
        sys.exit("error: there is no py-spy on the PATH: pip install py-spy")
    head, worker = Counter(), Counter()
    train = [
        sys.executable, str(SCRIPT), "--env-id", args.env_id, *work.FLAGS,
        "--total-timesteps", str(args.iterations * work.BATCH_SIZE), *shlex.split(args.flags),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        spy = shlex.split(
            f"py-spy record --nonblocking --subprocesses --rate {RATE} --format raw --output "
            f"stacks --"
        )
        call([*spy, *train], directory, OMP_NUM_THREADS="1")
        lines = Path(directory, "stacks").read_text().splitlines()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if not count.isdigit():
            continue  # part of a command of torch.compile, which has line breaks
        frames, of_a_worker = stack.split(";"), "clusterenv_runtime.worker" in stack
        if name := of_worker(frames) if of_a_worker else of_head(frames):
            (worker if of_a_worker else head)[name] += int(count)
    few = sum(head.values()) / 100
    for line in [key for key in head if isinstance(key, int)]:
        count = head.pop(line)
        text = linecache.getline(str(SCRIPT), line).strip()
        head[f"line {line}: {text}" if count >= few else "other lines"] += count
    for title, found, processes in (("head", head, 1), ("each worker", worker, work.NUM_WORKERS)):
        print(f"{title}, CPU ms per iteration of {work.BATCH_SIZE} steps:")
        for name, count in found.most_common():
            print(f"  {count / RATE / args.iterations / processes * 1e3:6.1f}  {name}")
