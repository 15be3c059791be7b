"""Bugs for the model, one line each. A search must find all of them."""

import types
from pathlib import Path

from . import model

# For each bug: a piece of a line of model.py, and its replacement.
BUGS = {
    "an answered request stays outstanding": (
        "requests = tuple(other for other in state.requests if other != request)",
        "requests = state.requests",
    ),
    "a replacement gets no outstanding requests": ("if request.worker == index:", "if False:"),
    "a replacement does not get the policy's structure": ("if state.structure:", "if False:"),
    "a replacement is believed to hold its predecessor's weights": (
        "worker._replace(held=0, chain=(), behavior=0, measured=0)",
        "worker",
    ),
    "messages of a former process are read": ("if process.number != worker.greeted:", "if False:"),
    "a hello is accepted at any time": ("if worker.phase == STARTING else state", ""),
    "a worker that pulls handles a new structure too late": (
        'if message[0] == "structure":',
        "if False:",
    ),
    "a worker keeps its weights under another structure": (
        "structure=structure, held=0, chain=()",
        "structure=structure",
    ),
    "the head believes that a worker keeps its weights under another structure": (
        "worker = worker._replace(held=0, chain=(), behavior=0)\n",
        "pass\n",
    ),
    "a pull without an outstanding request gets no weights": (
        'case ("pull", held) if worker.phase in (BUILDING, READY):',
        'case ("pull", held) if any(request.worker == index for request in state.requests):',
    ),
    "differences start from the previous version, whatever a worker holds": (
        "base, chain = worker.chain, ",
        "base, chain = (state.version - 1,), ",
    ),
    "messages that came during a pull are handled in reverse": (
        "process.later[0])",
        "process.later[-1])",
    ),
    "an interrupted call is not given up": (
        'if call in ("rollout", "step", "reset"):',
        "if False:",
    ),
    "the end of a lost episode is not reported": ("if worker.seen:", "if False:"),
    "an episode lost after its step is not reported": ("if number != worker.number:", "if False:"),
    "episodes begun by a reset are reported lost": (
        "process._replace(cut=False).says(",
        "process._replace(cut=process.cut and kind == 'reset').says(",
    ),
    "a step after a rollout reports episodes that were lost before": (
        "process._replace(request=None, cut=False)",
        "process._replace(request=None)",
    ),
    "the user is not told that a worker is given up": (
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
