"""The pages' programs run, their commands have valid flags, and their links have targets.

Bash runs a page's shell code, with a stand-in for each program that records how it is called. Each
call is then checked as far as possible: the project's scripts make a dry run, its other commands
parse their flags, and make and torchrun read theirs. Calls that cannot be checked here are skipped,
and the page says so: ``*Not run by the tests: `program`, because X.*``
"""

import argparse
import importlib
import importlib.util
import inspect
import itertools
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import tyro
import yaml
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Rollout
from docs import site

from .nets import linear
from .scripts import ROOT, train
from .test_install import EXTRAS, PROJECT
from .test_policies import PROGRAMS

# The other pages are tables that commands have written.
PAGES = [page for page in site.pages() if "results" not in page.parts]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
BLOCKS = [
    (page, match[2], match[3]) for page in PAGES for match in BLOCK.finditer(page.read_text())
]
KINDS = {"python", "diff", "toml", "sh", "text"}
NOT_RUN = re.compile(r"\*Not run by the tests: (.*?)\.\*", re.DOTALL)
OF_OTHERS = "git", "kubectl", "podman", "ray", "scp", "squeue", "ssh", "tail", "wandb"
PROGRAMS_IN_TEXT = "make", "pip", "python", "sbatch", "source", "torchrun", "uv", *OF_OTHERS
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS_IN_TEXT)})\s[^`]+")
MODULES = "experiments", "tests", "verification", "clusterenv_runtime", "clusterenv_utils", "docs"


def name_of(page):
    return str(page.relative_to(ROOT))


def sources(language):
    return [
        pytest.param(page, text, id=name_of(page))
        for page, kind, text in BLOCKS
        if kind == language
    ]


# Blocks.


def test_every_block_is_of_a_kind_that_is_tested():
    assert {kind for _, kind, _ in BLOCKS} <= KINDS
    assert not [page for page in PAGES if "```" in BLOCK.sub("", page.read_text())]


# Programs.


class Twice:
    """A condition that is true twice, for two updates."""

    def __init__(self):
        self.left = 2

    def __bool__(self):
        self.left -= 1
        return self.left >= 0


FRAGMENTS = [
    (page, code)
    for page, kind, code in BLOCKS
    if kind == "python" and "import gymnasium" not in code
]
FRAGMENTS += [
    (page, re.sub(r"^(-.*\n|[+ ])", "", code, flags=re.M))
    for page, kind, code in BLOCKS
    if kind == "diff" and not code.startswith("---")
]
DIFFS = [(page, code) for page, kind, code in BLOCKS if code.startswith("--- ")]
FRAGMENTS = {code: name_of(page) for page, code in FRAGMENTS}  # each fragment once


@pytest.mark.parametrize(("page", "code"), DIFFS, ids=[name_of(page) for page, _ in DIFFS])
def test_a_diff_fits_its_script_without_fuzz(page, code):
    command = ["patch", "-p0", "--dry-run", "--fuzz", "0"]
    result = subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True)
    assert result.returncode == 0 and "offset" not in result.stdout, result.stdout


@pytest.mark.parametrize("code", FRAGMENTS, ids=FRAGMENTS.values())
def test_a_fragment_runs_with_what_it_leaves_to_the_reader(code):
    if "envpool" in code:
        pytest.importorskip("envpool", reason="EnvPool is not installed: pip install envpool")
    env_fns = [partial(gym.make, "CartPole-v1")] * 4
    given = {
        "agent": SimpleNamespace(actor=linear(4, 2)), "env_fns": env_fns, "num_iterations": 2,
        "num_steps": 8, "args": SimpleNamespace(env_id="", capture_video=False, num_envs=2),
        "run_name": "", "learning": Twice(), "make_env": lambda *_: env_fns[0],
    }  # fmt: skip
    if "envs =" not in code:
        given |= {"envs": ClusterEnv(env_fns, 2), "policy": CategoricalPolicy(linear(4, 2))}
    exec(compile(code, "fragment", "exec"), given)
    with given["envs"] as envs:
        if "reset" not in code:
            envs.reset(seed=1)


