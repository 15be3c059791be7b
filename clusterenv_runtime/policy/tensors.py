"""A policy's tensors, numbers and structure: what workers need to act. How far these diverge.

The structure is everything in the policy except its weights and its `Policy.numbers`. It travels
once, as a pickle, and again when it has changed. Weights travel with each pull, numbers with each
request. Float32 parameters may be rounded, see `differences`. All other tensors travel unrounded,
because a buffer may belong to a normalizer or hold an index. The divergence of the policy is
measured from the policies that workers acted on.
"""

import contextlib
import copy
import io
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from numbers import Real
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import nn

from ..arrays import Frames, leaves, map_tree
from ..errors import one_line
from ..rollout import Part
from .base import Policy
from .sync import measured_states


def to_tensors(observations: Any, policy: Policy, device: torch.device | str = "cpu") -> Any:
    """Return a copy of a tree of arrays as tensors, with the dtypes that the policy wants."""

    def convert(array: np.ndarray) -> torch.Tensor:
        is_float = policy.float_observations or array.dtype.kind == "f"
        return torch.tensor(array, dtype=torch.float32 if is_float else None, device=device)

    return map_tree(convert, observations)


def numbers_of(policy: Policy) -> list[float]:
    """Return the values of `Policy.numbers`.

    Raises:
        ValueError: an attribute that `Policy.numbers` names is not a number.
    """
    found = {name: getattr(policy, name, None) for name in policy.numbers}
    for name, value in found.items():
        if not isinstance(value, Real):
            raise ValueError(
                f"{name!r} is among the policy's numbers {policy.numbers!r}, but is {value!r}"
            )
    return [float(value) for value in found.values()]


def set_numbers(policy: Policy, numbers: Sequence[float]) -> None:
    """Set the attributes in `Policy.numbers` to the values that `numbers_of` returned."""
    for name, number in zip(policy.numbers, numbers, strict=True):
        setattr(policy, name, number)


def rounded_sizes(policy: Policy) -> list[int]:
    """Return the number of elements of each tensor that may be rounded."""
    return [tensor.numel() for tensor in _tensors(policy) if _is_rounded(tensor)]


