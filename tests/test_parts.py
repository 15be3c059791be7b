"""What a worker sends of a rollout: it comes back as it was, and what is not of its shape is refused by name."""

import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from clusterenv_runtime import ProtocolError
from clusterenv_runtime.codec import pack
from clusterenv_runtime.protocol import Call, Collect, CutOff, Part, Reply, Reset, SetAttr, Step
from clusterenv_runtime.rollout import RolloutPart, open_answer
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


def opened(asked, answer, buffers, newest=5):
    """Open what a worker of two environments has answered."""
    space = PART_SPACES[0]
    return open_answer(space, create_empty_array(space, 1), asked, answer, [b"header", *buffers], 2, newest)


@pytest.mark.parametrize("version", [-1, 0, 1, 5, 6, 10**6])
def test_a_part_is_of_a_version_that_was_published(version):
    part, buffers = msgspec.structs.replace(a_part(PART_SPACES[0]), version=version), []
    answer = Part(part.pack(buffers), b"", 0.0)
    buffers = [bytes(buffer) for buffer in buffers]
    if 0 < version <= 5:
        assert opened(Collect(6, 5, 0, 0.0, 0.0), answer, buffers).version == version
    else:
        with pytest.raises(ProtocolError, match=f"version {version}, and 5 is the newest"):
            opened(Collect(6, 5, 0, 0.0, 0.0), answer, buffers)


OBSERVATIONS, FLAGS = np.zeros((2, 3), np.float32), np.zeros(2, bool)
REPLIES = [
    (Reset(), OBSERVATIONS, [(0, {"a": 1})]),
    (Step(), (OBSERVATIONS, np.zeros(2), FLAGS, FLAGS), []),
    (CutOff(), (OBSERVATIONS, np.zeros(2), FLAGS, FLAGS), [(1, {"worker_lost": True})]),
    (Call("name"), (1, "two"), None),
    (SetAttr("name"), None, None),
]
WRONG_REPLIES = [
    (Reset(), OBSERVATIONS[:1], []),
    (Reset(), OBSERVATIONS.astype(np.int64), []),
    (Reset(), None, []),
    (Reset(), {"a": OBSERVATIONS}, []),
    (Step(), (OBSERVATIONS, np.zeros(2), FLAGS), []),
    (Step(), [OBSERVATIONS, np.zeros(2), FLAGS, FLAGS], []),
    (Step(), (OBSERVATIONS, np.zeros(3), FLAGS, FLAGS), []),
    (Step(), (OBSERVATIONS, np.zeros(2), np.zeros(2), FLAGS), []),
    (CutOff(), None, []),
    (Call("name"), (1, 2, 3), None),
    (Call("name"), 7, None),
    (Reset(), OBSERVATIONS, [(2, {})]),
    (Reset(), OBSERVATIONS, [(0, 1)]),
    (Reset(), OBSERVATIONS, [{}]),
    (Reset(), OBSERVATIONS, 5),
    (Collect(6, 5, 0, 0.0, 0.0), None, []),
]


def a_reply(value, infos):
    buffers = []
    reply = Reply(pack(value, buffers), pack(infos, buffers))
    return reply, [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize("asked, value, infos", REPLIES, ids=str)
def test_a_reply_comes_back(asked, value, infos):
    reply = opened(asked, *a_reply(value, infos))
    assert_same(reply.value, value)
    assert reply.infos == infos


@pytest.mark.parametrize("asked, value, infos", WRONG_REPLIES, ids=str)
def test_a_reply_that_cannot_be_one_is_a_protocol_error(asked, value, infos):
    with pytest.raises(ProtocolError):
        opened(asked, *a_reply(value, infos))


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
