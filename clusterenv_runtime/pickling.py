"""Values as frames, and pickles that the head reads although it does not trust its workers.

The head calls nothing of a worker's choosing but the constructors of spaces, of exceptions and of
the classes that the user allows, and methods of these that Python calls to fill an object (append,
extend, add, __setitem__), to call it, and to write an exception's text. It imports nothing.
Two rules make this true:

- A worker's pickle holds no opcode that `writer` does not write, see `OPCODES`. So none sets an
  object's state: with `ndarray.__setstate__`, or an attribute such as `__array_interface__`, a
  worker could reach all of the head's memory.
- The only globals that such a pickle finds are `MAKERS`, which take plain data.
"""

import copyreg
import functools
import io
import pickle
import re
from collections import OrderedDict, deque
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from .errors import ClusterEnvError, ProtocolError, one_line

Classes = tuple[type, ...]
MAX_FRAME = 2**18  # bytes; the head also accepts as many in a stranger's handshake
LARGE = 2**14  # bytes; smaller arrays are faster in the pickle than in frames of their own
NUMBERS = "biufcSUmM"  # the kinds of dtypes without pointers in their data
# NumPy crashes at other texts, such as M8[s/0].
DTYPE = re.compile(rf"[<>|][{NUMBERS}]\d+(\[([1-9]\d*)?[a-zA-Z]+\])?|\|O")
# The opcodes that `writer` writes. Before a text or bytes is their length: in one byte, or in four
# or eight bytes, which `reader` reads.
SHORT = b"|".join(rb"\x%02x.{%d}" % (size, size) for size in range(256))
OPCODES = re.compile(
    rb"(?:[]\x85-\x89\x8f-\x91\x93\x94\x97\x98()}01NRaestu]++|[\x80Kh].|M..|[Jj].{4}|[\x95G].{8}"
    rb"|[\x8a\x8cC](?:" + SHORT + rb"))*+(?:[\x8bBX](.{4})|\x96(.{8})|\.\Z)",
    re.DOTALL,
)
# The attributes that make up the form of a space, apart from those that are spaces.
FORM = "dtype _shape low high n start nvec spaces stack min_length max_length _char_str"


class NotSendable(TypeError):
    """A worker was to send an object that the head does not accept."""

    def __init__(self, kind: type) -> None:
        self.name = name_of(kind)
        super().__init__(
            f"a {self.name} cannot be sent to the head, only arrays, numbers, strings and their "
            f"containers: allow it with ClusterEnv(allow=({kind.__name__},))"
        )


def to_frames(value: Any, dumps: Any = pickle.dumps) -> list[Any]:
    """Return the frames of a value: the sizes of what follows, its pickle, and its large arrays.

    Raises:
        NotSendable: ``dumps`` is a `writer`, and the value holds what it does not write.
    """
    arrays: list[pickle.PickleBuffer] = []
    blobs = [dumps(value, 5, buffer_callback=arrays.append), *(each.raw() for each in arrays)]
    sizes = np.array([*map(len, blobs)], "<u8").tobytes()
    return [sizes, *(b[at : at + MAX_FRAME] for b in blobs for at in range(0, len(b), MAX_FRAME))]


