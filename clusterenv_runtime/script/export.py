"""Exports the policy of a trained model to ONNX, for programs without torch, or by `torch.export`.

    python -m clusterenv_runtime.script.export runs/NAME model.onnx

The extension of the file selects the format: ``.onnx`` or ``.pt2``.
"""

import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn
from torch.distributions import Distribution

from ..arrays import map_tree
from ..errors import one_line
from ..policy.base import Policy
from ..policy.tensors import to_tensors
from .checks import check
from .environments import of_environment, one_line_for_environments
from .progress import say
from .trained import Trained, TrainedArgs

BATCHES = 3, 1  # the batch sizes of the export and of the check
TOLERANCE = 1e-4
NEEDED = "onnx", "onnxscript", "onnxruntime"


@dataclass
class Args(TrainedArgs):
    """The flags: which model to export, and where to."""

    output: Annotated[str, tyro.conf.Positional] = "model.onnx"
    """the file to write, `.onnx` or `.pt2`"""
    stochastic: bool = False
    """draw actions by noise, which is an input; otherwise take the policy's most likely actions"""


class Acting(nn.Module):
    """A policy as a function of tensors, from the environments' observations to their actions.

    It is called with the values of its inputs, in the order of `example`, and returns its outputs
    by name. All tensors are ``(batch, ...)``. Each leaf of a tree is a separate input or output.

    Args:
        policy: the policy that acts.
        space: a single environment's observation space.
        stochastic: whether the policy draws actions.
    """

    def __init__(self, policy: Policy, space: gym.Space, stochastic: bool) -> None:
        super().__init__()
        self.policy = policy
        self._space = space
        self._stochastic = stochastic
        self._like = self._inputs(BATCHES[0])  # the structure of the inputs

    def example(self, batch: int) -> dict[str, Tensor]:
        """Return sampled inputs by name.

        They are ``observation``, as environments return it; with memory ``state``, and ``starts``,
        which marks where episodes begin; and if actions are drawn ``noise``.
        """
        return _flat(self._inputs(batch))

    @torch.no_grad()
    def _inputs(self, batch: int) -> dict[str, Any]:
        drawn = batch_space(self._space, batch).sample()
        inputs = {"observation": map_tree(torch.as_tensor, drawn)}
        observation = to_tensors(drawn, self.policy)
        state = self.policy.initial_state(batch)
        if state is None:
            params = self.policy(observation)
        else:
            params, inputs["state"] = self.policy(observation, state)
            inputs["starts"] = torch.arange(batch) % 2 == 1
        if self._stochastic:
            first = map_tree(lambda leaf: leaf[:1], params)
            # Workers draw noise for one environment at a time. Its steps serve as a batch here.
            noise = self.policy.noise(batch, first, torch.Generator())
            inputs["noise"] = map_tree(lambda leaf: leaf[:, 0], noise)
        return inputs

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        rest = iter(tensors)
        inputs = map_tree(lambda _: next(rest), self._like)
        outputs = {}
        observation = map_tree(self._converted, inputs["observation"])
        if "state" in inputs:
            state = self.policy.started(inputs["state"], inputs["starts"])
            params, outputs["next_state"] = self.policy(observation, state)
        else:
            params = self.policy(observation)
        if self._stochastic:
            actions = self.policy.act(params, inputs["noise"])
        else:
            actions = self.policy.mode(params)
        return _flat({"action": self.policy.to_env(actions), **outputs})

    def _converted(self, leaf: Tensor) -> Tensor:
        """Convert a leaf as `to_tensors` does."""
        is_float = self.policy.float_observations or leaf.is_floating_point()
        return leaf.float() if is_float else leaf


