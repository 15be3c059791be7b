"""The command line of a training script: the flags that all have, W&B's spellings of booleans, and
--resume.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import socket
import sys
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
import tyro

from ..errors import (
    CheckpointError,
    LearnerLostError,
    RunLockedError,
    StartupError,
    WorkerDiedError,
    printable,
)
from ..options import (
    ClusterOptions,
    Name,
    NotNegative,
    Positive,
    PositiveNumber,
    Range,
    RunsCode,
    that_run_code,
)
from .checkpoint import check_run, has_checkpoint, load_checkpoint
from .checks import check
from .learners.learners import Learners
from .lock import lock

T = TypeVar("T", bound="ScriptArgs")
Seed = Annotated[int, Range("from 0 to 4294967295", lambda value: 0 <= value < 2**32)]
Interval = Annotated[float, Range("a number of seconds >= 0", lambda value: value >= 0)]
WORDS = {"true": True, "false": False, "none": None, "null": None}


def read_kwargs(text: str) -> dict[str, Any]:
    """Return the keyword arguments in a text like ``gravity=-5 enable_wind=true``.

    Values are numbers, booleans, None, JSON's lists and objects, or else texts. Quotes are as in a
    shell.

    Raises:
        ValueError: a part of the text is no ``name=value``, or a name is there twice.
    """
    kwargs: dict[str, Any] = {}
    for part in shlex.split(text):
        name, equals, value = part.partition("=")
        if not (equals and name.isidentifier()) or name in kwargs:
            raise ValueError(f"{part} is no name=value, or the second of this name")
        try:
            kwargs[name] = WORDS[value.lower()] if value.lower() in WORDS else json.loads(value)
        except json.JSONDecodeError:
            kwargs[name] = value
    return kwargs


def _are_kwargs(text: str) -> bool:
    try:
        return read_kwargs(text) is not None
    except ValueError:
        return False


Kwargs = Annotated[
    str, Range("name=value pairs, as in 'gravity=-5 enable_wind=true'", _are_kwargs), RunsCode(bool)
]


DIVIDED = "num_workers", "min_workers"  # among several learners


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Be the interpreter's last words of an error: a line where the user can do something about it."""
    if issubclass(kind, StartupError | WorkerDiedError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def spell(name: str) -> str:
    """Write a field's name as a flag."""
    return "--" + name.replace("_", "-")


@dataclass
class ScriptArgs(ClusterOptions):
    """The flags of every script. Its own add ``env_id``, ``total_timesteps``, and what belongs to
    the algorithm.
    """

    envs_per_worker: Positive = 32
    """the number of parallel game environments on each worker"""
    num_envs: Positive | None = None
    """the number of all environments, shared out among the workers; by default `--envs-per-worker`
    times as many
    """
    env_backend: Literal["gymnasium", "vector", "envpool"] = "gymnasium"
    """what steps the environments: a loop (`gymnasium`), the environment's own `vector` version, or
    `envpool`
    """
    env_threads: Positive = 1
    """with `--env-backend envpool`: the number of threads that step each worker's environments"""
    env_kwargs: Kwargs = ""
    """arguments of the environment's constructor, in one string, as in `"gravity=-5
    enable_wind=true"`
    """
    dry_run: bool = False
    """print the workers' commands, one a line, and start nothing"""
    run_name: Name | None = None
    """the run goes to `runs/RUN_NAME`; by default it is named after environment, experiment, seed
    and time
    """
    checkpoint_interval: Interval = 300.0
    """seconds between checkpoints; there is also one at the end, and at SIGTERM, SIGUSR1, SIGHUP
    and Ctrl-C
    """
    resume: str | None = None
    """go on with this run (`runs/NAME`) and its flags, but for those given here; repeat those that
    can run code
    """

    exp_name: Name = "experiment"
    """the name of this experiment, and of its model's file"""
    seed: Seed = 1
    """seed of the experiment"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """if toggled, the learner uses a GPU where there is one"""
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
    """the number of episodes of the final evaluation, in environments of this process; 0 for none
    """
    max_seconds: PositiveNumber | None = None
    """stop cleanly after so many seconds of training"""

    @property
    def make_kwargs(self) -> dict[str, Any]:
        """The ``env_kwargs``, as such."""
        return read_kwargs(self.env_kwargs)

    @property
    def resumed_name(self) -> str | None:
        """The name, in ``runs``, of the run to go on with, if any."""
        return None if self.resume is None else os.path.relpath(self.resume, "runs")

    def options(self) -> dict[str, Any]:
        """Return those of these that are options of `ClusterEnv`, its keyword arguments."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(ClusterOptions)
        }


