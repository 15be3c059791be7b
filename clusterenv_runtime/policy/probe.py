"""Whether a policy can act here. It is tried as workers will run it, before any of them does."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array

from ..arrays.spaces import check_actions, one_of
from ..arrays.trees import leaves, map_tree
from ..errors import one_line
from ..wire.protocol import Collect

if TYPE_CHECKING:
    from .base import Policy

SIZES = (
    3,
    5,
    7,
    11,
    13,
)  # of the rollout in which it is tried: the first two that no axis of its actions has
DRAWS = 256  # actions that are drawn to see whether they are of the action space


class Probed(NamedTuple):
    """What is known of a policy that has been tried."""

    example: dict[
        str, Any
    ]  # what a part of a rollout holds of it, arrays ``(1, ...)`` by the names of `RolloutPart`
    dimensions: int  # of an action
    volatile: set[str]  # the keys of `structure.layout_of` that change when it acts
    kl_fault: str | None  # why its divergence cannot be measured, if it cannot


def probe(policy: Policy, space: Space, action_space: Space, seen: Any) -> Probed:
    """Have a copy of the policy act as on a worker, on the CPU, and check what comes of it.

    ``seen`` are observations of environments. Where there are none yet, it sees one drawn from the
    space, or zeros.

    Raises:
        ValueError: it cannot act in these environments.
    """
    made_up = [one_of(space), create_empty_array(space, 1)] if seen is None else []
    errors = []
    for observations in [seen] if seen is not None else made_up:
        try:
            return _act(policy, action_space, observations)
        except Exception as error:
            errors.append(error)
    drawn = "; the observation was drawn from the space" if seen is None else ""
    raise ValueError(
        f"the policy cannot act on {space}: {_blamed(errors[0], policy, drawn)}"
    ) from errors[0]


def _act(policy: Policy, action_space: Space, observations: Any) -> Probed:
    import torch

    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        # On the CPU, where a worker is, whatever the learner's new tensors are, and without its
        # random numbers.
        with torch.device("cpu"), torch.random.fork_rng([]):
            return _act_there(policy, action_space, observations)
    finally:
        torch.set_default_dtype(default)


def _act_there(policy: Policy, action_space: Space, observations: Any) -> Probed:
    from .actor import Actor
    from .structure import layout_of  # brings torch, as the policy has by now

    used = [size for leaf in leaves(create_empty_array(action_space, 1)) for size in leaf.shape[1:]]
    num_steps, num_envs, *_ = sorted(SIZES, key=used.__contains__)
    rows = np.resize(np.arange(len(leaves(observations)[0])), num_envs)
    observations = map_tree(lambda leaf: leaf[rows], observations)

    class Tried(Actor):
        def draw(self, params: Any) -> Any:
            _check_tree("forward", params)
            return super().draw(params)

        def noise_of_row(self, params: Any) -> Any:
            noise = super().noise_of_row(params)
            _check_tree("noise", noise)
            _check_leading("noise", noise, (num_steps, 1))
            return noise

    actor = Tried()
    actor.load_structure(
        policy
    )  # what was pickled by value must not come back: it would replace the user's classes
    actor.policy.load_flat_weights(policy.flat_weights().cpu().numpy())
    actor.prepare(
        Collect(num_steps, 0, 0, 0.0, policy.numbers_now(), states=num_steps), range(num_envs)
    )
    initial = actor.policy.initial_state(num_envs)
    if initial is not None:
        _check_tree("initial_state", initial)
        _check_leading("initial_state", initial, (num_envs,))
    before, starts = layout_of(actor.policy), np.ones(num_envs, bool)
    actor.start(num_steps, starts)
    for step in range(num_steps):
        given = actor.act(observations, starts & (step == 0))
        _check_leading("to_env", given, (num_envs,))
        check_actions(action_space, given)
        if initial is not None:
            _check_state(initial, actor.state)
    kept = actor.finish()
    _check_kept(kept, num_steps, num_envs)
    _check_draws(actor.policy, kept["params"], action_space)
    kl_fault, after = _fault_of_kl(actor.policy, kept["params"]), layout_of(actor.policy)
    volatile = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    lead = {"params": np.s_[:1], "states": np.s_[:1]}  # of the others the first step's first
    example = {
        name: tree
        if tree is None
        else map_tree(lambda leaf, key=lead.get(name, np.s_[0, :1]): leaf[key], tree)
        for name, tree in kept.items()
    }
    dimensions = max(sum(leaf[0].size for leaf in leaves(given)), 1)  # of what environments get
    return Probed(example, dimensions, volatile, kl_fault)


def _check_kept(kept: dict[str, Any], num_steps: int, num_envs: int) -> None:
    """Raise ValueError if what a part would hold of the policy has not the shapes of so many steps."""
    steps = num_steps, num_envs
    _check_leading("forward", kept["params"], (num_steps * num_envs,))
    _check_leading("act", kept["actions"], steps)
    if kept["logprobs"].shape != steps:
        found = f"its log_prob gives {kept['logprobs'].shape} for {num_steps} steps of {num_envs} environments"
        raise ValueError(
            f"{found}, not one number for each: sum over the last dimensions, of the actions"
        )
    for name, extra in kept["extras"].items():
        if not isinstance(name, str) or not isinstance(extra, np.ndarray):
            raise ValueError(
                f"its extras must be tensors by their names, got {name!r}: a {type(extra).__name__}"
            )
        _check_leading(f"extra {name!r}", extra, steps)


def _check_draws(policy: Policy, params: Any, action_space: Space) -> None:
    """Raise ValueError if some of many actions of one state are not of the action space."""
    import torch

    with torch.inference_mode():
        many = map_tree(
            lambda leaf: torch.from_numpy(leaf[:1]).expand(DRAWS, *leaf.shape[1:]), params
        )
        noise = policy.noise(1, many, torch.Generator().manual_seed(0))
        actions = policy.to_env(policy.act(many, map_tree(lambda leaf: leaf[0], noise)))
    check_actions(action_space, map_tree(lambda leaf: leaf.numpy(), actions))


def _fault_of_kl(policy: Policy, params: Any) -> str | None:
    twice = map_tree(lambda leaf: leaf[:1].repeat(2, 0), params)
    try:
        kl = policy.kl(*[policy.to_device(twice)] * 2)
        if tuple(kl.shape) != (2,) or not kl.isfinite().all() or kl.min() < -1e-3:
            return f"of 2 states it must be 2 numbers, not negative, got {tuple(kl.shape)}: {kl.tolist()}"
    except Exception as error:
        return one_line(error)
    return None


def _check_leading(name: str, tree: Any, leading: tuple[int, ...]) -> None:
    for leaf in leaves(tree):
        if leaf.shape[: len(leading)] != leading:
            wanted = f"({', '.join(map(str, leading))}, ...)"
            raise ValueError(
                f"its {name} gives {tuple(leaf.shape)}, where {wanted} is wanted of {leading[-1]} rows"
            )


def _check_tree(name: str, tree: Any) -> None:
    """Raise TypeError if what a method gives is no tree of tensors."""
    import torch

    if isinstance(tree, dict) or type(tree) is tuple:
        for part in tree.values() if isinstance(tree, dict) else tree:
            _check_tree(name, part)
    elif not isinstance(tree, torch.Tensor):
        wanted = "a tensor, or a dict or plain tuple of tensors"
        raise TypeError(f"its {name} must give {wanted}, got a {type(tree).__name__}")


def _check_state(initial: Any, state: Any) -> None:
    """Raise ValueError if the next state is not like the initial one."""

    def check(before: Any, after: Any) -> None:
        if type(after) is not type(before) or (after.shape, after.dtype) != (
            before.shape,
            before.dtype,
        ):
            found = (
                f"{after.dtype} {tuple(after.shape)}"
                if hasattr(after, "dtype")
                else f"a {type(after).__name__}"
            )
            expected = f"its initial_state is {before.dtype} {tuple(before.shape)}"
            raise TypeError(f"its forward returns a state that is {found}, {expected}")

    try:
        map_tree(check, initial, state)
    except ValueError:
        raise TypeError(
            "its forward returns a state of another structure than its initial_state"
        ) from None


def _blamed(error: Exception, policy: Policy, more: str) -> str:
    """Return a line that names which of a policy's methods has raised an error, and what `forward`
    gets.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    mine = [
        frame.f_code.co_name for frame in frames if type(frame.f_locals.get("self")) is type(policy)
    ]
    mine += [frame.f_code.co_name for frame in frames if frame.f_code.co_name == "log_prob"]
    if not mine or mine[-1] == "numbers_now":  # it is ours
        return str(error)
    if mine[-1] != "forward":
        return f"its {mine[-1]} fails: {one_line(error)}"
    kept = (
        "all come as float32"
        if policy.float_observations
        else "floats come as float32, others as they are"
    )
    return f"its forward fails: {one_line(error)} ({kept}, see its float_observations{more})"
