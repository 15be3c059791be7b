"""A worker that lies: an insider, with the run's keys and a worker's place.

It gets the head to call nothing, and ends the run with one line.
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

from clusterenv_runtime import (
    CategoricalPolicy,
    ClusterEnv,
    EnvError,
    Frames,
    ProtocolError,
    WorkerDiedError,
)
from clusterenv_runtime.messages import PING, Error, Part, Reply, worker_frames
from clusterenv_runtime.pickling import MAX_FRAME, to_frames, writer
from clusterenv_runtime.worker.connection import Connection

from .envs import CountingEnv
from .nets import linear
from .patience import at_most, kill
from .test_pickling import STATE, array, named, text
from .test_protocol import LOOPED

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


POLICY = CategoricalPolicy(linear(1, 2))


def refused(lie, kinds=Part, after=0, action=None):
    """Have worker 1 lie in its next message of these kinds, in a rollout or another action.

    Return what the head says of it.
    """
    env_fns = [partial(Traitor, number) for number in range(2)]
    with ClusterEnv(env_fns, 2, info_keys=("x",)) as envs, at_most():
        envs.reset(seed=1)
        envs.call("betray", lie, kinds, after)
        with pytest.raises(ProtocolError, match="^worker 1 ") as caught:
            action(envs) if action else envs.rollout(POLICY, STEPS)
        with pytest.raises(WorkerDiedError, match="shut down by the head"):
            envs.reset()
    assert not called
    return str(caught.value).partition(") sent a ")[2]


# Pickles


def framed(data, *buffers):
    """Return the frames of a pickle and its buffers."""
    return [struct.pack(f"<{1 + len(buffers)}Q", *map(len, (data, *buffers))), data, *buffers]


class Bomb:
    def __reduce__(self):
        return os._exit, (7,)


PICKLES = {  # `test_pickling` has many more
    "a bomb": to_frames(Bomb()),
    "a bomb in a reply": to_frames((1, "Reply", {"value": Bomb(), "dropped": []})),
    "a call": framed(pickle.dumps(called.append)),
    "os.system": framed(named("os", "system") + text("false") + b"\x85R."),
    "state of an array": framed(array() + STATE + b"b."),
    "an extension": framed(b"\x82\x01."),
    "half a pickle": framed(b"\x80\x05](K\x01"),
    "frames of other sizes": [struct.pack("<Q", 2**63), b"N."],
    "many tuples": framed(b"N" + b"\x85" * 10**5 + b"."),
    "none at all": framed(b"N."),
    "a ping": PING,
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
def test_a_hostile_pickle_ends_the_run(frames):
    copyreg.add_extension(__name__, "called", 1)
    try:
        assert refused(partial(send_frames, frames)).startswith("malformed message: ")
    finally:
        copyreg.remove_extension(__name__, "called", 1)


# Values of the wrong form


def send_forged(fields, send, seq, message):
    """Send a message with other fields."""
    content = seq, type(message).__name__, vars(message) | fields
    send(to_frames(content, writer((Frames,))))


def box(**attributes):
    """Return a space with any attributes."""
    made = spaces.Box(0, np.inf, (1,))
    vars(made).update(attributes)
    return made


STACKS = np.zeros((STEPS, 1, 1), np.int32)
WRONG = {  # `test_parts` has many more
    "rewards": {"rewards": np.zeros((STEPS, 2))},
    "a terabyte of ends": {
        "terminations": np.zeros((10**6, 1), bool), "truncations": np.zeros((1, 10**6), bool)
    },
    "observations that are a list": {"observations": LOOPED},
    "frames at fractions": {"observations": Frames(np.zeros(2, np.float32), STACKS + 0.5)},
    "infos that are none": {"infos": {"x": None}},
    "a time": {"waited": None},
}  # fmt: skip


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_a_part_of_the_wrong_form_ends_the_run(fields):
    reason = refused(partial(send_forged, fields))
    assert reason.startswith(("malformed message: ", "wrong response: "))


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
def test_an_exception_that_lies_is_an_error_of_its_environment(names, fields):
    with ClusterEnv([partial(Traitor, number) for number in range(2)], 2) as envs, at_most():
        envs.reset()
        envs.call("betray", partial(send_error, names, fields), Part, 0)
        with pytest.raises(EnvError, match=r"^environment 1 on worker 1 \(.* raised K: no\n\n"):
            envs.rollout(POLICY, STEPS)
        envs.reset()
        assert not called and not envs.restarts


# Spaces


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


FIELDS = {"names": ["a"], "formats": ["O"], "offsets": [0], "itemsize": 8}
BUILT = {
    "nothing": lambda: None,
    "no space": lambda: {"observation_space": None},
    "a huge shape": lambda: {"observation_space": box(_shape=(2**62, 2**62))},
    "a text that crashes NumPy": lambda: {"observation_space": box(dtype="M8[s/0]")},
    "fields of a dtype": lambda: {"observation_space": box(dtype=FIELDS)},
    "another space": lambda: {"action_space": spaces.Discrete(3)},
}


def forged_envs(path, fields, letters, **options):
    path.write_text(letters)
    lies = [(str(path), partial(send_built, fields)) if i == 1 else () for i in range(2)]
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


def test_a_replacement_with_another_space_ends_the_run_in_one_line(tmp_path):
    with forged_envs(tmp_path / "letters", BUILT["another space"], "-x") as envs, at_most():
        envs.reset()
        kill(envs.call("pid")[1])
        text = r"action_space is Discrete\(3\), another's is Discrete\(2\); all must be alike$"
        with pytest.raises(RuntimeError, match=text):
            envs.rollout(POLICY, STEPS)