def test_the_page_of_scripts_has_a_script(tmp_path):
    (code,) = (code for page, _, code in BLOCKS if page.stem == "script")
    (tmp_path / "script.py").write_text(code)
    flags = "--envs-per-worker 4 --num-steps 16 --total-timesteps 640 --eval-episodes 1"
    _, summary = train(tmp_path / "script.py", tmp_path, *flags.split())
    assert summary["global_step"] == 640 and summary["pulls_per_worker"] > 1


OF_OTHER_LIBRARIES = [
    code for page, kind, code in BLOCKS if page.stem == "any_learner" and kind == "python"
]


@pytest.mark.long
@pytest.mark.parametrize("code", OF_OTHER_LIBRARIES)
def test_a_program_for_another_library_runs(code):
    library = re.search(r"^from (stable_baselines3|torchrl)", code, re.MULTILINE)[1]
    pytest.importorskip(library, reason=f"{library} is not installed: pip install {library}")
    exec(compile(code.replace("10_000", "256"), "program", "exec"), {})


def test_all_programs_of_the_pages_are_run_by_one_test():
    python = {code for _, kind, code in BLOCKS if kind == "python"}
    have_tests = "script", "mpi", "after_training"
    alone = [code for page, kind, code in BLOCKS if kind == "python" and page.stem in have_tests]
    assert python == {
        *PROGRAMS.values(),
        *alone,
        *OF_OTHER_LIBRARIES,
        *(FRAGMENTS.keys() & python),
    }


def test_help_of_a_rollout_says_what_to_bootstrap_from():
    text = inspect.getdoc(Rollout)  # without the indentation, which only some Pythons remove
    code = textwrap.dedent(re.search(r"bootstrap from are:\n\n((?: {4}.*\n)+)", text)[1])
    with ClusterEnv([partial(gym.make, "CartPole-v1", max_episode_steps=9)] * 4, 1) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(CategoricalPolicy(linear(4, 2)), 32)
    values = {"rollout": rollout, "np": np, "critic": lambda observations: observations.sum(-1)}
    exec(code, values)
    for step, row in itertools.product(range(31), range(4)):
        value = values["next_values"][step, row]
        assert not rollout.terminations[step, row] or value == 0
        if not values["done"][step, row]:
            assert value == rollout.observations[step + 1, row].sum()
    cut_off = values["next_values"][rollout.truncations & ~rollout.terminations]
    assert len(cut_off) > 4 and not np.isin(cut_off, rollout.observations.sum(-1)).any()
    assert {field.name for field in Rollout.__dataclass_fields__.values()} == set(
        re.findall(
            r"^ {4}(\w+): ", inspect.getdoc(Rollout).partition("Attributes:")[2], re.MULTILINE
        )
    )


@pytest.mark.parametrize(("page", "text"), sources("toml"))
def test_tables_of_toml_can_be_read(page, text):
    assert tomllib.loads(text)


# Links.


def anchors_of(page):
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    assert len(set(slugs)) == len(slugs), (
        "the site and GitHub number titles that are the same in different ways"
    )
    return slugs


@pytest.mark.parametrize("page", site.pages(), ids=name_of)
def test_links_lead_to_files_of_the_repository_and_to_titles_in_them(page):
    for target, anchor in site.links_of(page):
        assert target.is_file() and target.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors_of(target), f"{target}#{anchor}"


def test_every_page_is_in_the_navigation():
    assert set(ROOT.glob("docs/*.md")) <= set(site.pages())


def test_the_navigation_and_pages_have_the_same_titles():
    entries = [*yaml.safe_load(site.CONFIGURATION.read_text())["nav"]]
    for entry in entries:  # the list grows in this loop
        [(title, content)] = entry.items()
        if isinstance(content, str):
            assert title == site.title_of(ROOT / content)
        else:
            entries += content


def test_the_list_for_language_models_has_all_pages():
    text = site.llms_txt()
    assert text.startswith("# ClusterEnv\n\n> ")
    assert "- [Quickstart](docs/quickstart.md): " in text
    for page in site.pages():
        sentence = r": [\w`]" if page in PAGES else ""  # a page of tables has no sentence
        assert re.search(rf"\({page.relative_to(ROOT)}\){sentence}", text), page


