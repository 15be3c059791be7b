"""The flags that all scripts share, the ranges of all flags, and what a resumed run takes over."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import sys
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch
from importlib.metadata import entry_points
from typing import Any, Self, TypeVar, cast

import msgspec
import tyro

from clusterenv_runtime.errors import StartupError
from clusterenv_runtime.launchers import BUILT_IN, GROUP
from clusterenv_runtime.options import ClusterOptions

from .errors import check, one_line_for, print_error, printable

T = TypeVar("T", bound="ScriptArgs")
ABOVE_0 = math.ulp(0.0)
# The lowest and highest value of flags, by name, beginning or end. No flag may be NaN or infinite.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "port": (0, 2**16 - 1),
    **dict.fromkeys(("gamma", "gae_lambda", "tau", "start_e", "end_e"), (0, 1)),
    **dict.fromkeys(("kl_threshold", "target_kl", "*_coef", "learning_starts"), (0, math.inf)),
    **dict.fromkeys(("max_policy_lag", "max_worker_restarts"), (0, math.inf)),
    **dict.fromkeys(("eval_episodes", "checkpoint_interval"), (0, math.inf)),
    **dict.fromkeys(("learning_rate", "*_lr", "alpha", "utd", "clip_rho"), (ABOVE_0, math.inf)),
    **dict.fromkeys(("max_*", "*_timeout", "exploration_fraction"), (ABOVE_0, math.inf)),
    **dict.fromkeys(("num_*", "*_steps", "*_timesteps", "*_frequency", "*_size"), (1, math.inf)),
    **dict.fromkeys(("*_epochs", "*_threads", "*_per_worker", "*_interval"), (1, math.inf)),
    **dict.fromkeys(("outstanding", "episodes"), (1, math.inf)),
}
FREE = "ent_coef", "reward_scale"  # any finite number
NAMES = "exp_name", "run_name"  # slurm/train.sh checks them by the same rule
NAME = re.compile(r"[\w+=-][\w.+=-]*")
# Values that can run someone's code, or upload yours. A resumed run does not take them from its
# checkpoint, which may be a stranger's: the command line must repeat them.
RUNS_CODE = {
    "launcher": lambda value: is_foreign(value),
    **dict.fromkeys(("worker_prefix", "worker_preload", "key_file"), bool),
    "env_id": lambda value: ":" in value,  # Gymnasium imports the module before the colon
    **dict.fromkeys(("env_kwargs", "track"), bool),
}
ALWAYS_FIXED = "num_envs", "envs_per_worker", "env_kwargs"
NUMBER = re.compile(r"[+-]?(\d+\.\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)  # with a point
WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass
class ScriptArgs(ClusterOptions):
    """The flags of all scripts. Each adds ``env_id``, ``total_timesteps`` and its algorithm's."""

    envs_per_worker: int = 32
    """the number of parallel game environments on each worker"""
    num_envs: int | None = None
    """the total number of environments, divided among the workers; by default `--envs-per-worker`
    on each
    """
    env_kwargs: str = ""
    """keyword arguments for the environment's constructor, as one string, for example `"gravity=-5
    enable_wind=true"`
    """
    dry_run: bool = False
    """print the workers' commands, one per line, and start nothing"""
    run_name: str | None = None
    """the run's directory is `runs/RUN_NAME`; by default the name consists of the environment,
    experiment, seed and time
    """
    checkpoint_interval: float = 300.0
    """seconds between checkpoints; the run also writes one at the end, and on SIGTERM, SIGUSR1,
    SIGHUP and Ctrl-C
    """
    resume: str | None = None
    """resume this run (`runs/NAME`) with its own flags, except for those given here; flags that can
    run code must be repeated
    """

    exp_name: str = "experiment"
    """the name of this experiment and of its model file"""
    seed: int = 1
    """seed of the experiment"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    torch_threads: int | None = None
    """the number of torch threads in the learner; None leaves it to torch"""
    cuda: bool = True
    """if toggled, the learner uses a GPU if there is one"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: str = "clusterenv"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """whether to record videos of environment 0 (check out the `videos` folder)"""
    save_model: bool = True
    """whether to save the model into the `runs/{run_name}` folder"""
    eval_episodes: int = 20
    """the number of episodes of the final evaluation, which runs on the workers; 0 skips it"""
    eval_deterministic: bool = False
    """evaluate the policy by its most likely actions, not by sampled actions"""
    eval_interval: int | None = None
    """steps between evaluations during training; they run on a separate worker, and the best model
    is kept
    """
    max_seconds: float | None = None
    """stop cleanly after this many seconds of training"""

    @property
    def make_kwargs(self) -> dict[str, Any]:
        """The keyword arguments for the environment's constructor."""
        return read_kwargs(self.env_kwargs)

    @property
    def of_evaluation(self) -> Self:
        """The flags of the worker that evaluates while the others train."""
        port = self.port and self.port + 1
        return dataclasses.replace(self, num_workers=1, port=port, eval_interval=None)

    def options(self) -> dict[str, Any]:
        """Return the flags that are options of `ClusterEnv`, as its keyword arguments."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(ClusterOptions)}


# Workers may get a script's `Args`, with a function that reads it. These are its fields: their
# types in `ClusterOptions` cannot be pickled, and are not needed there.
for _name, _field in [*ScriptArgs.__dataclass_fields__.items()]:
    ScriptArgs.__dataclass_fields__[_name] = _field = copy.copy(_field)
    _field.type = object


def parse(script_args: type[T], default: T | None = None) -> T:
    """Return the flags of the command line. Flags that are not given are those of ``default``.

    From here on, a `ScriptError` that nobody catches is printed in one line.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_error
    # As if the script were in this directory: --env-id my_env:Mine-v0 imports my_env.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    # W&B agents write booleans as --flag=True; tyro's spellings are --flag and --no-flag
    hints = typing.get_type_hints(script_args)
    booleans = "|".join(name.replace("_", "[-_]") for name, hint in hints.items() if hint is bool)
    argv = [re.sub(rf"^--({booleans})=[Tt]rue$", r"--\1", arg) for arg in sys.argv[1:]]
    argv = [re.sub(rf"^--({booleans})=[Ff]alse$", r"--no-\1", arg) for arg in argv]
    args = tyro.cli(script_args, args=argv, default=default)
    check_ranges(args)
    pairs = "must be name=value pairs, as in 'gravity=-5 enable_wind=true'"
    with one_line_for(ValueError, text=f"--env-kwargs {pairs}"):
        read_kwargs(args.env_kwargs)
    return args


