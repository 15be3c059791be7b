"""A worker that lies: an insider, with the run's keys and a worker's place.

It gets the head to call nothing, the run loses it with one line, and goes on with a replacement.
"""

import copyreg
import itertools
import os
import pickle
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, EnvError, Frames, WorkerDiedError
from clusterenv_runtime.messages import (
    PING,
    Built,
    Error,
    Part,
    Pull,
    Reply,
    hello_frames,
    worker_frames,
)
from clusterenv_runtime.pickling import MAX_FRAME, to_frames, writer
from clusterenv_runtime.worker.connection import Connection

from .envs import CountingEnv
from .nets import linear
from .patience import at_most, kill
from .test_pickling import STATE, array, maker, named, text
from .test_protocol import HELLO, LOOPED

STEPS = 4
called = []


def betray(lie, kinds, after=0):
    """In a worker: have ``lie`` send one message of these kinds, after a number of them."""
    honest, numbers = Connection.send, itertools.count()

    def send(connection, seq, message, allowed):
        if isinstance(message, kinds) and next(numbers) == after:
            connection.settle()
            lie(connection._socket.send_multipart, seq, message)
        else:
            honest(connection, seq, message, allowed)

    Connection.send = send


class Traitor(CountingEnv):
    """The second of these environments makes its worker lie when it is told to."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def betray(self, lie, kinds, after):
        if self.number == 1:
            betray(lie, kinds, after)


@pytest.fixture(scope="module")
def cluster():
    env_fns = [partial(Traitor, number) for number in range(2)]
    with ClusterEnv(env_fns, 2, info_keys=("x",)) as envs:
        envs.reset(seed=1)
        envs.rollout(POLICY, STEPS)
        yield envs


POLICY = CategoricalPolicy(linear(1, 2))


def lost(cluster, lie, kinds=Part, after=0, action=None):
    """Have worker 1 lie in its next message of these kinds, during a rollout or another action.

    Return why the head lost it, or None if it kept it.
    """
    cluster.call("betray", lie, kinds, after)
    before = len(cluster.restarts)
    pid = os.getpid()
    with at_most():
        if action is None:
            rollout = cluster.rollout(POLICY, STEPS)
            assert rollout.rewards.shape == (STEPS, 2) and rollout.rewards.all()
        else:
            action()
        assert cluster.rollout(POLICY, STEPS).rewards.shape == (STEPS, 2)
    assert os.getpid() == pid and not called
    new = cluster.restarts[before:]
    assert {restart["worker"] for restart in new} <= {1} and len(new) < 2
    if not new:
        return None
    reason = new[0]["reason"]
    assert reason.isprintable() and reason.startswith("worker 1 (")
    return reason.partition(" died: ")[2]


# Pickles


def framed(data, *buffers):
    """Return the frames of a pickle and its buffers."""
    return [struct.pack(f"<{1 + len(buffers)}Q", *map(len, (data, *buffers))), data, *buffers]


class Bomb:
    def __reduce__(self):
        return os._exit, (7,)


class Call:
    """Its pickle calls a function of this module, as that of a worker's module would."""

    def __reduce__(self):
        return called.append, (1,)