# Commands.

STAND_IN = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" $'\\1' >>"$CALLS"  # in one write: others may run now, too
"""


def commands_of(page):
    """Return the shell code of a page: its blocks, and the commands in its text."""
    blocks = [text for each, kind, text in BLOCKS if each == page and kind == "sh"]
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", BLOCK.sub("", page.read_text()))
    spans = [re.sub(r"\s+", " ", span).replace("\\|", "|") for span in spans]
    return blocks + [span for span in spans if COMMAND.fullmatch(span)]


def calls_of(page, directory):
    """Return a page's calls of programs, in order, each as the words that bash passes."""
    tools, log = directory / "tools", directory / "calls"
    here = directory / "here"
    for folder in (tools, here / "docs", here / ".venv/bin"):
        folder.mkdir(parents=True)
    for name in ("experiments", "slurm"):
        (here / name).symlink_to(ROOT / name)
    (here / "clusterenv").symlink_to(".")
    for name in set(PROGRAMS_IN_TEXT) - {"source"}:
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    (here / ".venv/bin/python").symlink_to(tools / "python")
    (here / ".venv/bin/activate").touch()
    (tools / "basename").symlink_to(shutil.which("basename"))
    env = {"PATH": str(tools), "HOME": str(directory), "CALLS": str(log)}
    for text in commands_of(page):
        command = [shutil.which("bash"), "-euc", text + "\nwait"]
        result = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, ""), text
    calls = log.read_text().split("\1\0")[:-1] if log.exists() else []
    calls = [call.split("\0")[:-1] for call in calls]
    for call in calls:
        if call[0] == "ssh" and "python" in call[-1]:  # the command for the other machine
            subprocess.run([shutil.which("bash"), "-euc", call[-1]], cwd=here, env=env, check=True)
            calls.append(log.read_text().split("\1\0")[-2].split("\0")[:-1])
    return calls


class Parsed(Exception):
    """Raised to stop one of the project's commands when it has parsed its flags."""


MY_ENV = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    def __init__(self, goal=1.0, render_mode=None):
        super().__init__()

