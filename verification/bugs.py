"""Bugs for the model, one line each. A search must find all of them."""

import types
from pathlib import Path

from . import model

# For each bug: a piece of a line of model.py, and its replacement.
BUGS = {
    "a request stays when it is answered": (
        "requests = tuple(other for other in state.requests if other != request)",
        "requests = state.requests",
    ),
    "a replacement is not asked what is outstanding": ("if request.worker == index:", "if False:"),
    "a replacement is not told the policy's structure": ("if state.structure:", "if False:"),
    "a replacement is believed to hold what its predecessor held": (
        "held=0, chain=(), behavior=0, measured=0, ",
        "",
    ),
    "messages of a former process are read": ("if process.number != worker.greeted:", "if False:"),
    "whoever says hello is greeted": ("if worker.phase == STARTING else state", ""),
    "a worker that pulls takes another structure only later": (
        'if message[0] == "structure":',
        "if False:",
    ),
    "a worker keeps its weights under another structure": (
        "structure=structure, held=0, chain=()",
        "structure=structure",
    ),
    "the head believes so, too": (
        "worker = worker._replace(held=0, chain=(), behavior=0)\n",
        "pass\n",
    ),
    "who pulls for nobody gets no weights": (
        'case ("pull", held) if worker.phase in (BUILDING, READY):',
        'case ("pull", held) if any(request.worker == index for request in state.requests):',
    ),
    "differences are from what is published, whatever a worker holds": (
        "base, chain = worker.chain, ",
        "base, chain = (state.version - 1,), ",
    ),
    "what came while weights were awaited is done in reverse": (
        "process.later[0])",
        "process.later[-1])",
    ),
    "an interrupted call is not given up": ('if call in ("rollout", "step"):', "if False:"),
    "the end of a lost episode is not told": (
        '"cut" if request.kind == "step" and worker.cut else ',
        "",
    ),
    "nor if it is lost after the answer": ("cut=number != worker.number", "cut=False"),
    "nobody is told that a worker is given up": (
        "requests=requests, error=True",
        "requests=requests",
    ),
}


def model_with(bug: str) -> type[model.Model]:
    """Return the model with one of `BUGS` in it."""
    old, new = BUGS[bug]
    source = Path(model.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is in model.py {source.count(old)} times"
    module = types.ModuleType(model.__name__)
    module.__package__ = model.__package__
    exec(compile(source.replace(old, new), model.__file__, "exec"), module.__dict__)
    return module.Model
