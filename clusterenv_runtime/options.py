"""Every option of a `ClusterEnv`, once: name, type, range, default and text. Its arguments and the
scripts' flags.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import ipaddress
import math
import os
import re
import shlex
import shutil
import socket
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from .launchers import Launcher, is_ours, launcher_names, make_launcher
from .policy.sync import SyncRule
from .wire.security import HeadKeys, read_key_file


@dataclass(frozen=True)
class Range:
    """What a value must be, in words and as a function that says whether it is."""

    text: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class RunsCode:
    """Which values run someone's code: they start a program, name what is imported, or say who may
    send code.

    The training scripts never take such a value from a checkpoint alone: the command line must have
    it, too.
    """

    holds: Callable[[Any], bool]


# Of the types of options and flags. A NaN is in none of these.
Positive = Annotated[int, Range("at least 1", lambda value: value >= 1)]
NotNegative = Annotated[int, Range("at least 0", lambda value: value >= 0)]
PositiveNumber = Annotated[float, Range("a number > 0", lambda value: value > 0)]
NotNegativeNumber = Annotated[float, Range("a number >= 0", lambda value: 0 <= value < math.inf)]
Number = Annotated[float, Range("a finite number", math.isfinite)]
Fraction = Annotated[float, Range("in [0, 1]", lambda value: 0 <= value <= 1)]
Seconds = Annotated[float, Range("a number of seconds > 0", lambda value: value > 0)]
Nats = Annotated[float, Range("a number of nats >= 0", lambda value: value >= 0)]
Port = Annotated[int, Range("from 0 to 65535", lambda value: 0 <= value < 2**16)]
_NAME = "of letters, digits and -_.+=, not begin with a dot"  # slurm/train.sh has the same rule
LauncherName = Annotated[str, RunsCode(lambda value: not is_ours(value))]
EnvId = Annotated[
    str, RunsCode(lambda value: ":" in str(value))
]  # Gymnasium imports the module before the colon
Name = Annotated[str, Range(_NAME, lambda value: re.fullmatch(r"[\w+=-][\w.+=-]*", value))]


@dataclass
class ClusterOptions:
    """Where workers run, how they are supervised, when they pull, and what."""

    num_workers: Positive = 2
    """the number of environment worker processes, each with a contiguous share of the environments
    """
    launcher: LauncherName = "local"
    """where workers run: `local` (here), `external` (started by you), or as another launcher that
    is installed says
    """
    worker_prefix: Annotated[str, RunsCode(bool)] = ""
    """goes before each worker's Python, as in `nice -n 19` or, on other machines, `apptainer exec
    image.sif`
    """
    worker_resources: str = ""
    """each worker's resources, if its launcher knows them: `CPU=4` or, of some launchers, `CPU=2
    GPU=0.5`
    """
    sync_mode: Literal["kl", "interval", "always", "never"] = "kl"
    """when workers pull weights: by divergence (APS), every `sync_interval` versions, every
    version, or once
    """
    kl_threshold: Nats = 0.01
    """a worker pulls when the mean KL(its policy || the learner's) exceeds this, in nats per action
    dimension
    """
    sync_interval: Positive | None = None
    """with the mode `interval`: a worker pulls after so many versions"""
    max_policy_lag: NotNegative | None = None
    """a worker that is more than this many versions behind when it is asked to act pulls in any
    mode
    """
    weights: Literal["difference", "float32"] = "difference"
    """what a worker pulls: the `difference` from what it holds, about a bit a weight; or all
    weights, in `float32`
    """
    on_worker_loss: Literal["restart", "raise"] = "restart"
    """what happens when a worker dies or falls silent: another takes its place, or the run ends
    with an error
    """
    max_worker_restarts: NotNegative = 3
    """how many replacements of one worker in a row may die without an answer, before the run ends
    """
    min_workers: Positive | None = None
    """how many workers must be up to begin, by default all; the others join when they come"""
    worker_timeout: Seconds = 30.0
    """a worker whose process or link is silent for so many seconds counts as dead; a slow step is
    not silent
    """
    startup_timeout: Seconds = 60.0
    """how many seconds a worker may take to start, and then to build each of its environments"""
    bind_address: str | None = None
    """the IP address to listen on, over tcp; by default a socket file, or what the launcher's
    machines reach
    """
    interface: str | None = None
    """instead of an address: the network interface whose address to listen on"""
    port: Port = 0
    """the tcp port to listen on; 0 for a random free one"""
    security: Literal["curve", "none"] = "curve"
    """over tcp: `curve` encrypts and admits only workers that have this run's keys, `none` does
    neither
    """
    allow_insecure: Annotated[bool, RunsCode(bool)] = False
    """permit the security `none`, with which whoever can reach the port can execute code as you"""
    key_file: Annotated[str | None, RunsCode(bool)] = None
    """over tcp: the keys, in a file of `python -m clusterenv_runtime.keys FILE`; by default each
    run makes its own
    """

    @property
    def rule(self) -> SyncRule:
        """When a worker pulls."""
        return SyncRule(self.sync_mode, self.kl_threshold, self.sync_interval, self.max_policy_lag)

    @property
    def rounds(self) -> bool:
        """Whether what workers pull is rounded."""
        return self.weights == "difference"

    @property
    def restarts_in_a_row(self) -> int:
        """How many replacements of one worker in a row may die without an answer."""
        return self.max_worker_restarts if self.on_worker_loss == "restart" else 0

    @property
    def resources(self) -> dict[str, float]:
        """What each worker takes, by name.

        Raises:
            ValueError: `worker_resources` is not of its form; the text goes on after its name.
        """
        pairs = [
            re.fullmatch(r"([^=]+)=(\d+(?:\.\d+)?)", word) for word in self.worker_resources.split()
        ]
        if None in pairs:
            raise ValueError(
                f"must be of the form NAME=NUMBER, as in CPU=2, got {self.worker_resources!r}"
            )
        resources = {pair[1]: float(pair[2]) for pair in pairs}
        if len(resources) < len(pairs):
            raise ValueError(f"must name each resource once, got {self.worker_resources!r}")
        return resources

    def make_launcher(
        self, log_dir: str | os.PathLike[str] | None, spell: Callable[[str], str] = str
    ) -> Launcher:
        """Return the launcher of this name, whose workers may log to files in ``log_dir``.

        Raises:
            ValueError: there is none of this name, or the prefix is not a command line.
            StartupError: it cannot start workers here; the text says what to do.
        """
        if self.launcher not in (names := launcher_names()):
            raise ValueError(
                f"{spell('launcher')} must be one of {', '.join(map(repr, names))}, got {self.launcher!r}"
            )
        try:
            shlex.split(self.worker_prefix)
        except ValueError as error:
            raise ValueError(f"{spell('worker_prefix')} {self.worker_prefix}: {error}") from None
        return make_launcher(self.launcher, log_dir, self.worker_prefix)

    def keys(self) -> HeadKeys | None:
        """Return the keys that were made ahead, if any were.

        Raises:
            StartupError: the file does not hold them, or others can read it.
        """
        return None if self.key_file is None else read_key_file(self.key_file, HeadKeys)

    def workers_key_file(self, launcher: Launcher, made: Any) -> Any:
        """Return the file of the workers' keys that their commands name: the one that a head has
        ``made``, if any.

        But you have your own copies of keys that you have made and of workers that you start; see
        `keys`.
        """
        return f"{self.key_file}.worker" if launcher.by_hand and self.key_file else made

    def check(self, launcher: Launcher, spell: Callable[[str], str] = str) -> str | None:
        """Check all options, and return where to listen: an address or interface for tcp, None for
        a socket file.

        A launcher may have to ask a scheduler for the address, so keep it. ``spell`` writes an
        option's name as the user knows it.

        Raises:
            ValueError: an option is out of range, or does not go with the others; the text is for
                the user.
            StartupError: the launcher cannot start workers here, or the key file is not one.
        """
        check_ranges(self, spell)
        program = "".join(launcher.prefix[:1])
        interfaces = [name for _, name in socket.if_nameindex()]
        either = f"{spell('bind_address')} or {spell('interface')}"
        try:
            launcher.check_resources(self.resources, self.num_workers)
        except ValueError as error:
            raise ValueError(f"{spell('worker_resources')} {error}") from None
        address = self.bind_address or self.interface or launcher.address(self.num_workers)
        if self.min_workers is not None and self.min_workers > self.num_workers:
            most = f"{spell('num_workers')}, {self.num_workers}"
            raise ValueError(
                f"{spell('min_workers')} must be from 1 to {most}, got {self.min_workers}"
            )
        if self.sync_mode == "interval" and self.sync_interval is None:
            needs = f"{spell('sync_mode')} 'interval' needs {spell('sync_interval')}"
            raise ValueError(f"{needs}: pull every how many policy versions?")
        if program and not launcher.remote and shutil.which(program) is None:
            raise ValueError(
                f"{spell('worker_prefix')} begins with {program}, and there is no such program here"
            )
        if self.bind_address and self.interface:
            raise ValueError(f"give either {either}, not both")
        if self.interface is not None and self.interface not in interfaces:
            raise ValueError(
                f"{spell('interface')} must be one of {', '.join(interfaces)}, got {self.interface}"
            )
        if self.bind_address:
            _check_address(self.bind_address, spell)
        if launcher.remote and not address:
            needs = f"{spell('launcher')} {launcher.name} needs {either}"
            raise ValueError(f"{needs}: an address that its workers can connect to")
        if self.port != 0 and not address:
            raise ValueError(f"{spell('port')} needs {either}")
        encrypted = self.security == "curve"
        if self.key_file is not None and not (address and encrypted):
            raise ValueError(f"{spell('key_file')} is for tcp with {spell('security')} curve")
        if address and not (encrypted or self.allow_insecure):
            who = "whoever can reach the port, on this machine or another, execute code as you"
            only = f"use curve, or set {spell('allow_insecure')} where nobody else can"
            raise ValueError(f"{spell('security')} none on {address} would let {who}: {only}")
        self.keys()
        return address


def _check_address(text: str, spell: Callable[[str], str]) -> None:
    """Raise ValueError if this is not the address of one interface; ZeroMQ would read "0" as all of
    them.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        name = f"an interface's name goes to {spell('interface')}"
        raise ValueError(
            f"{spell('bind_address')} must be an IP address ({name}), got {text}"
        ) from None
    if (getattr(address, "ipv4_mapped", None) or address).is_unspecified:
        raise ValueError(f"{spell('bind_address')} must be one address, not all of them ({text})")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def check_ranges(options: Any, spell: Callable[[str], str] = str) -> None:
    """Raise ValueError if a field of this dataclass is not in the `Range` or `Literal` of its type;
    None may be.
    """
    for name, hint in _hints(type(options)).items():
        value = getattr(options, name)
        if value is None:
            continue
        for part in (hint, *typing.get_args(hint)):  # of a union as well
            if typing.get_origin(part) is Literal and value not in typing.get_args(part):
                words = " or ".join(map(repr, typing.get_args(part)))
                raise ValueError(f"{spell(name)} must be {words}, got {value!r}")
            for mark in getattr(part, "__metadata__", ()):
                if isinstance(mark, Range) and not mark.holds(value):
                    raise ValueError(f"{spell(name)} must be {mark.text}, got {value!r}")


def that_run_code(options: Any) -> dict[str, Any]:
    """Return the fields of this dataclass whose values run someone's code, as their types'
    `RunsCode` say.
    """
    marks = [
        (name, mark)
        for name, hint in _hints(type(options)).items()
        for mark in getattr(hint, "__metadata__", ())
    ]
    found = [
        name
        for name, mark in marks
        if isinstance(mark, RunsCode) and mark.holds(getattr(options, name))
    ]
    return {name: getattr(options, name) for name in found}


def parse_options(
    options: dict[str, Any], log_dir: str | os.PathLike[str] | None
) -> tuple[ClusterOptions, Launcher, str | None]:
    """Return a `ClusterEnv`'s keyword arguments as options, their launcher, and where to listen, as
    `check` says it.

    Raises:
        TypeError: there is no option of a name.
        ValueError: an option is out of range, or does not go with the others.
        StartupError: the launcher cannot start workers here.
    """
    names = [field.name for field in dataclasses.fields(ClusterOptions)]
    if unknown := [name for name in options if name not in names]:
        raise TypeError(
            f"ClusterEnv has no option {unknown[0]!r}; its options are {', '.join(names)}"
        )
    parsed = ClusterOptions(**options)
    launcher = parsed.launcher
    if isinstance(launcher, Launcher):
        kind = type(launcher).__name__
        if log_dir is not None or parsed.worker_prefix:
            raise ValueError(
                f"log_dir and worker_prefix belong to the launcher: {kind}(log_dir, prefix)"
            )
        if launcher.started:
            raise ValueError(f"a {kind} starts the workers of one ClusterEnv: make another")
        parsed.launcher = launcher.name
    else:
        launcher = parsed.make_launcher(log_dir)
    return parsed, launcher, parsed.check(launcher)


def with_options(cls: type) -> type:
    """Show the options in the signature of a class that takes them as ``**options``."""
    parameters = inspect.signature(cls).parameters
    own = [
        parameter
        for parameter in parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    options = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(ClusterOptions).parameters.items()
        if name not in parameters
    ]
    cls.__signature__ = inspect.Signature([*own, *options])
    return cls