HOME = "clusterenv_runtime.pickling"
PICKLES = {
    "a bomb": to_frames(Bomb()),
    "a bomb in a reply": to_frames((1, "Reply", {"value": Bomb(), "dropped": []})),
    "a call": framed(pickle.dumps(called.append)),
    "os.system": framed(named("os", "system") + text("false") + b"\x85R."),
    "eval": framed(named("builtins", "eval") + text("called.append(1)") + b"\x85R."),
    "an import": framed(named("antigravity", "x") + b"."),
    "a dotted name": framed(named(HOME, "io.BytesIO") + b")R."),
    "globals of a maker": framed(named(HOME, "_array.__globals__") + b"."),
    "an old global": framed(b"cos\n_exit\n(K\x07tR."),
    "an instance": framed(b"(ios\n_exit\n."),
    "an object": framed(b"(" + named("os", "_exit") + b"K\x07o."),
    "a new object": framed(named(__name__, "Call") + b")\x81."),
    "a new object with keywords": framed(named(__name__, "Call") + b")}\x92."),
    "state of an array": framed(array() + STATE + b"b."),
    "slots of an array": framed(array() + b"N" + STATE + b"\x86b."),
    "an extension": framed(b"\x82\x01."),
    "a persistent name": framed(b"Pos._exit\n."),
    "a huge memo": framed(b"Nr\xff\xff\xff\x7f."),
    "a huge text": framed(b"\x8d" + struct.pack("<Q", 2**62) + b"."),
    "a huge array": framed(
        maker("_array") + text("<f8") + b"\x8a\x06" + bytes(5) + b"\x10\x85C\0\x87R."
    ),
    "a dtype that crashes NumPy": framed(array("<M8[s/0]") + b"."),
    "pointers": framed(
        maker("_array")
        + text("<u8")
        + b"K\x01\x85"
        + (maker("_array") + text("") + b"K\x01\x85]Na\x87R")
        + b"\x87R."
    ),
    "a buffer too many": framed(b"\x97\x97.", b"12345678"),
    "half a pickle": framed(b"\x80\x05](K\x01"),
    "no pickle": [b"", b"x"],
    "frames of other sizes": [struct.pack("<Q", 2**63), b"N."],
    "many tuples": framed(b"N" + b"\x85" * 10**5 + b"."),
    "many marks": framed(b"(" * 10**5 + b"N" + b"t" * 10**5 + b"."),
    "none at all": framed(b"N."),
    "a ping": PING,
    "the head's own message": to_frames((1, Pull(0))),
}


def send_frames(frames, send, seq, message):
    send(
        [
            frame[at : at + MAX_FRAME]
            for frame in frames
            for at in range(0, len(frame) or 1, MAX_FRAME)
        ]
    )


@pytest.mark.parametrize("frames", PICKLES.values(), ids=PICKLES)
def test_a_hostile_pickle_is_refused_and_its_worker_replaced(cluster, frames):
    copyreg.add_extension(__name__, "called", 1)
    try:
        reason = lost(cluster, partial(send_frames, frames))
    finally:
        copyreg.remove_extension(__name__, "called", 1)
    assert reason.startswith("it sent a malformed message: ")


def send_long(send, seq, message):
    send([bytes(2 * MAX_FRAME)] * 2)


def test_a_worker_with_a_frame_that_is_too_long_is_cut_off(cluster):
    assert "malformed" not in lost(cluster, send_long)


# Values of the wrong form


def send_forged(fields, send, seq, message, claims=None):
    """Send a message with other fields, as the message of kind ``claims`` if there is one."""
    content = vars(message) | fields
    send(to_frames((seq, claims or type(message).__name__, content), writer((Frames,))))


def box(**attributes):
    """Return a space with any attributes."""
    made = spaces.Box(0, np.inf, (1,))
    vars(made).update(attributes)
    return made


