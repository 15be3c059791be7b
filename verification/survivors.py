"""Mutation tests of the runtime and of scripts, which print the changes that no test notices.

    python -m verification.survivors policy/sync.py wire/codec.py   # minutes to hours; resumes
    python -m verification.survivors ppo_clusterenv.py --since HEAD~3    # only lines changed since

Each change goes into a copy of the project, in which the tests of that file run until one fails. A
surviving change means that a test is missing, or that the change does not matter: `survivors.txt`
lists the latter, and says why. In a script, only its computation is changed: its advantages, its
loss or target, its replay buffer, and its training loop as far as the logs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gymnasium  # noqa: F401  imported here once, because it takes most of a short test's time
import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401
import zmq  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = Path(__file__).with_name("survivors.txt")
SCHEDULES = "test_verification.py::test_no_schedule_breaks_the_runtime"
# The tests of each file, with the ones that fail soonest first.
TESTS = {
    "head/responses.py": ["test_parts.py", SCHEDULES],
    "wire/buffers.py": ["test_protocol.py", "test_parts.py"],
    "wire/codec.py": ["test_protocol.py", "test_parts.py",
        "test_vector_env.py"],
    "wire/protocol.py": [
        "test_protocol.py", "test_head.py", "test_replacement.py", "test_strangers.py",
        "test_security.py",
        "test_streaming.py",
    ],
    "wire/security.py": ["test_transport.py", "test_security.py", "test_launchers.py"],
    "policy/sync.py": ["test_sync.py"],
    "head/interrupts.py": ["test_ctrl_c.py", SCHEDULES],
    "policy/versions.py": ["test_versions.py", "test_differences.py", "test_probe.py", SCHEDULES,
        "test_sync.py"],
    "head/worker.py": ["test_replacement.py", "test_head.py", "test_pool.py", SCHEDULES,
        "test_recovery.py", "test_failures.py", "test_vector_env.py"],
    "head/pool.py": [
        "test_head.py", "test_pool.py", "test_ctrl_c.py", SCHEDULES, "test_strangers.py",
        "test_streaming.py",
        "test_failures.py", "test_env_errors.py", "test_ends.py",
    ],
    "head/messenger.py": ["test_head.py", "test_pool.py", SCHEDULES, "test_strangers.py",
        "test_failures.py", "test_env_errors.py"],
    "head/requests.py": ["test_head.py", "test_pool.py", SCHEDULES, "test_streaming.py",
        "test_env_errors.py", "test_failures.py"],
    "head/recovery.py": ["test_replacement.py", "test_head.py", SCHEDULES, "test_recovery.py",
        "test_resume.py"],
    "head/supervisor.py": [
        "test_head.py", "test_pool.py", "test_recovery.py", "test_failures.py", "test_ends.py",
        "test_launchers.py",
    ],
    "head/transport.py": ["test_transport.py", "test_strangers.py", "test_security.py",
        "test_launchers.py"],
    "script/frame_replay.py": [
        "algorithms/test_harness.py", "algorithms/test_formulas.py",
        "algorithms/test_training.py", "algorithms/test_resuming.py",
        "-k", "dqn_atari or not clusterenv",
    ],
    "script/stream.py": [
        "test_stream.py", "algorithms/test_training.py", "algorithms/test_resuming.py",
        "test_dqn_clusterenv.py", "-k", "dqn_clusterenv or stream",
    ],
    "script/normalize.py": [
        "algorithms/test_harness.py", "algorithms/test_formulas.py",
        "algorithms/test_training.py", "algorithms/test_resuming.py",
        "-k", "ppo_continuous or not clusterenv",
    ],
    "script/checkpoint.py": ["test_checkpoint.py", "test_forged_states.py", "test_arguments.py",
        "test_resume.py"],
}  # fmt: skip
# The parts of a script that are changed: these functions and classes, and its loop between the
# lines of LOOP.
COMPUTE = {
    "compute_gae", "compute_vtrace", "normalize", "ppo_loss", "update", "get_states", "get_hidden",
    "get_action_and_value", "get_value", "ReplayBuffer", "compute_td_target", "td_loss",
    "linear_schedule", "explore", "get_action", "compute_next_q_value", "q_loss", "pi_loss",
    "actor_loss", "alpha_loss", "update_q", "update_actor",
}  # fmt: skip
# SAC's begins earlier, where it makes its networks, their targets, and alpha.
STARTS = "    actor, policy =", "    with run.training("
LOOP = STARTS, "            # TRY NOT TO MODIFY: record rewards"
FOLDERS = ROOT, ROOT / "scripts"
SCRIPTS = sorted(
    str(path.relative_to(ROOT)) for folder in FOLDERS for path in folder.glob("*_clusterenv.py")
)
for script in SCRIPTS:
    # The tests of this script, and those that belong to no single script.
    files = ["sac"] * ("sac" in script) + ["formulas", "training", "not_finite", "resuming"]
    names = [f"algorithms/test_{file}.py" for file in files]
    TESTS[script] = [*names, "-k", f"{Path(script).stem} or not clusterenv"]
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}  # fmt: skip


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield each piece of a file that may be changed, and its replacement."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[op]) if type(op) in SWAPS:
                swapped = ast.Compare(node.left, [SWAPS[type(op)]()], node.comparators)
                yield node, f"({ast.unparse(swapped)})"
            case ast.BoolOp() if type(node.op) in SWAPS:
                yield node, f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"
            case ast.BinOp() if type(node.op) in SWAPS:
                yield (
                    node,
                    f"({ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))})",
                )
            case ast.UnaryOp(op=ast.Not()):
                yield node, f"({ast.unparse(node.operand)})"
            case ast.Constant(value=bool() as value):
                yield node, str(not value)
            case ast.Constant(value=int() | float() as value):
                yield node, str(value + 1)
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                pass
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield test, f"(not ({ast.unparse(test)}))"
            case (
                ast.Expr(value=ast.Call())
                | ast.Raise()
                | ast.AugAssign()
                | ast.Assign(targets=[ast.Attribute()])
            ):
                yield node, "pass"
            case ast.Return(value=ast.AST()):
                yield node, "return None"


def formula_changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield further changes, for formulas: signs, extremes, and left-out assignments."""
    stored = Counter(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    others = {"min": "max", "max": "min", "amax": "amin", "exp": "neg", "mean": "sum"}
    for node in ast.walk(tree):
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                yield node, f"({ast.unparse(operand)})"
            case ast.Attribute(value=value, attr=name) if name in others:
                yield node, f"{ast.unparse(value)}.{others[name]}"
            case ast.Assign(targets=[ast.Subscript()]):
                yield node, "pass"
            case ast.Assign(targets=[ast.Name(name)]) if stored[name] > 1:
                yield node, "pass"


def mutants(text: str, has_formulas: bool = False) -> Iterator[tuple[str, str, int]]:
    """Yield each change's description, the text with the change, and its line."""
    tree, lines = ast.parse(text), text.encode().splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    skips = [
        getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")
    ]
    # The `strict` of `zip`.
    skips += [
        node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "strict"
    ]
    skipped = {id(part) for skip in skips if skip is not None for part in ast.walk(skip)}
    seen = Counter[str]()
    more = formula_changes(tree) if has_formulas else ()
    for node, new in itertools.chain(changes(tree), more):
        start, end = (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )
        old = text.encode()[start:end]
        if id(node) not in skipped and b"f" + old[:1] not in (b'f"', b"f'") and old != new.encode():
            changed = text.encode()[:start] + new.encode() + text.encode()[end:]
            piece, line = (
                " ".join(old.decode().split()),
                lines[node.lineno - 1].decode().split("  #")[0].strip(),
            )
            description = f"{piece} => {new}" + f" in {line}" * (piece != line)
            seen[description] += 1
            again = f" [{seen[description]}]" * (seen[description] > 1)
            yield description + again, changed.decode(), node.lineno


def path_of(file: str) -> Path:
    """Return the path of a file in the project."""
    return Path(file) if file in SCRIPTS else Path("clusterenv_runtime", file)


def computing_lines(text: str) -> set[int]:
    """Return the numbers, from 1, of the lines of a script that compute what it learns."""
    lines = text.splitlines()
    first, last = (
        next(number for number, line in enumerate(lines, 1) if line.startswith(mark))
        for mark in LOOP
    )
    chosen = set(range(first, last))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in COMPUTE:
            chosen |= set(range(node.lineno, node.end_lineno + 1))
    return chosen


def changed_lines(path: Path, revision: str) -> set[int]:
    """Return the numbers, from 1, of a file's lines that were changed since a revision."""
    command = ["git", "diff", "--unified=0", revision, "--", str(path)]
    difference = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    chosen = set()
    for start, number in re.findall(r"^@@ .* \+(\d+)(?:,(\d+))? @@", difference, re.MULTILINE):
        chosen |= set(range(int(start), int(start) + int(number or 1)))
    return chosen


def passes(directory: Path, file: str, seconds: float | None = None) -> bool:
    """Return whether all tests of a file pass in a copy of the project within ``seconds``."""
    if (pid := os.fork()) == 0:
        _test(directory, [f"tests/{name}" if ".py" in name else name for name in TESTS[file]])
    process = os.pidfd_open(pid)
    try:
        if not select.select([process], [], [], seconds)[0]:
            return False
        return os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOWAIT).si_status == 0
    finally:
        os.close(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with all processes that it has started
        os.waitpid(pid, 0)


def _test(directory: Path, tests: list[str]) -> None:
    """Run these tests in this forked process, and end the process."""
    code = 1
    try:
        os.setsid()
        os.chdir(directory)
        sys.path[0] = str(directory)
        for name in [name for name in sys.modules if name.partition(".")[0] == "verification"]:
            del sys.modules[name]  # these belong to the project, and not to its copy
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])
    finally:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Print the changes of the runtime or of scripts that no test notices."
    )
    parser.add_argument(
        "files", nargs="+", choices=TESTS, metavar="FILE", help=f"of {', '.join(TESTS)}"
    )
    parser.add_argument(
        "--done",
        type=Path,
        default="runs/survivors.csv",
        help="table of tried changes, survived or noticed",
    )
    parser.add_argument("--since", help="change only lines that were changed since this commit")
    args = parser.parse_args()
    args.done.parent.mkdir(exist_ok=True)
    explained = {line.partition("\t")[0] for line in EXPLAINED.read_text().splitlines()}
    found_explained = set()
    done = dict(csv.reader(args.done.open(newline=""))) if args.done.exists() else {}
    found = 0
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent, "project")
        shutil.copytree(
            ROOT, directory, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__")
        )
        for file in args.files:
            path, seconds = directory / path_of(file), None
            original = path.read_text()
            all_lines = set(range(1, len(original.splitlines()) + 1))
            chosen = computing_lines(original) if file in SCRIPTS else all_lines
            chosen &= changed_lines(path_of(file), args.since) if args.since else all_lines
            for number, (description, changed, line) in enumerate(
                mutants(original, file in SCRIPTS)
            ):
                name = f"{file}: {description}"
                # An explanation may be for all scripts of a kind: ppo*_clusterenv.py.
                kind = Path(file).name[:3]
                kinds = {name, f"{kind}*_clusterenv.py: {description}"} & explained
                found_explained |= kinds
                if kinds:
                    continue
                if line not in chosen:
                    continue
                if name not in done:
                    if seconds is None:
                        start = time.monotonic()
                        if not passes(directory, file):
                            sys.exit(
                                f"error: the tests of {file} fail without a change: fix them first"
                            )
                        # Tests that take longer have noticed the change.
                        seconds = 60 + 3 * (time.monotonic() - start)
                    path.write_text(changed)
                    # Python recognizes compiled files by size and second of modification.
                    os.utime(path, (number, number))
                    done[name] = "survived" if passes(directory, file, seconds) else "noticed"
                    path.write_text(original)
                    with args.done.open("a", newline="") as log:
                        csv.writer(log).writerow([name, done[name]])
                if done[name] == "survived":
                    found += 1
                    print(name, flush=True)
    stale = [
        name
        for name in sorted(explained - found_explained)
        if name.partition(": ")[0] in args.files
    ]
    for name in stale:
        print(f"there is no such change to explain any more: {name}")
    print(f"{found} changes that no test notices and nobody has explained, of {len(done)}")
    sys.exit(found + len(stale) > 0)


if __name__ == "__main__":
    main()
