"""`make results`: each command runs once for each commit."""

import subprocess

import pytest

from experiments import results


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "OUTPUT", tmp_path)
    commands = {
        "fine": "-c 'print(42)'",
        "drawn": "-c \"open('{folder}/a.csv', 'w')\"",
        "broken": "-c 1/0",
        "cleanrl": "{cleanrl}/dqn.py",
    }
    monkeypatch.setattr(results, "COMMANDS", commands)

    def commit(text):
        (tmp_path / "code.py").write_text(text)
        subprocess.run("git init -q && git add code.py", shell=True, cwd=tmp_path, check=True)
        author = ["-c", "user.name=a", "-c", "user.email=b@c"]
        subprocess.run(["git", *author, "commit", "-qm", text], cwd=tmp_path, check=True)

    commit("one")
    return commit


def test_a_command_runs_once_for_each_commit(repository, tmp_path):
    assert results.measure("fine", {"cleanrl": ""}).endswith(" s")
    command, facts, nothing, printed, _ = (tmp_path / "fine.txt").read_text().split("\n")
    assert (command, nothing, printed) == ("$ python -c 'print(42)'", "", "42")
    assert facts.startswith(f"commit {results.commit_of_code()}, ") and "torch" in facts
    assert results.measure("fine", {"cleanrl": ""}) == "already there"
    repository("two")
    assert results.measure("fine", {"cleanrl": ""}).endswith(" s")
    (tmp_path / "code.py").write_text("three")
    assert results.commit_of_code().endswith("-dirty")


def test_a_command_that_fails_or_lacks_a_path_leaves_no_result(repository, tmp_path):
    assert results.measure("cleanrl", {"cleanrl": ""}) == "left out: needs --cleanrl"
    assert results.measure("broken", {"cleanrl": ""}).startswith("failed after ")
    broken = tmp_path / "build/results" / results.commit_of_code() / "broken.txt"
    assert "ZeroDivisionError" in broken.read_text()
    assert not list(tmp_path.glob("*.txt"))


def test_tables_and_plots_go_beside_the_printed_output(repository, tmp_path):
    assert results.measure("drawn", {"cleanrl": ""}).endswith(" s")
    assert (tmp_path / "a.csv").exists()
