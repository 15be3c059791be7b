"""The distributions of parameters under W&B's names, and the check of their descriptions."""

import math

import numpy as np

from .checks import check, is_number

RANGE, NORMAL, BETA = {"min": None, "max": None}, {"mu": 0.0, "sigma": 1.0}, {"a": 1.0, "b": 1.0}
# Each distribution's keys with their defaults (None: must be given), and a function that draws.
DISTRIBUTIONS = {
    "constant": ({"value": None}, lambda rng, value: value),
    "categorical": (
        {"values": None, "probabilities": ()},
        lambda rng, values, probabilities: values[rng.choice(len(values), p=probabilities or None)],
    ),
    "int_uniform": (RANGE, lambda rng, min, max: int(rng.integers(min, max, endpoint=True))),
    "uniform": (RANGE, lambda rng, min, max: rng.uniform(min, max)),
    "normal": (NORMAL, lambda rng, mu, sigma: rng.normal(mu, sigma)),
    "beta": (BETA, lambda rng, a, b: rng.beta(a, b)),
    "log_normal": (NORMAL, lambda rng, mu, sigma: rng.lognormal(mu, sigma)),
    "log_uniform": (
        RANGE,
        lambda rng, min, max: math.exp(rng.uniform(min, max)),
    ),  # min and max are exponents of e
    "inv_log_uniform": (RANGE, lambda rng, min, max: math.exp(-rng.uniform(min, max))),
    "log_uniform_values": (
        RANGE,
        lambda rng, min, max: math.exp(rng.uniform(math.log(min), math.log(max))),
    ),
    "inv_log_uniform_values": (
        RANGE,
        lambda rng, min, max: math.exp(-rng.uniform(-math.log(max), -math.log(min))),
    ),
}


def quantized(draw):
    return lambda rng, q, **keys: round(draw(rng, **keys) / q) * q


weighted = ({"values": None, "probabilities": None}, DISTRIBUTIONS["categorical"][1])
DISTRIBUTIONS["categorical_w_probabilities"] = weighted
for name in ("uniform", "normal", "beta", "log_normal", "log_uniform", "log_uniform_values"):
    keys, draw = DISTRIBUTIONS[name]
    DISTRIBUTIONS[f"q_{name}"] = ({**keys, "q": 1}, quantized(draw))


def check_parameter(name, keys):
    """Check the description of one parameter. Return its distribution and all of its keys."""

    def need(fine, message):
        check(fine, f"parameter {name}: {message}")

    need(isinstance(keys, dict), f"expected value, values or a distribution, got {keys!r}")
    keys = dict(keys)
    whole = type(keys.get("min")) is type(keys.get("max")) is int
    kinds = {
        "value": "constant",
        "values": "categorical",
        "min": "int_uniform" if whole else "uniform",
    }
    kind = str(
        keys.pop("distribution", next((kinds[key] for key in kinds if key in keys), "uniform"))
    )
    need(
        kind in DISTRIBUTIONS,
        f"distribution {kind} is not supported; supported: {', '.join(DISTRIBUTIONS)}",
    )
    allowed, draw = DISTRIBUTIONS[kind]
    for key in keys:
        need(key in allowed, f"{kind} has no key {key}; it has: {', '.join(allowed)}")
    for key, default in allowed.items():
        need(key in keys or default is not None, f"{kind} needs {key}")
    keys = {**allowed, **keys}
    if kind.startswith("categorical"):
        values, odds = keys["values"], keys["probabilities"]
        need(isinstance(values, list) and values, f"values must be a list, not {values!r}")
        fine = isinstance(odds, list) and len(odds) == len(values) and all(map(is_number, odds))
        wanted = f"probabilities must be one for each of the {len(values)} values and sum to 1"
        need(odds == () or fine and math.isclose(sum(odds), 1), wanted)
    elif kind != "constant":
        for key, value in keys.items():
            hint = "; YAML takes 1e-3 for a word, write 1.0e-3" if isinstance(value, str) else ""
            need(is_number(value), f"{key} must be a number, got {value!r}{hint}")
            positive = key in ("q", "a", "b", "sigma") or key == "min" and kind.endswith("values")
            need(value > 0 or not positive, f"{key} must be > 0, got {value}")
        low, high = keys.get("min", 0), keys.get("max", 1)
        need(low < high, f"min {low} must be less than max {high}")
        need(whole or kind != "int_uniform", "min and max of int_uniform must be integers")
        fine = not kind.endswith("log_uniform") or max(abs(low), abs(high)) < 700
        need(
            fine,
            f"min and max of {kind} are exponents of e, at most 700; limits themselves: "
            f"{kind}_values",
        )
    try:
        draw(np.random.default_rng(0), **keys)
    except (ValueError, OverflowError) as error:
        need(False, f"{kind} cannot draw from this: {error}")
    return kind, keys
