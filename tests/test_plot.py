"""Comparisons of runs, from small logs in which every value is known."""

import csv
import os
import sys
import time

import numpy as np
import pytest
from clusterenv_utils.logged import LoggedRun
from torch.utils.tensorboard import SummaryWriter

from clusterenv_utils import plot

BEGIN = time.time() + 1000  # the wall time at which all runs here begin
OURS = {"exp_name": "ppo_clusterenv", "env_id": "CartPole-v1", "num_steps": 8, "seed": 1}


def log(
    directory, values, flags=OURS, tag="charts/episodic_return", begin=BEGIN, first=10, purge=None
):
    """Write logs with one value every 10 steps and 2 seconds."""
    writer = SummaryWriter(str(directory), purge_step=purge)
    if flags:
        table = "".join(f"|{name}|{value}|\n" for name, value in flags.items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", 0, walltime=begin)
    for index, value in enumerate(values):
        writer.add_scalar(tag, value, first + 10 * index, walltime=begin + 2 * (index + 1))
    writer.close()


def compare(monkeypatch, *words):
    """Run the command. Return the rows of its CSV file."""
    monkeypatch.setattr(sys, "argv", ["plot", *words, "--output", "one.png"])
    plot.main()
    assert os.path.getsize("one.png") > 10_000
    with open("one.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_the_numbers_equal_those_computed_by_hand(runs, monkeypatch, capsys):
    heights = [1, 2, 30, 4, 5]  # the middle three are 2, 4 and 5
    for seed, height in enumerate(heights):
        flags = OURS | {"seed": seed, "run_name": seed, "num_steps": 16}
        log(runs / f"a{seed}", [height, 2 * height, 4 * height], flags)
    for seed in range(3):
        log(runs / f"b{seed}", [seed, 10 * seed, 100], OURS | {"seed": seed})
    rows = compare(monkeypatch, *(f"runs/{name}" for name in sorted(os.listdir(runs))))
    assert [row["axis"] for row in rows] == ["steps"] * 6 + ["seconds"] * 6
    for axis, places in (("steps", (10, 20, 30)), ("seconds", (2, 4, 6))):
        of_a = [row for row in rows if (row["axis"], row["setting"]) == (axis, "num_steps=16")]
        of_b = [row for row in rows if (row["axis"], row["setting"]) == (axis, "num_steps=8")]
        for own, runs_of_it in (of_a, "5"), (of_b, "3"):
            assert [float(row["x"]) for row in own] == pytest.approx(places)
            assert [row["runs"] for row in own] == [runs_of_it] * 3
        assert [float(row["iqm"]) for row in of_a] == pytest.approx([11 / 3, 22 / 3, 44 / 3])
        assert [float(row["iqm"]) for row in of_b] == pytest.approx([1, 10, 100])
        # The interval of fewer than five runs is their range.
        assert [(float(row["low"]), float(row["high"])) for row in of_b] == [
            (0, 2), (0, 20), (100, 100),
        ]  # fmt: skip
        draws = np.random.default_rng(0).integers(5, size=(1000, 5))
        middles = np.sort(np.array(heights)[draws], axis=1)[:, 1:-1].mean(axis=1)
        low, high = np.percentile(middles, [2.5, 97.5])
        assert (float(of_a[1]["low"]), float(of_a[1]["high"])) == pytest.approx((2 * low, 2 * high))
    a, b = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    assert a[:5] == ["num_steps=16", "5", "30", "6", "14.67"]
    assert b == ["num_steps=8", "3", "30", "6", "100", "37"]


def test_runs_of_three_libraries_appear_side_by_side(runs, monkeypatch, capsys):
    log(runs / "ours", [1, 2, 3])
    cleanrl = {"exp_name": "ppo", "env_id": "CartPole-v1", "seed": 1, "num_minibatches": 4}
    for seed in 1, 2:
        log(runs / f"cleanrl{seed}", [4, 5, 6], cleanrl | {"seed": seed, "upload_model": seed})
        log(runs / f"PPO_{seed}", [7, 8, 9], flags=None, tag="rollout/ep_rew_mean")
    rows = compare(monkeypatch, *(f"runs/{name}" for name in sorted(os.listdir(runs))))
    ends = {row["setting"]: (row["runs"], row["iqm"]) for row in rows if row["axis"] == "steps"}
    assert ends == {
        "PPO": ("2", "9.0"), "exp_name=ppo": ("2", "6.0"), "exp_name=ppo_clusterenv": ("1", "3.0"),
    }  # fmt: skip
    log(runs / "begun", [])
    runs = "runs/ours", "runs/begun", "runs/PPO_1"
    compare(monkeypatch, *runs, "--metric", "rollout/ep_rew_mean")
    says = "warning: left out because they have no rollout/ep_rew_mean so far: ours, begun\n"
    assert capsys.readouterr().err == says


def test_settings_with_the_same_values_are_kept_apart_if_one_has_more_flags(runs, monkeypatch):
    log(runs / "x", [1])
    log(runs / "y", [2], OURS | {"mine": 1})
    rows = compare(monkeypatch, "runs/x", "runs/y")
    ours = "ppo_clusterenv on CartPole-v1"
    assert {row["setting"]: row["iqm"] for row in rows} == {ours: "1.0", f"{ours} (y)": "2.0"}


def test_an_unfinished_run_is_drawn_up_to_its_last_complete_value(runs, monkeypatch):
    for seed in range(3):
        log(runs / f"{seed}", [seed] * 4, OURS | {"seed": seed})
    log(runs / "3", [9, 9, 9], OURS | {"seed": 3})
    (file,) = (runs / "3").iterdir()
    file.write_bytes(file.read_bytes()[:-20])  # its third value is half written
    rows = compare(monkeypatch, *(f"runs/{seed}" for seed in range(4)))
    found = [(row["runs"], row["iqm"], row["high"]) for row in rows if row["axis"] == "steps"]
    assert found == [("4", "1.5", "9.0")] * 2 + [("3", "1.0", "nan")] * 2


def test_a_resumed_run_has_no_step_twice_and_no_time_between_its_parts(runs):
    log(runs / "x", [1, 2, 3])
    time.sleep(1.1)  # log files are named by the second in which they begin
    for begin in (BEGIN + 3000, BEGIN + 4000):  # two more parts end before they log anything
        log(runs / "x", [], begin=begin, purge=21)
        time.sleep(1.1)
    log(runs / "x", [7, 8], OURS | {"num_steps": 9}, begin=BEGIN + 5000, first=30)
    run = LoggedRun(str(runs / "x"))
    steps, seconds, values = run.scalars("charts/episodic_return")
    assert steps.tolist() == [10, 20, 30, 40] and values.tolist() == [1, 2, 7, 8]
    assert seconds == pytest.approx([2, 4, 6, 8], abs=0.01) and run.last_step == 40
    assert run.flags["num_steps"] == "9"


def test_smoothed_points_are_means_of_the_points_before(runs, monkeypatch):
    log(runs / "x", [0, 4, 8, 0])
    rows = compare(monkeypatch, "runs/x", "--smooth", "2")
    assert [float(row["iqm"]) for row in rows if row["axis"] == "steps"] == [0, 2, 6, 4]


def test_a_repeated_seed_prints_a_warning(runs, monkeypatch, capsys):
    log(runs / "x", [1])
    log(runs / "y", [1])
    compare(monkeypatch, "runs/x", "runs/y", "runs/../runs/x")
    says = "warning: ppo_clusterenv on CartPole-v1: several runs of seed 1; each counts\n"
    assert capsys.readouterr().err == says


def test_each_mistake_is_a_one_line_error(runs, monkeypatch):
    log(runs / "x", [1], tag="losses/value")
    (runs / "empty").mkdir()
    for words, says in (
        ([], "name the runs to compare"),
        (["runs/y*"], r"there is no run runs/y\*; existing runs: empty, x$"),
        (["runs/empty"], "runs/empty has no TensorBoard logs"),
        (["runs/x"], "no run has charts/episodic_return or rollout/ep_rew_mean; there are: losses"),
        (["runs/x", "--metric", "losses/valu"], "no run has losses/valu; there are: losses/value"),
        (["runs/x", "--metric", "losses/value", "--smooth", "0"], "smooth is 0"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {says}"):
            compare(monkeypatch, *words)
    for output, says in ("nowhere/one.png", "No such file or directory"), ("one.foo", "foo"):
        words = ["plot", "runs/x", "--metric", "losses/value", "--output", output]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit, match=f"^error: cannot write {output}: .*{says}"):
            plot.main()
    monkeypatch.setattr(sys, "argv", ["plot", "runs/x", "--output", "image"])
    with pytest.raises(SystemExit, match="^error: --output must be a file's name with an ending"):
        plot.main()
