"""What a worker's process takes over from the head's, as it was when the `ClusterEnv` was made.

These are the facts that `multiprocessing` hands to a process that it spawns, and those that a
process inherits from the one that forks it. The launcher hands over the environment variables and
the interpreter's flags, because these take effect when a process starts.
"""

from __future__ import annotations

import locale
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import resource
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import cloudpickle

from ..launchers import Launcher
from ..launchers.processes import current_directory, import_path

logger = logging.getLogger(__name__)
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass
class System:
    """What the system keeps for a process: its niceness, cores and limits."""

    niceness: int
    cores: set[int] | None
    limits: dict[int, tuple[int, int]]  # soft and hard limit, by resource number

    @classmethod
    def of_this_process(cls) -> System:
        limits = {number: resource.getrlimit(number) for number in LIMITS}
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        return cls(os.getpriority(os.PRIO_PROCESS, 0), cores, limits)

    def take(self) -> None:
        """Give this process the same niceness, cores and limits."""
        _try("niceness", os.setpriority, os.PRIO_PROCESS, 0, self.niceness)
        if self.cores is not None:
            _try("cores", os.sched_setaffinity, 0, self.cores)
        for number, limit in self.limits.items():
            if resource.getrlimit(number) != limit:
                _try(f"limit {number}", resource.setrlimit, number, limit)


@dataclass
class Likeness:
    """The facts about the head's process that its workers take over."""

    preparation: dict[str, Any]  # for `multiprocessing.spawn.prepare`
    before_library: int | None  # how many entries of `sys.path` go before a remote worker's own
    directory: str | None
    umask: int
    recursion_limit: int
    locale: str
    variables: dict[str, str | None]  # the head's values of variables that only the start needs
    main: tuple[str | None, str | None]  # the script's name as a module, and its file
    warning_filters: list[tuple[str, bytes, tuple[Any, ...]]]
    system: System | None  # None if a prefix or another machine sets these

    @classmethod
    def of_this_process(cls, launcher: Launcher) -> Likeness:
        """Return the facts about this process, for workers of this launcher."""
        path = import_path()
        process = multiprocessing.current_process()
        preparation = {
            "authkey": bytes(process.authkey),
            "sys_path": path,
            "sys_argv": list(sys.argv),
            "orig_dir": multiprocessing.process.ORIGINAL_DIR,
        }
        method = multiprocessing.get_start_method(allow_none=True)
        if method is not None:
            preparation["start_method"] = method
        library = os.path.dirname(os.__file__)
        before_library = path.index(library) if library in path else len(path)
        mask = os.umask(0o077)
        os.umask(mask)
        names = ["PYTHONHASHSEED", *launcher.variables()]
        variables = {name: os.environ.get(name) for name in names if name.startswith("PYTHON")}
        main = sys.modules["__main__"]
        is_plain = not launcher.remote and not launcher.prefix
        return cls(
            preparation=preparation,
            before_library=None if launcher.same_python else before_library,
            directory=current_directory(),
            umask=mask,
            recursion_limit=sys.getrecursionlimit(),
            locale=locale.setlocale(locale.LC_ALL),
            variables=variables,
            main=(getattr(main.__spec__, "name", None), getattr(main, "__file__", None)),
            warning_filters=[_packed(*each) for each in warnings.filters],
            system=System.of_this_process() if is_plain else None,
        )

    def take(self) -> None:
        """Make this process like the head's, except for the warning filters.

        This can be done before the environments' modules are imported.
        """
        if self.before_library is not None:
            path = self.preparation["sys_path"]
            first, last = path[: self.before_library], path[self.before_library :]
            own = [entry for entry in sys.path if entry not in path]
            self.preparation["sys_path"] = [*first, *own, *last]
        multiprocessing.spawn.prepare(self.preparation)
        if self.directory is not None:
            _try(f"directory {self.directory}", os.chdir, self.directory)
        os.umask(self.umask)
        _try("recursion limit", sys.setrecursionlimit, self.recursion_limit)
        _try(f"locale {self.locale}", locale.setlocale, locale.LC_ALL, self.locale)
        for name, text in self.variables.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
        if self.system is not None:
            self.system.take()
        self._be_main()

    def _be_main(self) -> None:
        """Make ``__main__`` a module like the script, but an empty one."""
        name, file = self.main
        main = types.ModuleType("__main__")
        if name is not None:
            main.__spec__ = ModuleSpec(name, None, origin=file)
        if file is not None and os.path.exists(file):
            main.__file__ = file
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # as in `multiprocessing`

    def filter_warnings(self) -> None:
        """Set the head's warning filters, except for categories of modules not imported here."""
        warnings.resetwarnings()
        for module, category, (action, message, where, line) in self.warning_filters:
            if module in sys.modules:
                kind = pickle.loads(category)
                warnings.filters.append((action, message, kind, where, line))


def _packed(
    action: str, message: Any, category: type[Warning], where: Any, line: int
) -> tuple[str, bytes, tuple[Any, ...]]:
    return category.__module__, cloudpickle.dumps(category), (action, message, where, line)


def _try(what: str, change: Callable[..., Any], *arguments: Any) -> None:
    """Change something in this process. Log a warning if that is impossible here."""
    try:
        change(*arguments)
    except (OSError, ValueError, RecursionError, locale.Error) as error:
        logger.warning("the head's %s cannot be set here: %s", what, error)
