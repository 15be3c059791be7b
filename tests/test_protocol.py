"""The wire protocol: values arrive exactly, and no message can do harm."""

import contextlib
import dataclasses
import datetime
import functools
import sys

import msgspec
import numpy as np
import pytest
import torch
import zmq
from gymnasium.spaces import GraphInstance
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clusterenv_runtime import ProtocolError
from clusterenv_runtime.wire.buffers import MAX_FRAME, SMALL, Arrays, to_buffers
from clusterenv_runtime.wire.codec import (
    ARRAY,
    BYTES,
    DICT,
    DTYPE_OF,
    GENERATOR,
    GRAPH,
    INT,
    SCALAR,
    SET,
    SPACE,
    TUPLE,
    pack,
    unpack,
)
from clusterenv_runtime.wire.protocol import (
    PROTOCOL_VERSION,
    Error,
    Hello,
    Pull,
    Reply,
    decode_from_worker,
    frames,
    keep_alive,
    mismatch,
    set_limits,
    shared_versions,
)

from .envs import assert_same

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(),
    hnp.unicode_string_dtypes(min_len=1, max_len=5),
    hnp.byte_string_dtypes(min_len=1, max_len=5),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
)
SCALARS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, (1,))).map(lambda array: array[0])
GENERATORS = st.builds(
    lambda seed: np.random.Generator(np.random.PCG64(seed)),
    st.integers(0, 2**64),
)
KEYS = st.one_of(
    st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.tuples(st.text(max_size=2))
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**100), 2**100),
    st.floats(),
    st.text(),
    st.binary(),
)
VALUES = st.recursive(
    st.one_of(PLAIN, ARRAYS, SCALARS, GENERATORS),
    lambda values: st.one_of(
        st.lists(values, max_size=4),
        st.lists(values, max_size=4).map(tuple),
        st.dictionaries(KEYS, values, max_size=4),
        st.builds(GraphInstance, values, values, values),
    ),
    max_leaves=8,
)


def over_the_wire(value, dropped=None):
    """Pack, encode, decode and unpack ``value``, as worker and head do."""
    arrays = []
    packed = pack(value, arrays, dropped)
    return received(packed, [bytes(buffer) for buffer in to_buffers(arrays)])


def received(packed, buffers):
    """Encode, decode and unpack data that may be a packed value. Check that all bytes are used."""
    arrays = Arrays(buffers)
    value = unpack(decode_from_worker(frames(1, Reply(packed))[0])[1].value, arrays)
    arrays.end()
    return value


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_values_come_back_exactly(value):
    assert_same(over_the_wire(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63) - 1,
        2**4000,
        float("nan"),
        -0.0,
        np.float32("nan"),
        np.longdouble(1) / 3,
        np.empty((0, 3), np.float16),
        np.empty((3, 0), "<M8[ns]"),
        np.array(["", ""]),
        np.array(5, ">i2"),
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)[::2, ::-1],
        np.array("2020-01-01T00:00", "M8[m]"),
        np.timedelta64("NaT"),
        ["list", []],
        ("dict", ["array", 0, 0, "<f8", [1]]),
        {"int": "0x1", ("tuple", 1): {}, 1: {2: None}, "1": {}},
        [
            np.arange(3),
            np.zeros(SMALL, np.int8),
            np.int8(5),
            np.arange(1.5),
            np.ones(SMALL),
            b"x",
            np.zeros(3, bool),
        ],
        [
            np.arange(2 * MAX_FRAME // 8 + 1),
            1,
            np.arange(MAX_FRAME),
            b"x" * MAX_FRAME,
            b"y" * (MAX_FRAME + 1),
            b"",
        ],
        [np.full(SMALL - 1, number, np.uint8) for number in range(99)],
        dict.fromkeys(range(2000)),
        GraphInstance(np.zeros((2, 1)), None, None),
        [[[[[[[[[]]]]]]]]],
    ],
    ids=repr,
)
def test_tricky_values_come_back_exactly(value):
    assert_same(over_the_wire(value), value)


def test_generators_go_on_where_they_were():
    generator = np.random.default_rng(3)
    generator.random(5, np.float32)  # an odd number of 32-bit draws: half a draw is buffered
    twin = over_the_wire(generator)
    assert (
        twin.integers(2**31, size=5, dtype=np.int32).tolist()
        == generator.integers(2**31, size=5, dtype=np.int32).tolist()
    )


def test_only_generators_like_gymnasiums_are_sent():
    with pytest.raises(
        TypeError, match="a numpy.random._generator.Generator cannot be sent to the head"
    ):
        pack(np.random.Generator(np.random.Philox(1)), [])


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 2**1000])
def test_integers_may_be_of_any_size(number):
    assert over_the_wire(number) == number


