"""The command line of a training script, and the flags that all scripts share."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import sys
import typing
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
import tyro

from clusterenv_runtime.errors import Interrupted, LearnerLostError, StartupError, WorkerDiedError
from clusterenv_runtime.launchers.local import current_directory
from clusterenv_runtime.options import REMOVED, ClusterOptions

from .checks import check, one_line_for
from .flags import names, show_help
from .types import Name, NotNegative, Positive, PositiveNumber, RunsCode, check_values

T = TypeVar("T", bound="ScriptArgs")
Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Interval = Annotated[float, msgspec.Meta(ge=0)]
Kwargs = Annotated[str, RunsCode(bool)]
NUMBER = re.compile(r"[+-]?(\d+\.\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)  # with a point
WORDS = {"true": True, "false": False, "none": None, "null": None}


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
            part = shlex.split(rest)[0]
            raise ValueError(f"{part} is not name=value, or repeats a name")
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


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends the process, without a traceback if the message says enough."""
    if issubclass(kind, Interrupted | LearnerLostError | StartupError | WorkerDiedError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def spell(name: str) -> str:
    """Return a field's name as a flag."""
    return "--" + name.replace("_", "-")


@dataclass
class ScriptArgs(ClusterOptions):
    """The flags of all scripts. Each adds ``env_id``, ``total_timesteps`` and its algorithm's."""

    envs_per_worker: Positive = 32
    """the number of parallel game environments on each worker"""
    num_envs: Positive | None = None
    """the total number of environments, divided among the workers; by default `--envs-per-worker`
    on each
    """
    env_backend: Literal["gymnasium", "vector", "envpool"] = "gymnasium"
    """what steps the environments: a loop (`gymnasium`), the environment's own vectorized version
    (`vector`), or EnvPool (`envpool`)
    """
    env_threads: Positive = 1
    """with `--env-backend envpool`: the number of threads that step each worker's environments"""
    env_kwargs: Kwargs = ""
    """keyword arguments for the environment's constructor, as one string, for example `"gravity=-5
    enable_wind=true"`
    """
    dry_run: bool = False
    """print the workers' commands, one per line, and start nothing"""
    run_name: Name | None = None
    """the run's directory is `runs/RUN_NAME`; by default the name consists of the environment,
    experiment, seed and time
    """
    checkpoint_interval: Interval = 300.0
    """seconds between checkpoints; the run also writes one at the end, and on SIGTERM, SIGUSR1,
    SIGHUP and Ctrl-C
    """
    resume: str | None = None
    """resume this run (`runs/NAME`) with its own flags, except for those given here; flags that can
    run code must be repeated
    """

    exp_name: Name = "experiment"
    """the name of this experiment and of its model file"""
    seed: Seed = 1
    """seed of the experiment"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    torch_threads: Positive | None = None
    """the number of torch threads in the learner; by default `OMP_NUM_THREADS` if it is set,
    otherwise 1 for small networks, 2 in SAC, and torch's own number on Atari
    """
    cuda: bool = True
    """if toggled, the learner uses a GPU if there is one"""
    track: Annotated[bool, RunsCode(bool)] = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: str = "clusterenv"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """whether to record videos of environment 0 (check out the `videos` folder)"""
    save_model: bool = True
    """whether to save the model into the `runs/{run_name}` folder"""
    eval_episodes: NotNegative = 20
    """the number of episodes of the final evaluation, which runs on the workers; 0 skips it"""
    eval_deterministic: bool = False
    """evaluate the policy by its most likely actions, not by sampled actions"""
    eval_interval: Positive | None = None
    """steps between evaluations during training; they run on a separate worker, and the best model
    is kept
    """
    eval_video: bool = False
    """record one more evaluation episode, as `evaluation.mp4` in the run's directory"""
    max_seconds: PositiveNumber | None = None
    """stop cleanly after this many seconds of training"""

    @property
    def make_kwargs(self) -> dict[str, Any]:
        """The keyword arguments for the environment's constructor."""
        return read_kwargs(self.env_kwargs)

    @property
    def of_evaluation(self) -> Self:
        """The flags of the worker that evaluates while the others train."""
        port = self.port and self.port + 1
        own = {"num_workers": 1, "port": port, "eval_interval": None}
        return dataclasses.replace(self, **own)

    def options(self) -> dict[str, Any]:
        """Return the flags that are options of `ClusterEnv`, as its keyword arguments."""
        names = [field.name for field in dataclasses.fields(ClusterOptions)]
        return {name: getattr(self, name) for name in names}


def groups_of(script_args: type[ScriptArgs]) -> dict[str, list[str]]:
    """Return the names of a script's flags by group. The groups of all scripts come last."""
    workers, shared = names(ClusterOptions), names(ScriptArgs)
    return {
        "algorithm": [name for name in names(script_args) if name not in shared],
        "run": [name for name in shared if name not in workers],
        "workers": workers,
    }


def parse(script_args: type[T], default: T | None = None) -> T:
    """Return the flags of the command line. Flags that are not given are those of ``default``.

    An error in a single flag ends the process with a one-line message. `check_flags` checks all
    flags together.
    """
    sys.excepthook = _report
    # As if the script were in this directory: --env-id my_env:Mine-v0 imports my_env.
    if (here := current_directory()) not in (None, *sys.path):
        sys.path.append(here)
    # W&B agents write booleans as --flag=True; tyro's spellings are --flag and --no-flag
    hints = typing.get_type_hints(script_args)
    booleans = "|".join(name.replace("_", "[-_]") for name, hint in hints.items() if hint is bool)
    argv = [re.sub(rf"^--({booleans})=[Tt]rue$", r"--\1", arg) for arg in sys.argv[1:]]
    argv = [re.sub(rf"^--({booleans})=[Ff]alse$", r"--no-\1", arg) for arg in argv]
    if {"-h", "--help"} & set(argv):
        show_help(groups_of(script_args), default or script_args())
    for name, instead in REMOVED.items():
        flag = rf"--(no-)?{name.replace('_', '[-_]')}(=|$)"
        given = [arg for arg in argv if re.match(flag, arg)]
        instead = instead.replace("bind_address", "--bind-address")
        check(not given, f"{spell(name)} is no longer a flag: {instead}")
    args = tyro.cli(script_args, args=argv, default=default)
    with one_line_for(ValueError):
        check_values(args)
    pairs = "must be name=value pairs, as in 'gravity=-5 enable_wind=true'"
    with one_line_for(ValueError, text=f"env_kwargs {pairs}"):
        read_kwargs(args.env_kwargs)
    return args


def check_moviepy(flag: str) -> None:
    """Exit with a one-line error if MoviePy, which a flag needs for videos, is not installed."""
    check(importlib.util.find_spec("moviepy"), f"{flag} needs MoviePy: pip install moviepy")


def check_flags(args: ScriptArgs) -> None:
    """Exit with a one-line error if flags of all scripts do not fit each other or this machine."""
    with one_line_for(StartupError, ValueError):
        args.check(args.make_launcher(None))
    if args.bind_address and args.bind_address not in dict(map(reversed, socket.if_nameindex())):
        family = socket.AF_INET6 if ":" in args.bind_address else socket.AF_INET
        where = f"--bind-address {args.bind_address}, port {args.port}"
        with one_line_for(OSError, text=f"cannot listen on {where}"):
            socket.create_server((args.bind_address, args.port), family=family).close()
    has_next = args.port != 65535 or not (args.eval_interval or args.eval_video)
    check(has_next, "--port 65535 leaves no next port for the worker that evaluates")
    too_few = f"must be at least --num-workers {args.num_workers}"
    check(args.num_envs >= args.num_workers, f"--num-envs {args.num_envs} {too_few}")
    videos = {"--capture-video": args.capture_video, "--eval-video": args.eval_video}
    for flag in filter(videos.get, videos):
        gymnasium = args.env_backend == "gymnasium"
        check(gymnasium, f"{flag} needs --env-backend gymnasium, not {args.env_backend}")
        check_moviepy(flag)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    needs = "--compile needs a C++ compiler, g++ or clang++, and there is none"
    check(compiler or not getattr(args, "compile", False), needs)
    episodes = args.eval_episodes or not args.eval_interval
    check(episodes, "--eval-interval needs --eval-episodes")
    threaded = args.env_backend == "envpool" or args.env_threads == 1
    check(threaded, f"--env-threads needs --env-backend envpool, not {args.env_backend}")
