"""The scripts' common parts: kept objects, environments of another backend, flags and names."""

import importlib
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import ppo_clusterenv
from clusterenv_runtime import ClusterEnv
from clusterenv_utils import Counters, Run, ScriptError, arguments, parse
from clusterenv_utils.checkpoint import load_checkpoint, save_checkpoint
from clusterenv_utils.progress import Progress
from clusterenv_utils.signals import TOLD
from docs import flags

from . import scripts
from .envs import CountingEnv
from .scripts import ROOT

SCRIPT = "ppo_clusterenv.py"


def edited(directory, *edits):
    """Write a copy of the PPO script with a user's edits. Return its path."""
    text = (ROOT / SCRIPT).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    directory.mkdir(exist_ok=True)
    path = directory / "edited_clusterenv.py"
    path.write_text(text)
    return path


def after(line, *lines):
    """Return an edit that adds lines after a line, with its indentation."""
    indent = " " * (len(line) - len(line.lstrip()))
    return line, "\n".join([line, *(indent + new for new in lines)])


# Objects that a run keeps.

SHUFFLE = "                b_inds = torch.randperm(args.batch_size, device=device)"
EDITS = [
    ("import CudaGraph,", "import Counters, CudaGraph,"),
    after('    run.keep("agent", agent.to(device))',
          'extra = run.keep("extra", nn.Linear(1, 1, bias=False, device=device))',  # a module
          'count = run.keep("count", Counters(epochs=0))'),  # a counter
    # a metric
    after('        "value_loss": v_loss.detach(), "policy_loss": pg_loss.detach(),',
          '"ratio": ratio.mean().detach(),'),
    after(SHUFFLE, "count.epochs += 1", "extra.weight.data.fill_(count.epochs)"),
]  # fmt: skip


@pytest.mark.long
def test_a_module_a_counter_and_a_metric_take_one_line_each_and_are_resumed(tmp_path):
    script, epochs = edited(tmp_path / "scripts", *EDITS), ppo_clusterenv.Args.update_epochs
    flags = [*scripts.TINY[SCRIPT], "--total-timesteps", "3840", "--checkpoint-interval", "0.1"]
    process, workers = scripts.start_and_await_training(script, tmp_path, *flags)
    folder = tmp_path / scripts.check_interruption(process, workers, signal.SIGTERM, 75)
    before = load_checkpoint(folder)
    done = before["global_step"] // 64
    assert 0 < done < 60 and before["parts"]["count"] == {"epochs": done * epochs}
    (tmp_path / "go").touch()
    result = scripts.run(
        script, tmp_path, "--env-id", scripts.LASTING_ID, "--resume", f"runs/{folder.name}"
    )
    assert result.returncode == 0, result.stderr
    parts = load_checkpoint(folder)["parts"]
    assert parts["count"] == {"epochs": 60 * epochs}
    assert parts["extra"]["weight"].item() == 60 * epochs
    assert scripts.scalars(folder, "losses/ratio") == pytest.approx([1] * 60, abs=0.5)


