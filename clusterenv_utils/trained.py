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
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle
import tyro

from clusterenv_runtime import Policy

from .arguments import ScriptArgs, check_code, read_kwargs, saved_flags
from .checkpoint import load
from .errors import CheckpointError, ScriptError, check, one_line_for

PLACES = ".", "scripts"  # the directories to search for scripts
PARTS = "Args", "make_env", "make_policy"  # the parts of a script that are used
KEPT = "env_kwargs", "seed"  # the shared flags that determine a model's environments and seeds


@dataclass
class TrainedArgs:
    """The flags that name a trained model."""

    run: tyro.conf.Positional[str]
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
    """A trained model, which the flags name, and its script.

    Attributes:
        path: the model's file.
        script: the script's file.
        args: the script's flags: those of the algorithm, the environment and the seed as in
            training, and the others' defaults.

    Raises:
        ScriptError: there is no such model or script, or the model does not fit.
    """

    def __init__(self, named: TrainedArgs) -> None:
        self.path = _model_of(named.run, named.best)
        saved = load_model(self.path)
        self._weights = saved["model"]
        self.script = named.script or _script_of(saved["script"])
        self._module = _imported(self.script)
        kind = self._module.Args
        flags = saved_flags(saved["args"], kind, self.path)
        chosen = {"env_id": named.env_id, "env_kwargs": named.env_kwargs}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        given = dataclasses.replace(kind(), **chosen)
        shared = {field.name for field in dataclasses.fields(ScriptArgs)}
        own = [field.name for field in dataclasses.fields(kind) if field.name not in shared]
        trained = {name: getattr(flags, name) for name in (*own, *KEPT)}
        self.args: Any = dataclasses.replace(given, **(trained | chosen))
        vars(self._module)["args"] = self.args  # a script's own functions may read this global
        check_code(self.args, given, self.path)
        with one_line_for(ValueError, text="--env-kwargs"):
            read_kwargs(self.args.env_kwargs)

    def make_env(self, video: str | None = None) -> Any:
        """Return a function that makes the environment, which may record into ``videos/VIDEO``."""
        records = video is not None
        return self._module.make_env(self.args.env_id, 0, records, video, **self.args.make_kwargs)

    def policy(self, envs: Any) -> Policy:
        """Return the policy that acts. ``envs`` has the spaces of a single environment."""
        try:
            model, policy = self._module.make_policy(self.args, envs)
            model.load_state_dict(self._weights)
        except Exception as error:  # whatever the user's networks raise for other spaces
            fits = f"{self.path} does not fit {self.script} on {self.args.env_id}"
            says = " ".join(str(error).split())  # torch's message has several lines
            raise ScriptError(f"{fits}: {type(error).__name__}: {says:.300}") from error
        return cast(Policy, policy.eval())


def load_model(path: str) -> dict[str, Any]:
    """Return what `save_model` has written. The file may be a stranger's."""
    try:
        saved = load(path)
        if saved.keys() != {"model", "args", "script"} or not isinstance(saved["args"], dict):
            raise KeyError
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # whatever torch raises on a stranger's file; report only its type
        raise CheckpointError(f"{path} is not a model of a run: {type(error).__name__}") from None
    return cast(dict[str, Any], saved)


def _model_of(run: str, best: bool) -> str:
    if os.path.isfile(run):
        return run
    check(os.path.isdir(run), f"there is no run {run}")
    found = set(glob.glob(f"{glob.escape(run)}/*.cleanrl_model"))
    bests = {path for path in found if path.endswith(".best.cleanrl_model")}
    found = bests if best else found - bests
    hint = "--eval-interval writes one" if best else "each checkpoint does, but for --no-save-model"
    check(found, f"there is no {'best ' * best}model in {run}: {hint}")
    check(len(found) == 1, f"there are several, name one: {' '.join(sorted(found))}")
    return found.pop()


def _script_of(recorded: str) -> str:
    name = os.path.basename(recorded)  # without a path, which a stranger may have chosen
    paths = [os.path.normpath(os.path.join(place, name)) for place in PLACES]
    found = [path for path in paths if name.endswith(".py") and os.path.isfile(path)]
    where = "neither here nor in scripts/: name its file with --script"
    check(found, f"the script {name!r} is {where}")
    return found[0]


def _imported(path: str) -> ModuleType:
    """Return a script as a module. A file without a script's parts is not run at all."""
    with one_line_for(OSError, text=f"cannot read {path}"):
        text = Path(path).read_text(errors="replace")
    missing = [name for name in PARTS if name not in text]
    check(not missing, f"{path} has no {', '.join(missing)}: docs/after_training.md says what for")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # as if Python ran the script
    loader = SourceFileLoader(f"script {path}", path)  # not another module's name
    spec = importlib.util.spec_from_loader(loader.name, loader)
    if spec is None:
        raise ScriptError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with one_line_for(ModuleNotFoundError, text=f"cannot import {path}"):
        loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # so that workers need not import it
    return module
