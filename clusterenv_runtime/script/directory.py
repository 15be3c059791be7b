"""A run's directory: one process makes it, and all of its learners agree on it."""

from __future__ import annotations

import os

from ..errors import LearnerLostError, RunLockedError
from .arguments import ScriptArgs, check_for_learners, spell
from .checks import check
from .learners.learners import Learners
from .lock import lock


def meet(args: ScriptArgs, learners: Learners, name: str, step: int) -> str:
    """Make the directory of a run that has done so many steps, and meet the other learners; return
    its name.

    Or exit with one line.
    """
    try:
        if learners.world_size > 1:
            check_for_learners(args, learners.world_size)
            flags = {spell(field): value for field, value in vars(args).items()}
            learners.meet({**flags, "done": step}, args.cuda)
        if learners.rank == 0:
            _make(f"runs/{name}", args)
        name = learners.tell("name", name)
    except LearnerLostError as error:
        check(False, error)
    check(os.path.basename(name) == name, f"the first learner's run is {name!r}, no name")
    return name


def _make(directory: str, args: ScriptArgs) -> None:
    named = args.resume is not None or args.run_name is not None
    try:
        os.makedirs(directory, exist_ok=named)
        lock(directory)
    except RunLockedError as error:
        check(False, error)
    except OSError as error:
        check(False, f"cannot write to {directory}: {error.strerror}")
    begun = any(name.startswith("checkpoint-") for name in os.listdir(directory))
    to_go_on = f"to go on: --resume {directory}, else another --run-name"
    check(args.resume or not begun, f"{directory} has begun already; {to_go_on}")
