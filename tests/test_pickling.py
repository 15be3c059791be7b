"""What travels as pickles: frames, spaces, infos, exceptions, and a worker that sends others."""

import collections
import contextlib
import copyreg
import dataclasses
import enum
import errno
import io
import itertools
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import threading
import time
import types
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from clusterenv_runtime.errors import ClusterEnvError, ProtocolError, StartupError
from clusterenv_runtime.pickling import (
    LARGE,
    MAX_FRAME,
    Absent,
    NotSendable,
    from_frames,
    load_exception,
    name_of,
    pack_exception,
    reader,
    sendable,
    space_form,
    to_frames,
    writer,
)

from .envs import assert_same


def on_the_wire(frames):
    """Return frames as pyzmq receives them: writable, and of their own memory."""
    return [memoryview(bytearray(frame)) for frame in frames]


def sent(value, allowed=()):
    """Return a worker's value as it arrives at the head."""
    return from_frames(on_the_wire(to_frames(value, writer(allowed))), reader(allowed))


# Values and frames

DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(),
    arrays.floating_dtypes(endianness="?"),
    arrays.complex_number_dtypes(),
    arrays.unicode_string_dtypes(max_len=5),
    arrays.byte_string_dtypes(max_len=5),
    arrays.datetime64_dtypes(),
    arrays.timedelta64_dtypes(),
)
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=4))
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(),
    st.binary().map(bytearray),
    ARRAYS,
    # NumPy has no array of empty texts.
    ARRAYS.filter(lambda array: array.size and array.ravel()[0].itemsize).map(
        lambda array: array.ravel()[0]
    ),
)
KEYS = st.one_of(st.integers(), st.text(max_size=5), st.tuples(st.booleans()))
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(KEYS),
        st.frozensets(KEYS),
        st.lists(inner, max_size=4).map(lambda items: np.fromiter(items, object)),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_values_arrive_exactly(value):
    assert_same(sent(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        -(2**5000),
        "\ud800 alone",
        "x" * 300,
        b"y" * 70_000,
        np.longdouble("0.1"),
        np.datetime64("NaT"),
        np.array(3, ">i2"),
        np.array([["a", None], [np.arange(3), [1]]], object),
        np.array(["2020-01-01"], "M8[25s]"),
        np.zeros((0, 5), "M8[D]"),
        np.asfortranarray(np.arange(20_000.0).reshape(100, 200)),
        np.arange(40_000)[::-2],
        np.dtype("O"),
        np.dtype(">f8"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_odd_value_arrives_exactly(value):
    assert_same(sent(value), value)


def test_a_graph_a_generator_and_what_is_shared_arrive():
    graph = spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)).sample()
    assert type(sent(graph)) is spaces.GraphInstance
    assert_same(tuple(sent(graph)), tuple(graph))
    rng = np.random.default_rng(7)
    rng.random(3)
    assert sent(rng).random() == rng.random()
    array, items = np.arange(3), []
    items.append((items, array, array))
    again = sent(items)
    assert again[0][0] is again and again[0][1] is again[0][2]


@pytest.mark.parametrize("size", [3, LARGE, MAX_FRAME + 5])
def test_a_read_only_array_arrives_as_a_writable_one(size):
    array = np.full(size, 7, np.uint8)
    array.flags.writeable = False
    again = sent(array)
    assert again.flags.behaved and again.tolist() == [7] * size


def test_large_arrays_travel_without_copies_in_bounded_frames():
    small, fits, large = np.zeros(LARGE - 1, "u1"), np.ones(LARGE, "u1"), np.zeros(10**6, "u1")
    frames = to_frames({"a": small, "b": fits, "c": large}, writer(()))
    sizes, dump, *rest = frames
    assert struct.unpack("<3Q", sizes) == (len(dump), LARGE, 10**6)
    assert max(map(len, frames)) == MAX_FRAME and len(rest) == 5
    assert all(np.shares_memory(np.frombuffer(frame, "u1"), large) for frame in rest[1:])
    came = on_the_wire(frames)
    again = from_frames(came, reader(()))
    assert np.shares_memory(again["b"], np.frombuffer(came[2], "u1"))
    assert all(map(np.array_equal, (small, fits, large), again.values()))


def test_a_view_at_an_odd_address_arrives_aligned():
    frames = to_frames(np.arange(LARGE, dtype=np.float64)[: LARGE // 8], writer(()))
    odd = [memoryview(bytearray(b"x" + bytes(frame)))[1:] for frame in frames]
    again = from_frames(odd, reader(()))
    assert again.flags.behaved and again.tolist() == list(range(LARGE // 8))


class Own:
    def __init__(self, value):
        self.value = value


VALID = to_frames([np.ones(LARGE, "u1"), np.ones(MAX_FRAME + 1, "u1")], writer(()))


@pytest.mark.parametrize(
    "frames",
    [
        *([], [b""], [b"1234567"], VALID[:1], VALID[:-1], VALID[1:], VALID[::-1]),
        *([*VALID, b""], [*VALID, b"x"]),
        [*VALID[:2], VALID[2][:-1], *VALID[3:]],
        [*VALID[:2], bytes(VALID[2]) + b"x", *VALID[3:]],
        [VALID[0][:-8], *VALID[1:]],
        [VALID[0] + bytes(4), *VALID[1:]],
        [struct.pack("<Q", 2**64 - 1), b"N."],
        [struct.pack("<Q", 0)],
        [struct.pack("<QQ", 2, 2**63), b"N."],
        [struct.pack("<2Q", 2, 2**18), b"N.", b"x" * 2**17, b"x" * 2**17],
    ],
)
def test_frames_that_do_not_match_their_sizes_are_refused_before_anything_is_unpickled(frames):
    def loads(data, buffers):
        pytest.fail("unpickled")

    if frames == [struct.pack("<Q", 0)]:
        loads = reader(())  # nothing to unpickle, but of the right size
    with pytest.raises(ProtocolError, match="^malformed message: [^\n]*$"):
        from_frames(frames, loads)


# What a worker does not send, and what the user allows


@dataclasses.dataclass
class Score:
    points: np.ndarray
    note: str = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int


@dataclasses.dataclass(frozen=True)
class Key:
    x: int


class Slotted:
    __slots__ = ("a", "_b", "__c", "unset", "__dict__")

    def __init__(self):
        self.a, self._b, self.__c, self.d = 1, [2], np.arange(3), 4

    def __eq__(self, other):
        one, two = ((self.a, self._b, self.__c.tolist(), self.d) for self in (self, other))
        return one == two


class Color(enum.Enum):
    RED = (1, "r")


class Mask(enum.Flag):
    A = 1
    B = 2


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: list


class Stateful:
    def __init__(self, x):
        self.x = x

    def __getstate__(self):
        return 0

    def __setstate__(self, state):
        self.x = ("set", state)


class OfText(str):
    pass


class Bag(dict):
    """A dict of a class of its own."""


ALLOWED = (
    *(Score, Frozen, Key, Slotted, Color, Mask, Level, Point, Stateful, OfText),
    *(Own, types.SimpleNamespace, collections.Counter, Bag),
)


@pytest.mark.parametrize(
    "value",
    [
        Frozen(3),
        Slotted(),
        Color.RED,
        Mask.A | Mask.B,
        Level.LOW,
        Point(1, [2]),
        OfText("x"),
        {Color.RED: {Key(1)}, Key(2): [Point(1, [Level.LOW])]},
        types.SimpleNamespace(x=1),
        collections.Counter("aab"),
        Bag(a=1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_instance_of_an_allowed_class_arrives_as_it_is(value):
    again = sent(value, ALLOWED)
    assert again == value and type(again) is type(value)
    if isinstance(value, Color | Mask | Level):
        assert again is value
    if type(value) not in (dict, OfText):
        with pytest.raises((NotSendable, ProtocolError)):
            sent(value)


@pytest.mark.parametrize(
    "value", [collections.OrderedDict(a=1, b=[2]), collections.deque([1, 2], 5)], ids=repr
)
def test_containers_of_collections_arrive_as_they_are(value):
    again = sent(value)
    assert again == value and type(again) is type(value)
    assert getattr(again, "maxlen", None) == getattr(value, "maxlen", None)


def test_state_of_allowed_classes_is_set_as_pickle_sets_it():
    assert sent(Stateful(1), ALLOWED).x == ("set", 0)
    again = sent(Score(np.arange(3)), ALLOWED)
    assert again.points.tolist() == [0, 1, 2] and again.note == "none"


class Unlisted(Own):
    """A subclass of an allowed class."""


@pytest.mark.parametrize(
    "value",
    [
        *(object(), Unlisted(1), threading.Lock(), ValueError("x"), collections.Counter("a")),
        *(lambda: 0, len, from_frames, Own, np.float32, np, ...),
        np.str_(""),
        np.ma.masked_array([1], [True]),
        np.zeros(1, "i4,f4"),
        np.zeros(1, "i4,f4")[0],
        np.zeros(1, "i4,O"),
        np.dtype("i4,f4"),
        np.random.Generator(np.random.MT19937(1)),
        memoryview(b"x"),
        range(3),
        io.BytesIO(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_else_is_sent(value):
    for each in (value, [{"x": (value,)}], np.array([value, None], object)):
        with pytest.raises(NotSendable) as caught:
            to_frames(each, writer((Own,)))
        kind = type(value)
        text = f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the head"
        assert text in str(caught.value) and f"allow=({kind.__name__},)" in str(caught.value)


# Spaces

OF_GYMNASIUM = [
    spaces.Box(-1, 2, (3,), np.float32),
    spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 5]), dtype=np.float64),
    spaces.Box(0, 255, (4, 84, 84), np.uint8),
    spaces.Discrete(3, start=-1),
    spaces.MultiBinary((2, 3)),
    spaces.MultiDiscrete([2, 3], start=[1, 0]),
    spaces.Text(4, charset="abc"),
    spaces.Sequence(spaces.Discrete(2), stack=True),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1)]),
    spaces.Dict(b=spaces.Tuple([spaces.Discrete(2)]), a=spaces.Dict({"7": spaces.Box(0, 1)})),
]
OTHERS = [
    spaces.Box(-1, 2, (3,), np.float64),
    spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 6]), dtype=np.float64),
    spaces.Box(0, 255, (84, 84, 4), np.uint8),
    spaces.Discrete(3),
    spaces.MultiBinary((3, 2)),
    spaces.MultiDiscrete([2, 3]),
    spaces.Text(4, charset="abd"),
    spaces.Sequence(spaces.Discrete(2)),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(4)),
    spaces.OneOf([spaces.Box(0, 1), spaces.Discrete(2)]),
    spaces.Dict(b=spaces.Tuple([spaces.Discrete(2)]), a=spaces.Dict({"8": spaces.Box(0, 1)})),
]


@pytest.mark.parametrize("space", OF_GYMNASIUM, ids=lambda space: type(space).__name__)
def test_a_space_of_gymnasium_arrives_as_it_is(space):
    space.seed(5)
    again = sent(space)
    assert again == space and repr(again) == repr(space) and type(again) is type(space)
    assert again._np_random is None and space._np_random is not None
    again.seed(3)
    space.seed(3)
    assert repr(again.sample()) == repr(space.sample())


def test_forms_tell_spaces_apart_by_what_they_hold():
    forms = [space_form(sent(space)) for space in OF_GYMNASIUM + OTHERS]
    for one, two in itertools.combinations(forms, 2):
        assert one != two
    str(OF_GYMNASIUM[1])  # keeps texts of its bounds
    assert forms[: len(OF_GYMNASIUM)] == [space_form(space) for space in OF_GYMNASIUM]
    assert forms == [space_form(pickle.loads(pickle.dumps(each))) for each in OF_GYMNASIUM + OTHERS]


class Angle(spaces.Box):
    def __init__(self, inner=None):
        super().__init__(-np.pi, np.pi, (2,))
        self.unit, self.lock, self.inner = "rad", threading.Lock(), inner
        self.formats = {"rad": str}

    def __new__(cls, *args):
        assert not hasattr(cls, "is_at_head"), "its own code was called"
        return super().__new__(cls)

    def __eq__(self, other):
        raise AssertionError("its own code was called")


def test_a_space_of_a_known_class_keeps_its_class_and_none_of_its_code_is_called(monkeypatch):
    angle = Angle(spaces.Discrete(3))
    angle.__orig_class__ = Angle
    monkeypatch.setattr(Angle, "is_at_head", True, raising=False)
    again = sent(angle)
    assert type(again) is Angle and again.unit == "rad" and again.lock == Absent("Angle.lock")
    assert np.array_equal(again.low, angle.low) and not hasattr(again, "__orig_class__")
    assert space_form(again) == space_form(sent(angle))
    angle.inner = spaces.Discrete(4)
    assert space_form(again) != space_form(sent(angle))


class Mission(spaces.Space):
    """Like MiniGrid's."""

    def __init__(self, function, placeholders):
        self.ordered_placeholders, self.mission_func = placeholders, function
        super().__init__(dtype=str)

    def sample(self, mask=None, probability=None):
        return self.mission_func()


class OfShape(spaces.Space):
    dtype = np.dtype(np.int8)
    shape = (2, 3)

    def __init__(self):
        pass


def test_a_function_stays_on_the_workers():
    again = sent(spaces.Dict(mission=Mission(lambda: "go", [["a"]])))["mission"]
    assert type(again) is Mission and again.ordered_placeholders == [["a"]] and str(again)
    with pytest.raises(ClusterEnvError, match="^Mission.mission_func stays on the workers[^\n]*$"):
        again.sample()
    for other in (pickle.loads(pickle.dumps(again)), sent(again)):
        assert other.mission_func == again.mission_func


def renamed(monkeypatch, space):
    """Return a space as a head gets it that has not imported its class."""
    with monkeypatch.context() as patch:
        patch.setattr(type(space), "__module__", "simulator.spaces")
        frames = to_frames(space, writer(()))
    return from_frames(frames, reader(()))


def test_a_space_of_an_unknown_class_becomes_one_of_its_nearest_base(monkeypatch):
    class Elsewhere(Angle):
        pass

    again = renamed(monkeypatch, Elsewhere())
    assert type(again) is Angle and str(again) == str(Elsewhere())
    mission = renamed(monkeypatch, Mission(lambda: "go", None))
    assert type(mission) is spaces.Space and str(mission)
    assert (mission.shape, mission.dtype) == (None, np.dtype(str))
    assert space_form(mission) == space_form(renamed(monkeypatch, Mission(len, None)))
    shape = renamed(monkeypatch, OfShape())
    assert (shape.shape, shape.dtype) == ((2, 3), np.int8) and type(shape) is spaces.Space


# Infos


def test_infos_lose_what_cannot_be_sent_with_its_mask():
    class Env(gym.Env):
        observation_space, action_space = spaces.Box(0, 1), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            info = {"good": 1.5, "bad": object(), "score": Score(np.arange(2)), "text": "x"}
            info["inner"] = {"bad": [threading.Lock()], "good": 2, "deep": {"f": len}}
            return np.zeros(1, np.float32), info

    _, infos = SyncVectorEnv([Env] * 2).reset()
    with pytest.raises(NotSendable):
        to_frames(infos, writer(()))
    kept, left_out = sendable(infos, ())
    module = Score.__module__
    assert sorted(left_out) == [
        "bad (_thread.lock)",
        "bad (builtins.object)",
        "f (builtins.builtin_function_or_method)",
        f"score ({module}.Score)",
    ]
    assert set(kept) == {"good", "_good", "text", "_text", "inner", "_inner"}
    assert set(kept["inner"]) == {"good", "_good", "deep", "_deep"} and not kept["inner"]["deep"]
    assert_same(sent(kept), kept)
    assert "bad" in infos and "bad" in infos["inner"]
    kept, left_out = sendable(infos, (Score,))
    assert kept["score"][1].note == "none" and len(left_out) == 3
    assert sent(kept, (Score,))["score"][0].points.tolist() == [0, 1]


def test_infos_of_dict_classes_become_dicts_and_those_whose_code_raises_are_left_out():
    class Odd:
        def __reduce_ex__(self, protocol):
            raise OSError

    itself = []
    itself = np.array([None], object)
    itself[0] = itself
    infos = {"odd": Odd(), "itself": itself, "counts": collections.Counter("aab")}
    kept, left_out = sendable(infos, (Odd,))
    assert kept == {"counts": {"a": 2, "b": 1}} and type(kept["counts"]) is dict
    assert left_out == ["odd (builtins.OSError)", "itself (builtins.RecursionError)"]


# Exceptions


class SimCrash(Exception):
    pass


class Coded(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class OfState(SimCrash):
    def __init__(self, sim):
        self.sim, self.step, self._sim = sim, 7, 8

    def __str__(self):
        return f"the simulator {self.sim} failed"


class Looped(StopIteration):
    pass


class Started(StartupError):
    pass


def raised(error, allowed=()):
    data = pack_exception(error, allowed)
    return None if data is None else load_exception(data, allowed)


def json_error():
    try:
        json.loads('{"a": 1,}')
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        SimCrash("physics diverged"),
        SimCrash(),
        SimCrash("two", 2),
        json_error(),
        OSError(errno.ENOSPC, "no space left", "a file"),
        FileNotFoundError(errno.ENOENT, "none"),
        KeyError("key"),
        KeyError("\x1b[31m"),
        ValueError("é\nsecond line\tof two"),
        UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"),
        ImportError("no module", name="name", path="path"),
        Coded(3, detail="x"),
        subprocess.CalledProcessError(3, ["a", "b"], b"out"),
        gym.error.InvalidAction("no"),
        ValueError(np.arange(10**6)),
        RuntimeError("x" * 10**5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_with_its_class_text_and_attributes(error):
    again = raised(error)
    assert type(again) is type(error) and str(again) == str(error)
    assert_same((again.args, vars(again)), (error.args, vars(error)))
    for name in ("errno", "filename", "reason", "name", "path"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_attributes_and_arguments_that_cannot_be_sent_are_left_out():
    error = SimCrash("diverged")
    error.sim, error.step = object(), 3
    again = raised(error)
    assert type(again) is SimCrash and vars(again) == {"step": 3} and str(again) == "diverged"
    error = SimCrash(object(), "and more")
    assert raised(error).args == (str(error),)
    error = Coded(Own(1), detail=Score(None))
    assert raised(error, (Own,)).code.value == 1 and not hasattr(raised(error), "code")


def test_no_text_that_was_complete_is_lost():
    complete, lacking = OfState("x"), OfState(object())
    assert type(raised(complete)) is OfState and raised(complete).step == 7
    again = raised(lacking)  # has no `sim` for its own text
    assert type(again) is SimCrash and str(again) == str(lacking) and again.step == 7


@pytest.mark.parametrize(
    "error",
    [
        *(kind("x") for kind in (StopIteration, StopAsyncIteration, Looped, Exception, SystemExit)),
        *(KeyboardInterrupt(), ExceptionGroup("x", [ValueError("y")])),
    ],
    ids=lambda error: type(error).__name__,
)
def test_some_exceptions_are_never_raised_again(error):
    assert raised(error) is None


def test_the_runtimes_own_exceptions_become_their_bases():
    assert type(raised(Started("x"))) is RuntimeError


def test_an_exception_whose_own_code_raises_is_not_sent():
    class Worse(Exception):
        def __str__(self):
            raise SystemError

    class Later(Exception):
        fails = False

        def __str__(self):
            return str(1 / (not self.fails))

    assert pack_exception(Worse(), ()) is None
    data = pack_exception(Later(), ())
    Later.fails = True
    assert load_exception(data, ()) is None
    for malformed in (b"", b"N.", data[:-1], pickle.dumps(ValueError()), pickle.dumps((1, 2, 3))):
        assert load_exception(malformed, ()) is None


# A worker that sends what no worker would

HOME = "clusterenv_runtime.pickling"
called = []


class Spy:
    """Allowed, and notes each call of its code that is not a constructor."""

    def __init__(self, *args):
        self.args = args

    def _called(self, *args):
        called.append(args)

    append = extend = add = __setstate__ = __call__ = _called


class Bare:
    """Allowed, with a `__dict__` that BUILD could update."""


def text(content):
    content = content.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def named(module, name):
    return text(module) + text(name) + b"\x93"


def maker(name):
    return named(HOME, name)


def array(dtype="<f8", shape=b"K\x02\x85", data=b"B\x10\0\0\0" + bytes(16)):
    return maker("_array") + text(dtype) + shape + data + b"\x87R"


def instance(kind, args=b")", state=b"N"):
    name = maker("_instance") + b"(" + text(name_of(kind))
    return name + b"\x89" + args + state + b"]]tR"


SPACE = maker("_space") + b"]" + text("gymnasium.spaces.box.Box") + b"a}\x86R"
STATE = b"}" + text("__array_interface__") + b"}s"
EMPTY = b"}"
ON_THE_STACK = {
    "maker": maker("_array"),
    "instances": maker("_instance"),
    "array": array(),
    "number": maker("_array") + text("<f8") + b"NC\x08" + bytes(8) + b"\x87R",
    "objects": maker("_array") + text("") + b"K\x01\x85]Na\x87R",
    "dtype": maker("_dtype") + text("<f8") + b"\x85R",
    "space": SPACE,
    "graph": instance(spaces.GraphInstance, b"NNN\x87"),
    "spy": instance(Spy),
    "bare": instance(Bare),
    "list": b"]",
    "dict": b"}",
    "set": b"\x8f",
    "bytearray": b"\x96" + bytes(8),
    "text": text("x"),
    "number of Python": b"K\x01",
    "buffer": b"\x97",
}
BUFFERS = (memoryview(bytearray(16)),)


def loaded(data, allowed=(Spy, Bare)):
    """Return what a head makes of a worker's pickle."""
    frames = [struct.pack("<2Q", len(data), 16), data, BUFFERS[0]]
    return from_frames(frames, reader(allowed))


def refused(data, reason="malformed message"):
    called.clear()
    with pytest.raises(ProtocolError, match=reason):
        loaded(data)
    assert not called


def test_the_assembled_pickles_are_what_a_worker_writes():
    assert loaded(b"\x80\x05" + array() + b".").tolist() == [0, 0]
    for made in ON_THE_STACK.values():
        loaded(made + b".")


GLOBALS = [
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("gymnasium.spaces.box", "Box"),
    ("builtins", "ValueError"),
    ("copyreg", "_reconstructor"),
    ("copyreg", "__newobj__"),
    (Spy.__module__, "Spy"),
    (HOME, "make"),
    (HOME, "io.BytesIO"),
    (HOME, "_array.__globals__"),
    (HOME, "_array.__class__"),
    (HOME, "_instance.__code__"),
    (HOME, "from_frames"),
    (HOME, "Reader"),
    ("", f"{HOME}._array"),
    ("clusterenv_runtime", "pickling.io"),
    ("never_imported_module", "x"),
]


@pytest.mark.parametrize(("module", "name"), GLOBALS)
def test_no_other_global_is_found_in_any_way(module, name):
    find = [
        named(module, name),
        f"c{module}\n{name}\n".encode(),
        f"(i{module}\n{name}\n".encode(),
        b"(" + named(module, name) + b"o",
        named(module, name) + b")\x81",
        named(module, name) + b")}\x92",
        named(module, name) + b")R",
    ]
    for each in find:
        refused(each + b".")
    assert "never_imported_module" not in sys.modules


@pytest.mark.parametrize("made", ON_THE_STACK.values(), ids=ON_THE_STACK)
def test_no_state_is_set_and_nothing_is_called(made):
    for state in (EMPTY, STATE, b"N" + STATE + b"\x86", STATE + STATE + b"\x86"):
        refused(made + state + b"b.", "an opcode that no worker writes")
    for arguments in (b")", b"]", EMPTY, text("os.system") + b"\x85", array() + b"\x85"):
        if made != ON_THE_STACK["spy"]:
            refused(made + arguments + b"R.")
        for opcode in (b"\x81", b"}\x92", b"o", b"i", b"Q"):
            refused(made + arguments + opcode + b".", "an opcode that no worker writes")


OPCODES = [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"Pid\n", b"NQ", b"(d", b"(l"]
OPCODES += [b"Nq\x01", b"Nr\xff\xff\xff\x7f", b"Np99999999\n", b"I1\n", b"Vx\n", b"S'x'\n", b"F1\n"]
OPCODES += [b"2", b"g0\n", b"T\xff\xff\xff\xff", b"U\x00"]


@pytest.mark.parametrize("opcodes", OPCODES)
def test_no_opcode_is_accepted_that_a_worker_does_not_write(opcodes):
    copyreg.add_extension("os", "getpid", 1)
    try:
        assert pickle.loads(b"\x82\x01.") is os.getpid  # Python keeps it, and finds it on its own
        refused(opcodes + b".", "an opcode that no worker writes")
    finally:
        copyreg.remove_extension("os", "getpid", 1)
        copyreg.clear_extension_cache()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b".", b"N", b"N.N.", b"N..", b"N\x94h\x07."),
        b"X\xff\xff\xff\xff.",
        b"\x96" + b"\xff" * 8 + b".",
        b"\x8e" + struct.pack("<Q", 2**40) + b".",
        b"\x8d" + struct.pack("<Q", 2) + b"\xff\xff.",
        b"\x8b\xff\xff\xff\xff.",
        b"\x95" + struct.pack("<Q", 2**62) + b"N.",
        b"\x80\x06N.",
        b"\x97\x97.",
        b"(" * 100 + b".",
    ],
)
def test_a_malformed_pickle_is_refused(data):
    refused(data)


TEXTS = ["M8[s/0]", "<M8[s/0]", "<M8[0s]", "|V8", "O", "i4,f4", "(2,3)f4", "<f3", "<U99999999999"]


@pytest.mark.parametrize("dtype", [*TEXTS, "|O", "", "<f8 ", "object", "<U0"])
def test_arrays_are_made_of_numbers_alone(dtype):
    refused(array(dtype) + b".")
    if dtype not in ("|O", "<U0"):
        refused(maker("_dtype") + text(dtype) + b"\x85R.")


def test_arrays_are_made_of_bytes_alone():
    objects = maker("_array") + text("") + b"K\x02\x85]NaNa\x87R"
    pointers = array("<u8", b"K\x02\x85", objects)
    refused(pointers + b".", "no bytes")
    for data in (array(), text("x" * 16), b"K\x10", b"(NNt", instance(Bare)):
        refused(array(data=data) + b".")
    for shape in (b"K\x03\x85", b"J\xff\xff\xff\xffK\x03\x86", b"]", text("x"), b"K\x03"):
        refused(array(shape=shape) + b".")
    huge = b"\x8a\x05" + struct.pack("<Q", 2**32)[:5]
    refused(array(shape=huge + huge + b"\x86") + b".")
    refused(array(shape=huge + huge + b"K\0\x87", data=b"C\0") + b".")


def test_an_array_never_loses_the_memory_that_it_shows():
    store = b"\x96" + struct.pack("<Q", 16) + bytes(16) + b"\x94"
    growth = b"(" + b"K\x01" * 200 + b"e"
    refused(b"(" + store + array(data=b"h\0") + b"h\0" + growth + b"t.", "BufferError")


def test_no_attribute_is_set_that_numpy_or_python_would_obey():
    pointer = b"}(" + text("data") + b"K\0\x89\x86" + text("shape") + b"K\x08\x85"
    pointer += text("typestr") + text("<f8") + text("version") + b"K\x03u"
    state = b"}" + text("__array_interface__") + pointer + b"s"
    names = b"]" + text("gymnasium.spaces.box.Box") + b"a"
    for made in (
        maker("_space") + names + state + b"\x86R",
        instance(Bare, state=state),
        instance(Bare, state=b"N" + state + b"\x86"),
    ):
        again = loaded(made + b".")
        assert not hasattr(again, "__array_interface__")
        with contextlib.suppress(ProtocolError):  # NumPy takes it for some object
            loaded(array() + b"(N" + made + b"u.")
    refused(instance(Bare, state=b"](" + text("__class__") + b"N\x86e") + b".")
    refused(instance(Bare, state=b"}" + b"C\x03abc" + b"Ns") + b".")


def test_only_allowed_classes_and_their_own_code_are_called():
    again = loaded(instance(Spy, b"K\x01\x85") + b".")
    assert type(again) is Spy and again.args == (1,)
    for kind in (int, Own, spaces.Box, ValueError, type, SimCrash):
        refused(instance(kind, b"K\x01\x85") + b".", "KeyError")


def test_a_space_is_only_made_of_a_space_class_that_is_imported():
    for name in ("builtins.object", "never_imported_module.Space", "os.system", Spy.__qualname__):
        again = loaded(maker("_space") + b"]" + text(name) + b"a}\x86R.")
        assert type(again) is spaces.Space
    assert "never_imported_module" not in sys.modules


def test_numpy_gets_no_text_of_a_space_as_a_dtype():
    for dtype in (text("M8[s/0]"), b"}", b"](" + text("a") + text("O") + b"\x86e", b"K\x01"):
        content = b"}(" + text("_shape") + b"K\x02\x85" + text("dtype") + dtype + b"u"
        again = loaded(
            maker("_space") + b"]" + text("gymnasium.spaces.box.Box") + b"a" + content + b"\x86R."
        )
        assert again.dtype is None and again.shape == (2,)


def test_a_generator_has_a_state_of_its_own_kind():
    state = np.random.default_rng(1).bit_generator.state
    for wrong in ({}, {**state, "state": 3}, {**state, "bit_generator": "MT19937"}, None):
        refused(maker("_generator") + pickle.dumps(wrong, 5)[:-1] + b"\x85R.")


MESSAGES = [
    {"a": np.arange(3), "b": [1.5, None, ("x", np.float32(2))], "c": {1, 2}, "d": 2**70},
    [spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Discrete(2)), np.random.default_rng(1)],
    [np.array([None, [1]], object), Spy(1), Bare(), "text" * 100, b"bytes" * 100],
]
TOKENS = [*ON_THE_STACK.values(), b"b", b"R", b"\x81", b"\x92", b"h\0", b"h\1", b"\x94", b"0", b"s"]
TOKENS += [STATE, *(bytes([opcode]) for opcode in b"a(teu\x93\x85\x86\x87N)j")]
TOKENS += [struct.pack("<Q", 2**40), b"\xff\xff\xff\xff", b"\x82\x01", b"\x98", b"\x90", b"\x91"]


