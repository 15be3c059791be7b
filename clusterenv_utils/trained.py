"""A trained model with its script, which makes the environments and the policy that acts.

A model's file may be a stranger's. It names a script, which is searched for only where the user's
own scripts are.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import cloudpickle
import gymnasium as gym
import tyro

from clusterenv_runtime.errors import CheckpointError
from clusterenv_runtime.policy.base import Policy

from .arguments import ScriptArgs, groups_of, read_kwargs
from .checks import check, one_line_for
from .directory import check_exists
from .model import Model, load_model
from .resume import check_code, saved_flags

PLACES = ".", "scripts"  # the directories to search for scripts
PARTS = "Args", "make_env", "make_policy"  # the parts of a script that are used
# The shared flags that determine a model's environments and seeds.
KEPT = "env_kwargs", "seed"


@dataclass
class TrainedArgs:
    """The flags that name a trained model."""

    run: Annotated[str, tyro.conf.Positional]
    """the run's directory, `runs/NAME`, or the file of a model"""
    best: bool = False
    """take the best model of `--eval-interval`, not the last one"""
    script: str | None = None
    """the script's file; by default the script with the recorded name, here or in `scripts/`"""
    env_id: str | None = None
    """the environment, to replace that of training, or to confirm one whose id can run code"""
    env_kwargs: str | None = None
    """arguments for the environment's constructor, to replace or confirm those of training"""


class Trained:
    """A trained model, and its script.

    Any error ends the process with a one-line message.

    Args:
        flags: the flags that name the model.

    Attributes:
        path: the model's file.
        script: the script's file.
        module: the script.
        args: the script's flags. Those of the algorithm, the environment and the seed are as in
            training, unless ``flags`` replaces them.
    """

    def __init__(self, flags: TrainedArgs) -> None:
        self.path = _model_of(flags.run, flags.best)
        with one_line_for(CheckpointError):
            self._saved = load_model(self.path)
        self.script = _script_of(self._saved, flags.script)
        self.module = _imported(self.script)
        self.args = self._flags_of(flags)

    def _flags_of(self, flags: TrainedArgs) -> ScriptArgs:
        kind = self.module.Args
        saved = saved_flags(self._saved.args, kind, self.path)
        of_envpool = saved.env_backend == "envpool" and saved.env_id not in gym.registry
        theirs = f"{self.path} was trained on EnvPool's {saved.env_id}"
        hint = "name Gymnasium's with --env-id, as in ALE/Pong-v5"
        check(flags.env_id or not of_envpool, f"{theirs}: {hint}")
        chosen = {"env_id": flags.env_id, "env_kwargs": flags.env_kwargs}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        given = dataclasses.replace(kind(), **chosen)
        trained = {name: getattr(saved, name) for name in [*groups_of(kind)["algorithm"], *KEPT]}
        args = dataclasses.replace(given, **(trained | chosen))
        check_code(args, given, self.path)
        with one_line_for(ValueError, text="--env-kwargs"):
            read_kwargs(args.env_kwargs)
        return args

    @property
    def env_fn(self) -> Callable[[], gym.Env]:
        """A function that makes the environment."""
        return self.module.make_env(self.args.env_id, 0, False, "", **self.args.make_kwargs)

    def policy(self, envs: Any) -> Policy:
        """Return the policy that acts.

        ``envs`` provides ``single_observation_space`` and ``single_action_space``.
        """
        try:
            model, policy = self.module.make_policy(self.args, envs)
            model.load_state_dict(self._saved.model)
        except Exception as error:  # whatever the user's networks raise for other spaces
            fits = f"{self.path} does not fit {self.script} on {self.args.env_id}"
            says = " ".join(str(error).split())  # torch's message has several lines
            check(False, f"{fits}: {type(error).__name__}: {says:.300}")
        return policy.eval()


def _model_of(run: str, best: bool) -> str:
    """Return the file of a run's model, or exit with a one-line error."""
    if os.path.isfile(run):
        return run
    check_exists(run)
    kind, hint = "model", "each checkpoint writes one, except with --no-save-model"
    found = set(glob.glob(f"{glob.escape(run)}/*.cleanrl_model"))
    bests = {path for path in found if path.endswith(".best.cleanrl_model")}
    if best:
        kind, hint = "best model", "--eval-interval writes one"
        found = bests
    else:
        found -= bests
    check(found, f"there is no {kind} in {run}: {hint}")
    check(len(found) == 1, f"there are several, name one: {' '.join(sorted(found))}")
    return found.pop()


def _script_of(model: Model, given: str | None) -> str:
    """Return the file of a model's script, or exit with a one-line error."""
    if given is not None:
        check(os.path.isfile(given), f"--script: there is no file {given}")
        return given
    name = os.path.basename(model.script)  # without a path, which a stranger may have chosen
    paths = [os.path.normpath(os.path.join(place, name)) for place in PLACES]
    found = [path for path in paths if os.path.isfile(path)]
    where = "neither here nor in scripts/: name its file with --script"
    check(name.endswith(".py") and found, f"the script {name!r} is {where}")
    return found[0]


def _imported(path: str) -> ModuleType:
    """Return a script as a module, or exit with a one-line error.

    A file without a script's parts is not run at all, because a stranger may have named it.
    """
    with one_line_for(OSError, text=f"cannot read {path}"):
        text = Path(path).read_text(errors="replace")
    missing = [name for name in PARTS if name not in text]
    check(not missing, f"{path} has no {', '.join(missing)}: docs/after_training.md says what for")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # as if Python ran the script
    name = f"script {path}"  # not another module's name
    loader = SourceFileLoader(name, path)  # whatever the file's suffix is
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with one_line_for(ModuleNotFoundError, text=f"cannot import {path}"):
        loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # so that workers need not import it
    return module
