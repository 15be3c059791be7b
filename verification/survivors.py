"""Changes the runtime a little in one place after another, and says which changes no test notices.

    python -m verification.survivors sync.py codec.py          # minutes to hours; goes on where it stopped

Each change is made to a copy of the project, in which the tests of that file are run until one fails. What survives is
either a test that is missing, or a change that changes nothing that matters: `survivors.txt` has these, and says why.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TIMEOUT_S = 300
ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = Path(__file__).with_name("survivors.txt")
# The tests of each file, those that fail soonest first.
TESTS = {
    "answers.py": ["test_parts", "test_verification"],
    "codec.py": ["test_protocol"],
    "protocol.py": ["test_protocol", "test_strangers", "test_security", "test_streaming"],
    "security.py": ["test_security", "test_launchers"],
    "sync.py": ["test_sync"],
    "head/versions.py": ["test_differences", "test_sync", "test_verification"],
    "head/episodes.py": ["test_head", "test_vector_env", "test_verification"],
    "head/failures.py": ["test_head", "test_failures"],
    "head/handle.py": ["test_head", "test_verification", "test_failures"],
    "head/pool.py": ["test_head", "test_verification", "test_strangers", "test_streaming", "test_failures"],
    "head/recovery.py": ["test_head", "test_verification", "test_recovery", "test_resume"],
    "head/supervisor.py": ["test_head", "test_failures", "test_launchers"],
    "head/transport.py": ["test_strangers", "test_security", "test_launchers"],
    "script/checkpoint.py": ["test_resume"],
}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Return each piece of a file that may be changed, and what may stand in its place."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[op]) if type(op) in SWAPS:
                yield node, f"({ast.unparse(ast.Compare(node.left, [SWAPS[type(op)]()], node.comparators))})"
            case ast.BoolOp() if type(node.op) in SWAPS:
                yield node, f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"
            case ast.BinOp() if type(node.op) in SWAPS:
                yield node, f"({ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))})"
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
            case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Assign(targets=[ast.Attribute()]):
                yield node, "pass"
            case ast.Return(value=ast.AST()):
                yield node, "return None"


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Return of each change a description, and the text with it."""
    tree, lines = ast.parse(text), text.encode().splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    hints = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    skipped = {id(part) for hint in hints if hint is not None for part in ast.walk(hint)}
    seen = Counter[str]()
    for node, new in changes(tree):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old = text.encode()[start:end]
        if id(node) not in skipped and b"f" + old[:1] not in (b'f"', b"f'"):
            changed = text.encode()[:start] + new.encode() + text.encode()[end:]
            description = f"{' '.join(old.decode().split())} => {new}"
            seen[description] += 1
            yield description + f" [{seen[description]}]" * (seen[description] > 1), changed.decode()


def survives(directory: Path, file: str, changed: str) -> bool:
    """Say whether no test of a file in a copy of the project notices a change."""
    path = directory / "clusterenv_runtime" / file
    original = path.read_text()
    path.write_text(changed)
    tests = [f"tests/{name}.py" for name in TESTS[file]]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass  # whoever waits for ever has noticed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        path.write_text(original)
    return process.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Say which changes of the runtime no test notices.")
    parser.add_argument("files", nargs="+", choices=TESTS, metavar="FILE", help=f"of {', '.join(TESTS)}")
    parser.add_argument(
        "--done", type=Path, default="runs/survivors.csv", help="what has been tried, and survived or not"
    )
    args = parser.parse_args()
    args.done.parent.mkdir(exist_ok=True)
    explained = {line.partition("\t")[0] for line in EXPLAINED.read_text().splitlines()}
    done = dict(csv.reader(args.done.open(newline=""))) if args.done.exists() else {}
    found = 0
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent, "project")
        shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__"))
        for file in args.files:
            for description, changed in mutants((ROOT / "clusterenv_runtime" / file).read_text()):
                name = f"{file}: {description}"
                if name not in done:
                    done[name] = "survived" if survives(directory, file, changed) else "noticed"
                    with args.done.open("a", newline="") as log:
                        csv.writer(log).writerow([name, done[name]])
                if done[name] == "survived" and name not in explained:
                    found += 1
                    print(name, flush=True)
    print(f"{found} changes that no test notices and nobody has explained, of {len(done)}")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