def range_of(name: str) -> tuple[float, float] | None:
    """Return the lowest and highest value of a flag, or None if it may be any number."""
    if name in FREE:
        return None
    return next((RANGES[each] for each in RANGES if fnmatch(name, each)), None)


def check_ranges(args: Any) -> None:
    """Check each flag's value by `RANGES`, and names."""
    for name, value in vars(args).items():
        flag = f"{spell(name)} must be"
        if name in NAMES and value is not None:
            letters = "of letters, digits and _.+=-, with no dot at the beginning"
            check(NAME.fullmatch(value), f"{flag} {letters}, got {value!r}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        check(math.isfinite(value), f"{flag} finite, got {value}")
        if limits := range_of(name):
            low, high = limits
            least = "above 0" if low == ABOVE_0 else f"at least {low}"
            most = "" if high == math.inf else f" and at most {high}"
            check(low <= value <= high, f"{flag} {least}{most}, got {value}")


def check_flags(args: ScriptArgs) -> None:
    """Check that flags of all scripts fit each other and this machine."""
    with one_line_for(StartupError, ValueError):
        args.check(args.make_launcher(None))
    envs, workers = args.num_envs, args.num_workers
    check(envs >= workers, f"--num-envs {envs} must be at least --num-workers {workers}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    needs = "--compile needs a C++ compiler, g++ or clang++, and there is none"
    check(compiler or not getattr(args, "compile", False), needs)
    check(args.eval_episodes or not args.eval_interval, "--eval-interval needs --eval-episodes")


def spell(name: str) -> str:
    """Return a field's name as a flag."""
    return "--" + name.replace("_", "-")


def read_kwargs(text: str) -> dict[str, Any]:
    """Return the keyword arguments in a text like ``gravity=-5 enable_wind=true``.

    Values are numbers, booleans, None, JSON lists and objects, and otherwise strings. A value that
    begins with a quote, as in a shell, is a string.

    Raises:
        ValueError: a part of the text is not ``name=value``, a value is malformed, or a name
            appears twice.
    """
    kwargs: dict[str, Any] = {}
    rest = text.strip()
    while rest:
        name, equals, after = rest.partition("=")
        if not (equals and name.isidentifier()) or name in kwargs:
            raise ValueError(f"{shlex.split(rest)[0]} is not name=value, or repeats a name")
        kwargs[name], rest = _read_value(after)
        rest = rest.lstrip()
    return kwargs


def _read_value(text: str) -> tuple[Any, str]:
    """Return the value at the start of a text, and the rest of the text."""
    if text.startswith(("[", "{")):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{text} is not JSON: {error}") from None
        rest = text[end:]
        if rest and not rest[0].isspace():
            raise ValueError(f"{rest} follows a list or an object")
        return value, rest
    if not text or text[0].isspace():
        return "", text
    words = shlex.shlex(text, posix=True)
    words.whitespace_split = True
    words.commenters = ""
    word = words.get_token()
    rest = words.instream.read()
    if text[0] in "'\"":
        return word, rest
    if word.lower() in WORDS:
        return WORDS[word.lower()], rest
    if NUMBER.fullmatch(word):
        return float(word), rest
    try:
        return json.loads(word.removeprefix("+")), rest
    except json.JSONDecodeError:
        return word, rest


def is_foreign(launcher: str) -> bool:
    """Return whether a launcher of this name, if there is one, comes from another package."""
    modules = [point.module for point in entry_points(group=GROUP, name=launcher)] or [""]
    own = all(module.startswith("clusterenv_runtime.") for module in modules)
    return launcher not in BUILT_IN and not own


def that_run_code(args: ScriptArgs) -> dict[str, Any]:
    """Return the flags whose values can run code, by name."""
    values = {name: getattr(args, name, None) for name in RUNS_CODE}
    return {name: value for name, value in values.items() if value and RUNS_CODE[name](value)}


def new_name(args: Any) -> str:
    """Return the name of a new run without a --run-name."""
    env_id = re.sub("[/:]", "-", args.env_id)
    now = datetime.now()
    time_of_day = f"{now:%H%M%S}-{now.microsecond // 1000:03}"  # jobs of an array start together
    return f"{env_id}__{args.exp_name}__{args.seed}__{now:%Y%m%d}-{time_of_day}"


def resumed_path(args: ScriptArgs) -> str:
    """Return the directory of the run that --resume names. A --run-name must name the same."""
    directory = cast(str, args.resume)
    name = os.path.relpath(directory, "runs")
    where = "must be runs/NAME in the working directory"
    check(not name.startswith("."), f"--resume {where}, got {directory}")
    another = f"--run-name {args.run_name} is not the run of --resume {directory}"
    check(args.run_name in (None, name), another)
    return f"runs/{name}"


def resumed_flags(saved: dict[str, Any], args: T, fixed: Iterable[str]) -> T:
    """Return the flags of a resumed run: the checkpoint's, except for those of the command line.

    Args:
        saved: the flags in the checkpoint.
        args: the flags of the command line.
        fixed: the names of the flags that must not change.
    """
    directory = args.resume
    before = saved_flags(saved, type(args), directory)
    now = parse(type(args), default=before)
    now.resume = directory
    check_code(now, args, directory)
    for name in (*ALWAYS_FIXED, *fixed):
        was, got = getattr(before, name), getattr(now, name)
        change = f"{directory} has {was}, got {got}"
        check(was == got, f"{spell(name)} cannot change on resume: {change}")
    return now


def saved_flags(saved: dict[str, Any], kind: type[T], path: str) -> T:
    """Return the flags that a run has saved at ``path``; ``kind`` is the class of its script."""
    unknown = ", ".join(spell(name) for name in saved if name not in typing.get_type_hints(kind))
    of_another = f"{path} is from another script, or another version of it"
    check(not unknown, f"{of_another}: it has {unknown}")
    with one_line_for(msgspec.ValidationError, text=f"the flags in {path} are wrong"):
        return msgspec.convert(saved, kind)


def check_code(flags: T, given: T, path: str) -> None:
    """Check that flags which can run code are ``given`` here, not only in the file at ``path``."""
    code = {
        name: each for name, each in that_run_code(flags).items() if each != getattr(given, name)
    }
    has = " and ".join(f"{spell(name)} {value!r}" for name, value in code.items())
    why = "a flag that can run someone's code, or upload yours, is not taken from a file"
    check(not code, f"{path} has {has}: {why}; to accept it, give it again here")


def resume_command(args: ScriptArgs, directory: str, program: Iterable[str]) -> str:
    """Return the command that resumes a run, with the flags that its checkpoint cannot give.

    It begins with ``program``, which runs scripts, unless CLUSTERENV_RESUME says how to submit this
    job.
    """
    defaults = vars(type(args)())
    start = [*program, sys.argv[0]]
    if submit := os.environ.get("CLUSTERENV_RESUME"):
        start = shlex.split(submit)
        defaults["worker_prefix"] = args.worker_prefix  # the job sets it itself
    code = that_run_code(args).items()
    flags = [f"{spell(name)}={value}" for name, value in code if value != defaults[name]]
    return printable(shlex.join([*start, *flags, "--resume", directory]))
