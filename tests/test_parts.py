"""A worker's part of a rollout arrives unchanged. A wrong field is refused with its name."""

import contextlib

import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterenv_runtime import ProtocolError
from clusterenv_runtime.arrays.trees import map_space
from clusterenv_runtime.envs.blueprint import EnvLayout
from clusterenv_runtime.errors import EnvRaised
from clusterenv_runtime.head.responses import Opener, Published
from clusterenv_runtime.rollout import RolloutPart
from clusterenv_runtime.wire.buffers import Arrays, to_buffers
from clusterenv_runtime.wire.codec import pack
from clusterenv_runtime.wire.part import check_part, pack_part
from clusterenv_runtime.wire.protocol import (
    Call,
    Collect,
    CutOff,
    Reply,
    Reset,
    SetAttr,
    Step,
    decode_from_worker,
    frames,
)

from .envs import assert_same


def a_part(space, num_steps=6, num_envs=2):
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

    return RolloutPart(
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


PART_SPACES = [
    spaces.Box(-1, 1, (3,)),
    spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 255, (2, 2), np.uint8)),
]
WRONG = [
    ("observations", lambda part: map_leaf(part.observations, lambda leaf: leaf[:-1])),
    (
        "final_observations",
        lambda part: map_leaf(part.final_observations, lambda leaf: np.concatenate([leaf, leaf])),
    ),
    (
        "next_observations",
        lambda part: map_leaf(part.next_observations, lambda leaf: leaf[..., None]),
    ),
    ("starts", lambda part: part.starts[1:]),
    ("logprobs", lambda part: part.logprobs.astype("U8")),
    ("terminations", lambda part: part.terminations.astype(np.int8)),
    ("starts", lambda part: part.starts.astype(np.int8)),
    ("rewards", lambda part: part.rewards.astype(np.float32)),
    ("logprobs", lambda part: part.logprobs.astype(np.float64)),
    ("actions", lambda part: part.actions.astype(np.uint64)),
    (
        "observations",
        lambda part: map_leaf(part.observations, lambda leaf: leaf.astype(np.float64)),
    ),
    ("episodes", lambda part: part.episodes.astype(np.int8)),
    ("states", lambda part: np.zeros((2, 3), np.float32)),
    ("extras", lambda part: {"value": part.rewards, "more": part.rewards}),
    ("extras", lambda part: {"value": part.rewards}),
    ("infos", lambda part: {"success": (np.zeros(1, np.int64), np.zeros(1))}),
    ("actions", lambda part: {"a": part.actions}),
    ("actions", lambda part: (part.actions,)),
    ("truncations", lambda part: part.truncations[None]),
    ("actions", lambda part: part.actions.T),
    ("params", lambda part: part.params[1:]),
    ("episodes", lambda part: part.episodes.astype(np.float64)),
    ("episodic_returns", lambda part: part.episodic_returns[1:]),
    ("actions", lambda part: part.actions[..., None]),
    ("actions", lambda part: part.actions.astype(float)),
    ("params", lambda part: part.params[:, :2]),
    ("episodic_lengths", lambda part: part.episodic_lengths[1:]),
    ("episodic_lengths", lambda part: part.episodic_lengths.astype(float)),
    ("rewards", lambda part: part.rewards.astype(">f8")),
    ("rewards", lambda part: part.rewards.astype(np.longdouble)),
]


def map_leaf(tree, function):
    """Return a tree with one leaf changed."""
    return {**tree, "b": function(tree["b"])} if isinstance(tree, dict) else function(tree)


NOW = Published(
    1,
    1,
    {
        "params": np.zeros((1, 3), np.float32),
        "actions": np.zeros(1, np.int64),
        "logprobs": np.zeros(1, np.float32),
        "extras": {},
        "states": None,
    },
)


def opened(asked, answer, buffers, space=PART_SPACES[0], action_space=None, policy=NOW):
    """Open the response of a worker with two environments."""
    opener = Opener(EnvLayout(space, action_space or spaces.Discrete(2)))
    return opener(asked, answer, [b"header", *buffers], 2, policy)


def packed(part, **fields):
    """Return the message and the buffers of a part, with some fields changed."""
    part = msgspec.structs.replace(part, **fields)
    answer, buffers = pack_part(part, 0.0)
    _, came = decode_from_worker(frames(1, answer)[0])
    return came, [bytes(buffer) for buffer in buffers]


COLLECT = Collect(6, 5, 0, 0.0, [], states=6)


@pytest.mark.parametrize("version", [-1, 0, 1, 2, 10**6])
def test_a_part_must_have_the_version_that_its_worker_was_last_sent(version):
    answer = packed(a_part(PART_SPACES[0]), version=version)
    with pytest.raises(ProtocolError, match=f"version {version}, but it was last sent version 0"):
        opened(COLLECT, *answer, policy=None)
    if version == NOW.version:
        assert opened(COLLECT, *answer).version == version
    else:
        says = f"version {version}, but it was last sent version 1"
        with pytest.raises(ProtocolError, match=says):
            opened(COLLECT, *answer)


