"""How a run resumes: the flags that it takes from its checkpoint, and the command."""

from __future__ import annotations

import os
import shlex
import sys
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from clusterenv_runtime.errors import printable

from .arguments import ScriptArgs, parse, spell
from .checks import check, one_line_for
from .types import that_run_code

T = TypeVar("T", bound=ScriptArgs)


def name_of(directory: str, run_name: str | None) -> str:
    """Return the name of the run that --resume names, or exit with a one-line error.

    If --run-name is given, it must name the same run.
    """
    name = os.path.relpath(directory, "runs")
    where = "must be runs/NAME in the working directory"
    check(not name.startswith("."), f"--resume {where}, got {directory}")
    another = f"--run-name {run_name} is not the run of --resume {directory}"
    check(run_name in (None, name), another)
    return name


def flags_of(saved: dict[str, Any], args: T, fixed: Iterable[str]) -> T:
    """Return the flags of a resumed run: the checkpoint's, except for those of the command line.

    Errors end the process with a one-line message. So do flags of the checkpoint that can run
    someone's code (`RunsCode`) and that ``args``, the flags of the command line alone, do not have,
    because whoever made the checkpoint chose them.

    Args:
        saved: the checkpoint.
        args: the flags of the command line.
        fixed: the names of the flags that must not change.
    """
    directory = args.resume
    before = saved_flags(saved["args"], type(args), directory)
    now = parse(type(args), default=before)
    now.resume = directory
    check_code(now, args, directory)
    for name in fixed:
        was, got = getattr(before, name), getattr(now, name)
        change = f"{directory} has {was}, got {got}"
        check(was == got, f"{spell(name)} cannot change on resume: {change}")
    return now


def saved_flags(saved: dict[str, Any], kind: type[T], path: str) -> T:
    """Return the flags that a run has saved at ``path``, or exit with a one-line error.

    ``kind`` is the class of the script's flags.
    """
    hints = typing.get_type_hints(kind)
    unknown = ", ".join(spell(name) for name in saved if name not in hints)
    of_another = f"{path} is from another script, or another version of it"
    check(not unknown, f"{of_another}: it has {unknown}")
    with one_line_for(msgspec.ValidationError, text=f"the flags in {path} are wrong"):
        return msgspec.convert(saved, kind)


def check_code(flags: T, given: T, path: str) -> None:
    """Exit with a one-line error if flags can run someone's code and are not ``given`` here.

    Flags that are not given come from the file at ``path``.
    """
    code = {
        name: value for name, value in that_run_code(flags).items() if value != getattr(given, name)
    }
    has = " and ".join(f"{spell(name)} {value!r}" for name, value in code.items())
    why = "a flag that can run someone's code, or upload yours, is not taken from a file"
    check(not code, f"{path} has {has}: {why}; to accept it, give it again here")


def resume_command(args: ScriptArgs, directory: str, program: list[str]) -> str:
    """Return the command that resumes a run, with the flags that are not taken from its checkpoint.

    It begins with ``program``, which runs scripts, unless CLUSTERENV_RESUME says how to submit this
    job.
    """
    defaults = vars(type(args)())
    start = [*program, sys.argv[0]]
    if submit := os.environ.get("CLUSTERENV_RESUME"):
        start = shlex.split(submit)
        defaults["worker_prefix"] = args.worker_prefix  # the job sets it itself
    flags = [
        f"{spell(name)}={value}"
        for name, value in that_run_code(args).items()
        if value != defaults[name]
    ]
    return printable(shlex.join([*start, *flags, "--resume", directory]), most=10_000)