def test_no_mutation_of_a_pickle_calls_or_imports_anything():
    rng, end = random.Random(3), time.monotonic() + 2
    allowed, outcomes, audited = (Spy, Bare), collections.Counter(), []
    dumps = [writer(allowed)(message) for message in MESSAGES]
    events = {"import", "os.system", "exec", "compile", "open", "pickle.find_class"}
    watching = True

    def audit(event, arguments):
        if watching and event in events:
            audited.append((event, arguments))

    from_frames([struct.pack("<Q", 2), b"N."], reader(allowed))
    sys.addaudithook(audit)
    while time.monotonic() < end:
        data = bytearray(rng.choice(dumps))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(5):
                case 0 if at < len(data):
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 8)]
                case 2:
                    data[at:at] = rng.choice(TOKENS)
                case 3:
                    data[at : at + 1] = rng.choice(TOKENS)
                case 4:
                    other = rng.randrange(len(data) + 1)
                    data[at:at] = data[other : other + rng.randint(1, 30)]
        if rng.random() < 0.5:  # random programs
            data = bytearray(b"".join(rng.choices(TOKENS, k=rng.randint(1, 12))) + b".")
        try:
            with np.errstate(all="ignore"):
                loaded(bytes(data))
            outcomes["harmless"] += 1
        except ProtocolError:
            outcomes["refused"] += 1
    watching = False
    assert outcomes["harmless"] > 10 and outcomes["refused"] > 100
    assert not audited
