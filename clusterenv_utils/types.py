"""The types of the scripts' flags, with their ranges, and which values of flags can run code."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from clusterenv_runtime.launchers import is_ours
from clusterenv_runtime.options import Nats, NotNegative, Positive, Seconds, check_ranges

__all__ = [
    "EnvId",
    "Fraction",
    "Name",
    "Nats",
    "NotNegative",
    "NotNegativeNumber",
    "Number",
    "Positive",
    "PositiveNumber",
    "RunsCode",
    "Seconds",
    "check_values",
    "that_run_code",
]


@dataclass(frozen=True)
class RunsCode:
    """A mark on a flag's type: the values for which ``holds`` returns True can run code.

    Such a value starts a program, names a module to import, is passed to one, sends files away, or
    decides who may send code. The training scripts never take such a value from a checkpoint alone:
    the command line must repeat it.
    """

    holds: Callable[[Any], bool]


LARGEST = sys.float_info.max
# None of these ranges includes NaN.
PositiveNumber = Annotated[float, Meta(gt=0)]
NotNegativeNumber = Annotated[float, Meta(ge=0, le=LARGEST)]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
# slurm/train.sh checks names by the same rule.
Name = Annotated[str, Meta(pattern=r"^[\w+=-][\w.+=-]*\Z")]
# Gymnasium imports the module before the colon.
EnvId = Annotated[str, RunsCode(lambda value: ":" in str(value))]
# Options of a `ClusterEnv` whose values can run code.
OPTIONS = {
    "launcher": RunsCode(lambda value: not is_ours(value)),
    "worker_prefix": RunsCode(bool),
    "worker_preload": RunsCode(bool),
    "key_file": RunsCode(bool),
}


def check_values(args: Any) -> None:
    """Raise ValueError if a flag has the wrong type or is out of range."""
    try:
        check_ranges(args)
    except ValueError as error:
        if "regex" not in str(error):
            raise
        raise ValueError(
            f"{str(error).partition(':')[0]}: it must be of letters, digits and _.+=-, with no dot "
            "at the beginning"
        ) from None


def that_run_code(args: Any) -> dict[str, Any]:
    """Return the flags of a dataclass whose values can run code, by name; see `RunsCode`."""
    found = {}
    for name, hint in typing.get_type_hints(type(args), include_extras=True).items():
        marks = [OPTIONS.get(name), *getattr(hint, "__metadata__", ())]
        value = getattr(args, name)
        if any(isinstance(mark, RunsCode) and mark.holds(value) for mark in marks):
            found[name] = value
    return found
