"""Comparisons of runs, from small logs in which every value is known."""

import csv
import os
import time

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from clusterenv_utils import ScriptError
from tools import plot

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


def compare(*runs, **flags):
    """Run the command. Return the rows of its CSV file."""
    plot.main(plot.Args(runs, **{"output": "one.png", **flags}))
    assert os.path.getsize("one.png") > 10_000
    with open("one.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_the_numbers_equal_those_computed_by_hand(runs, capsys):
    heights = [1, 2, 30, 4, 5]  # the middle three are 2, 4 and 5
    for seed, height in enumerate(heights):
        flags = OURS | {"seed": seed, "run_name": seed, "num_steps": 16}
        log(runs / f"a{seed}", [height, 2 * height, 4 * height], flags)
    for seed in range(3):
        log(runs / f"b{seed}", [seed, 10 * seed, 100], OURS | {"seed": seed})
    rows = compare(*(f"runs/{name}" for name in sorted(os.listdir(runs))))
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


def test_runs_of_three_libraries_appear_side_by_side(runs, capsys):
    log(runs / "ours", [1, 2, 3])
    cleanrl = {"exp_name": "ppo", "env_id": "CartPole-v1", "seed": 1, "num_minibatches": 4}
    for seed in 1, 2:
        log(runs / f"cleanrl{seed}", [4, 5, 6], cleanrl | {"seed": seed})
        log(runs / f"PPO_{seed}", [7, 8, 9], flags=None, tag="rollout/ep_rew_mean")
    rows = compare(*(f"runs/{name}" for name in sorted(os.listdir(runs))))
    ends = {row["setting"]: (row["runs"], row["iqm"]) for row in rows if row["axis"] == "steps"}
    assert ends == {
        "run=PPO": ("2", "9.0"), "exp_name=ppo, num_minibatches=4": ("2", "6.0"),
        "exp_name=ppo_clusterenv, num_steps=8": ("1", "3.0"),
    }  # fmt: skip
    log(runs / "begun", [])
    runs = "runs/ours", "runs/begun", "runs/PPO_1"
    compare(*runs, metric="rollout/ep_rew_mean")
    says = [f"warning: left out: {name} has no rollout/ep_rew_mean" for name in ("ours", "begun")]
    assert capsys.readouterr().err.splitlines() == says


def test_runs_on_several_environments_are_refused(runs):
    log(runs / "x", [1])
    log(runs / "y", [2], OURS | {"env_id": "Acrobot-v1"})
    says = "^draw each environment alone: Acrobot-v1, CartPole-v1$"
    with pytest.raises(ScriptError, match=says):
        compare("runs/x", "runs/y")


def test_a_settings_curve_ends_where_the_first_of_its_runs_does(runs):
    for seed in range(3):
        log(runs / f"{seed}", [seed] * 4, OURS | {"seed": seed})
    log(runs / "3", [9, 9, 9], OURS | {"seed": 3})
    (file,) = (runs / "3").iterdir()
    file.write_bytes(file.read_bytes()[:-20])  # its third value is half written
    rows = compare(*(f"runs/{seed}" for seed in range(4)))
    found = [(row["iqm"], row["high"]) for row in rows if row["axis"] == "steps"]
    assert found == [("1.5", "9.0")] * 2 + [("nan", "nan")] * 2


def test_a_resumed_run_has_no_step_twice_and_no_time_between_its_parts(runs):
    log(runs / "x", [1, 2, 3])
    time.sleep(1.1)  # log files are named by the second in which they begin
    for begin in (BEGIN + 3000, BEGIN + 4000):  # two more parts end before they log anything
        log(runs / "x", [], begin=begin, purge=21)
        time.sleep(1.1)
    log(runs / "x", [7, 8], OURS | {"num_steps": 9}, begin=BEGIN + 5000, first=30)
    run = plot.LoggedRun(str(runs / "x"))
    steps, seconds, values = run.scalars("charts/episodic_return").values()
    assert steps.tolist() == [10, 20, 30, 40] and values.tolist() == [1, 2, 7, 8]
    assert seconds == pytest.approx([2, 4, 6, 8], abs=0.01) and run.last["steps"] == 40
    assert run.flags["num_steps"] == "9"


def test_each_mistake_is_a_one_line_error(runs):
    log(runs / "x", [1], tag="losses/value")
    (runs / "empty").mkdir()
    for words, flags, says in (
        ([], {}, "name the runs to compare"),
        (["runs/y"], {}, "there is no run .*runs/y$"),
        (["runs/empty"], {}, ".*runs/empty has no TensorBoard logs"),
        (["runs/x"], {}, "no run has charts/episodic_return or rollout/ep_rew_mean, but losses/"),
        (["runs/x"], {"metric": "losses/valu"}, "no run has losses/valu, but losses/value"),
        (["runs/x"], {"output": "image"}, "--output must end as in comparison.png"),
        (["runs/x"], {"metric": "losses/value", "output": "nowhere/one.png"}, "cannot write nowh"),
        (
            ["runs/x"],
            {"metric": "losses/value", "output": "one.foo"},
            "cannot write one.foo: .*foo",
        ),
    ):
        with pytest.raises(ScriptError, match=f"^{says}"):
            compare(*words, **flags)
