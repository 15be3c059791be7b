"""The structure of both packages: which files may import which, and how large they may be."""

import ast
from pathlib import Path

import pytest

import clusterenv_runtime

from .scripts import ROOT

PACKAGE = Path(clusterenv_runtime.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# From the bottom up: a lower layer imports no higher one. `name/` is a whole folder.
LAYERS = [
    ["errors"],
    ["arrays", "pickling"],
    ["rollout"],
    ["messages"],
    ["security", "policy/"],
    ["launchers/"],
    ["options", "setup"],
    ["keys"],
    ["head/", "worker/"],
    ["env"],
    ["__init__"],
    ["extras/"],
]
UTILS = ROOT / "clusterenv_utils"
ROOMS = [
    ["errors"],
    ["arguments"],
    ["checkpoint"],
    ["signals", "stream", "cuda_graph", "progress", "logs"],
    ["replay", "dry_run", "evaluation", "trained"],
    ["run"],
    ["__init__"],
]
APART = {"head": "worker", "worker": "head"}  # side by side: neither imports the other
FEW = 11  # files at the package's root, at most


def name_of(path):
    """Return a file's path below its package, without its suffix; for a package, its folder's."""
    package = UTILS if UTILS in path.parents else PACKAGE
    return str(path.relative_to(package)).removesuffix(".py").removesuffix("/__init__")


def imported(path):
    """Yield the names of the package's files that a file imports, also within functions, but not
    for type checkers.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1] / (node.module or "").replace(".", "/")
            for alias in node.names:
                for candidate in (base / f"{alias.name}.py", base / alias.name / "__init__.py"):
                    if candidate.exists():
                        yield name_of(candidate)
                        break
                else:
                    file = base.with_suffix(".py")
                    yield name_of(file if file.exists() else base / "__init__.py")


def layer(name):
    return next(
        number
        for number, names in enumerate(LAYERS)
        if any(
            f"{name}/".startswith(entry) if entry.endswith("/") else name == entry
            for entry in names
        )
    )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    name = name_of(path)
    if name == "__init__" or name.endswith("__init__"):
        return
    for other in imported(path):
        assert APART.get(name.split("/")[0]) != other.split("/")[0], f"{name} imports {other}"
        together = name.split("/")[0] == other.split("/")[0] or layer(name) == layer(other)
        assert layer(other) < layer(name) or together, f"{name} imports {other}"


def test_the_rooms_of_the_harness_import_those_below_and_the_runtime_imports_none():
    floors = {name: floor for floor, names in enumerate(ROOMS) for name in names}
    paths = sorted(UTILS.glob("*.py"))
    assert floors.keys() == {name_of(path) for path in paths}
    for path in paths:
        for other in imported(path):
            assert floors[other] < floors[name_of(path)], f"{path.name} imports {other}"
    assert not [path for path in FILES if UTILS.name in path.read_text()]


def test_there_are_few_loose_files():
    assert len(list(PACKAGE.glob("*.py"))) <= FEW


def test_there_is_no_import_cycle():
    arrows = {name_of(path): set(imported(path)) - {name_of(path)} for path in FILES}
    while leaves := [name for name, others in arrows.items() if not others & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows


CODE = [
    path for path in ROOT.rglob("*.py") if not {".venv", "tests", "runs", "build"} & set(path.parts)
]


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_classes_are_small(path):
    text = path.read_text()
    # A script is one file by design, with a whole algorithm; so is the model, with all its rules.
    if path.name.endswith("_clusterenv.py") or path.name == "model.py":
        return
    assert text.count("\n") <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert node.end_lineno - node.lineno < 400, node.name
