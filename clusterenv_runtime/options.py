"""All options of a `ClusterEnv`, each defined once: name, type, range, default and help text.

The options are keyword arguments of `ClusterEnv`, and flags of the scripts.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from .launchers import Launcher, is_ours, make_launcher
from .policy.sync import SyncRule
from .wire.security import HeadKeys, read_key_file


@dataclass(frozen=True)
class RunsCode:
    """A mark on an option's type: the values for which ``holds`` returns True can run code.

    Such a value starts a program, names a module to import, is passed to one, sends files away, or
    decides who may send code. The training scripts never take such a value from a checkpoint alone:
    the command line must repeat it.
    """

    holds: Callable[[Any], bool]


LARGEST = sys.float_info.max
# The types of options and flags. None of these ranges includes NaN.
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
PositiveNumber = Annotated[float, Meta(gt=0)]
NotNegativeNumber = Annotated[float, Meta(ge=0, le=LARGEST)]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(gt=0)]
Nats = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, lt=2**16)]
# slurm/train.sh checks names by the same rule.
Name = Annotated[str, Meta(pattern=r"^[\w+=-][\w.+=-]*\Z")]
LauncherName = Annotated[str, RunsCode(lambda value: not is_ours(value))]
# Gymnasium imports the module before the colon.
EnvId = Annotated[str, RunsCode(lambda value: ":" in str(value))]


@dataclass
class ClusterOptions:
    """Where workers run, how the head supervises them, and when and how they pull weights."""

    num_workers: Positive = 2
    """the number of environment worker processes, each with a contiguous share of the environments
    """
    launcher: LauncherName = "local"
    """where workers run: `local` (on this machine), `external` (started by you), or the name of
    another installed launcher
    """
    worker_prefix: Annotated[str, RunsCode(bool)] = ""
    """a command that goes before each worker's Python, for example `nice -n 19` or, on other
    machines, `apptainer exec image.sif`
    """
    worker_start: Literal["fork", "spawn"] = "fork"
    """how workers on this machine start: `fork` forks them from one process where it can (on Linux,
    without a `worker_prefix`), `spawn` starts each as a new process
    """
    worker_preload: Annotated[str, RunsCode(bool)] = ""
    """modules to import once, before workers are forked, separated by spaces: modules that
    environments need and that are slow to import, for example `mujoco`
    """
    worker_resources: str = ""
    """each worker's resources, if the launcher supports them: `CPU=4` or, with some launchers,
    `CPU=2 GPU=0.5`
    """
    sync_mode: Literal["kl", "interval", "always", "never"] = "kl"
    """when workers pull weights: by divergence (`kl`, APS), every `sync_interval` versions
    (`interval`), at every new version (`always`), or only once (`never`)
    """
    kl_threshold: Nats = 0.01
    """a worker pulls when the mean KL(its policy || the learner's) exceeds this threshold, in nats
    per action dimension
    """
    sync_interval: Positive | None = None
    """with the mode `interval`: the number of versions after which a worker pulls"""
    max_policy_lag: NotNegative | None = None
    """in any mode, a worker that is more than this many versions behind pulls when it is asked to
    act
    """
    weights: Literal["difference", "float32"] = "difference"
    """what a worker pulls: the rounded `difference` from the weights that it holds, about one bit
    per weight, or all weights in `float32`
    """
    on_worker_loss: Literal["restart", "raise"] = "restart"
    """what happens when a worker dies or falls silent: a replacement takes its place (`restart`),
    or the run ends with an error (`raise`)
    """
    max_worker_restarts: NotNegative = 3
    """the run ends when this many replacements of one worker in a row have died before they stepped
    """
    min_workers: Positive | None = None
    """how many workers must be up for the run to begin, by default all; the others join later"""
    worker_timeout: Seconds = 30.0
    """a worker counts as dead when its process or link has been silent for this many seconds, or
    up to a quarter less, and so does the head for its workers; a slow step is not silence
    """
    startup_timeout: Seconds = 60.0
    """how many seconds a worker may take to start, and then to build each of its environments"""
    close_timeout: Seconds = 30.0
    """how many seconds a worker may take at the end of the run to finish its step and close its
    environments, before it is killed
    """
    bind_address: str | None = None
    """the IP address to listen on over tcp; by default a socket file, or an address that the
    launcher's machines can reach
    """
    interface: str | None = None
    """the network interface on whose address to listen, in place of `bind_address`"""
    port: Port = 0
    """the tcp port to listen on; 0 for a random free one"""
    security: Literal["curve", "none"] = "curve"
    """over tcp: `curve` encrypts and admits only workers that have this run's keys, `none` does
    neither
    """
    allow_insecure: Annotated[bool, RunsCode(bool)] = False
    """permit the security `none`, with which anyone who can reach the port can execute code as
    you
    """
    key_file: Annotated[str | None, RunsCode(bool)] = None
    """over tcp: the key file, made by `python -m clusterenv_runtime.keys FILE`; by default each run
    makes its own keys
    """

    @property
    def rule(self) -> SyncRule:
        """The rule by which a worker pulls."""
        return SyncRule(self.sync_mode, self.kl_threshold, self.sync_interval, self.max_policy_lag)

    @property
    def restarts_in_a_row(self) -> int:
        """The value of `max_worker_restarts`, or 0 if lost workers are not replaced."""
        return self.max_worker_restarts if self.on_worker_loss == "restart" else 0

    @property
    def resources(self) -> dict[str, float]:
        """Each worker's resources, by name.

        Raises:
            ValueError: `worker_resources` is malformed.
        """
        resources: dict[str, float] = {}
        for word in self.worker_resources.split():
            pair = re.fullmatch(r"([^=]+)=(\d+(?:\.\d+)?)", word)
            if pair is None or pair[1] in resources:
                raise ValueError(
                    "worker_resources must be of the form NAME=NUMBER, as in CPU=2, "
                    f"each name once, got {self.worker_resources!r}"
                )
            resources[pair[1]] = float(pair[2])
        return resources

    def make_launcher(self, log_dir: str | os.PathLike[str] | None) -> Launcher:
        """Return the launcher. Its workers log to files in ``log_dir``, unless that is None.

        Raises:
            ValueError: no launcher has this name, or `worker_prefix` is not a command line.
            StartupError: the launcher cannot start workers here; the error message says what to do.
        """
        return make_launcher(self.launcher, log_dir, self.worker_prefix)

    def keys(self) -> HeadKeys | None:
        """Return the keys that were made in advance, or None if there is no `key_file`.

        Raises:
            StartupError: the file cannot be read, is not a head's key file, or others can read it.
        """
        return None if self.key_file is None else read_key_file(self.key_file, HeadKeys)

    def worker_flags(self, launcher: Launcher, address: str, key_file: Any) -> list[str]:
        """Return the flags that all workers share.

        ``key_file`` is the file that the head writes for its workers, or None. Workers that the
        user starts read their own copy of the keys that the user has made instead.
        """
        if self.key_file and launcher.by_hand:
            key_file = f"{self.key_file}.worker"
        flags = ["--connect", address]
        flags += ["--key-file", str(key_file)] if key_file else []
        flags += ["--startup-timeout", str(self.startup_timeout)]
        return [*flags, "--head-timeout", str(self.worker_timeout)]

    def check(self, launcher: Launcher) -> str | None:
        """Check all options. Return the address to listen on over tcp, or None for a socket file.

        The address may be the name of a network interface. Keep it for later, because a launcher
        may have to ask a scheduler for it.

        Raises:
            ValueError: an option is out of range, or does not fit the others.
            StartupError: the launcher cannot start workers here, or the key file is not valid.
        """
        check_ranges(self)
        launcher.check_resources(self.resources, self.num_workers)
        _require(
            self.min_workers is None or self.min_workers <= self.num_workers,
            f"min_workers must be from 1 to num_workers, {self.num_workers}, got "
            f"{self.min_workers}",
        )
        _require(
            self.sync_mode != "interval" or self.sync_interval is not None,
            "sync_mode 'interval' needs sync_interval, the number of policy versions between pulls",
        )
        _require(
            self.sync_mode == "interval" or self.sync_interval is None,
            f"sync_interval is for sync_mode 'interval', but sync_mode is {self.sync_mode!r}",
        )
        _require(
            not self.worker_preload or self.worker_start == "fork" and launcher.can_fork,
            "worker_preload is for forked workers: those of the launcher local, on Linux, "
            "without a worker_prefix",
        )
        program = "".join(launcher.prefix[:1])
        _require(
            not program or launcher.remote or shutil.which(program),
            f"worker_prefix begins with {program}, and there is no such program here",
        )
        return self._check_network(launcher)

    def _check_network(self, launcher: Launcher) -> str | None:
        interfaces = [name for _, name in socket.if_nameindex()]
        address = self.bind_address or self.interface or launcher.address(self.num_workers)
        encrypted = self.security == "curve"
        either = "bind_address or interface"
        _require(not (self.bind_address and self.interface), f"give either {either}, not both")
        _require(
            self.interface in (None, *interfaces),
            f"interface must be one of {', '.join(interfaces)}, got {self.interface}",
        )
        if self.bind_address:
            _check_address(self.bind_address)
        _require(
            address or not launcher.remote,
            f"launcher {launcher.name} needs {either}: an address that its workers can connect to",
        )
        _require(address or self.port == 0, f"port needs {either}")
        _require(
            self.key_file is None or address and encrypted,
            "key_file is for tcp with security curve",
        )
        _require(
            not address or encrypted or self.allow_insecure,
            f"security none on {address} would let whoever can reach the port, on this machine or "
            "another, execute code as you: use curve, or set allow_insecure where nobody else can",
        )
        self.keys()
        return address


def _require(fine: Any, text: str) -> None:
    if not fine:
        raise ValueError(text)


def _check_address(text: str) -> None:
    """Raise ValueError unless the text is one IP address. To ZeroMQ, "0" would mean all of them."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        hint = "give the name of an interface as interface"
        raise ValueError(f"bind_address must be an IP address ({hint}), got {text}") from None
    is_all = (getattr(address, "ipv4_mapped", None) or address).is_unspecified
    _require(not is_all, f"bind_address must be one address, not all of them ({text})")


def check_ranges(options: Any) -> None:
    """Raise ValueError if a field has the wrong type or is out of range."""
    for name, hint in typing.get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        try:
            msgspec.convert(value.item() if isinstance(value, np.generic) else value, hint)
        except msgspec.ValidationError as error:
            text = str(error)
            if typing.get_origin(hint) is Literal:
                text += f", one of {typing.get_args(hint)}"
            elif Name in (hint, *typing.get_args(hint)) and "regex" in text:
                text = "it must be of letters, digits and _.+=-, with no dot at the beginning"
            raise ValueError(f"{name} is {value!r}: {text}") from None


def that_run_code(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass whose values can run code, by name; see `RunsCode`."""
    return {
        name: getattr(options, name)
        for name, hint in typing.get_type_hints(type(options), include_extras=True).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, RunsCode) and mark.holds(getattr(options, name))
    }


def parse_options(
    options: dict[str, Any], log_dir: str | os.PathLike[str] | None
) -> tuple[ClusterOptions, Launcher, str | None]:
    """Return the options of a `ClusterEnv`, their launcher, and the address to listen on.

    ``options`` are keyword arguments of `ClusterEnv`. `ClusterOptions.check` explains the address.

    Raises:
        TypeError: a keyword argument is not an option.
        ValueError: an option is out of range, or does not fit the others.
        StartupError: the launcher cannot start workers here, or the key file is not valid.
    """
    parsed = ClusterOptions(**options)
    launcher: Any = parsed.launcher
    if isinstance(launcher, Launcher):
        kind = type(launcher).__name__
        _require(
            log_dir is None and not parsed.worker_prefix,
            f"log_dir and worker_prefix belong to the launcher: {kind}(log_dir, prefix)",
        )
        _require(
            not launcher.num_workers,
            f"a {kind} starts the workers of one ClusterEnv: make another",
        )
        parsed.launcher = launcher.name
    else:
        launcher = parsed.make_launcher(log_dir)
    return parsed, launcher, parsed.check(launcher)