def test_a_part_must_have_the_structure_of_that_version():
    part = a_part(PART_SPACES[0])
    wide = packed(part, params=part.params[:, :2], actions=np.zeros((6, 2, 1), np.float32))
    of_wide = NOW.example | {
        "params": np.zeros((1, 2), np.float32),
        "actions": np.zeros((1, 1), np.float32),
    }
    with pytest.raises(ProtocolError, match="actions must be <i8"):
        opened(COLLECT, *wide)
    with pytest.raises(ProtocolError, match="actions must be <f4"):
        opened(COLLECT, *packed(part), policy=Published(1, 1, of_wide))
    assert opened(COLLECT, *wide, policy=Published(1, 1, of_wide)).params.shape == (12, 2)


@pytest.mark.parametrize("waited", [-1.0, 1e300, float("nan"), float("inf")])
def test_a_waiting_time_that_is_negative_or_huge_or_not_finite_is_refused(waited):
    answer, _ = pack_part(a_part(PART_SPACES[0]), waited)
    with pytest.raises(msgspec.ValidationError, match="waited"):
        decode_from_worker(frames(1, answer)[0])


OBSERVATIONS, FLAGS = np.zeros((2, 3), np.float32), np.zeros(2, bool)
REPLIES = [
    (Reset(), OBSERVATIONS, [(0, {"a": 1})]),
    (Step(), (OBSERVATIONS, np.zeros(2), FLAGS, FLAGS), []),
    (CutOff(), (OBSERVATIONS, np.zeros(2), FLAGS, FLAGS), [(1, {"worker_lost": True})]),
    (Call("name"), (1, "two"), []),
    (SetAttr("name"), None, []),
]
WRONG_REPLIES = [
    (Reset(), OBSERVATIONS[:1], []),
    (Reset(), OBSERVATIONS.astype(np.int64), []),
    (Reset(), None, []),
    (Reset(), {"a": OBSERVATIONS}, []),
    (Step(), (OBSERVATIONS, np.zeros(2), FLAGS), []),
    (Step(), (OBSERVATIONS, np.zeros(3), FLAGS, FLAGS), []),
    (Step(), (OBSERVATIONS, np.zeros(2), np.zeros(2), FLAGS), []),
    (CutOff(), None, []),
    (Call("name"), (1, 2, 3), []),
    (Call("name"), 7, []),
    (Call("name"), (1, "two"), None),
    (Reset(), OBSERVATIONS, [(2, {})]),
    (Reset(), OBSERVATIONS, [(0, 1)]),
    (Reset(), OBSERVATIONS, [{}]),
    (Reset(), OBSERVATIONS, 5),
    (Reset(), OBSERVATIONS, None),
    (Reset(), OBSERVATIONS, (0, {})),
    (COLLECT, None, []),
]


def a_reply(value, infos):
    arrays = []
    reply = Reply(pack(value, arrays), pack(infos, arrays))
    return reply, [bytes(buffer) for buffer in to_buffers(arrays)]


@pytest.mark.parametrize("asked, value, infos", REPLIES, ids=str)
def test_a_reply_comes_back(asked, value, infos):
    reply = opened(asked, *a_reply(value, infos))
    assert_same(reply.value, value)
    assert reply.infos == infos


@pytest.mark.parametrize("asked, value, infos", WRONG_REPLIES, ids=str)
def test_a_reply_that_does_not_match_its_request_is_a_protocol_error(asked, value, infos):
    with pytest.raises(ProtocolError):
        opened(asked, *a_reply(value, infos))


@pytest.mark.parametrize("space", PART_SPACES, ids=["Box", "Dict"])
def test_a_part_comes_back_and_one_that_does_not_fit_is_a_protocol_error(space):
    part = a_part(space)
    came = opened(COLLECT, *packed(part), space)
    assert_same(msgspec.structs.asdict(came), msgspec.structs.asdict(part))
    for name, wrong in WRONG:
        with pytest.raises((ProtocolError, ValueError), match=name):  # by the head or the worker
            opened(COLLECT, *packed(part, **{name: wrong(part)}), space)
    answer, buffers = packed(part)
    for layout in ({}, {**answer.layout, "more": "<f8 ()"}):
        with pytest.raises(ProtocolError, match="starts must be .*, got None|unknown fields"):
            opened(COLLECT, msgspec.structs.replace(answer, layout=layout), buffers, space)
    for sizes in ({"ends": answer.ends + 1}, {"episodes": 10**9}):
        with pytest.raises(ProtocolError, match="message is too short|final_observations for"):
            opened(COLLECT, msgspec.structs.replace(answer, **sizes), buffers, space)
    for wrong in (buffers[:-1], [*buffers, b"more"], [*buffers[:-1], buffers[-1] + bytes(8)]):
        with pytest.raises(ProtocolError, match="message is too short|longer than its arrays"):
            opened(COLLECT, answer, wrong, space)
    if isinstance(space, spaces.Dict):
        turned = dict(reversed(part.observations.items()))
        with pytest.raises(ProtocolError, match="observations must be {'a': .*, got {'b': "):
            opened(COLLECT, *packed(part, observations=turned), space)


