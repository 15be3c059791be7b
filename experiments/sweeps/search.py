"""Method bayes: each configuration is drawn just before it runs, from the results so far.

The draws are those of Optuna's tree-structured Parzen estimator, https://optuna.org.
"""

import json
import math
import warnings

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState, create_trial

from .attempts import directory_of, replace, result_of
from .checks import check
from .metrics import value_of

TAKES = (
    "values without probabilities, int_uniform, uniform, q_uniform, log_uniform and "
    "log_uniform_values"
)
OTHER = "was drawn from other parameters: choose another --output, or delete it"


def distribution_of(kind, keys):
    """Return Optuna's distribution of a parameter, or None if Optuna lacks it."""
    low, high, step = keys.get("min"), keys.get("max"), keys.get("q")
    if kind == "categorical" and not keys["probabilities"]:
        return CategoricalDistribution(keys["values"])
    whole = all(type(each) is int for each in keys.values())
    if kind == "int_uniform" or kind == "q_uniform" and whole:
        return IntDistribution(low, high, step=step or 1)
    if kind in ("uniform", "q_uniform"):
        return FloatDistribution(low, high, step=step)
    if kind == "log_uniform":
        return FloatDistribution(math.exp(low), math.exp(high), log=True)
    if kind == "log_uniform_values":
        return FloatDistribution(low, high, log=True)
    return None


def distributions_of(sweep):
    """Return Optuna's distributions of the parameters that vary, by their dotted names."""
    found = {}
    for path, (kind, keys) in sweep["flat"].items():
        name = ".".join(path)
        if kind == "constant":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about values that its storages could not keep
            found[name] = distribution_of(kind, keys)
        refusal = f"parameter {name}: method bayes cannot use {kind} here; it takes {TAKES}"
        check(found[name], refusal)
    return found


class Search:
    """The configurations that have been drawn, each in a file of `output`/drawn. `take` draws more.

    Attributes:
        number: The number of configurations in the end.
    """

    def __init__(self, sweep, seed, output):
        self.number = sweep["run_cap"]
        self._sweep = sweep
        self._seed = seed
        self._output = output
        self._distributions = distributions_of(sweep)
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    def known(self):
        """Return the configurations that have been drawn, by their indices."""
        paths = {int(path.stem): path for path in self._output.glob("drawn/*.json")}
        return {index: self._read(paths[index]) for index in sorted(paths) if index < self.number}

    def _read(self, path):
        drawn = json.loads(path.read_text())
        names = [".".join(each) for each in self._sweep["flat"]]
        check(sorted(drawn) == sorted(names), f"{path} {OTHER}")
        return {each: drawn[name] for each, name in zip(self._sweep["flat"], names, strict=True)}

    def take(self, index):
        """Return a configuration. Draw it first if it has not been drawn."""
        known = self.known()
        if index not in known:
            known[index] = self._draw(index, known)
            path = self._output / "drawn" / f"{index}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn = {".".join(each): value for each, value in known[index].items()}
            replace(path, lambda temporary: temporary.write_text(json.dumps(drawn)))
        return known[index]

    def _draw(self, index, known):
        """Draw a configuration, which depends on the seed, its index and the known results."""
        seed = int(np.random.SeedSequence([self._seed, index]).generate_state(1)[0])
        # A run without a result, running or failed, counts as bad, so the next draws are elsewhere.
        sampler = TPESampler(seed=seed, constant_liar=True)
        study = optuna.create_study(direction=self._sweep["metric"]["goal"], sampler=sampler)
        for other, flat in known.items():
            directory = directory_of(self._sweep, flat, self._output)
            result = result_of(directory)
            value = value_of(self._sweep, directory, result) if result else None
            values = {".".join(each): value for each, value in flat.items()}
            try:
                study.add_trial(
                    create_trial(
                        state=TrialState.RUNNING if value is None else TrialState.COMPLETE,
                        value=value,
                        params={name: values[name] for name in self._distributions},
                        distributions=self._distributions,
                    )
                )
            except ValueError:
                check(False, f"{self._output}/drawn/{other}.json {OTHER}")
        drawn = study.ask(self._distributions).params
        return {
            each: keys["value"] if kind == "constant" else drawn[".".join(each)]
            for each, (kind, keys) in self._sweep["flat"].items()
        }
