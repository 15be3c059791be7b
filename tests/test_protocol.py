"""The messages: they arrive unchanged, and what is no message is refused before it can do harm."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import zmq
from gymnasium import spaces

from clusterenv_runtime import Frames, ProtocolError
from clusterenv_runtime.messages import (
    MAX_FRAME,
    MAX_HELLO,
    PING,
    PROTOCOL_VERSION,
    Built,
    Error,
    Hello,
    Pull,
    Reply,
    hello_frames,
    keep_alive,
    mismatch,
    read_hello,
    read_worker,
    set_limit,
    shared_versions,
    worker_frames,
)
from clusterenv_runtime.pickling import to_frames, writer

from .envs import assert_same
from .test_parts import a_part

# Messages of workers


def on_the_wire(frames):
    """Return frames as pyzmq receives them: writable, and of their own memory."""
    return [memoryview(bytearray(frame)) for frame in frames]


def arrived(seq, message, allowed=()):
    return read_worker(on_the_wire(worker_frames(seq, message, allowed)), allowed)


ERROR = Error(0, "builtins.ValueError", "text\0ü", "traceback", True)
MESSAGES = [
    Built(),
    Reply({"arrays": (np.arange(3), np.zeros(10**5)), "infos": {"x": [None]}}, ["x (set)"]),
    Reply(None),
    Pull(7),
    ERROR,
    replace(ERROR, env=None, fatal=False, ends_episodes=True, exception=b"a pickle"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_of_a_worker_arrives(message):
    for seq in (None, 1, 2**62):
        again, came = arrived(seq, message)
        assert again == seq and type(came) is type(message)
        assert_same(vars(came), vars(message))


class Own:
    pass


def test_a_message_may_hold_classes_that_the_user_allows():
    with pytest.raises(TypeError, match="cannot be sent to the head"):
        worker_frames(1, Reply(Own()), ())
    assert type(arrived(1, Reply(Own()), (Own,))[1].value) is Own
    frames = worker_frames(1, Reply(Own()), (Own,))
    with pytest.raises(ProtocolError, match=r"^malformed message: KeyError: [^\n]*Own"):
        read_worker(frames, ())


def claimed(content):
    """Return the frames of a message with this content, which need not be one."""
    return on_the_wire(to_frames(content, writer((Frames,))))


PART = vars(a_part(spaces.Box(-1, 1, (3,))))
LOOPED = []
LOOPED.append((LOOPED,))
SPACE = spaces.Discrete(2)
WRONG = [("version", 1.5), ("waited", "long"), ("rewards", SPACE), ("starts", None)]
WRONG += [("infos", {"x": 3}), ("infos", {1: np.zeros(2)}), ("extras", [1])]


@pytest.mark.parametrize(
    "content",
    [
        None,
        (),
        (1, "Reply"),
        (1, "Reply", {"value": None}, 1),
        "abc",
        *((seq, "Pull", {"version": 1}) for seq in ("1", 1.0, True, np.int64(1))),
        (1, "Hello", {"protocol": 1, "index": 0, "host": "", "pid": 1, "versions": {}}),
        *((1, kind, PART) for kind in ("Rollout", "Setup", "\x1b[2J\n")),
        *((1, kind, {"value": None}) for kind in (["Reply"], b"Reply")),
        *((1, "Pull", fields) for fields in (None, [], {}, {1: 2}, spaces.Dict(version=SPACE))),
        *((1, "Pull", {"version": version}) for version in ("1", np.arange(3))),
        (1, "Reply", {}),
        *((1, "Reply", {"value": 1, "dropped": dropped}) for dropped in ("x", [2], LOOPED)),
        *((1, "Error", vars(ERROR) | {name: LOOPED}) for name in vars(ERROR)),
        *((1, "Error", vars(ERROR) | wrong) for wrong in ({"fatal": 1}, {"text": b"text"})),
        (1, "Part", {name: PART[name] for name in PART if name != "rewards"}),
        *((1, "Part", PART | {name: value}) for name, value in WRONG),
    ],
    ids=str,
)
def test_what_is_no_message_of_a_worker_is_refused_in_one_line(content):
    with pytest.raises(ProtocolError) as caught:
        read_worker(claimed(content), ())
    assert str(caught.value).startswith("malformed message: ")
    assert str(caught.value).isprintable()


def test_frames_that_are_none_are_refused():
    for frames in ([], [b""], [b"x" * 50] * 50, PING, hello_frames(HELLO)):
        with pytest.raises(ProtocolError, match=r"^malformed message: [^\n]*$"):
            read_worker(frames, ())


# Hello

HELLO = Hello(PROTOCOL_VERSION, 0, "host-1.lan", 4, {"numpy": "2.0", "torch": "2.8+cpu"})


def test_a_hello_arrives():
    assert read_hello(on_the_wire(hello_frames(HELLO))) == HELLO
    assert read_hello(hello_frames(replace(HELLO, host="", versions={}))).versions == {}


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def hello_of(**fields):
    return json.dumps(vars(HELLO) | fields).encode()


NO_INT = 1.5, True, float("nan")
ODD_TEXTS = "\x1b[2J", "a\n", "\n", "\u202e", "é", "a b", "x" * 256, "[red]", "%s", None, 3, ["a"]


@pytest.mark.parametrize(
    "frames",
    [
        *([], [b"", b""], PING, to_frames((None, HELLO)), to_frames(Bomb())),
        *(hello_frames(HELLO) * 2, [*hello_frames(HELLO), b""]),
        *([text] for text in (b"", b"\xff\xfe", b"null", b"3", b"[]", b"{}", b"[1, 2, 3, 4, 5]")),
        *([b"[" * 60_000], [b'{"a":' * 10_000], [b"9" * 10_000]),
        *([hello_of() + b" " * MAX_HELLO], [hello_of() + b"x"], [hello_of()[:-1]]),
        *([hello_of(**{name: value})] for name in ("protocol", "index", "pid") for value in NO_INT),
        *([hello_of(**{name: None})] for name in vars(HELLO)),
        *([hello_of(host=text)] for text in ODD_TEXTS),
        *([hello_of(versions={"numpy": text})] for text in ODD_TEXTS),
        *([hello_of(versions={text: "1"})] for text in ODD_TEXTS[:-3]),
        *([hello_of(versions=versions)] for versions in (["numpy"], "numpy")),
    ],
    ids=lambda frames: str(frames)[:50],
)
def test_what_is_no_hello_is_refused(frames):
    with pytest.raises(ProtocolError, match=r"\Ano hello: "):
        read_hello(on_the_wire(frames))


def test_a_worker_with_other_versions_is_told_which_ones_differ():
    ours = shared_versions()
    assert {"Python", "gymnasium", "numpy", "cloudpickle", "torch"} == ours.keys()
    assert ours["Python"] == "{}.{}".format(*sys.version_info)  # patch versions may differ

    def said(protocol=PROTOCOL_VERSION, **versions):
        return mismatch(Hello(protocol, 0, "host", 1, {**ours, **versions}))

    # Without any of these packages, a worker is accepted, too.
    assert said() is None and mismatch(Hello(PROTOCOL_VERSION, 0, "host", 1, {})) is None
    says = f"speaks protocol 7, the head {PROTOCOL_VERSION}: install the same clusterenv_runtime on"
    assert said(protocol=7) == f"{says} both"
    says = f"runs numpy 1.0 (head: {ours['numpy']}), torch 0.1 (head: {ours['torch']}): install the"
    assert said(numpy="1.0", torch="0.1", other="3") == f"{says} same versions on both"


# Sockets


@pytest.mark.parametrize(
    ("silence", "interval", "timeout", "told"),
    [(30, 50, 22500, 22500), (0.16, 40, 120, 100), (0.001, 1, 1, 100), (1e9, 50, 75e7, 65500)],
)
def test_a_socket_limits_frame_sizes_and_silence(silence, interval, timeout, told):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        set_limit(socket)
        assert socket.maxmsgsize == MAX_FRAME + 33  # CURVE adds 33 bytes to a frame
        keep_alive(socket, silence)
        # The worker closes a silent link after the interval plus the timeout, and the head after
        # the time that the worker sends it.
        found = socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl
        assert found == (interval, timeout, told)