def _flat(trees: dict[Any, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return the leaves of trees in order, by the keys that lead to each, joined with dots."""
    found = {}
    for key, tree in trees.items():
        part = dict(enumerate(tree)) if isinstance(tree, tuple) else tree
        if isinstance(part, dict):
            found |= _flat(part, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = part
    return found


def export(policy: Policy, space: gym.Space, path: str, stochastic: bool = False) -> str:
    """Write a policy to ``path``, and check that the file computes the same as the policy.

    Args:
        policy: the policy that acts, on the CPU.
        space: a single environment's observation space.
        path: the file, which ends with ``.onnx`` or ``.pt2``.
        stochastic: whether actions are drawn.

    Returns:
        The names, shapes and dtypes of the inputs and outputs.

    Raises:
        Exception: the policy cannot be exported. The type is the one that torch raises.
        ValueError: the file computes something else.
    """
    validates = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # validation would branch on values
    temporary = f"{path}.tmp"
    to_onnx = path.endswith(".onnx")
    try:
        acting = Acting(policy, space, stochastic).eval()
        with _quiet(), torch.no_grad():
            _write(acting, temporary, to_onnx)
            text = _checked(acting, temporary, to_onnx)
        os.replace(temporary, path)
        return text
    finally:
        Distribution.set_default_validate_args(validates)
        if os.path.exists(temporary):
            os.remove(temporary)


def _write(acting: Acting, path: str, to_onnx: bool) -> None:
    inputs = acting.example(BATCHES[0])
    tensors = tuple(inputs.values())
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    program = torch.export.export(acting, tensors, dynamic_shapes=(shapes,))
    if to_onnx:
        torch.onnx.export(
            program, f=path, input_names=[*inputs], output_names=[*acting(*tensors)], dynamo=True,
            external_data=False, verbose=False,
        )  # fmt: skip
    else:
        with open(path, "wb") as file:
            torch.export.save(program, file)


def _checked(acting: Acting, path: str, is_onnx: bool) -> str:
    """Check that a file computes the same as the policy; return its inputs and outputs as text."""
    inputs = acting.example(BATCHES[1])
    expected = acting(*inputs.values())
    if is_onnx:
        session = importlib.import_module("onnxruntime").InferenceSession(path)
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        outputs = dict(zip(expected, session.run(None, arrays), strict=True))
    else:
        outputs = torch.export.load(path).module()(*inputs.values())
    for name, output in outputs.items():
        if not np.allclose(output, expected[name], TOLERANCE, TOLERANCE):
            raise ValueError(f"the file's {name} differs from the policy's")
    return f"{_described(inputs)} -> {_described(expected)}"


def _described(tensors: dict[str, Tensor]) -> str:
    texts = []
    for name, tensor in tensors.items():
        shape = ", ".join(map(str, ("batch", *tensor.shape[1:])))
        texts.append(f"{name} ({shape}) {str(tensor.dtype).removeprefix('torch.')}")
    return ", ".join(texts)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence messages of torch about packages that are not needed."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def main() -> None:
    """Export the model that the command line names."""
    args = tyro.cli(Args, description=__doc__)
    path = args.output
    check(path.endswith((".onnx", ".pt2")), f"{path} must end with .onnx or .pt2")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    needs = f"ONNX needs {', '.join(missing)}: pip install {' '.join(NEEDED)}"
    check(path.endswith(".pt2") or not missing, needs)
    trained = Trained(args)
    with one_line_for_environments(trained.args), of_environment():
        env = trained.env_fn()
        env.close()
    space = env.observation_space
    envs = SimpleNamespace(single_observation_space=space, single_action_space=env.action_space)
    policy = trained.policy(envs)
    try:
        text = export(policy, space, path, args.stochastic)
    except Exception as error:  # torch and ONNX raise many kinds of errors
        hint = ""
        if isinstance(error, NotImplementedError) and not args.stochastic:
            hint = "; does its distribution have a mode? --stochastic needs none"
        elif path.endswith(".onnx"):
            hint = "; a .pt2 file can hold what ONNX cannot"
        check(False, f"{trained.path} cannot be exported to {path}: {one_line(error)}{hint}")
    say(f"{path}: {text}")


if __name__ == "__main__":
    main()
