"""The page docs/flags.md: ``python -m docs.flags > docs/flags.md``, from the root of the
repository.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterable

from clusterenv_runtime.options import ClusterOptions
from clusterenv_runtime.script.arguments import ScriptArgs, spell

SCRIPTS = {
    "PPO": "ppo_clusterenv",
    "PPO with several learners": "scripts.ppo_multilearner_clusterenv",
    "Continuous PPO": "scripts.ppo_continuous_clusterenv",
    "PPO with memory": "scripts.ppo_lstm_clusterenv",
    "PPO on Atari": "scripts.ppo_atari_clusterenv",
    "PPO on MinAtar": "scripts.ppo_minatar_clusterenv",
    "DQN": "dqn_clusterenv",
    "DQN on Atari": "scripts.dqn_atari_clusterenv",
}
HEAD = """# Flags

These are the flags of the eight scripts. Hyphens and underscores are both accepted. A boolean is
`--x`, `--no-x`, `--x=True` or `--x=False`. This page is
generated from the code: `python -m docs.flags > docs/flags.md`.
"""


def page() -> str:
    """Return the page, in Markdown."""
    kinds = {name: importlib.import_module(module).Args for name, module in SCRIPTS.items()}
    options, shared = names(ClusterOptions), names(ScriptArgs)
    parts = [HEAD]
    parts += ["## Workers, their link, when they pull, and what", "", table(kinds, options)]
    parts += ["## The run", "", table(kinds, [name for name in shared if name not in options])]
    for name, kind in kinds.items():
        own = [flag for flag in names(kind) if flag not in shared]
        parts += [f"## {name}", "", table({name: kind}, own)]
    return "\n".join(parts).rstrip() + "\n"


def names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def table(kinds: dict[str, type], flags: Iterable[str]) -> str:
    """Return a table of these flags, with a column of defaults for each script."""
    heads = ["flag", *(f"{name}'s default" for name in kinds), ""]
    rows = [heads, ["---"] * len(heads)]
    for flag in flags:
        texts = dict.fromkeys(text_of(kind, flag) for kind in kinds.values())
        rows.append(
            [
                f"`{spell(flag)}`",
                *(default(kind, flag) for kind in kinds.values()),
                "; ".join(texts),
            ]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def default(kind: type, flag: str) -> str:
    value = getattr(kind(), flag)
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, "") else f"`{value}`"


def text_of(kind: type, flag: str) -> str:
    """Return the docstring below a field, of this class or of one that it inherits from, as one
    line.
    """
    for cls in kind.__mro__:
        body = (
            ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
            if cls is not object
            else []
        )
        for statement, after in zip(body, body[1:], strict=False):
            field = isinstance(statement, ast.AnnAssign) and statement.target.id == flag
            if field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return " ".join(after.value.value.split()).replace("|", "\\|")
    raise LookupError(f"{kind.__qualname__}.{flag} has no text")


if __name__ == "__main__":
    print(page(), end="")
