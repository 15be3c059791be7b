"""What a worker sends of a rollout: it comes back as it was, and what is not of its shape is refused by name."""

import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from clusterenv_runtime import ProtocolError
from clusterenv_runtime.rollout import RolloutPart
from clusterenv_runtime.spaces import map_space

from .envs import assert_same


def a_part(space, num_steps=6, num_envs=2):
    """A part as a worker makes it, packed."""
    rng = np.random.default_rng(1)
    shape = num_steps, num_envs
    ends = rng.random(shape) < 0.3

    def batch(*leading):
        return map_space(
            lambda leaf: rng.random((*leading, *leaf.shape[1:])).astype(leaf.dtype), space, create_empty_array(space, 1)
        )

    return RolloutPart(
        version=1,
        observations=batch(*shape),
        actions=np.zeros(shape, np.int64),
        logprobs=np.zeros(shape, np.float32),
        rewards=np.zeros(shape),
        terminations=ends,
        truncations=np.zeros(shape, bool),
        final_observations=batch(int(ends.sum())),
        next_observations=batch(num_envs),
        episodes=np.flatnonzero(ends),
        episodic_returns=np.zeros(int(ends.sum())),
        episodic_lengths=np.ones(int(ends.sum()), np.int64),
        params=np.zeros((num_steps * num_envs, 3), np.float32),
    )


PART_SPACES = [spaces.Box(-1, 1, (3,)), spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 255, (2, 2), np.uint8))]
WRONG = {
    "observations": lambda part: map_leaf(part.observations, lambda leaf: leaf[:-1]),
    "final_observations": lambda part: map_leaf(part.final_observations, lambda leaf: np.concatenate([leaf, leaf])),
    "next_observations": lambda part: map_leaf(part.next_observations, lambda leaf: leaf[..., None]),
    "rewards": lambda part: part.rewards[:, :1],
    "logprobs": lambda part: part.logprobs.astype("U8"),
    "terminations": lambda part: part.terminations.astype(np.int8),
    "truncations": lambda part: part.truncations[None],
    "actions": lambda part: part.actions.T,
    "params": lambda part: part.params[1:],
    "episodes": lambda part: part.episodes.astype(np.float64),
    "episodic_returns": lambda part: part.episodic_returns[1:],
    "version": lambda part: "1",
}


def map_leaf(tree, function):
    """Change one leaf of a tree."""
    return {**tree, "b": function(tree["b"])} if isinstance(tree, dict) else function(tree)


@pytest.mark.parametrize("space", PART_SPACES, ids=["Box", "Dict"])
def test_a_part_comes_back_and_one_that_does_not_fit_is_a_protocol_error(space):
    example = create_empty_array(space, 1)

    def over_the_wire(fields, buffers):
        return RolloutPart.unpack(fields, [bytes(buffer) for buffer in buffers], space, example, 6, 2)

    part, buffers = a_part(space), []
    came = over_the_wire(part.pack(buffers), buffers)
    assert_same(msgspec.structs.asdict(came), msgspec.structs.asdict(part))
    for name, wrong in WRONG.items():
        other, buffers = msgspec.structs.replace(part, **{name: wrong(part)}), []
        with pytest.raises(ProtocolError, match=name if name != "version" else "version|int"):
            over_the_wire(other.pack(buffers), buffers)
    for fields in ({}, {**part.pack(buffers := []), "more": 1}):
        with pytest.raises(ProtocolError, match="missing|unknown field"):
            over_the_wire(fields, buffers)
