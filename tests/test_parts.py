"""A worker's part of a rollout arrives unchanged. A wrong field is refused with its name."""

from dataclasses import fields, replace

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from clusterenv_runtime import Frames, ProtocolError
from clusterenv_runtime.arrays import map_space
from clusterenv_runtime.messages import Part, read_worker, worker_frames

from .envs import assert_same

STEPS, ENVS = 6, 2


def a_part(space, num_steps=STEPS, num_envs=ENVS):
    """Return a part of random values, as a worker makes it."""
    rng = np.random.default_rng(1)
    shape = num_steps, num_envs
    ends = rng.random(shape) < 0.3

    def batch(*leading):
        return map_space(
            lambda leaf: rng.random((*leading, *leaf.shape[1:])).astype(leaf.dtype),
            space,
            create_empty_array(space, 1),
        )

    return Part(
        version=1,
        starts=np.ones(num_envs, bool),
        observations=batch(*shape),
        actions=np.zeros(shape, np.int64),
        logprobs=np.zeros(shape, np.float32),
        states=None,
        extras={},
        infos={},
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


def arrived(part):
    """Return the part that the head reads from a worker's message."""
    frames = [bytearray(frame) for frame in worker_frames(7, part, ())]
    seq, came = read_worker(frames, ())
    assert seq == 7 and type(came) is Part
    return came


SPACES = {
    "Box": spaces.Box(-1, 1, (3,)),
    "Dict": spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 255, (2, 2), np.uint8)),
    "image": spaces.Box(0, 255, (64, 64), np.uint8),  # in frames of its own
}
MORE = {
    "states": (np.zeros((ENVS, 3), np.float32), np.ones(ENVS)),
    "extras": {"value": np.zeros((STEPS, ENVS, 2), np.float32)},
    "infos": {"x": np.ones((STEPS, ENVS, 3), np.float16), "_x": np.ones((STEPS, ENVS), bool)},
    "waited": 0.5,
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_part_arrives_unchanged(space):
    for more in {}, MORE:
        part = replace(a_part(space), **more)
        came = arrived(part)
        came.check(space, STEPS, ENVS)
        for field in fields(part):
            assert_same(getattr(came, field.name), getattr(part, field.name), field.name)


def map_leaf(tree, function):
    """Return a tree with one leaf changed."""
    return {**tree, "b": function(tree["b"])} if isinstance(tree, dict) else function(tree)


WRONG = [
    ("observations", lambda leaf: leaf[:-1]),
    ("observations", lambda leaf: leaf.astype(np.float64)),
    ("final_observations", lambda leaf: np.concatenate([leaf, leaf])),
    ("next_observations", lambda leaf: leaf[..., None]),
    ("starts", lambda starts: starts[1:]),
    ("starts", lambda starts: starts.astype(np.int8)),
    ("terminations", lambda terminations: terminations.astype(np.int8)),
    ("truncations", lambda truncations: truncations[None]),
    ("rewards", lambda rewards: rewards.astype(np.float32)),
    ("rewards", lambda rewards: rewards.astype(">f8")),
    ("rewards", lambda rewards: rewards[:-1]),
    ("logprobs", lambda logprobs: logprobs[:, :1]),
    ("actions", lambda actions: actions.T),
    ("actions", lambda actions: {"a": actions.T}),
    ("episodes", lambda episodes: episodes.astype(np.float64)),
    ("episodic_returns", lambda returns: returns[1:]),
    ("episodic_lengths", lambda lengths: lengths[1:]),
    ("episodic_lengths", lambda lengths: lengths.astype(float)),
]


@pytest.mark.parametrize("space", [SPACES["Box"], SPACES["Dict"]], ids=["Box", "Dict"])
def test_a_part_that_does_not_fit_is_refused(space):
    part = a_part(space)
    short = np.zeros((STEPS - 1, ENVS))
    wrong = [(name, {name: map_leaf(getattr(part, name), change)}) for name, change in WRONG]
    wrong += [("extras", {"extras": {"value": short}}), ("x", {"infos": {"x": short}})]
    for name, changed in wrong:
        came = arrived(replace(part, **changed))
        with pytest.raises(ValueError, match=f"{name} must be "):
            came.check(space, STEPS, ENVS)
    for num_steps, num_envs in (STEPS - 1, ENVS), (STEPS, ENVS + 1):
        with pytest.raises(ValueError, match="rewards must be "):
            arrived(part).check(space, num_steps, num_envs)
    for name in "observations", "actions", "episodes":
        for value in None, 3, "text", [part.rewards]:
            with pytest.raises((TypeError, AttributeError, LookupError, ProtocolError)):
                arrived(replace(part, **{name: value})).check(space, STEPS, ENVS)


STACKS = spaces.Box(0, 255, (4, 3), np.uint8)


def folded(frames=np.uint8, **fields):
    """Return a part whose observations are stacks of one frame of five."""
    part = a_part(STACKS)
    leading = {"observations": (STEPS, ENVS), "next_observations": (ENVS,)}
    leading["final_observations"] = (len(part.final_observations),)
    index = {name: np.full((*shape, 4), 4, np.int32) for name, shape in leading.items()}
    frames = np.zeros((5, 3), np.uint8) if frames is np.uint8 else frames
    stacks = {name: Frames(frames, each) for name, each in (index | fields).items()}
    return replace(part, **stacks)


def test_stacks_arrive_with_each_frame_once():
    came = arrived(folded())
    came.check(STACKS, STEPS, ENVS)
    stacks = came.observations, came.next_observations, came.final_observations
    assert {type(each) for each in stacks} == {Frames}
    assert len({id(each.frames) for each in stacks}) == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"frames": np.zeros((5, 3), np.int8)}, "observations must be uint8"),
        ({"frames": np.zeros((5, 2), np.uint8)}, "observations must be uint8"),
        ({"frames": np.zeros((4, 3), np.uint8)}, "observations have indices of frames that do not"),
        ({"frames": np.zeros((0, 3), np.uint8)}, "observations have indices of frames that do not"),
        (
            {"observations": np.full((STEPS, ENVS, 4), -1, np.int32)},
            "observations have indices of frames that do not exist",
        ),
        ({"observations": np.zeros((STEPS, ENVS, 4, 3), np.uint8)}, "observations must be uint8"),
        ({"next_observations": np.zeros((ENVS, 5), np.int32)}, "next_observations must be uint8"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        arrived(folded(**fields)).check(STACKS, STEPS, ENVS)
