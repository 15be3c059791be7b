"""A sweep file in W&B's format: its configurations, and the command of each."""

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

try:
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )
except ImportError:
    sys.exit("error: sweeps need Optuna: pip install optuna")

MACROS = ("${env}", "${interpreter}", "${program}", "${args}")


def check(fine: Any, message: str) -> None:
    """End this process with one line if something is not fine."""
    if not fine:
        sys.exit(f"error: {message}")


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """W&B's keys of a parameter that is not one of some values."""

    min: int | float
    max: int | float
    distribution: Literal["int_uniform", "uniform", "log_uniform_values"] | None = None


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
        for word in self.command:
            if "${" in word and word not in MACROS:
                raise ValueError(f"macro {word} is not one of {' '.join(MACROS)}")
        if self.method != "grid" and not self.run_cap:
            raise ValueError(f"method {self.method} needs run_cap, the number of configurations")
        self.varied  # noqa: B018, to check the parameters

    @property
    def varied(self) -> dict[str, BaseDistribution]:
        """Optuna's distribution of each parameter that has not just one value."""
        found = {}
        for name, keys in self.parameters.items():
            try:
                if keys.keys() - {"distribution"} != {"value"}:
                    found[name] = distribution_of(keys, self.method)
            except (msgspec.ValidationError, ValueError) as error:
                raise ValueError(f"parameter {name}: {error}") from None
        return found

    def grid(self) -> list[dict[str, Any]]:
        """Return the configurations of a grid in W&B's order: by name, the last name fastest."""
        if self.method != "grid":
            return []
        names = sorted(self.varied)
        rows = itertools.product(*(self.parameters[name]["values"] for name in names))
        found = (dict(zip(names, row, strict=True)) for row in rows)
        return [self.configuration(each) for each in itertools.islice(found, self.run_cap)]

    def configuration(self, varied: dict[str, Any]) -> dict[str, Any]:
        """Return the values of all parameters, in the file's order."""
        return {name: keys.get("value") for name, keys in self.parameters.items()} | varied

    def name_of(self, configuration: dict[str, Any]) -> str:
        """Return the name of a configuration's directory, which stays when the grid grows."""
        return hashed([self.program, self.command, configuration])

    def study_name(self) -> str:
        """Return a name that changes with the file, but not if more is drawn at random."""
        cap = self.run_cap if self.method == "grid" else None
        parts = [self.program, self.command, self.parameters, self.method, self.metric, cap]
        return hashed(parts)

    def words(self, configuration: dict[str, Any], python: str, program: str) -> list[str]:
        """Return the command that runs a configuration."""
        args = [f"--{name}={value}" for name, value in configuration.items()]
        macros = dict(zip(MACROS, ([], [python], [program], args), strict=True))
        return [part for word in self.command for part in macros.get(word, [word])]

    def label(self, configuration: dict[str, Any]) -> str:
        """Return the parameters that vary, if any, in one line, with six digits of a number."""
        values = [(name, configuration[name]) for name in self.varied or self.parameters]
        return " ".join(f"{n}={v:.6g}" if isinstance(v, float) else f"{n}={v}" for n, v in values)


def distribution_of(keys: dict[str, Any], method: str) -> BaseDistribution:
    if keys.keys() - {"distribution"} == {"values"}:
        return CategoricalDistribution(msgspec.convert(keys["values"], list[Any]))
    if method == "grid":
        raise ValueError(f"method grid takes value or values, got {', '.join(keys)}")
    limits = msgspec.convert(keys, Limits)
    low, high, kind = limits.min, limits.max, limits.distribution
    if kind in (None, "int_uniform") and type(low) is type(high) is int:
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=kind == "log_uniform_values")


def hashed(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def load(path: Path) -> Sweep:
    """Read a sweep file. A mistake in it ends this process with one line."""
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Sweep)
    except (OSError, msgspec.DecodeError) as error:
        sys.exit(f"error: {path}: {' '.join(str(error).split())}")