STACKS = np.zeros((STEPS, 1, 1), np.int32)
WRONG = {
    "a version": {"version": "1"},
    "rewards": {"rewards": np.zeros((STEPS, 2))},
    "more steps": {"rewards": np.zeros((STEPS + 1, 1))},
    "texts": {"rewards": np.full((STEPS, 1), "x")},
    "objects": {"rewards": np.full((STEPS, 1), None)},
    "ends": {"terminations": np.ones((STEPS, 1), bool)},
    "a terabyte of ends": {
        "terminations": np.zeros((10**6, 1), bool), "truncations": np.zeros((1, 10**6), bool)
    },
    "observations": {"observations": np.zeros((STEPS, 1, 2), np.float32)},
    "observations that are None": {"observations": None},
    "observations that are a space": {"observations": spaces.Box(0, 1, (STEPS, 1, 1))},
    "observations that are a list": {"observations": LOOPED},
    "observations of floats": {"observations": np.zeros((STEPS, 1, 1))},
    "final observations": {"final_observations": np.zeros((9, 1), np.float32)},
    "frames that do not exist": {"observations": Frames(np.zeros(2, np.float32), STACKS + 9)},
    "frames at fractions": {"observations": Frames(np.zeros(2, np.float32), STACKS + 0.5)},
    "frames of a space": {"observations": Frames(spaces.Box(0, 1, (2,)), STACKS)},
    "frames of nothing": {"observations": Frames(None, None)},
    "actions": {"actions": np.zeros((STEPS, 3), np.int64)},
    "actions that are None": {"actions": None},
    "log-probabilities": {"logprobs": np.zeros(STEPS, np.float32)},
    "extras": {"extras": {"value": np.zeros(3)}},
    "extras that are none": {"extras": 3},
    "infos": {"infos": {"x": np.zeros(3)}},
    "infos that are none": {"infos": {"x": None}},
    "infos of numbers": {"infos": {1: np.zeros((STEPS, 1))}},
    "infos with a mask of another shape": {
        "infos": {"x": np.zeros((STEPS, 1)), "_x": np.zeros((1, STEPS), bool)}
    },
    "episodes": {"episodes": np.zeros(3, np.int64)},
    "returns": {"episodic_returns": np.zeros(3)},
    "a time": {"waited": None},
}  # fmt: skip


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_a_part_of_the_wrong_form_is_refused(cluster, fields):
    reason = lost(cluster, partial(send_forged, fields))
    assert reason.startswith(("it sent a malformed message: ", "its response was wrong: "))


@pytest.mark.parametrize("claims", ["Setup", "Rollout", "Hello", "\x1b[2J"])
def test_a_message_of_no_worker_is_refused(cluster, claims):
    reason = lost(cluster, partial(send_forged, {}, claims=claims))
    assert reason.startswith("it sent a malformed message: KeyError: ")


def send_reply(send, seq, message):
    send(worker_frames(seq, Reply(None), ()))


def test_a_reply_is_no_part(cluster):
    assert lost(cluster, send_reply).startswith("its response was wrong: ")


def send_part(send, seq, message):
    zeros = np.zeros((1, 1))
    fields = dict.fromkeys(Part.__dataclass_fields__, zeros)
    fields |= {"version": 1, "extras": {}, "infos": {}, "waited": 0.0}
    send(worker_frames(seq, Part(**fields), ()))


@pytest.mark.parametrize("action", ["reset", "call", "get_attr", "set_attr"])
def test_a_part_is_no_reply(cluster, action):
    def act():
        match action:
            case "reset":
                assert cluster.reset()[0].tolist() == [[0], [0]]
            case "call":
                assert len(cluster.call("pid")) == 2
            case "get_attr":
                assert cluster.get_attr("number") == (0, 1)
            case "set_attr":
                cluster.set_attr("length", 5)

    assert lost(cluster, send_part, Reply, 1, act).startswith("its response was wrong: ")


# Messages that nobody waits for


def send_with_others(others, send, seq, message):
    for other_seq, other in others:
        number = seq + other_seq if type(other_seq) is int else other_seq
        send(worker_frames(number, other, ()))
    send(worker_frames(seq, message, ()))
    send(worker_frames(seq, message, ()))


OTHERS = {
    "replies to other requests": [(n, Reply(3)) for n in (-1, 1, 2**70, None)] * 100,
    "errors of other requests": [
        (n, Error(0, "x", "no", "no", False)) for n in (1, -9, None)
    ],
    "pulls": [(n, Pull(v)) for n in (0, 1, None) for v in (0, -1, 10**30)] * 20,
    "environments": [(None, Built())] * 1000,
}  # fmt: skip


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_messages_that_nobody_waits_for_change_nothing(cluster, others):
    assert lost(cluster, partial(send_with_others, others)) is None


def test_a_second_hello_changes_nothing(cluster):
    assert lost(cluster, send_hello) is None


def send_hello(send, seq, message):
    for frames in (hello_frames(HELLO), [b""], [b"x" * 2**17]):
        send(frames)
    send(worker_frames(seq, message, ()))


# Exceptions


