"""The file of a trained model, ``NAME.cleanrl_model``: all that another program needs to use it.

It is plain data: ``torch.load(path, weights_only=True)`` returns a dict of the fields of `Model`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from clusterenv_runtime.errors import CheckpointError

from .arguments import ScriptArgs
from .checkpoint import dump, replaced


class Model(msgspec.Struct):
    """A model that a run has trained.

    Attributes:
        model: the ``state_dict`` of the module that the script trains.
        args: the run's flags, by name.
        script: the name of the script's file, for example ``ppo_clusterenv.py``.
    """

    model: dict[str, Any]
    args: dict[str, Any]
    script: str


def is_finite(model: torch.nn.Module) -> bool:
    """Return whether all weights of a model are finite. Its buffers may be masks of infinities."""
    return all(bool(weight.isfinite().all()) for weight in model.parameters())


def save_model(directory: str, state: dict[str, Any], args: ScriptArgs, kind: str = "") -> None:
    """Write a model of this script as a whole file. If that fails, the previous file stays.

    ``kind`` is part of the file's name: ``.best``, or empty for the last model.

    Raises:
        OSError: the file cannot be written.
    """
    path = f"{directory}/{args.exp_name}{kind}.cleanrl_model"
    saved = Model(state, asdict(args), os.path.basename(sys.argv[0]))
    with replaced(path) as file:
        dump(msgspec.structs.asdict(saved), file)


def load_model(path: str) -> Model:
    """Return the model in a file, with tensors on the CPU. The file may be a stranger's.

    Raises:
        CheckpointError: the file cannot be read, or is not a model; the message says why.
    """
    try:
        return msgspec.convert(torch.load(path, map_location="cpu", weights_only=True), Model)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        why = str(error)
    except Exception as error:  # whatever torch raises on a stranger's file; report only its type
        why = type(error).__name__
    raise CheckpointError(f"{path} is not a model of a run: {why}")