def from_frames(frames: list[Any], loads: Any = pickle.loads) -> Any:
    """Return the value that `to_frames` took. Its arrays are views of the frames where possible.

    Raises:
        ProtocolError: the frames do not match their sizes, or cannot be unpickled.
    """
    blobs, at = [], 1
    try:
        sizes = np.frombuffer(frames[0], "<u8").tolist()
        for size in sizes:
            parts = frames[at : (at := at - -size // MAX_FRAME)]  # rounded up
            blobs.append(parts[0] if len(parts) == 1 else bytearray().join(parts))
        if (at, *map(len, blobs)) != (len(frames), *sizes):
            raise ValueError("wrong sizes")
        return loads(blobs[0], buffers=blobs[1:])
    except Exception as error:  # a peer may send anything
        raise ProtocolError(f"malformed message: {one_line(error)}") from None


def name_of(kind: Any) -> str:
    """Return the qualified name of a class or function, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _known(base: Any) -> dict[str, Any]:
    """Return all subclasses that this process has imported; of those of one name, the oldest."""
    known: dict[str, Any] = {}
    for kind in type.__subclasses__(base):
        known = {name_of(kind): kind} | _known(kind) | known
    return known


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes without those that NumPy or Python would obey."""
    return {name: value for name, value in attributes.items() if not name.startswith("__")}


class Absent(NamedTuple):
    """Stands at the head for an attribute of a space that cannot be sent, such as a function."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ClusterEnvError(f"{self.name} stays on the workers: the head cannot call it")


@functools.lru_cache
def _dtype(text: str) -> np.dtype[Any]:
    if not DTYPE.fullmatch(text):
        raise ValueError(f"dtype {text}")
    return np.dtype(text)


def _array(dtype: str, shape: Any, data: Any) -> Any:
    """Return an array of numbers or of objects, or a number if ``shape`` is None."""
    if type(data) is list:
        return np.fromiter(data, object).reshape(shape)
    if memoryview(data).format != "B":  # for example the pointers in an array of objects
        raise TypeError("no bytes")
    array = np.frombuffer(data, _dtype(dtype)).reshape(shape or ())
    if shape is None:
        return array[()]
    return array if array.flags.behaved else array.copy()  # aligned and writable


def _generator(state: Any) -> np.random.Generator:
    bits = np.random.PCG64()
    bits.state = state
    return np.random.Generator(bits)


def _space(names: list[str], attributes: dict[str, Any]) -> Any:
    space = object.__new__(next(filter(None, map(_known(Space).get, names)), Space))
    dtype = attributes.get("dtype")  # NumPy would read a text, see `DTYPE`
    vars(space).update(_plain(attributes), dtype=dtype if isinstance(dtype, np.dtype) else None)
    return space


def _instance(kind: Any, is_new: bool, args: Any, state: Any, items: Any, pairs: Any) -> Any:
    """Return an instance of a class that is allowed, made as pickle would make it."""
    instance = kind.__new__(kind, *args) if is_new else kind(*args)
    if state is not None and hasattr(kind, "__setstate__"):
        instance.__setstate__(state)
    elif state:
        for attributes in state if type(state) is tuple else (state,):
            for name, value in _plain(attributes or {}).items():
                object.__setattr__(instance, name, value)
    for item in items:
        instance.append(item)
    for key, item in pairs:
        instance[key] = item
    return instance


MAKERS = _array, _dtype, _generator, _space, _instance
# Classes that are always allowed.
BASIC = Absent, spaces.GraphInstance, complex, OrderedDict, deque


@functools.cache
def writer(allowed: Classes) -> Any:
    """Return a function like `pickle.dumps` for what a worker may send."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            kind = type(value)
            if kind is np.ndarray or isinstance(value, np.generic):
                dtype, shape = value.dtype, value.shape if kind is np.ndarray else None
                if dtype.kind == "O":
                    return _array, ("", shape, value.ravel().tolist())
                if dtype.kind in NUMBERS and dtype.itemsize:  # an empty text has none
                    if value.nbytes < LARGE:
                        data = value.tobytes()
                    else:
                        data = np.ascontiguousarray(value).view(np.uint8)
                        data = pickle.PickleBuffer(data)  # type: ignore[arg-type]
                    return _array, (dtype.str, shape, data)
            if isinstance(value, np.dtype) and value.kind in "O" + NUMBERS:
                return _dtype, (value.str,)
            if kind is np.random.Generator and type(value.bit_generator) is np.random.PCG64:
                return _generator, (value.bit_generator.state,)
            if isinstance(value, Space):
                # A class that the head lacks may have its own properties `shape` and `dtype`.
                content = {"_shape": value.shape, "dtype": value.dtype} | vars(value)
                content["_np_random"] = None
                for name, each in content.items():
                    if _problem(each, allowed):
                        content[name] = Absent(f"{kind.__name__}.{name}")
                return _space, ([*map(name_of, kind.__mro__)], content)
            if kind in BASIC + allowed:
                function, args, *more = value.__reduce_ex__(5)
                state, items, pairs, *_ = *more, None, None, None  # type: ignore[misc]
                is_new = function is copyreg.__newobj__  # type: ignore[attr-defined]
                if is_new or function is kind:
                    content = state, [*(items or ())], [*(pairs or ())]
                    return _instance, (name_of(kind), is_new, args[is_new:], *content)
            if any(value is maker for maker in MAKERS):
                return NotImplemented
            raise NotSendable(kind)

    def dumps(value: Any, protocol: int = 5, **options: Any) -> bytes:
        file = io.BytesIO()
        Pickler(file, protocol, **options).dump(value)
        return file.getvalue()

    return dumps


@functools.cache
def reader(allowed: Classes) -> Any:
    """Return a function like `pickle.loads` for what a `writer` writes, and for nothing else."""
    kinds = {name_of(kind): kind for kind in BASIC + allowed}
    found: dict[str, Any] = {name_of(maker): maker for maker in MAKERS}
    found[name_of(_instance)] = lambda name, *content: _instance(kinds[name], *content)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return found[f"{module}.{name}"]

    def loads(data: Any, **options: Any) -> Any:
        at = 0
        while match := OPCODES.match(data, at):
            if not match.lastindex:
                return Unpickler(io.BytesIO(data), **options).load()
            at = match.end() + int.from_bytes(match[match.lastindex], "little")
        raise ValueError("an opcode that no worker writes")

    return loads


def _problem(value: Any, allowed: Classes) -> str | None:
    """Return why a value cannot be sent, as a rule the name of a class that is not allowed."""
    try:
        writer(allowed)(value)
    except Exception as error:  # the value's own code may raise anything
        return error.name if isinstance(error, NotSendable) else name_of(type(error))
    return None


def sendable(infos: dict[str, Any], allowed: Classes) -> tuple[dict[str, Any], list[str]]:
    """Return infos without what cannot be sent, and a text "key (class)" for each key left out."""
    kept, left_out = dict(infos), []
    for key, value in infos.items():
        if not (problem := _problem(value, allowed)):
            continue
        if isinstance(value, dict):
            kept[key], more = sendable(value, allowed)
            left_out += more
        else:
            kept.pop(key, None)
            kept.pop(f"_{key}", None)
            left_out.append(f"{key} ({problem})")
    return kept, left_out


def space_form(value: Any) -> Any:
    """Return a space's form as plain data, which compares without code of the space's class."""
    if isinstance(value, Space):
        form = {k: v for k, v in vars(value).items() if k in FORM.split() or isinstance(v, Space)}
        return name_of(type(value)), space_form(sorted(form.items()))
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, tuple | list):
        return [space_form(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return repr(value)


def _builtin(kind: type) -> Any:
    """Return the built-in class that an exception's class is or extends."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def pack_exception(error: BaseException, allowed: Classes) -> bytes | None:
    """Return an exception for `load_exception`, or None if it cannot be sent."""
    with suppress(BaseException):  # the exception's own code may raise anything
        _, args, *state = _builtin(type(error)).__reduce__(error)
        content, _ = sendable(dict(*state) | {"": args}, allowed)
        return writer(allowed)(([*map(name_of, type(error).__mro__)], str(error), content))  # type: ignore[no-any-return]
    return None


def load_exception(data: bytes, allowed: Classes) -> Exception | None:
    """Return an exception with the text of the one that was packed.

    It has the nearest class that this process has imported. Return None if this is `Exception`, or
    if no exception can be made.
    """
    with suppress(Exception):  # a worker may send anything
        names, text, content = reader(allowed)(data)
        sent = content.pop("", (text,))
        for kind in filter(None, map(_known(Exception).get, names)):
            own = _builtin(kind)
            for args in (sent, (text,)):
                with suppress(Exception):  # so may the class's own code
                    error = own.__new__(kind, *args)
                    own.__init__(error, *args)
                    error.__setstate__(_plain(content))
                    # The first two would end a user's loop or generator. The runtime's own are
                    # about the process that raises them.
                    if str(error) == text and not isinstance(
                        error, StopIteration | StopAsyncIteration | ClusterEnvError
                    ):
                        return error  # type: ignore[no-any-return]
    return None
