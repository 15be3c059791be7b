"""A sweep file in W&B's format: its configurations, and the command of each."""

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

MACROS = ("${env}", "${interpreter}", "${program}", "${args}")
# W&B's distributions of real numbers, and whether their logarithm is what is uniform.
UNIFORM = {None: False, "uniform": False, "log_uniform_values": True}


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number in the runs' summary.json."""

    name: str
    goal: Literal["minimize", "maximize"] = "minimize"


class Sweep(msgspec.Struct, forbid_unknown_fields=True):
    """A sweep file, with W&B's keys and defaults."""

    program: str
    method: Literal["grid", "random", "bayes"]
    parameters: dict[str, dict[str, Any]]
    metric: Metric = Metric("eval_return_mean", "maximize")
    command: tuple[str, ...] = MACROS
    run_cap: Annotated[int, msgspec.Meta(ge=1)] | None = None
    # How W&B shows the sweep.
    name: str = ""
    description: str = ""
    project: str = ""
    entity: str = ""

    def __post_init__(self) -> None:
        if not Path(self.program).is_file():
            raise ValueError(f"no program {self.program} in {Path.cwd()}")
        if self.method != "grid" and not self.run_cap:
            raise ValueError(f"method {self.method} needs run_cap, the number of configurations")
        self.space  # noqa: B018, to check the parameters

    @property
    def space(self) -> dict[str, BaseDistribution]:
        """What Optuna draws each parameter from. One that has a value has only this choice."""
        found = {}
        for name, keys in self.parameters.items():
            try:
                found[name] = distribution_of(keys, self.method)
            except ValueError as error:
                raise ValueError(f"parameter {name}: {error}") from None
        return found

    def grid(self) -> list[dict[str, Any]]:
        """Return the configurations of a grid in W&B's order: by name, the last name fastest."""
        space = dict(sorted(self.space.items()))
        rows = itertools.product(*(each.choices for each in space.values()))
        return [dict(zip(space, row, strict=True)) for row in itertools.islice(rows, self.run_cap)]

    def name_of(self, content: Any) -> str:
        """Return a name for a configuration or something else that this program runs with."""
        text = json.dumps([self.program, self.command, content], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def words(self, configuration: dict[str, Any], python: str, program: str) -> list[str]:
        """Return the command that runs a configuration."""
        args = [f"--{name}={value}" for name, value in configuration.items()]
        macros = dict(zip(MACROS, ([], [python], [program], args), strict=True))
        return [part for word in self.command for part in macros.get(word, [word])]


def distribution_of(keys: dict[str, Any], method: str) -> BaseDistribution:
    """Return what a parameter with these keys of W&B's is drawn from."""
    kind = keys.get("distribution")
    match sorted(pair for pair in keys.items() if pair[0] != "distribution"):
        case [("value", value)]:
            return CategoricalDistribution([value])
        case [("values", [*values])]:
            return CategoricalDistribution(values)
        case _ if method == "grid":
            raise ValueError(f"method grid takes value or values, got {keys}")
        case [("max", int(high)), ("min", int(low))] if kind in (None, "int_uniform"):
            return IntDistribution(low, high)
        case [("max", int() | float() as high), ("min", int() | float() as low)] if kind in UNIFORM:
            return FloatDistribution(low, high, log=UNIFORM[kind])
    kinds = "int_uniform, uniform or log_uniform_values"
    raise ValueError(f"expected value, values, or the min and max of {kinds}, got {keys}")


def load(path: Path) -> Sweep:
    """Read a sweep file. A mistake in it ends this process with one line."""
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Sweep)
    except (OSError, msgspec.DecodeError) as error:
        sys.exit(f"error: {path}: {' '.join(str(error).split())}")