def send_error(names, fields, send, seq, message):
    packed = writer(())((names, "no", fields))
    send(worker_frames(seq, Error(1, "K", "no", "trace", False, True, packed), ()))


LIES = {
    "the end of a loop": (["builtins.StopIteration"], {}),
    "the end of the program": (["builtins.SystemExit"], {"": (3,)}),
    "Ctrl-C": (["builtins.KeyboardInterrupt"], {}),
    "the runtime's own": (["clusterenv_runtime.errors.StartupError"], {}),
    "no exception": (["os.system", "builtins.eval", "builtins.object"], {"": ("called",)}),
    "odd names": ([[], None, {}], {}),
    "no names": (None, None),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("names", "fields"), LIES.values(), ids=LIES)
def test_an_exception_that_lies_is_an_error_of_its_environment(cluster, names, fields):
    def act():
        with pytest.raises(EnvError, match=r"^environment 1 on worker 1 \(.* raised K: no\n\n"):
            cluster.rollout(POLICY, STEPS)
        cluster.reset()

    assert lost(cluster, partial(send_error, names, fields), Part, 0, act) is None


def test_an_exception_keeps_nothing_that_python_would_obey(cluster):
    fields = {"": ("no",), "__cause__": 3, "__traceback__": 4, "__class__": 5, "detail": 6}

    def act():
        with pytest.raises(ValueError, match="^no$") as caught:
            cluster.rollout(POLICY, STEPS)
        assert caught.value.detail == 6 and isinstance(caught.value.__cause__, EnvError)
        cluster.reset()

    assert lost(cluster, partial(send_error, ["builtins.ValueError"], fields), Part, 0, act) is None


def send_hostile_exception(data, send, seq, message):
    send(worker_frames(seq, Error(1, "K", "no", "trace", False, True, data), ()))


@pytest.mark.parametrize(
    "data",
    [b"", b"N.", pickle.dumps(Bomb()), pickle.dumps(ValueError()), PICKLES["os.system"][1]],
)
def test_an_exceptions_pickle_is_read_like_any_other(cluster, data):
    def act():
        with pytest.raises(EnvError, match="raised K: no\n\ntrace"):
            cluster.rollout(POLICY, STEPS)
        cluster.reset()

    assert lost(cluster, partial(send_hostile_exception, data), Part, 0, act) is None


# Ends


def send_pull(send, seq, message):
    for version in (0, 1, -1):
        send(worker_frames(seq, Pull(version), ()))
    send(worker_frames(seq, message, ()))


def test_a_pull_before_there_is_a_policy_changes_nothing(tmp_path):
    (tmp_path / "letters").write_text("x")
    env_fns = [CountingEnv, partial(Builder, tmp_path / "letters", send_pull)]
    with ClusterEnv(env_fns, 2) as envs, at_most():
        envs.reset()
        assert envs.rollout(POLICY, STEPS).rewards.shape == (STEPS, 2) and not envs.restarts


class AlwaysTraitor(Traitor):
    """Its worker lies, and so does each replacement."""

    def reset(self, **kwargs):
        if self.number == 1:
            betray(partial(send_forged, {"rewards": np.zeros(3)}), Part)
        return super().reset(**kwargs)


@pytest.mark.parametrize(
    ("options", "processes"),
    [({"on_worker_loss": "raise"}, 1), ({"max_worker_restarts": 2}, 3)],
)
def test_the_run_ends_in_one_line_if_every_replacement_lies(options, processes):
    env_fns = [partial(AlwaysTraitor, number) for number in range(2)]
    with ClusterEnv(env_fns, 2, **options) as envs, at_most():
        envs.reset()
        text = r"^worker 1 \(.*\) died: its response was wrong: ValueError: rewards must be "
        with pytest.raises(WorkerDiedError, match=text) as caught:
            envs.rollout(POLICY, STEPS)
        assert str(caught.value).isprintable() and len(envs.restarts) == processes - 1
        with pytest.raises(WorkerDiedError):
            envs.rollout(POLICY, STEPS)


