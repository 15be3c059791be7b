"""The help of a script's flags: in groups, each flag with the text below its field."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NoReturn

import tyro

from .output import until_pipe_closes


def names(kind: type) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(kind)]


def show_help(groups: Mapping[str, Iterable[str]], default: Any) -> NoReturn:
    """Print the help of a dataclass's flags, in these groups of its fields, and exit."""
    kind = type(default)
    hints = typing.get_type_hints(kind, include_extras=True)

    def field(name: str) -> tuple[str, Any, Any]:
        hint = Annotated[hints[name], tyro.conf.arg(help=text_of(kind, name))]
        return name, hint, dataclasses.field(default=getattr(default, name))

    kinds = {
        group: dataclasses.make_dataclass(group, map(field, groups[group])) for group in groups
    }
    fields = [(name, each, dataclasses.field(default_factory=each)) for name, each in kinds.items()]
    flags = dataclasses.make_dataclass("Flags", fields)
    with until_pipe_closes():
        tyro.cli(flags, args=["--help"], config=(tyro.conf.OmitArgPrefixes,))


def text_of(kind: type, name: str) -> str:
    """Return the text below a field of a class or its bases, in one line; empty if none."""
    texts = (_texts_of(each).get(name) for each in kind.__mro__)
    return next(filter(None, texts), "")


@functools.cache
def _texts_of(kind: type) -> dict[str, str]:
    """Return the texts below the fields that a class itself defines, if its source is available."""
    if not dataclasses.is_dataclass(kind):
        return {}
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    body = ast.parse(source).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
