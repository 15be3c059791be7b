"""The page docs/flags.md. From the repository's root: ``python -m docs.flags > docs/flags.md``."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable

from clusterenv_runtime.options import ClusterOptions
from clusterenv_utils import ScriptArgs
from clusterenv_utils.arguments import spell

SCRIPTS = {
    "PPO": "ppo_clusterenv",
    "PPO with several learners": "scripts.ppo_multilearner_clusterenv",
    "Continuous PPO": "scripts.ppo_continuous_clusterenv",
    "PPO with memory": "scripts.ppo_lstm_clusterenv",
    "PPO on Atari": "scripts.ppo_atari_clusterenv",
    "PPO on MinAtar": "scripts.ppo_minatar_clusterenv",
    "DQN": "dqn_clusterenv",
    "DQN on Atari": "scripts.dqn_atari_clusterenv",
    "SAC": "scripts.sac_clusterenv",
}
HEAD = """# Flags

These are the flags of the nine scripts. Hyphens and underscores are both accepted. A boolean is
`--x`, `--no-x`, `--x=True` or `--x=False`. This page is
generated from the code: `python -m docs.flags > docs/flags.md`.
"""


def page() -> str:
    """Return the page, in Markdown."""
    kinds = {name: importlib.import_module(module).Args for name, module in SCRIPTS.items()}
    workers, shared = names(ClusterOptions), names(ScriptArgs)
    of_run = [name for name in shared if name not in workers]
    parts = [HEAD]
    parts += ["## Workers, connections and pulls", ""]
    parts += [table(kinds, workers)]
    parts += ["## The run", "", table(kinds, of_run)]
    for name, kind in kinds.items():
        own = [flag for flag in names(kind) if flag not in shared]
        parts += [f"## {name}", "", table({name: kind}, own)]
    return "\n".join(parts).rstrip() + "\n"


def names(kind: type) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(kind)]


def text_of(kind: type, name: str) -> str:
    """Return the text below a field of a class or its bases, in one line; empty if none."""
    texts = (_texts_of(each).get(name) for each in kind.__mro__)
    return next(filter(None, texts), "")


@functools.cache
def _texts_of(kind: type) -> dict[str, str]:
    """Return the texts below the fields that a class itself defines."""
    if not dataclasses.is_dataclass(kind):
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def table(kinds: dict[str, type], flags: Iterable[str]) -> str:
    """Return a table of these flags, with what each does and its default."""
    rows = [["flag", "what it does", "default"], ["---"] * 3]
    for flag in flags:
        texts = dict.fromkeys(text_of(kind, flag).replace("|", "\\|") for kind in kinds.values())
        rows.append([f"`{spell(flag)}`", "; ".join(texts), defaults(kinds, flag)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def defaults(kinds: dict[str, type], flag: str) -> str:
    """Return the default of most scripts, and the other defaults with the scripts' names."""
    if flag == "exp_name":
        return "the script's name"
    values = {name: default(kind, flag) for name, kind in kinds.items()}
    (usual, _), *others = Counter(values.values()).most_common()
    texts = [usual or "none"]
    for value, _ in others:
        names = " and ".join(name for name in values if values[name] == value)
        texts.append(f"{names}: {value or 'none'}")
    return "; ".join(texts)


def default(kind: type, flag: str) -> str:
    """Return a script's default of a flag, or an empty text if there is none."""
    value = getattr(kind(), flag)
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, "") else f"`{value}`"


if __name__ == "__main__":
    print(page(), end="")