def test_a_part_with_fewer_steps_than_requested_is_refused():
    answer = packed(a_part(PART_SPACES[0], num_steps=5))
    with pytest.raises(ProtocolError, match="message is too short"):
        opened(COLLECT, *answer)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_a_worker_sends_is_a_part_or_a_protocol_error(data):
    answer, buffers = packed(a_part(PART_SPACES[1]))
    sizes = st.integers(0, 20) | st.integers(0, 2**48 - 1)
    changes = {
        "version": st.integers(-1, 7),
        "ends": sizes,
        "episodes": sizes,
        "frames": st.lists(sizes, max_size=2),
        "infos": st.dictionaries(
            st.sampled_from(["success", "more"]),
            st.tuples(sizes, st.sampled_from(["<f8", "|b1", "<i9"]), st.lists(sizes, max_size=3)),
        ),
    }
    names = data.draw(st.sets(st.sampled_from(list(changes)), max_size=2))
    answer = msgspec.structs.replace(answer, **{name: data.draw(changes[name]) for name in names})
    more = data.draw(st.lists(st.binary(max_size=100), max_size=2))
    opener = Opener(EnvLayout(PART_SPACES[1], spaces.Discrete(2), info_keys=("success",)))
    with contextlib.suppress(ProtocolError, TypeError):  # NumPy has no nine-byte integer
        part = opener(COLLECT, answer, [b"header", *buffers, *more], 2, NOW, NOW)
        assert part.observations["a"].shape == (6, 2)


@pytest.mark.parametrize(
    ("steps", "values", "says"),
    [
        ([11, 0], np.ones((2, 3)), None),
        ([12], np.ones(1), "info 'x' has steps that do not exist"),
        ([-1], np.ones(1), "info 'x' has steps that do not exist"),
        ([], np.ones((0, 2**40)), "info 'x' has steps that do not exist"),
        ([0], np.array(["text"]), "x"),
        ([0], np.ones(1, ">f8"), None),
    ],
)
def test_infos_are_numbers_at_some_steps(steps, values, says):
    opener = Opener(EnvLayout(PART_SPACES[0], spaces.Discrete(2), info_keys=("x",)))

    def opened():
        infos = {"x": (np.array(steps, np.int64), values)}
        answer, buffers = packed(a_part(PART_SPACES[0]), infos=infos)
        return opener(COLLECT, answer, [b"header", *buffers], 2, NOW).infos["x"]

    if says is None:
        assert_same(opened(), (np.array(steps), values))
        return
    with pytest.raises((ProtocolError, msgspec.ValidationError), match=says):
        opened()


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("rewards", 3e38, None),
        ("rewards", -1e39, "rewards are not all finite numbers of float32"),
        ("episodic_returns", np.nan, "episodic_returns are not all finite numbers of float32"),
        ("actions", 1.5, None),
        ("actions", np.inf, "actions are not all finite"),
        ("actions", np.nan, "actions are not all finite"),
        ("logprobs", np.inf, None),
        (
            "logprobs",
            -np.inf,
            "logprobs are of actions that cannot have been drawn: has the policy diverged?",
        ),
        ("logprobs", np.nan, "logprobs hold NaN: has the policy diverged?"),
        ("params", -np.inf, None),
        ("params", np.nan, "params hold NaN: has the policy diverged?"),
    ],
)
def test_values_that_no_learner_can_use_are_reported(name, value, fault):
    part = a_part(PART_SPACES[0])
    found = np.array(getattr(part, name), np.float64)
    found[..., -1] = value
    setattr(part, name, found)
    if fault is None:
        check_part(part, None)
        return
    with pytest.raises((EnvRaised, ValueError)) as caught:
        check_part(part, None)
    is_an_environments = name in ("rewards", "episodic_returns")
    assert isinstance(caught.value, EnvRaised) == is_an_environments
    assert str(caught.value.__cause__ if is_an_environments else caught.value) == fault


@pytest.mark.parametrize("actions", [np.full((6, 2), 2), np.full((6, 2), -1), np.zeros((6, 2))])
def test_actions_outside_their_space_are_reported(actions):
    part = a_part(PART_SPACES[0])
    space = spaces.Discrete(2)
    check_part(part, space, part.actions)
    with pytest.raises(ValueError, match=r"^actions are not of Discrete\(2\)$"):
        check_part(part, space, actions)


def test_a_shape_that_overflows_is_a_protocol_error_even_without_elements():
    arrays = Arrays(iter([b""]))
    with pytest.raises(ProtocolError, match="infos cannot be <f8"):
        arrays.take("infos", np.dtype("<f8"), (0, 145816, 7906687226415))
