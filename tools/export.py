"""Export the policy of a trained model to ONNX, for programs without torch, or by `torch.export`.

    python tools/export.py runs/NAME model.onnx

The extension of the file selects the format: ``.onnx`` or ``.pt2``.
"""

import os
import sys
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from gymnasium.vector.utils import batch_space
from torch import nn
from torch.distributions import Distribution

from clusterenv_runtime.arrays import map_tree
from clusterenv_runtime.errors import one_line
from clusterenv_runtime.policy.tensors import to_tensors
from clusterenv_utils.errors import ScriptError, check, one_line_for_environments, print_error
from clusterenv_utils.trained import Trained, TrainedArgs

BATCHES = 3, 1  # the batch sizes of the export and of the check
TOLERANCE = 1e-4


@dataclass
class Args(TrainedArgs):
    output: tyro.conf.Positional[str] = "model.onnx"
    """the file to write, `.onnx` or `.pt2`"""
    stochastic: bool = False
    """draw actions by noise, which is an input; otherwise take the policy's most likely actions"""


class Acting(nn.Module):
    """A policy as a function of tensors, from the environments' observations to their actions.

    It is called with the values of its inputs, in the order of `example`, and returns its outputs
    by name. All tensors are ``(batch, ...)``. Each leaf of a tree is a separate input or output.
    ``space`` is a single environment's observation space.
    """

    def __init__(self, policy, space, stochastic):
        super().__init__()
        self.policy, self._space, self._stochastic = policy, space, stochastic
        self._like = self._inputs(BATCHES[0])  # the structure of the inputs

    def example(self, batch):
        """Return sampled inputs by name.

        They are ``observation``, as environments return it; with memory ``state``, and ``starts``,
        which marks where episodes begin; and if actions are drawn ``noise``.
        """
        return flat(self._inputs(batch))

    @torch.no_grad()
    def _inputs(self, batch):
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

    def forward(self, *tensors):
        rest, outputs = iter(tensors), {}
        inputs = map_tree(lambda _: next(rest), self._like)
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
        return flat({"action": self.policy.to_env(actions), **outputs})

    def _converted(self, leaf):
        """Convert a leaf as `to_tensors` does."""
        is_float = self.policy.float_observations or leaf.is_floating_point()
        return leaf.float() if is_float else leaf


def flat(trees, prefix=""):
    """Return the leaves of trees in order, by the keys that lead to each, joined with dots."""
    found = {}
    for key, tree in trees.items():
        part = dict(enumerate(tree)) if isinstance(tree, tuple) else tree
        found |= (
            flat(part, f"{prefix}{key}.") if isinstance(part, dict) else {f"{prefix}{key}": part}
        )
    return found


def export(policy, space, path, stochastic=False):
    """Write a policy to ``path``, and check that the file computes the same as the policy.

    Return the names, shapes and dtypes of the inputs and outputs. Raise whatever torch raises, and
    ValueError if the file computes something else.
    """
    validates = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # validation would branch on values
    temporary, is_onnx = f"{path}.tmp", path.endswith(".onnx")
    try:
        acting = Acting(policy, space, stochastic).eval()
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            write(acting, temporary, is_onnx)
            inputs = acting.example(BATCHES[1])
            expected = acting(*inputs.values())
            for name, output in compute(temporary, is_onnx, inputs, [*expected]).items():
                if not np.allclose(output, expected[name], TOLERANCE, TOLERANCE):
                    raise ValueError(f"the file's {name} differs from the policy's")
        os.replace(temporary, path)
        return f"{described(inputs)} -> {described(expected)}"
    finally:
        Distribution.set_default_validate_args(validates)
        if os.path.exists(temporary):
            os.remove(temporary)


def write(acting, path, is_onnx):
    inputs = acting.example(BATCHES[0])
    tensors = tuple(inputs.values())
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    program = torch.export.export(acting, tensors, dynamic_shapes=(shapes,))
    if is_onnx:
        torch.onnx.export(
            program, f=path, input_names=[*inputs], output_names=[*acting(*tensors)], dynamo=True,
            external_data=False, verbose=False,
        )  # fmt: skip
    else:
        with open(path, "wb") as file:
            torch.export.save(program, file)


def compute(path, is_onnx, inputs, names):
    if not is_onnx:
        return torch.export.load(path).module()(*inputs.values())
    import onnxruntime

    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    return dict(zip(names, onnxruntime.InferenceSession(path).run(None, arrays), strict=True))


def described(tensors):
    texts = []
    for name, tensor in tensors.items():
        shape = ", ".join(map(str, ("batch", *tensor.shape[1:])))
        texts.append(f"{name} ({shape}) {str(tensor.dtype).removeprefix('torch.')}")
    return ", ".join(texts)


def main(args):
    path = args.output
    check(path.endswith((".onnx", ".pt2")), f"{path} must end with .onnx or .pt2")
    trained = Trained(args)
    with one_line_for_environments(trained.args):
        env = trained.make_env()()
        env.close()
    space = env.observation_space
    envs = SimpleNamespace(single_observation_space=space, single_action_space=env.action_space)
    policy = trained.policy(envs)
    try:
        text = export(policy, space, path, args.stochastic)
    except Exception as error:  # torch and ONNX raise many kinds of errors
        text = f"{trained.path} cannot be exported to {path}: {one_line(error)}"
        raise ScriptError(text) from error
    print(f"{path}: {text}")


if __name__ == "__main__":
    sys.excepthook = print_error
    sys.path.append(os.getcwd())
    main(tyro.cli(Args, description=__doc__))
