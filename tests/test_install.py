"""The installation: the wheel and the sdist. Scripts, pyproject.toml and requirements.txt name the
same packages.
"""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import gymnasium as gym
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from .scripts import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SCRIPTS = [*ROOT.glob("*_clusterenv.py"), *ROOT.glob("scripts/*.py")]
PACKAGE, UTILS = ROOT / "clusterenv_runtime", ROOT / "clusterenv_utils"


def metadata_of(script):
    """Return a script's inline metadata, which PEP 723 defines."""
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", script.read_text(), re.MULTILINE)
    return tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))


def modules_of(path):
    """Yield the top-level names of the modules that a file imports, except by relative imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        yield from (name.partition(".")[0] for name in names)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_uv_run_installs_what_the_script_needs(script):
    metadata = metadata_of(script)
    (text,) = metadata["dependencies"]
    need = Requirement(text)
    assert metadata["requires-python"] == PROJECT["requires-python"]
    (source,) = metadata["tool"]["uv"]["sources"].items()
    assert source == (need.name, {"path": source[1]["path"], "editable": True})
    assert (script.parent / source[1]["path"]).resolve() == ROOT
    assert need.name == PROJECT["name"] and need.extras <= EXTRAS.keys()
    listed = [*PROJECT["dependencies"], *(line for extra in need.extras for line in EXTRAS[extra])]
    brought = {Requirement(line).name for line in listed}
    distributions = packages_distributions()
    files = [script, *UTILS.glob("*.py")]
    modules = (
        {name for path in files for name in modules_of(path)}
        - sys.stdlib_module_names
        - {PACKAGE.name, UTILS.name}
    )
    assert len(modules) > 5
    for module in modules:
        assert brought & {name.lower() for name in distributions[module]}, module


def needs_of(*files):
    """Return the requirements in these files, by name."""
    texts = "\n".join((ROOT / file).read_text() for file in files)
    lines = [line.partition("#")[0].strip() for line in texts.splitlines()]
    return {need.name: need for need in map(Requirement, filter(None, lines))}


def test_the_versions_that_are_tested_are_in_the_ranges():
    pinned = needs_of(
        "experiments/benchmarks/peers/requirements-envpool.txt",
        "experiments/benchmarks/peers/requirements-ray.txt",
        "requirements.txt",
    )
    for line in [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]:
        need, pin = Requirement(line), pinned[Requirement(line).name]
        (version,) = pin.specifier
        assert version.operator == "==" and need.specifier.contains(version.version), line
        assert need.extras <= pin.extras, line


def test_the_lowest_versions_that_are_tested_are_those_of_the_ranges():
    pinned, lowest = needs_of("requirements.txt"), needs_of("tests/lowest.txt")
    own = {"export", "minatar"}  # tested only with the pinned versions
    others = {"envpool", "ray"}  # in neither file: tested where they are installed
    extras = [line for name in EXTRAS.keys() - own - others for line in EXTRAS[name]]
    ranges = [(line, lowest) for line in [*PROJECT["dependencies"], *extras]]
    ranges += [(line, pinned) for name in own for line in EXTRAS[name]]
    for line, tested in ranges:
        need = Requirement(line)
        (version,) = tested[need.name].specifier
        release = Version(version.version).release
        for bound in (Version(each.version) for each in need.specifier if each.operator == ">="):
            assert release[: len(bound.release)] == bound.release, need


def test_gymnasium_has_the_private_attributes_that_are_used():
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")])
    assert envs._add_info({}, {"a": 1}, 0)["a"] == 1
    assert gym.wrappers.vector.RecordEpisodeStatistics(envs)._stats_key == "episode"
    assert envs.single_action_space._np_random is None or envs.single_action_space.np_random
    envs.close()


def build(tree, kind):
    """Build a distribution of a tree, and return its path. Every warning is an error."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return tree / "dist" / result.stdout.splitlines()[-1]


def test_the_sdist_holds_the_package_and_so_does_the_wheel_that_it_builds(tmp_path):
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("clusterenv_runtime", "clusterenv_utils", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    paths = *PACKAGE.rglob("*.py"), *UTILS.rglob("*.py")
    sources = {str(path.relative_to(ROOT)) for path in paths}
    files = sources | {"clusterenv_runtime/py.typed", "clusterenv_utils/py.typed"}
    with tarfile.open(build(tree, "sdist")) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("clusterenv_runtime-*")
    assert {str(path.relative_to(unpacked)) for path in unpacked.rglob("*.py")} - {
        "setup.py"
    } == sources
    wheel = build(unpacked, "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (
            archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")
        )
    assert {name for name in names if ".dist-info/" not in name} == files
    assert "License-Expression: MIT" in metadata and any(
        name.endswith("/licenses/LICENSE") for name in names
    )


def told_to_install():
    """Yield the packages that texts and messages tell users to install, and scripts require."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in files.stdout.split():
        if not name.startswith("tests/") and not name.endswith(".png"):
            text = (ROOT / name).read_text()
            yield from re.findall(r"\bclusterenv(?:[-_.]runtime)?(?=\[[a-z,]+\])", text)
            commands = re.findall(r"(?:pip install|uv pip|uv add|uvx|pipx)\b[^\n]*", text)
            for command in commands:  # a path has a slash before or after it
                yield from re.findall(r"(?<![/\w.-])clusterenv(?:[-_.]runtime)?(?![/\w])", command)


def test_the_package_of_another_project_is_never_installed():
    assert set(told_to_install()) == {PROJECT["name"]}