gym.register("Mine-v0", Mine, max_episode_steps=1000)
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that checks a page's call of a program, or that the page says why it is not
    run.
    """
    place = tmp_path / "there"
    (place / "runs").mkdir(parents=True)
    (place / "my_env.py").write_text(MY_ENV)
    monkeypatch.setattr(sys, "path", [*sys.path])  # scripts add the working directory
    monkeypatch.setenv("CXX", "c++")  # needed by the check of --compile

    def stopping(parse):
        def stop(*args, **kwargs):
            parse(*args, **kwargs)
            raise Parsed

        return stop

    def run(start, argv):
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", argv)
        start()

    def script(name, flags, dry_run=True):
        kind = importlib.import_module(name.removesuffix(".py").replace("/", ".")).Args
        if flags == ["--help"]:
            return
        tyro.cli(kind, args=flags)
        is_missing = any(
            name in flags and importlib.util.find_spec(name) is None for name in ("envpool", "ray")
        )
        if not dry_run or is_missing or "--resume" in flags:
            return
        flags = ["lo" if flag == "eth0" else flag for flag in flags]
        with pytest.raises(SystemExit) as exit:
            run(
                partial(runpy.run_path, str(ROOT / name), run_name="__main__"),
                [name, *flags, "--dry-run"],
            )
        assert exit.value.code is None, exit.value.code

    def ours(start, path, argv):
        """Check that a command parses its flags, by argparse or tyro, after it is imported."""
        assert re.search(r"parse_args|tyro\.cli", path.read_text()), path
        if argv[1:]:
            with monkeypatch.context() as patch, pytest.raises(Parsed):
                patch.setattr(
                    argparse.ArgumentParser,
                    "parse_args",
                    stopping(argparse.ArgumentParser.parse_args),
                )
                patch.setattr(tyro, "cli", stopping(tyro.cli))
                run(start, argv)

    def module(page, name, flags):
        if name.endswith("."):  # all modules of the table below
            for row in re.findall(r"^\| `(\w+)`", page.read_text(), re.MULTILINE):
                module(page, name + row.partition("`")[0], [])
        elif name == "pip":
            pip(flags)
        elif name == "timeit":
            assert all(
                compile(text, "timeit", "exec") for text in flags if not text.startswith("-")
            )
        elif name == "pytest":
            (path,) = (flag for flag in flags if flag.startswith("tests/"))
            assert f"{flags[flags.index('-k') + 1]}" in (ROOT / path).read_text()
        elif name == "docs.flags":
            assert flags == []  # another test checks its output
        else:
            assert name.partition(".")[0] in MODULES
            spec = importlib.util.find_spec(name)
            if spec.submodule_search_locations:
                spec = importlib.util.find_spec(name := f"{name}.__main__")
            if name == "clusterenv_runtime.keys" and flags:
                for old in (*flags, f"{flags[0]}.worker"):
                    Path(place, old).unlink(missing_ok=True)  # a page may create them twice
                run(partial(runpy.run_module, name, run_name="__main__"), [name, *flags])
            else:
                ours(
                    partial(runpy.run_module, name, run_name="__main__"),
                    Path(spec.origin),
                    [name, *flags],
                )

    def pip(flags):
        if flags == ["list"]:
            return
        assert flags[0] == "install"
        for flag in flags[1:]:
            if re.match(r"[\w.-]+\[", flag):
                need = Requirement(re.sub(r"^\.", PROJECT["name"], flag))
                assert need.name == PROJECT["name"] and need.extras <= EXTRAS.keys()
            elif flag.endswith(".txt"):
                assert (ROOT / flag).exists()
            else:
                known = {Requirement(line).name for lines in EXTRAS.values() for line in lines}
                known |= {"--find-links", "DIRECTORY", "-e", "-r", "py-spy", "stable-baselines3"}
                assert flag in known

    def sbatch(flags):
        at = next(number for number, flag in enumerate(flags) if not re.match("--|:$", flag))
        assert (ROOT / flags[at]).is_file()
        if "sweep_offline" in flags[at]:
            assert (ROOT / flags[at + 1]).is_file()
        elif not re.search("sweep|figures", flags[at]):
            script(
                "dqn_clusterenv.py" if "dqn" in flags[at] else "ppo_clusterenv.py",
                flags[at + 1 :],
                dry_run=False,
            )

    def one(page, program, *words):
        words = list(words)
        if program == "python" and words[0] == "-m":
            module(page, words[1], words[2:])
        elif program in ("python", "uv"):
            path, *flags = words[1:] if program == "uv" else words
            assert program == "python" or words[0] == "run"
            if path.endswith("_clusterenv.py"):
                script(path, flags)
            else:
                ours(
                    partial(runpy.run_path, str(ROOT / path), run_name="__main__"),
                    ROOT / path,
                    [path, *flags],
                )
        elif program == "pip":
            pip(words)
        elif program == "make":
            result = subprocess.run(
                ["make", "-n", *words], cwd=ROOT, capture_output=True, text=True
            )
            assert result.returncode == 0, result.stderr
        elif program == "torchrun":
            names_script = any(word.endswith(".py") for word in words)
            args = get_args_parser().parse_args(words if names_script else [*words, "script.py"])
            if args.training_script.endswith("_clusterenv.py"):
                script(args.training_script, args.training_script_args, dry_run=False)
        elif program == "sbatch":
            sbatch(words)
        else:
            assert program in OF_OTHERS
            (says,) = NOT_RUN.findall(page.read_text())
            assert f"`{program}`" in says and "because" in says

    return one


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_are_understood(page, tmp_path, check):
    calls = calls_of(page, tmp_path)
    for call in calls:
        check(page, *call)
    not_run = {
        name for says in NOT_RUN.findall(page.read_text()) for name in re.findall(r"`(\w+)`", says)
    }
    assert not_run <= {program for program, *_ in calls}
