"""Flags of resumed runs and of the runtime, accepted ones and those refused with one line."""

import importlib
import math
import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import dqn_clusterenv
import ppo_clusterenv
from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_runtime.security import HeadKeys, write_key_file
from clusterenv_utils import Run, ScriptError, arguments, parse
from clusterenv_utils.checkpoint import save_checkpoint

from . import scripts
from .envs import CountingEnv
from .nets import linear
from .test_checkpoint import saved_in


def refusal(monkeypatch, args, *flags):
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ScriptError) as raised:
        Run(parse(args), fixed=["env_id"])
    assert "\n" not in str(raised.value)
    return str(raised.value)


def whole(args, step):
    """Return the minimal content of a run's checkpoint."""
    state = {"args": args, "parts": {}, "rng": {}, "global_step": step, "seconds": 0.5}
    return {**state, "waiting": 0.0, "wandb_id": None}


@pytest.fixture
def run_x(tmp_path, monkeypatch):
    """Change to a new directory with a run, runs/x, whose flags differ from the defaults."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs/x")
    changed = {"num_workers": 3, "num_envs": 96, "learning_rate": 0.5, "anneal_lr": False}
    args = vars(ppo_clusterenv.Args(**changed, max_policy_lag=7))
    save_checkpoint("runs/x", whole(args, 5), 5)


def test_flags_of_the_run_are_defaults_and_the_command_line_overrides_them(run_x, monkeypatch):
    flags = "--resume runs/x --learning_rate 0.25 --anneal-lr=True --no-cuda --total-timesteps=9"
    monkeypatch.setattr(sys, "argv", ["script.py", *flags.split()])
    run = Run(parse(ppo_clusterenv.Args), fixed=["env_id"])
    changed = {"learning_rate": 0.25, "total_timesteps": 9, "cuda": False, "resume": "runs/x"}
    of_run = {"num_workers": 3, "max_policy_lag": 7, "num_envs": 96}
    assert vars(run.args) == vars(ppo_clusterenv.Args(**changed, **of_run))
    assert (run.global_step, run.name) == (5, "x")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--resume runs/y", "there is no run runs/y"),
        ("--resume runs/empty", "there is no checkpoint in runs/empty"),
        ("--resume runs", "--resume must be runs/NAME in the working directory, got runs"),
        ("--resume elsewhere/x", "must be runs/NAME in the working directory, got elsewhere/x"),
        ("--resume runs/x --run-name y", "--run-name y is not the run of --resume runs/x"),
        (
            "--resume runs/x --num-envs 6",
            "--num-envs cannot change on resume: runs/x has 96, got 6",
        ),
        ("--resume runs/x --envs-per-worker 2", "cannot change on resume: runs/x has 32, got 2"),
        (
            "--resume runs/x --env-id Acrobot-v1",
            "cannot change on resume: runs/x has LunarLander-v3",
        ),
        ("--resume runs/x --kl-threshold -1", "--kl-threshold must be at least 0, got -1.0"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_one_line(run_x, monkeypatch, flags, says):
    os.mkdir("runs/empty")
    assert says in refusal(monkeypatch, ppo_clusterenv.Args, *flags.split())


@pytest.mark.parametrize(
    "name", ["dqn_clusterenv", "scripts.dqn_atari_clusterenv", "scripts.sac_clusterenv"]
)
def test_learning_starts_cannot_change_on_resume(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs/x")
    args = vars(importlib.import_module(name).Args(num_envs=2, learning_starts=16))
    save_checkpoint("runs/x", whole(args, 5), 5)
    script = f"{name.replace('.', '/')}.py"
    monkeypatch.setattr(sys, "argv", [script, "--resume", "runs/x", "--learning-starts", "17"])
    with pytest.raises(ScriptError, match="--learning-starts cannot change on resume: runs/x has"):
        runpy.run_path(str(scripts.ROOT / script), run_name="__main__")


RUNNING_CODE = [
    ("worker_prefix", "touch owned", "'--worker-prefix=touch owned'"),
    ("env_id", "owned:Env-v0", "--env-id=owned:Env-v0"),
    ("launcher", "added", "--launcher=added"),
    ("key_file", "their.key", "--key-file=their.key"),
    ("track", True, "--track=True"),
    ("env_kwargs", "xml_file=their.xml", "--env-kwargs=xml_file=their.xml"),
]


@pytest.fixture
def added_launcher(tmp_path):
    """Return a directory to import from, with a package that has a launcher named `added`."""
    (tmp_path / "added_launcher.py").write_text(
        "from clusterenv_runtime import LocalLauncher as Added\n"
    )
    information = tmp_path / "added-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[clusterenv.launchers]\nadded = added_launcher:Added\n"
    )
    return tmp_path


@pytest.mark.parametrize(("name", "value", "flag"), RUNNING_CODE)
def test_a_flag_that_can_run_code_is_not_taken_from_a_run_but_accepted_if_given_again(
    run_x, added_launcher, monkeypatch, name, value, flag
):
    args = ppo_clusterenv.Args(**{name: value, "bind_address": "127.0.0.1"})  # keys need TCP
    save_checkpoint("runs/x", whole(vars(args), 6), 6)
    monkeypatch.syspath_prepend(added_launcher)
    write_key_file("their.key", HeadKeys.make())
    says = refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")
    assert says.startswith(
        f"runs/x has {arguments.spell(name)} {value!r}: a flag that can run someone's code"
    )
    monkeypatch.setattr(sys, "argv", ["script.py"])
    again = arguments.resume_command(args, "runs/x", ["python"])
    assert again == f"python script.py {flag} --resume runs/x"
    monkeypatch.setattr(sys, "argv", shlex.split(again)[1:])
    assert getattr(Run(parse(ppo_clusterenv.Args), fixed=["env_id"]).args, name) == value


def test_flags_that_can_run_code_are_refused_together_and_may_get_other_values(run_x, monkeypatch):
    args = vars(ppo_clusterenv.Args(worker_prefix="touch owned", env_id="owned:Env-v0"))
    save_checkpoint("runs/x", whole(args, 6), 6)
    says = refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")
    assert "has --worker-prefix 'touch owned' and --env-id 'owned:Env-v0': " in says
    flags = ["--resume", "runs/x", "--worker-prefix", "nice", "--env-id", "owned:Env-v0"]
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    assert Run(parse(ppo_clusterenv.Args)).args.worker_prefix == "nice"


@pytest.mark.parametrize("script", ["ppo_clusterenv", "dqn_clusterenv"])
def test_a_run_from_elsewhere_neither_starts_nor_imports_anything(tmp_path, script):
    args = importlib.import_module(script).Args(
        worker_prefix="touch started", env_id="owned:Env-v0"
    )
    (tmp_path / "owned.py").write_text("open('imported', 'w').close()")
    os.makedirs(tmp_path / "runs" / "x")
    save_checkpoint(tmp_path / "runs" / "x", whole(vars(args), 0), 0)
    before = set(tmp_path.rglob("*"))
    result = scripts.run(f"{script}.py", tmp_path, "--resume", "runs/x")
    scripts.check_refusal(
        result, "runs/x has --worker-prefix 'touch started' and --env-id 'owned:Env-v0'"
    )
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "runs" / "x" / "lock"}


def changed(state, path, value):
    *way, last = path.split(".")
    for key in way:
        state = state[key]
    state[last] = value


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("seconds", math.nan, "seconds"),
        ("seconds", math.inf, "seconds"),
        ("global_step", -5, "global_step"),
        ("rng", [], "rng"),
        ("args.learning_rate", "x", "learning_rate"),
        ("args.env_id", ["CartPole-v1"], "env_id"),
    ],
)
def test_an_invalid_value_in_a_checkpoint_is_one_line(run_x, monkeypatch, path, value, says):
    state = whole(vars(ppo_clusterenv.Args()), 6)
    changed(state, path, value)
    save_checkpoint("runs/x", state, 6)
    assert says in refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")


def test_a_run_of_the_other_script_or_a_damaged_one_is_one_line(run_x, monkeypatch, caplog):
    assert "--clip-coef" in refusal(monkeypatch, dqn_clusterenv.Args, "--resume", "runs/x")
    (path,) = saved_in(Path("runs/x"))
    path.write_bytes(b"")
    says = refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")
    assert says == "all 1 checkpoints in runs/x are damaged"
    warning = f"skipped the checkpoint {path}: it is damaged, or not a checkpoint (BadZipFile)"
    assert [record.getMessage() for record in caplog.records] == [warning]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--max-worker-restarts -1", "--max-worker-restarts must be at least 0, got -1"),
        ("--worker-timeout 0", "--worker-timeout must be above 0, got 0.0"),
        ("--port 65536 --bind-address lo", "--port must be at least 0 and at most 65535"),
        ("--port 5000", "port and key_file are for tcp: they need bind_address"),
    ],
)
def test_a_flag_of_the_runtime_out_of_range_is_one_line(monkeypatch, flags, says):
    assert says in refusal(monkeypatch, dqn_clusterenv.Args, *flags.split())


def test_a_cluster_env_takes_what_the_flags_say(monkeypatch, tmp_path, workers):
    monkeypatch.chdir(tmp_path)
    flags = "--worker-start=spawn --bind-address lo --num-workers=1 --kl-threshold=0.5"
    monkeypatch.setattr(sys, "argv", ["script.py", *flags.split()])
    args = parse(dqn_clusterenv.Args)
    assert os.listdir() == []  # parsing creates no files
    options = args.options()
    assert options["bind_address"] == "lo" and options["max_policy_lag"] == 40
    with ClusterEnv([CountingEnv], **options) as envs:
        envs.publish(CategoricalPolicy(linear(1, 2)))
        assert envs.reset()[0].tolist() == [[0]]
        (command,) = workers().values()
        assert command[command.index("--connect") + 1].startswith("tcp://127.0.0.1:")


def test_a_link_in_place_of_the_lock_is_one_line_and_not_followed(run_x, monkeypatch, tmp_path):
    (tmp_path / "precious").write_text("precious")
    os.symlink(tmp_path / "precious", "runs/x/lock")
    says = refusal(monkeypatch, ppo_clusterenv.Args, "--resume", "runs/x")
    assert says == "cannot write to runs/x: Too many levels of symbolic links"
    assert (tmp_path / "precious").read_text() == "precious"