@pytest.fixture
def new_run(tmp_path, monkeypatch):
    """Return a function that begins a run, or resumes one whose checkpoint has the given parts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    before = {number: signal.getsignal(number) for number in (*TOLD, signal.SIGINT)}
    runs = []

    def new(parts=None):
        args = ppo_clusterenv.Args(run_name="x")
        if parts is not None:
            args.resume = "runs/x"
            flags = {**vars(ppo_clusterenv.Args()), "num_envs": 64}
            saved = {"args": flags, "parts": parts, "rng": {}, "global_step": 8, "seconds": 0.5}
            save_checkpoint("runs/x", {**saved, "waiting": 0.0, "wandb_id": None}, 8)
        runs.append(Run(args))
        runs[-1].begin()
        return runs[-1]

    yield new
    for run in runs:
        run.writer.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_kept_objects_get_their_state_from_the_checkpoint(new_run):
    curve = new_run().curve.state_dict()
    parts = {"curve": curve, "count": {"a": 3}, "net": {"weight": torch.ones(1, 1)}}
    parts["left out"] = None
    run = new_run(parts)
    assert (run.global_step, run.name, run.path) == (8, "x", "runs/x")
    assert vars(run.keep("count", Counters(a=0, b=5))) == {"a": 3, "b": 5}
    numbers = Counters(a=np.float64(1.5), b=np.int64(2)).state_dict()  # as of sums of rewards
    assert numbers == {"a": 1.5, "b": 2} and set(map(type, numbers.values())) == {float, int}
    assert run.keep("net", torch.nn.Linear(1, 1, bias=False)).weight.item() == 1
    assert run.keep("left out", Counters(a=1), False).a == 1
    with pytest.raises(ValueError, match="there is a part 'net' already"):
        run.keep("net", Counters())


def test_a_checkpoint_without_a_part_of_the_script_is_a_one_line_error(new_run):
    run = new_run({"curve": new_run().curve.state_dict()})
    with pytest.raises(ScriptError, match="^runs/x is from another .*: it has no 'extra'$"):
        run.keep("extra", Counters())


# Flags and imports.


NAMED = "must be of letters, digits and -_.+=, not begin with a dot, got"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--run-name", "../x"], f"--run-name {NAMED} '../x'"),
        (["--run_name="], f"--run-name {NAMED} ''"),
        (["--exp_name=.x"], f"--exp-name {NAMED} '.x'"),
        (["--resume", "../x"], "--resume must be runs/NAME in the working directory, got ../x"),
    ],
)
def test_a_job_with_an_invalid_run_name_says_so_before_it_makes_or_removes_anything(
    tmp_path, flags, says
):
    # A job removes old keys in the run that it trains.
    keys = tmp_path / "x" / "workers" / "clusterenv-old"
    keys.mkdir(parents=True)
    here = tmp_path / "here"
    here.mkdir()
    (here / "slurm").symlink_to(ROOT / "slurm")
    shell = f'set -euo pipefail; launch=(); source slurm/train.sh {SCRIPT} "$@"'
    env = scripts.environment(SLURM_JOB_ID="1", SLURM_JOB_NAME="job", SLURM_NTASKS="2")
    command = ["bash", "-c", shell, "job", *flags]
    result = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, f"error: {says}\n")
    assert os.listdir(here) == ["slurm"] and keys.exists()


def test_the_page_of_flags_equals_the_one_made_from_the_code():
    assert (ROOT / "docs" / "flags.md").read_text() == flags.page()


@pytest.mark.parametrize("name", flags.SCRIPTS.values())
def test_help_shows_the_flags_with_their_texts(monkeypatch, capsys, name):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    kind = importlib.import_module(name).Args
    with pytest.raises(SystemExit):
        parse(kind)
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    for flag in flags.names(kind):
        assert arguments.spell(flag) in text, flag
    own = [flag for flag in vars(kind)["__annotations__"] if flag != "exp_name"]
    for flag in own:
        assert vars(kind) and flags.text_of(kind, flag)[:30] in text, flag


def test_the_core_needs_nothing_of_the_scripts_and_the_extras():
    """All modules of the core can be imported without the scripts and the extras, and without the
    packages that only they need.
    """
    package = Path(ROOT, "clusterenv_runtime")
    paths = [path.relative_to(ROOT).with_suffix("") for path in package.rglob("*.py")]
    modules = [".".join(path.parts) for path in paths if "extras" not in path.parts]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = {name.partition(".")[0] for name in result.stdout.split()} | set(
        result.stdout.split()
    )
    assert {"clusterenv_runtime.head.pool", "torch"} <= imported
    assert not imported & {"tyro", "rich", "tensorboard", "matplotlib", "wandb"}
    assert not imported & {"clusterenv_utils", "clusterenv_runtime.extras"}


@pytest.mark.parametrize(
    ("text", "kwargs"),
    [
        ("", {}),
        ("gravity=-5 enable_wind=true", {"gravity": -5, "enable_wind": True}),
        ("a=-.5 b=5. c=+.5e1 d=1.5.2 e=.", {"a": -0.5, "b": 5.0, "c": 5.0, "d": "1.5.2", "e": "."}),
        ("a=False b=None c=1e-3 d=x=y e=", {"a": False, "b": None, "c": 1e-3, "d": "x=y", "e": ""}),
        (
            """sizes=[1,2] name='a b' a="5" b='none' c='{"c": 1}' d=''""",
            {"sizes": [1, 2], "name": "a b", "a": "5", "b": "none", "c": '{"c": 1}', "d": ""},
        ),
        (
            'config={"a": "a b", "c": [1, 2]} desc=["S F"]\n name="c=d #e" x=',
            {"config": {"a": "a b", "c": [1, 2]}, "desc": ["S F"], "name": "c=d #e", "x": ""},
        ),
    ],
)
def test_arguments_of_environments_are_read_from_one_string(text, kwargs):
    assert ppo_clusterenv.Args(env_kwargs=text).make_kwargs == kwargs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gravity", "name=value pairs, as in 'gravity=-5 enable_wind=true': gravity is not name"),
        ("a=1 a=2", "a=2 is not name=value, or repeats a name"),
        ("a='", "No closing quotation"),
        ("2a=1", "2a=1 is not name=value"),
        ("a=['S']", "['S'] is not JSON: Expecting value: line 1 column 2 (char 1)"),
        ("a=[1]b=2", "b=2 follows a list or an object"),
        ("unheard=1", "--env-kwargs unheard=1: TypeError: "),
        ("gravity=5", "--env-kwargs gravity=5: AssertionError: gravity"),
        ("id=LunarLander-v2", "--env-kwargs id=LunarLander-v2: TypeError: "),
    ],
)
def test_invalid_arguments_of_environments_are_a_one_line_error(empty, monkeypatch, text, says):
    flags = ["--env-id", "LunarLander-v3", "--env-kwargs", text]
    scripts.check_refusal_here(monkeypatch, "ppo_clusterenv.py", empty, flags, says)


# Names and progress.


def test_an_environment_in_the_working_directory_is_found_and_a_run_describes_itself(tmp_path):
    """A run describes itself at its start, and at a resume it says what has changed."""
    (tmp_path / "my_env.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gym.register('Mine-v0', CartPoleEnv, max_episode_steps=50)\n"
    )
    path = {"PYTHONPATH": str(ROOT)}  # without the current directory
    flags = [*scripts.TINY[SCRIPT], "--env-id", "my_env:Mine-v0", "--run-name", "x"]
    result = scripts.run("ppo_clusterenv.py", tmp_path, *flags, **path)
    is_run = "runs/x: 4 environments on 2 workers, 320 steps in all; learning on"
    assert result.returncode == 0 and result.stdout.startswith(is_run), result.stderr
    flags = ["--resume", "runs/x", "--env-id", "my_env:Mine-v0", "--gamma", "0.5"]
    result = scripts.run("ppo_clusterenv.py", tmp_path, *flags, **path)
    assert result.stdout.splitlines()[1] == "resuming at step 320; gamma 0.995 -> 0.5"


def test_long_waits_before_the_first_report_and_in_the_evaluation_are_shown(monkeypatch, capsys):
    monkeypatch.setattr("clusterenv_runtime.head.pool.SAY_S", 0.05)
    monkeypatch.setattr("clusterenv_utils.progress.FIRST_WORD_S", 0.2)
    shown = Progress()
    with ClusterEnv([partial(CountingEnv, delay=0.1), CountingEnv], 2) as envs:
        envs.reset()
        *_, ready = capsys.readouterr().out.splitlines()
        assert ready.startswith("2 workers ready in ")
        for expected, is_told in (
            (lambda: shown.begin(10, 0), True),
            (lambda: shown.show(0, "step 0"), False),
            (shown.end, True),
        ):
            expected()
            for _ in range(8):
                envs.step([0, 0])
            told = capsys.readouterr().out.splitlines()
            assert [line for line in told if "waiting for 1 of 2 workers" in line] == told
            # After 0.2 s and 0.4 s of 0.8 s.
            assert 1 <= len(told) <= 3 if is_told else not told
    shown.close()
    assert told[0].startswith("evaluating (0 s so far): ")