@dataclasses.dataclass
class Point:
    x: float
    y: np.ndarray


class Unspeakable:
    def __str__(self):
        raise RuntimeError("no")


def test_infos_that_can_become_plain_data_arrive_as_plain_data():
    dropped, arrays = [], []
    infos = {
        "point": Point(1.5, np.arange(3)), "tensor": torch.ones(2, requires_grad=True),
        "number": torch.tensor(3), "class": Point, Unspeakable(): 1, "text\ud800": 2,
        "value": "\ud800",
    }  # fmt: skip
    packed = pack(infos, arrays, dropped)
    found = unpack(packed, Arrays(to_buffers(arrays)))
    plain = {
        "point": {"x": 1.5, "y": np.arange(3)},
        "tensor": np.ones(2, np.float32),
        "number": np.int64(3),
    }
    assert_same(found, plain)
    assert found["tensor"].flags.owndata  # not a view of libzmq's memory, unless requested
    assert dropped == ["class (type)", "a Unspeakable (int)", "text\\ud800 (int)", "value (str)"]
    with pytest.raises(TypeError, match="a text with lone surrogates cannot be sent to the head"):
        pack("\ud800", [])


def test_views_are_aligned():
    arrays = [
        np.arange(number, dtype=kind)
        for number in (1, 3, 5)
        for kind in (np.uint8, np.float64, np.int16)
    ]
    views = Arrays(to_buffers(arrays))
    for array in arrays:
        view = views.take("name", array.dtype, array.shape)
        assert_same(view, array)
        assert view.flags.aligned and not view.flags.owndata


def test_large_arrays_are_not_copied():
    for size in (SMALL, MAX_FRAME):
        array = np.zeros(size, np.uint8)
        (buffer,) = to_buffers([array])
        assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)
        taken = Arrays([buffer]).take("name", array.dtype, array.shape)
        assert np.shares_memory(taken, array)


def test_unpacked_arrays_are_fresh_and_writable():
    array = np.arange(4.0)
    came = over_the_wire(array)
    came[0] = 7
    assert array[0] == 0


class IntLike(int):
    pass


UNSENDABLE = [
    object(),
    {1, 2},
    1j,
    IntLike(3),
    datetime.date(2020, 1, 1),
    np.array([None]),
    np.zeros(2, "f4,i4"),
    np.float64,
    len,
    bytearray(b"x"),
    range(3),
]


@pytest.mark.parametrize("value", UNSENDABLE, ids=lambda value: type(value).__name__)
def test_everything_else_is_a_type_error(value):
    for nested in (value, [value], ({"a": (1, value)},)):
        with pytest.raises(
            TypeError,
            match="cannot be sent to the head, only arrays, numbers, strings, bytes, None",
        ):
            pack(nested, [])


def test_keys_must_be_sendable_too():
    with pytest.raises(TypeError, match="a builtins.ellipsis cannot be sent to the head"):
        pack({...: 1}, [])


def test_values_that_are_too_long_must_be_in_arrays():
    with pytest.raises(ValueError, match="262144 at most: put long values into arrays"):
        frames(1, Reply(pack("x" * MAX_FRAME, [])))
    frames(1, Reply(None), b"x" * MAX_FRAME)


def test_an_instance_of_a_subclass_of_int_arrives_as_an_int():
    dropped = []
    assert_same(
        over_the_wire({"a": IntLike(3), "b": [IntLike(2**70)]}, dropped=dropped),
        {"a": 3, "b": [2**70]},
    )
    assert not dropped


@pytest.mark.parametrize(
    "value",
    [each for each in UNSENDABLE if type(each) is not IntLike],
    ids=lambda value: type(value).__name__,
)
def test_entries_that_cannot_be_sent_are_left_out_and_named(value):
    dropped = []
    array = np.arange(3)
    infos = {
        "a": array,
        "bad": value,
        "in": {"b": array, "worse": (array, [array, value])},
        "last": array + 1,
    }
    expected = {"a": array, "in": {"b": array}, "last": array + 1}
    assert_same(over_the_wire((infos, 1), dropped=dropped), (expected, 1))
    assert dropped == [f"bad ({type(value).__name__})", "worse (tuple)"]


def test_arrays_of_left_out_entries_are_not_sent():
    pack({"array": np.ones(SMALL), "bad": [np.ones(SMALL), object()]}, arrays := [], [])
    assert [array.size for array in arrays] == [SMALL]


