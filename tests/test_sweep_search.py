"""Method bayes without W&B: Optuna draws by the results so far, and its draws are kept."""

import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from experiments.sweeps import configurations
from experiments.sweeps.attempts import directory_of
from experiments.sweeps.search import Search

from .patience import PATIENCE
from .test_sweep import command, results, start_and_await, write

pytestmark = pytest.mark.long

__all__ = ["write"]  # a fixture

PARAMETERS = {
    "rate": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1.0},
    "inner": {"parameters": {"on": {"values": [True, False]}, "n": {"min": 1, "max": 9}}},
    "q": {"distribution": "q_uniform", "min": 0, "max": 8, "q": 2},
    "half": {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.5},
    "e": {"distribution": "log_uniform", "min": -3, "max": 1},
    "u": {"min": 0.0, "max": 2.5},
    "same": {"value": [1, 2]},
}
KEYS = {"method": "bayes", "run_cap": 40, "metric": {"name": "mean_return_100", "goal": "maximize"}}


def search_in(output, path, seed=1):
    sweep = configurations.load(path)
    return sweep, Search(sweep, seed, output)


def finish(sweep, flat, output, value):
    """Write a result as an attempt does."""
    directory = directory_of(sweep, flat, output)
    directory.mkdir(parents=True)
    (directory / "result.json").write_text(json.dumps({"summary": {"mean_return_100": value}}))


def test_draws_follow_their_distributions_and_have_plain_types(write, tmp_path):
    _, search = search_in(tmp_path, write(PARAMETERS, **KEYS))
    drawn = [configurations.nest(search.take(index)) for index in range(40)]
    for flat in drawn:
        assert list(flat) == list(PARAMETERS) and flat["same"] == [1, 2]
        assert 1e-5 <= flat["rate"] <= 1 and 0.049 < flat["e"] < 2.72 and 0 <= flat["u"] <= 2.5
        assert flat["half"] in (0.0, 0.5, 1.0) and flat["q"] in (0, 2, 4, 6, 8)
        assert flat["inner"]["on"] in (True, False) and 1 <= flat["inner"]["n"] <= 9
        assert [type(flat[name]) for name in ("q", "half", "rate")] == [int, float, float]
    assert len({flat["rate"] for flat in drawn}) == 40 and {flat["q"] for flat in drawn} > {0, 8}


@pytest.mark.parametrize("goal", ["maximize", "minimize"])
def test_it_comes_closer_to_the_best_than_chance(goal, write, tmp_path):
    keys = {**KEYS, "metric": {"name": "charts/mean_return_100", "goal": goal}}
    sweep, search = search_in(tmp_path, write({"x": {"min": 0.0, "max": 10.0}}, **keys))
    distances = []
    for index in range(40):
        flat = search.take(index)
        distances.append(abs(flat[("x",)] - 7))
        # Some runs fail, and some values are not numbers.
        value = -distances[-1] if goal == "maximize" else distances[-1]
        if index % 7:
            finish(sweep, flat, tmp_path, None if index % 8 == 0 else value)
    assert np.median(distances[20:]) < 1.3 < 1.7 < np.median(distances[:10])  # by chance 2.5


def test_draws_are_kept_and_depend_on_seed_index_and_results(write, tmp_path):
    path = write(PARAMETERS, **KEYS)
    _, search = search_in(tmp_path / "a", path)
    drawn = [search.take(index) for index in range(5)]
    assert [search_in(tmp_path / "a", path, seed=9)[1].take(index) for index in range(5)] == drawn
    assert list(search.known().values()) == drawn
    indices = random.Random(1).sample(range(5), 5)
    _, other = search_in(tmp_path / "b", path)
    # The first ten draws are random, in any order.
    assert {index: other.take(index) for index in indices} == dict(enumerate(drawn))
    assert search_in(tmp_path / "c", path)[1].take(0) == drawn[0]
    assert search_in(tmp_path / "d", path, seed=2)[1].take(0) != drawn[0]


@pytest.mark.parametrize(
    "other", [{"x": {"min": 0.0, "max": 0.1}}, {"y": {"min": 0.0, "max": 10.0}}]
)
def test_draws_from_other_parameters_are_refused(other, write, tmp_path):
    _, search = search_in(tmp_path, write({"x": {"min": 1.0, "max": 10.0}}, **KEYS))
    search.take(0)
    _, search = search_in(tmp_path, write(other, **KEYS))
    with pytest.raises(SystemExit, match=r"drawn/0.json was drawn from other parameters"):
        search.take(1)


@pytest.mark.parametrize(
    "keys",
    [
        {"distribution": "normal"},
        {"values": [1, 2], "probabilities": [0.5, 0.5]},
        {"distribution": "q_log_uniform_values", "min": 1, "max": 2},
    ],
)
def test_a_distribution_that_optuna_lacks_is_refused_by_name(keys, write, tmp_path):
    with pytest.raises(SystemExit, match="parameter x: method bayes cannot use .* it takes values"):
        search_in(tmp_path, write({"x": keys}, **KEYS))


def test_without_optuna_other_methods_work_and_bayes_says_what_to_install(write, monkeypatch):
    monkeypatch.setattr(configurations, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs Optuna, and it is not installed: pip install"):
        configurations.load(write(PARAMETERS, **KEYS))
    configurations.load(write({"x": {"values": [1]}}))
    Path("optuna.py").write_text("raise ImportError")
    for method in "grid", "random":
        path = write({"x": {"values": [1, 2]}}, method=method, run_cap=1)
        result = command(path, "--list")
        assert result.returncode == 0, result.stderr


def test_an_interrupted_search_continues_with_its_draws(write):
    metric = {"name": "eval/return_mean", "goal": "maximize"}
    parameters = {"x": {"value": 99}, "seed": {"min": 1, "max": 10**6}}
    path = write(parameters, method="bayes", run_cap=4, metric=metric)
    assert command(path, "--count").stdout == "4\n"
    assert command(path, "--list").stdout == "4 more are drawn when they are about to run\n"
    process, _ = start_and_await(path, number=2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    *before, rest = command(path, "--list").stdout.splitlines()
    assert len(before) == 2 and rest.startswith("2 more are drawn")
    Path("go").touch()
    result = command(path, "--jobs", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert "4 of 4 have finished; best eval/return_mean 990: seed=" in result.stdout
    after = command(path, "--list").stdout.splitlines()
    assert [line.replace("open", "finished") for line in before] == after[:2] and len(after) == 4
    assert [row["index"] for row in results()] == ["0", "1", "2", "3"]
    # As a task of an array.
    seed = after[3].split("seed=")[1]
    assert command(path, "--index", "3").stdout == f"configuration 3 has finished: seed={seed}\n"
