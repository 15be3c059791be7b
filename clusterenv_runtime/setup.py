"""What a worker takes over from the head: facts about the process, and what makes environments.

Both are taken when the `ClusterEnv` is made, so a replacement gets what the first process got. The
head makes a `Process` and calls `pack_environments`. A worker calls `Process.take`, then `loads`.
"""

import io
import mmap
import multiprocessing.spawn
import os
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from .errors import one_line
from .launchers import Launcher
from .launchers.local import current_directory, import_path

EnvFns = Sequence[Callable[[], gym.Env]] | Callable[[int], gym.vector.VectorEnv]
LARGE = 2**20  # bytes; an array of at least this size is held once for all workers


class Process:
    """The facts about the head's process that the workers of a launcher take over."""

    def __init__(self, launcher: Launcher) -> None:
        path, library = import_path(), os.path.dirname(os.__file__)
        # `multiprocessing` would also fix the start method, if the user has not chosen one yet.
        self._preparation: dict[str, Any] = {
            "sys_path": path,
            "sys_argv": list(sys.argv),
            "authkey": bytes(multiprocessing.current_process().authkey),
            "start_method": multiprocessing.get_start_method(allow_none=True),
        }
        # How many entries of the path go before the worker's own ones, which other machines have.
        self._first = path.index(library) if library in path else len(path)
        self._directory = current_directory() or "."
        # Otherwise, a prefix or another machine sets the cores.
        self._cores = os.sched_getaffinity(0) if launcher.can_fork else None
        main = sys.modules.get("__main__")
        spec = getattr(main, "__spec__", None)  # a debugger's script has none
        self._main = getattr(spec, "name", None), getattr(main, "__file__", None)
        self._registry = {}
        for env_id, spec in gym.registry.items():
            with suppress(TypeError):
                self._registry[env_id] = dumps(spec)

    def take(self) -> dict[str, EnvSpec]:
        """Make this process like the head's. Return the head's registry, see `register`."""
        path = self._preparation["sys_path"]
        path[self._first : self._first] = [entry for entry in sys.path if entry not in path]
        multiprocessing.spawn.prepare(self._preparation)
        with suppress(OSError):  # another machine may not have it
            os.chdir(self._directory)
        with suppress(OSError):  # the system may have taken some away since
            if self._cores is not None:
                os.sched_setaffinity(0, self._cores)
        self._make_main()
        # Modules that register environments when they are imported find the head's entries.
        warnings.filterwarnings("ignore", ".*Overriding environment .* already in registry")
        registry = {}
        for env_id, data in self._registry.items():
            with suppress(Exception):  # a module may be missing here
                registry[env_id] = loads(data)
        return registry

    def _make_main(self) -> None:
        """Make ``__main__`` a module like the script, but an empty one."""
        name, file = self._main
        main = ModuleType("__main__")
        main.__spec__ = name and ModuleSpec(name, None, origin=file)
        if file is not None and os.path.exists(file):
            main.__file__ = file
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # as in `multiprocessing`


def register(registry: dict[str, EnvSpec]) -> bool:
    """Put the head's entries into Gymnasium's registry. Return whether others were there."""
    were_others = any(gym.registry.get(env_id) is not spec for env_id, spec in registry.items())
    gym.registry.update(registry)
    return were_others


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes the script's classes and functions, by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.of_script: dict[str, Any] = {}
        self._main = sys.modules.get("__main__")
        if getattr(self._main, "__name__", None) == "__mp_main__":
            # `multiprocessing` has spawned this process: the script is a module of another name.
            cloudpickle.register_pickle_by_value(self._main)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType):
            name = value.__qualname__
            if getattr(self._main, name, None) is value:
                self.of_script[name] = value
        return super().reducer_override(value)


def dumps(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Return a cloudpickle of ``value`` for `loads`. ``buffer_callback`` is as in `pickle`.

    Raises:
        TypeError: something in ``value`` cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, buffer_callback=buffer_callback)
    try:
        pickler.dump((value, pickler.of_script))
    except Exception as error:  # an object's own code may raise anything
        raise TypeError(
            f"an environment refers to an object that cannot be sent to workers: {one_line(error)}"
        ) from error
    return file.getvalue()


def loads(data: bytes, buffers: Iterable[Any] = ()) -> Any:
    """Return the value that `dumps` has pickled.

    Its classes and functions of the script are also put into ``__main__``. Whoever pickles one of
    them again looks for it there.
    """
    # Environments may write to their arrays.
    writable = [bytearray(each) if memoryview(each).readonly else each for each in buffers]
    value, of_script = pickle.loads(data, buffers=writable)
    main = vars(sys.modules["__main__"])
    main.update(of_script | main)
    return value


class SharedArray:
    """A large array's bytes, in a file in memory. A worker on this machine unpickles a copy."""

    def __init__(self, file: io.BufferedWriter, array: np.ndarray) -> None:
        self._file = file  # which is closed when nothing refers to it any more
        start = file.seek(-file.tell() % mmap.PAGESIZE, os.SEEK_CUR)
        file.write(array.data)
        file.flush()
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        self._content = path, np.uint8, "c", start, array.nbytes  # writes stay in the worker

    def __reduce__(self) -> Any:
        return np.memmap, self._content


def pack_environments(values: Iterable[Any], is_shared: bool) -> list[tuple[bytes, list[Any]]]:
    """Return for each worker a pickle of its value, and the large arrays in it, for `loads`.

    Large arrays are copied once for all workers.

    Args:
        values: what each worker builds, for example functions that make environments.
        is_shared: whether workers can open this process's files.
    """
    file = None
    if is_shared:
        file = open(os.memfd_create("clusterenv"), "wb", closefd=False)  # noqa: SIM115
        weakref.finalize(file, os.close, file.fileno())
    # By address and size. The arrays are kept, so that no later one gets the address of another.
    copies: dict[tuple[int, int], tuple[Any, np.ndarray]] = {}

    def pack(value: Any) -> tuple[bytes, list[Any]]:
        arrays = []

        def stays(buffer: pickle.PickleBuffer) -> bool:  # whether the buffer is pickled
            array = np.frombuffer(buffer.raw(), np.uint8)
            if array.nbytes < LARGE:
                return True
            key = array.ctypes.data, array.nbytes
            if key not in copies:
                copies[key] = (array.copy() if file is None else SharedArray(file, array)), array
            arrays.append(copies[key][0])
            return False

        return dumps(value, stays), arrays

    return [pack(value) for value in values]
