"""The probe: whether a policy can act here, tried on the head before any worker runs it.

This module imports torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array

from ..arrays.trees import check_actions, leaves, map_tree, one_of
from ..errors import one_line
from ..wire.protocol import Collect
from .actor import Actor, layout_of_state
from .base import Policy
from .structure import changed_parts, parts_of
from .tensors import flat_weights, numbers_of

# The size of the rollout in which a policy is tried. These numbers differ from other sizes, for
# example those of actions, so that a sum over the wrong axis is noticed.
NUM_STEPS, NUM_ENVS = 3, 23


class Probed(NamedTuple):
    """What the head knows about a policy that has been tried."""

    # The fields of a `RolloutPart` that come from the policy, for one row: arrays ``(1, ...)``.
    example: dict[str, Any]
    dimensions: int  # the number of dimensions of an action
    volatile: set[str]  # the names of the policy's parts that change when it acts
    kl_fault: str | None  # why the divergence cannot be measured; None if it can


class Fault(ValueError):
    """A fault in a method of the policy; the text says what is wrong."""


# The methods that are tried, and the first axes of the tensors that each method returns.
AXES = {
    "initial_state": (NUM_ENVS,),
    "forward": (NUM_ENVS,),
    "noise": (NUM_STEPS, 1),
    "act": (NUM_ENVS,),
    "to_env": (NUM_ENVS,),
    "extras": (NUM_STEPS, NUM_ENVS),
}


def probe(policy: Policy, space: Space, action_space: Space, seen: Any) -> Probed:
    """Have a copy of the policy act as on a worker, on the CPU, and check what its methods return.

    ``seen`` holds observations from the environments. If there are none yet, or if some are not
    finite, the policy acts on an observation that is drawn from the space, or, if it cannot act on
    that one, on zeros.

    Raises:
        ValueError: the policy cannot act in these environments.
    """
    made_up = []
    if seen is None or not all(np.isfinite(leaf).all() for leaf in leaves(seen)):
        made_up = [one_of(space), create_empty_array(space, 1)]
    errors = []
    default = torch.get_default_dtype()
    for observations in made_up or [seen]:
        try:
            # As on a worker, without the learner's defaults and without its random numbers.
            torch.set_default_dtype(torch.float32)
            with torch.device("cpu"), torch.random.fork_rng([]):
                return _act(policy, action_space, observations)
        except Exception as error:
            errors.append(error)
        finally:
            torch.set_default_dtype(default)
    text = f"the policy cannot act on {space}: {errors[0]}"
    if made_up:
        text += " (the observation was drawn from the space)"
    raise ValueError(text) from errors[0]


def _act(policy: Policy, action_space: Space, observations: Any) -> Probed:
    rows = np.resize(np.arange(len(leaves(observations)[0])), NUM_ENVS)
    observations = map_tree(lambda leaf: leaf[rows], observations)
    actor = Actor()
    # Not through a pickle, which would replace the user's classes.
    actor.load(policy, [part.cpu().numpy() for part in flat_weights(policy)])
    acting = actor.policy
    _check_methods(acting)
    before = parts_of(acting)
    request = Collect(NUM_STEPS, 0, 0, 0.0, numbers_of(policy), states=NUM_STEPS)
    actor.prepare(request, range(NUM_ENVS))
    starts = np.ones(NUM_ENVS, bool)
    actor.start(starts)
    initial = layout_of_state(actor.state)
    for step in range(NUM_STEPS):
        given = actor.act(observations, starts & (step == 0))
        check_actions(action_space, given)
        state = layout_of_state(actor.state)
        if state != initial:
            raise Fault(f"its forward returns a state {state}, but its initial_state is {initial}")
    with _blamed_on("distribution or log_prob"):
        kept = actor.finish(map_tree(lambda leaf: leaf[None], observations))
    shape = kept["logprobs"].shape
    if shape != (NUM_STEPS, NUM_ENVS):
        text = f"its log_prob gives {shape} for {(NUM_STEPS, NUM_ENVS)} actions"
        raise Fault(f"{text}, not one number for each: sum over the last dimensions")
    for name, extra in kept["extras"].items():
        if not isinstance(name, str) or not isinstance(extra, np.ndarray):
            raise Fault(f"its extras must be tensors by name, got {name!r}: {extra!r:.100}")
    without_steps = {name: kept.pop(name) for name in ("params", "states")}
    example = map_tree(lambda leaf: leaf[0, :1], kept)
    example |= map_tree(lambda leaf: None if leaf is None else leaf[:1], without_steps)
    return Probed(
        example,
        dimensions=max(sum(leaf[0].size for leaf in leaves(given)), 1),
        kl_fault=_fault_of_kl(acting, example["params"]),
        volatile=changed_parts(before, parts_of(acting)),
    )


def _check_methods(acting: Policy) -> None:
    """Have the policy's methods check what they return to the actor, but not to each other."""
    under_way: list[str] = []

    def checked(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if under_way:
            return method(*args, **kwargs)
        under_way.append(name)
        try:
            with _blamed_on(name):
                returned = method(*args, **kwargs)
        finally:
            under_way.clear()
        if name != "initial_state" or returned is not None:
            _check_tree(name, returned, AXES[name])
        return returned

    for name in AXES:
        setattr(acting, name, functools.partial(checked, name, getattr(acting, name)))


@contextlib.contextmanager
def _blamed_on(name: str) -> Iterator[None]:
    try:
        yield
    except Fault:  # of another method, which the text already names
        raise
    except Exception as error:
        hint = " (see its float_observations)" if name == "forward" else ""
        raise Fault(f"its {name} fails: {one_line(error)}{hint}") from error


def _check_tree(name: str, tree: Any, axes: tuple[int, ...]) -> None:
    if isinstance(tree, dict) or type(tree) is tuple:
        for part in tree.values() if isinstance(tree, dict) else tree:
            _check_tree(name, part, axes)
    elif not isinstance(tree, torch.Tensor):
        wanted = "a tensor, or a dict or plain tuple of tensors"
        raise Fault(f"its {name} must give {wanted}, got a {type(tree).__name__}")
    elif tree.shape[: len(axes)] != axes:
        wanted = f"({', '.join(map(str, axes))}, ...)"
        raise Fault(f"its {name} gives {tuple(tree.shape)}, but {wanted} is expected")


def _fault_of_kl(policy: Policy, params: Any) -> str | None:
    """Return why the divergence at one state cannot be measured; None if it can."""
    twice = map_tree(lambda leaf: torch.from_numpy(leaf.repeat(2, 0)), params)
    try:
        kl = policy.kl(twice, twice)
        if tuple(kl.shape) == (2,) and kl.isfinite().all() and kl.min() >= -1e-3:
            return None
        return (
            f"for 2 states it must be 2 non-negative numbers, got {tuple(kl.shape)}: {kl.tolist()}"
        )
    except Exception as error:
        return one_line(error)