class Builder(CountingEnv):
    """Its worker lies about what it has built if ``path`` says so, one letter for each process."""

    def __init__(self, path=None, lie=None):
        super().__init__()
        if path is None:
            return
        letters = Path(path).read_text()
        Path(path).write_text(letters[1:])
        if letters[:1] == "x":
            betray(lie, Reply)


def send_built(fields, send, seq, message):
    value = fields()
    if isinstance(value, dict):
        value = message.value | value
    send(to_frames((seq, "Reply", {"value": value, "dropped": []}), writer(())))


def itself():
    made = box()
    made.low = [made]
    return made


def without_members():
    made = object.__new__(spaces.Tuple)
    vars(made).update(_shape=None, dtype=None, spaces=3)
    return made


FIELDS = {"names": ["a"], "formats": ["O"], "offsets": [0], "itemsize": 8}
BUILT = {
    "nothing": lambda: None,
    "no dict": lambda: [1, 2],
    "no space": lambda: {"observation_space": None},
    "a class": lambda: {"action_space": "Discrete"},
    "no attributes": lambda: {"observation_space": box(_shape=None, dtype=None)},
    "no dtype": lambda: {"observation_space": box(dtype=None)},
    "a shape": lambda: {"observation_space": box(_shape=("x",))},
    "a huge shape": lambda: {"observation_space": box(_shape=(2**62, 2**62))},
    "other bounds": lambda: {"observation_space": box(low=None, high=None)},
    "a text that crashes NumPy": lambda: {"observation_space": box(dtype="M8[s/0]")},
    "fields of a dtype": lambda: {"observation_space": box(dtype=FIELDS)},
    "itself": lambda: {"observation_space": itself()},
    "no members": lambda: {"observation_space": without_members()},
    "another space": lambda: {"action_space": spaces.Discrete(3)},
}


def forged_envs(path, fields, letters, who=(1,), **options):
    path.write_text(letters)
    lies = [(str(path), partial(send_built, fields)) if i in who else () for i in range(2)]
    env_fns = [partial(Builder, *arguments) for arguments in lies]
    return ClusterEnv(env_fns, 2, **options)


@pytest.mark.parametrize("fields", BUILT.values(), ids=BUILT)
def test_forged_spaces_at_the_start_end_it_in_one_line(tmp_path, workers, fields):
    before = workers()
    with at_most(), pytest.raises(RuntimeError) as caught:  # also WorkerDiedError
        forged_envs(tmp_path / "letters", fields, "x").close()
        pytest.fail("started")
    assert str(caught.value).isprintable()
    assert workers() == before


@pytest.mark.parametrize("name", ["a text that crashes NumPy", "other bounds", "a huge shape"])
def test_spaces_that_all_workers_forge_alike_end_the_start_in_one_line(tmp_path, workers, name):
    before = workers()
    with at_most(), pytest.raises((RuntimeError, ValueError, AttributeError)) as caught:
        forged_envs(tmp_path / "letters", BUILT[name], "xx", (0, 1)).close()
    assert str(caught.value).isprintable()
    assert workers() == before


@pytest.mark.parametrize("name", ["nothing", "itself", "no members"])
def test_a_replacement_that_forges_spaces_is_replaced_itself(tmp_path, name):
    # The constructor, the replacement that lies, and the one that does not.
    with forged_envs(tmp_path / "letters", BUILT[name], "-x-") as envs, at_most():
        envs.reset()
        envs.rollout(POLICY, STEPS)
        kill(envs.call("pid")[1])
        assert envs.rollout(POLICY, STEPS).rewards.shape == (STEPS, 2)
        _, forged = (restart["reason"] for restart in envs.restarts)
        assert forged.isprintable() and "died: its spaces were wrong: " in forged


def test_a_replacement_with_another_space_ends_the_run_in_one_line(tmp_path):
    with forged_envs(tmp_path / "letters", BUILT["another space"], "-x") as envs, at_most():
        envs.reset()
        kill(envs.call("pid")[1])
        text = r"action_space is Discrete\(3\), another's is Discrete\(2\): all must be alike$"
        with pytest.raises(RuntimeError, match=text):
            envs.rollout(POLICY, STEPS)