@torch.no_grad()
def flat_weights(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of a policy's tensors as two flat tensors, on the policy's device.

    The first holds the weights that may be rounded, ``(weights,)`` float32. The second holds the
    bytes of all other tensors.
    """
    tensors = _tensors(policy)
    flat = torch.cat([_bytes_of(tensor) for tensor in tensors])
    size = sum(tensor.nbytes for tensor in tensors if _is_rounded(tensor))
    return flat[:size].view(torch.float32), flat[size:]


@torch.no_grad()
def load_weights(policy: Policy, weights: Any, others: Any) -> None:
    """Load what `flat_weights` returned into a policy, from readable buffers.

    Raises:
        RuntimeError: the buffers do not have the size of the policy's tensors.
    """
    flat = np.concatenate([np.frombuffer(buffer, np.uint8) for buffer in (weights, others)])
    tensors = _tensors(policy)
    parts = torch.from_numpy(flat).split([tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        # A clone, because a view as another dtype needs an aligned start.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def check_policy(policy: Any) -> None:
    """Raise TypeError if this is not a `Policy`, and ValueError if it is one that cannot travel."""
    if not isinstance(policy, Policy):
        found = policy.__name__ if isinstance(policy, type) else type(policy).__name__
        raise TypeError(
            f"expected a Policy, such as CategoricalPolicy(actor), got {found}; "
            "see docs/policies.md"
        )
    if not list(policy.parameters()):
        raise ValueError("the policy has no parameters, so there is nothing to learn or to pull")


@contextlib.contextmanager
def eval_mode(policy: Policy) -> Iterator[None]:
    """Put a policy in eval mode, as on workers, and its modules back in their modes afterward."""
    training = [module for module in policy.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def pickled(policy: Policy, code: list[Any] | None = None) -> bytes:
    """Return the pickle of a policy's structure. Equal structures have equal pickles.

    A worker that unpickles it gets a policy in eval mode with uninitialized weights on the CPU.
    With a list ``code``, classes and functions are added to it instead of to the pickle. This takes
    a fraction of the time where a script defines them, but is good for comparison only.

    Raises:
        ValueError: the policy cannot travel, or has parameters that no pull would update.
    """
    with io.BytesIO() as file, eval_mode(policy):
        try:
            _Pickler(file, policy, code).dump(policy)
        except Exception as error:
            raise ValueError(f"the policy cannot be sent to workers: {one_line(error)}") from error
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, policy: Policy, code: list[Any] | None) -> None:
        super().__init__(file)
        self._policy = policy
        self._code = code
        self._weights = {id(tensor) for tensor in _tensors(policy)}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is OrderedDict:
            # Several times as fast as its own.
            return OrderedDict, (), None, None, iter(value.items())
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if self._code is not None and isinstance(value, type | FunctionType):
            self._code.append(value)
            return id, ()
        if value is self._policy and value.numbers:
            value = copy.copy(value)
            set_numbers(value, [0.0] * len(value.numbers))
            return value.__reduce_ex__(5)
        return super().reducer_override(value)

    def _tensor(self, value: torch.Tensor) -> Any:
        is_parameter = isinstance(value, nn.Parameter)
        form = tuple(value.shape), value.dtype, is_parameter
        if id(value) in self._weights:
            return _tensor, form
        if is_parameter and value.requires_grad:
            raise ValueError(
                f"it has a parameter {form[0]} that no module registers, as in a list or a "
                "function: workers would keep it as it is. Use nn.ModuleList, or make it an "
                "attribute"
            )
        if value.grad_fn is not None:  # from the last forward pass, so workers make their own
            return torch.empty, (0,)
        if value.layout != torch.strided:
            return NotImplemented
        return _tensor, (*form, _bytes_of(value.detach()).cpu().numpy().tobytes())


def _tensor(
    shape: tuple[int, ...], dtype: torch.dtype, is_parameter: bool, content: bytes = b""
) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if content:
        tensor = torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _tensors(policy: Policy) -> list[torch.Tensor]:
    """Return all parameters and buffers, beginning with the tensors that may be rounded."""
    tensors = [*policy.parameters(), *policy.buffers()]
    return sorted(tensors, key=lambda tensor: not _is_rounded(tensor))


def _is_rounded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.dtype == torch.float32


class Sample(NamedTuple):
    """Some states that a worker acted on, and its policy's distribution parameters there.

    They are sequences of ``num_steps`` steps if the policy has a state. Otherwise each sequence has
    one step.
    """

    observations: Any  # (num_steps, batch, ...)
    params: Any  # (num_steps, batch, ...)
    starts: np.ndarray  # (num_steps, batch) bool, whether an episode begins there
    states: Any  # (batch, ...), the policy's states before the first step; None if it has none

    @classmethod
    def of(cls, part: Part, rows: range) -> "Sample":
        """Return the measured states of a worker's part.

        The arrays are copies, because the user gets the part and may write to it, and because a
        view would keep a whole message in memory.
        """
        number = len(leaves(part.params)[0]) // len(rows)
        in_sequence = part.states is not None
        places = measured_states(len(part.rewards), rows, number, in_sequence)
        places = places.reshape(number if in_sequence else 1, -1)
        # No starts at step 0: where an episode begins there, the part's states already are initial.
        starts = np.zeros(part.rewards.shape, bool)
        starts[1:] = (part.terminations | part.truncations)[:-1]

        def at_places(leaf: Any) -> Any:
            leaf = leaf.reshape(starts.size, *leaf.shape[2:])
            return leaf.only(places) if isinstance(leaf, Frames) else leaf[places]

        def in_order(leaf: np.ndarray) -> np.ndarray:
            return leaf.reshape(*places.shape, *leaf.shape[1:]).copy()

        observations = map_tree(at_places, part.observations)
        states = map_tree(np.copy, part.states) if in_sequence else None
        return cls(observations, map_tree(in_order, part.params), at_places(starts), states)


@torch.no_grad()
def divergence(policy: Policy, workers: Sequence[Sequence[Sample]]) -> np.ndarray:
    """Return each worker's KL(behavior || policy) in nats, the mean over the states of its samples.

    All sequences must have the same length. `Frames` are gathered only here, because images take
    megabytes.
    """
    observations, acted, starts, states = zip(*itertools.chain(*workers), strict=True)
    begins = np.concatenate(starts, 1)
    state = None if states[0] is None else _concatenate(states, 0)
    params = params_along(policy, _concatenate(observations, 1), begins, state)
    acted = _concatenate(acted, 1)
    behavior = map_tree(lambda leaf: torch.as_tensor(leaf, device=policy.device), acted)
    flat = [map_tree(lambda leaf: leaf.flatten(0, 1), tree) for tree in (behavior, params)]
    kl = policy.kl(*flat).view(begins.shape).mean(0)
    sizes = [sum(part.starts.shape[1] for part in parts) for parts in workers]
    firsts = np.cumsum([0, *sizes[:-1]])
    return np.add.reduceat(kl.cpu().numpy(), firsts) / sizes


@torch.no_grad()
def params_along(policy: Policy, observations: Any, starts: np.ndarray, state: Any) -> Any:
    """Return the parameters that `Policy.unroll` returns for arrays, in eval mode as on workers."""
    begins = torch.tensor(starts, device=policy.device)
    if state is not None:
        state = map_tree(lambda leaf: torch.tensor(leaf, device=policy.device), state)
    with eval_mode(policy):
        return policy.unroll(to_tensors(observations, policy, policy.device), begins, state)[0]


def _concatenate(trees: Sequence[Any], axis: int) -> Any:
    return map_tree(lambda *arrays: np.concatenate(arrays, axis), *trees)