def test_small_arrays_share_a_frame_as_long_as_there_is_room():
    number, last = divmod(MAX_FRAME, SMALL - 8)
    sizes = [SMALL - 8] * number + [last, 1]
    buffers = to_buffers(np.zeros(size, np.uint8) for size in sizes)
    assert list(map(len, buffers)) == [MAX_FRAME, 8]


def test_large_arrays_between_small_ones_do_not_split_their_frame():
    arrays = [np.arange(3), np.ones(SMALL), np.arange(5), np.ones(2 * MAX_FRAME, bool), np.ones(2)]
    buffers = to_buffers(arrays)
    assert [len(buffer) for buffer in buffers] == [80, MAX_FRAME, MAX_FRAME, MAX_FRAME, MAX_FRAME]
    views = Arrays(buffers)
    for array in arrays:
        assert_same(views.take("name", array.dtype, array.shape), array)
    views.end()


def test_no_frame_is_longer_than_the_head_takes():
    arrays = [np.arange(2 * MAX_FRAME + 1), *(np.ones(SMALL - 1, bool) for _ in range(99))]
    buffers = to_buffers(arrays)
    assert max(map(len, buffers)) == MAX_FRAME
    assert len(buffers) < 64


@pytest.mark.parametrize("size", [8, SMALL, MAX_FRAME, 3 * MAX_FRAME])
def test_a_message_that_is_too_short_or_too_long_is_refused_with_its_arrays_name(size):
    (*first, last) = map(bytes, to_buffers([np.zeros(size, np.uint8)]))
    for buffers in ([*first, last[:-1]], first, []):
        with pytest.raises(ProtocolError, match=r"rewards must be \|u1 .*, but the message is too"):
            Arrays(buffers).take("rewards", np.dtype(np.uint8), (size,))
    for buffers in ([*first, last, b""], [*first, last + bytes(8)]):
        with pytest.raises(ProtocolError, match="longer than its arrays|must be"):
            arrays = Arrays(buffers)
            arrays.take("rewards", np.dtype(np.uint8), (size,))
            arrays.end()


def extension(code, content):
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))


CODES = st.sampled_from([*range(11), 99, -1])
GARBAGE = st.recursive(
    st.one_of(
        PLAIN.filter(lambda value: type(value) is not int or -(2**63) <= value < 2**64),
        st.integers(-2, 3),
        st.sampled_from(["PCG64", "state", "<f8", "f4", "O", "V8", "f4,(", "M8[", "?"]),
    ),
    lambda trees: st.one_of(
        st.lists(trees, max_size=5),
        st.builds(extension, CODES, trees),
        st.builds(extension, CODES, st.lists(trees, max_size=4)),
        st.builds(extension, st.just(DICT), st.lists(st.tuples(trees, trees), max_size=4)),
        st.builds(
            lambda code, dtype, shape: extension(code, [dtype, shape]),
            st.sampled_from([ARRAY, SCALAR]),
            st.sampled_from(["<f8", "|b1", "U0", "<U1", "O", "<M8[s]", "f4,(", ","])
            | st.text(max_size=5)
            | trees,
            st.lists(st.integers(-1, 4) | st.integers(-(2**63), 2**63), max_size=3) | trees,
        ),
        st.builds(
            lambda kind, state, inc: extension(
                GENERATOR,
                {"bit_generator": kind, "state": {"state": state, "inc": inc}, "has_uint32": inc},
            ),
            st.sampled_from(["PCG64", "MT19937", "SeedSequence"]),
            trees,
            trees,
        ),
    ),
    max_leaves=12,
)


def pcg64(state, has_uint32=0):
    rest = {"state": {"state": state, "inc": 1}, "has_uint32": has_uint32, "uinteger": 0}
    return extension(GENERATOR, {"bit_generator": "PCG64", **rest})


@settings(max_examples=500, deadline=None)
@given(
    GARBAGE.map(msgspec.msgpack.encode) | st.binary(max_size=40),
    st.lists(st.just(b"01234567") | st.binary(max_size=40), max_size=3),
)
def test_garbage_raises_protocol_error_or_nothing(data, buffers):
    with contextlib.suppress(ProtocolError):
        unpack(data, Arrays(buffers))


