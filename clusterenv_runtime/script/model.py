"""The file of a trained model, ``NAME.cleanrl_model``: all that another program needs to act by it.

It is plain data: ``torch.load(path, weights_only=True)`` gives a dict with the fields of a `Model`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from ..errors import CheckpointError
from .arguments import ScriptArgs
from .checkpoint import dump, replaced


class Model(msgspec.Struct):
    """What a run has trained.

    Attributes:
        model: the ``state_dict`` of what the script trains.
        args: the run's flags, by name.
        script: the name of the script's file, such as ``ppo_clusterenv.py``.
    """

    model: dict[str, Any]
    args: dict[str, Any]
    script: str


def is_finite(model: torch.nn.Module) -> bool:
    """Return whether all weights of a model are finite; its buffers may be masks of infinities."""
    return all(bool(weight.isfinite().all()) for weight in model.parameters())


def save_model(directory: str, state: dict[str, Any], args: ScriptArgs, kind: str = "") -> None:
    """Write a model of this script, whole; if that fails, the one before stays.

    ``kind`` is part of the file's name: ``.best``, or nothing for the last model.

    Raises:
        OSError: it cannot be written.
    """
    path = f"{directory}/{args.exp_name}{kind}.cleanrl_model"
    saved = Model(state, asdict(args), os.path.basename(sys.argv[0]))
    with replaced(path) as file:
        dump(msgspec.structs.asdict(saved), file)


def load_model(path: str) -> Model:
    """Return the model in a file, which may be anybody's, with tensors on the CPU.

    Raises:
        CheckpointError: there is none; the text says why.
    """
    try:
        return msgspec.convert(torch.load(path, map_location="cpu", weights_only=True), Model)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        why = str(error)
    except Exception as error:  # whatever somebody's file makes torch raise, with its own words
        why = type(error).__name__
    raise CheckpointError(f"{path} is no model of a run: {why}")