def parse(script_args: type[T], fixed: Iterable[str] = ()) -> tuple[T, dict[str, Any]]:
    """Read the command line; with --resume also the checkpoint to go on from, else an empty one.

    ``fixed`` are the flags that must stay as they were, besides the number of environments.
    Mistakes end the process with one line. So do flags of the run that can run someone's code
    (`RunsCode`), unless the command line has them, too: whoever made the checkpoint chose them.
    """
    sys.excepthook = _report
    # W&B agents write booleans as --flag=True; tyro's spelling is --flag and --no-flag
    hints = typing.get_type_hints(script_args)
    booleans = "|".join(name.replace("_", "[-_]") for name, hint in hints.items() if hint is bool)
    argv = [re.sub(rf"^--({booleans})=[Tt]rue$", r"--\1", arg) for arg in sys.argv[1:]]
    argv = [re.sub(rf"^--({booleans})=[Ff]alse$", r"--no-\1", arg) for arg in argv]
    args, saved = tyro.cli(script_args, args=argv), {}
    try:
        learners = Learners.of_torchrun()
        if (name := learners.run_before()) is not None:
            resume = learners.tell(
                "resume", f"runs/{name}" if has_checkpoint(f"runs/{name}") else ""
            )
            args.resume = resume or args.resume
            argv += ["--resume", resume] if resume else []
    except LearnerLostError as error:
        check(False, error)
    if args.resume is not None:
        in_runs = not args.resumed_name.startswith(".")
        check(in_runs, f"--resume must be runs/NAME, of the working directory, got {args.resume}")
        try:
            if os.path.isdir(args.resume) and not args.dry_run and learners.rank == 0:
                lock(
                    args.resume
                )  # before it is read: whoever has it may be about to write the next checkpoint
            step = None if learners.rank == 0 else int(learners.tell("step", ""))
            saved = load_checkpoint(args.resume, step)
            check_run(saved)
            if learners.rank == 0:
                learners.tell("step", str(saved["global_step"]))
        except (CheckpointError, LearnerLostError, RunLockedError) as error:
            check(False, error)
        except OSError as error:
            check(False, f"cannot write to {args.resume}: {error.strerror}")
        unknown = ", ".join(spell(name) for name in saved["args"] if name not in hints)
        check(
            not unknown, f"{args.resume} is of another script, or version of it: it has {unknown}"
        )
        try:
            before = msgspec.convert(saved["args"], script_args)
        except msgspec.ValidationError as error:
            check(False, f"the flags in {args.resume} are wrong: {error}")
        given, args = args, tyro.cli(script_args, args=argv, default=before)
        code = {
            name: value
            for name, value in that_run_code(args).items()
            if value != getattr(given, name)
        }
        has = " and ".join(f"{spell(name)} {value!r}" for name, value in code.items())
        why = "what can run someone's code, or upload yours, is not taken from a file; to accept it, give it again here"
        check(not code, f"{args.resume} has {has}: {why}")
        for name in ("num_envs", "envs_per_worker", "env_kwargs", *fixed):
            was, now = getattr(before, name), getattr(args, name)
            check(
                was == now,
                f"{spell(name)} cannot change on the way: {args.resume} has {was}, got {now}",
            )
    if args.num_envs is None:
        args.num_envs = args.num_workers * args.envs_per_worker
    _check(args)
    return args, saved


def resume_command(args: ScriptArgs, directory: str, command: list[str]) -> str:
    """Return the command that goes on with the run in ``directory``, with the flags that are not
    taken from there.

    ``command`` is what runs scripts, unless CLUSTERENV_RESUME says how to submit this job.
    """
    usual, start = vars(type(args)()), [*command, sys.argv[0]]
    if submit := os.environ.get("CLUSTERENV_RESUME"):
        usual["worker_prefix"], start = (
            args.worker_prefix,
            shlex.split(submit),
        )  # the job gives the prefix by itself
    flags = [
        f"{spell(name)}={value}"
        for name, value in that_run_code(args).items()
        if value != usual[name]
    ]
    return printable(shlex.join([*start, *flags, "--resume", directory]), most=10_000)


def check_for_learners(args: ScriptArgs, number: int) -> None:
    """Exit with one line if these flags do not go with so many learners."""
    for name in ("num_envs", *DIVIDED):
        value = getattr(args, name) or 0
        fits = value % number == 0
        check(
            fits, f"{spell(name)} {value} must be a multiple of the {number} learners of torchrun"
        )
    no_port = (
        f"--port {args.port} cannot be that of {number} learners: each listens on one of its own"
    )
    check(not args.port, no_port)
    gpus, here = (
        torch.cuda.device_count() if args.cuda else 0,
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    fewer = f"this machine has {gpus} GPUs for its {here} learners: start fewer of them, or give --no-cuda"
    check(not gpus or here <= gpus, fewer)


def _check(args: ScriptArgs) -> None:
    """Exit with one line if a flag that all scripts have is out of range, or does not go with the
    others.
    """
    try:
        args.check(args.make_launcher(None))
        if args.bind_address:
            family = socket.AF_INET6 if ":" in args.bind_address else socket.AF_INET
            socket.create_server((args.bind_address, args.port), family=family).close()
    except (StartupError, ValueError) as error:
        check(False, error)
    except OSError as error:
        check(
            False,
            f"cannot listen on --bind-address {args.bind_address}, port {args.port}: {error.strerror}",
        )
    too_few = (
        f"--num-envs {args.num_envs} must be at least as many as --num-workers {args.num_workers}"
    )
    check(args.num_envs >= args.num_workers, too_few)
    video = args.env_backend == "gymnasium" or not args.capture_video
    check(video, f"--capture-video needs --env-backend gymnasium, not {args.env_backend}")
    threaded = args.env_backend == "envpool" or args.env_threads == 1
    check(threaded, f"--env-threads needs --env-backend envpool, not {args.env_backend}")