@pytest.mark.parametrize(
    "tree",
    [
        extension(-2, []),
        extension(99, []),
        extension(TUPLE, None),
        extension(DICT, [["a"]]),
        extension(DICT, [[{1: 2}, 3]]),
        extension(INT, "x"),
        extension(BYTES, 9),
        extension(BYTES, -1),
        extension(ARRAY, ["<f8", [2]]),
        extension(ARRAY, ["<f8", [-1]]),
        extension(ARRAY, ["O", [1]]),
        extension(ARRAY, ["<f8"]),
        extension(ARRAY, ["<f8", 1]),
        extension(ARRAY, ["<f8", [1] * 65]),
        extension(ARRAY, ["<f8", [1.0]]),
        extension(ARRAY, ["<i8", [2**64 - 1]]),
        extension(ARRAY, ["<f8", [2**31, 2**31, 2**31]]),
        extension(ARRAY, ["U0", [2**45]]),
        extension(ARRAY, ["|S0", [2**40]]),
        extension(ARRAY, [",", [1]]),
        extension(ARRAY, ["f4,(", [1]]),
        extension(GRAPH, [1, 2]),
        extension(SPACE, [["gymnasium.spaces.space.Space"], {}]),
        extension(SPACE, [["gymnasium.spaces.discrete.Discrete"], 1]),
        extension(SPACE, [["gymnasium.spaces.discrete.Discrete"]]),
        extension(DTYPE_OF, "nothing"),
        extension(SET, [[]]),
        extension(GENERATOR, {"bit_generator": "SeedSequence"}),
        extension(GENERATOR, {"bit_generator": "PCG64"}),
        [extension(ARRAY, ["|u1", [5]]), extension(ARRAY, ["|u1", [5]])],
        pcg64(-1),
        pcg64(extension(INT, hex(2**200))),
        pcg64(1, has_uint32=2**64 - 1),
    ],
)
def test_malformed_values_are_protocol_errors(tree):
    with pytest.raises(ProtocolError):
        unpack(msgspec.msgpack.encode(tree), Arrays([b"01234567"]))


def test_too_deep_values_are_protocol_errors():
    tuples = functools.reduce(lambda tree, _: extension(TUPLE, [tree]), range(2000), None)
    for data in (b"\x91" * 100_000 + b"\xc0", msgspec.msgpack.encode(tuples)):
        with pytest.raises(ProtocolError, match="recursion"):
            unpack(data, Arrays([]))


MESSAGES = [
    Reply(pack([1, 2.5, None], []), pack([], []), ["x (set)"]),
    Pull(7),
    Error(None, "builtins.ValueError", "text\0ü", "traceback", True),
    Hello(1, 0, "host", 4, {"numpy": "2.0"}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back(message):
    for seq in (None, 1, 2**62):
        assert decode_from_worker(frames(seq, message)[0]) == (seq, message)


@pytest.mark.parametrize(("fatal", "ends_episodes"), [(False, False), (True, False), (False, True)])
def test_an_error_says_whether_it_ends_the_workers_other_requests(fatal, ends_episodes):
    error = Error(0, "builtins.ValueError", "\x1b[2Jtext", "", fatal, ends_episodes)
    assert error.ends == (fatal or ends_episodes) and str(error) == "\\x1b[2Jtext"
    assert str(Pull(1)) == "a Pull"


def test_a_worker_with_other_versions_is_told_which_ones_differ():
    ours = shared_versions()
    assert {"Python", "gymnasium", "numpy", "cloudpickle", "torch"} == ours.keys()
    assert ours["Python"] == "{}.{}".format(*sys.version_info)  # patch versions may differ

    def said(protocol=PROTOCOL_VERSION, **versions):
        return mismatch(Hello(protocol, 0, "host", 1, {**ours, **versions}))

    # Without any of these packages, a worker is accepted, too.
    assert said() is None and mismatch(Hello(PROTOCOL_VERSION, 0, "host", 1, {})) is None
    assert said(
        protocol=7
    ) == f"speaks protocol 7, the head {PROTOCOL_VERSION}: install the same " + (
        "clusterenv_runtime on both"
    )
    text = f"numpy 1.0 (head: {ours['numpy']}), torch 0.1 (head: {ours['torch']})"
    assert (
        said(numpy="1.0", torch="0.1", other="3")
        == f"runs {text}: install the same versions on both"
    )


@pytest.mark.parametrize(
    ("silence", "interval", "timeout", "told"),
    [(30, 50, 22500, 22500), (0.16, 40, 120, 100), (0.001, 1, 1, 100), (1e9, 50, 75e7, 65500)],
)
def test_a_socket_limits_frame_sizes_and_silence(silence, interval, timeout, told):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        set_limits(socket, 1000)
        assert socket.maxmsgsize == 1033  # CURVE adds 33 bytes to a frame
        keep_alive(socket, silence)
        # The worker closes a silent link after the interval plus the timeout, and the head after
        # the time that the worker sends it.
        assert (socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl) == (
            interval,
            timeout,
            told,
        )
