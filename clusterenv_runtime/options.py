"""All options of a `ClusterEnv`, each defined once: name, type, range, default and help text.

The options are keyword arguments of `ClusterEnv`, and flags of the scripts.
"""

import difflib
import os
import shutil
import typing
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from .launchers import Launcher, make_launcher
from .messages import PULSE_S
from .policy.sync import SyncRule
from .security import HeadKeys, read_key_file

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]  # no range includes NaN
Nats = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, lt=2**16)]


@dataclass
class ClusterOptions:
    """Where workers run, how the head supervises them, and when and how they pull weights."""

    num_workers: Positive = 2
    """the number of worker processes, each with a contiguous share of the environments"""
    launcher: str = "local"
    """where workers run: `local` (on this machine), `external` (started by you), or another
    installed launcher's name
    """
    worker_prefix: str = ""
    """a command before each worker's Python, for example `nice -n 19` or, on other machines,
    `apptainer exec image.sif`
    """
    worker_start: Literal["fork", "spawn"] = "fork"
    """how workers on this machine start: `fork` forks them from one process where it can (on Linux,
    without a `worker_prefix`), `spawn` starts new processes
    """
    worker_preload: str = ""
    """slow modules to import once, before workers are forked, separated by spaces, for example
    `mujoco`. All workers share what they make then: open files and variables, but no threads
    """
    worker_resources: str = ""
    """each worker's resources, if the launcher supports them: `CPU=4` or, with some launchers,
    `CPU=2 GPU=0.5`
    """
    sync_mode: Literal["kl", "interval", "always", "never"] = "kl"
    """when workers pull weights: by divergence (`kl`, APS), every `sync_interval` versions
    (`interval`), at every version (`always`), or once (`never`)
    """
    kl_threshold: Nats = 0.01
    """a worker pulls when the mean KL(its policy || the learner's) exceeds this threshold, in nats
    per action dimension
    """
    sync_interval: Positive | None = None
    """with the mode `interval`: the number of versions after which a worker pulls"""
    max_policy_lag: NotNegative | None = None
    """in any mode, a worker that is more than this many versions behind pulls"""
    weights: Literal["difference", "float32"] = "difference"
    """what a worker pulls: the rounded `difference` from its weights, about one bit per weight, or
    all weights in `float32`
    """
    on_worker_loss: Literal["restart", "raise"] = "restart"
    """when a worker dies or falls silent, a replacement takes its place (`restart`), or the run
    ends with an error (`raise`)
    """
    max_worker_restarts: NotNegative = 3
    """the run ends when this many replacements of one worker in a row have died before they stepped
    """
    worker_timeout: Seconds = 30.0
    """a worker counts as dead when its process or link has been silent for this many seconds, or
    up to a quarter less, and so does the head for its workers; a slow step is not silence
    """
    startup_timeout: Seconds = 60.0
    """how many seconds a worker may take to start, and then to build each of its environments"""
    close_timeout: Seconds = 30.0
    """how many seconds a worker may take at the end to finish its step and close its environments,
    before it is killed
    """
    bind_address: str | None = None
    """the IP address, or the network interface, to listen on over tcp; by default a socket file, or
    an address that the launcher's machines can reach
    """
    port: Port = 0
    """the tcp port to listen on; 0 for a random free one"""
    key_file: str | None = None
    """over tcp: the key file, made by `python -m clusterenv_runtime.keys FILE`; by default each run
    makes its own keys
    """

    @property
    def rule(self) -> SyncRule:
        """The rule by which a worker pulls."""
        return SyncRule(self.sync_mode, self.kl_threshold, self.sync_interval, self.max_policy_lag)

    def make_launcher(self, log_dir: str | os.PathLike[str] | None) -> Launcher:
        """Return the launcher, see `launchers.make_launcher`."""
        return make_launcher(self.launcher, log_dir, self.worker_prefix, self.worker_resources)

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
        # A thousand workers' signs of life would otherwise take half of two cores.
        pulse = self.num_workers / 1000
        flags += ["--pulse", str(pulse)] if pulse > PULSE_S else []
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
        launcher.check(self.num_workers)
        address = self.bind_address or launcher.address(self.num_workers)
        forks = self.worker_start == "fork" and launcher.can_fork
        program = "".join(launcher.prefix[:1])
        found = not program or launcher.remote or shutil.which(program)
        rules = {
            f"sync_interval goes with sync_mode 'interval', and is {self.sync_interval} with "
            f"{self.sync_mode!r}": (self.sync_mode == "interval") == bool(self.sync_interval),
            "worker_preload is for forked workers: those of the launcher local, on Linux, without "
            "a worker_prefix": forks or not self.worker_preload,
            f"worker_prefix: there is no program {program} here": found,
            f"launcher {launcher.name} needs bind_address: an address that its workers can connect "
            "to": address or not launcher.remote,
            "port and key_file are for tcp: they need bind_address": address
            or not (self.port or self.key_file),
        }
        for text, is_right in rules.items():
            if not is_right:
                raise ValueError(text)
        self.keys()
        return address


class Options(TypedDict, total=False):
    """The keyword arguments of `ClusterEnv` that are fields of `ClusterOptions`."""

    launcher: str | Launcher
    worker_prefix: str
    worker_start: Literal["fork", "spawn"]
    worker_preload: str
    worker_resources: str
    sync_mode: Literal["kl", "interval", "always", "never"]
    kl_threshold: float
    sync_interval: int | None
    max_policy_lag: int | None
    weights: Literal["difference", "float32"]
    on_worker_loss: Literal["restart", "raise"]
    max_worker_restarts: int
    worker_timeout: float
    startup_timeout: float
    close_timeout: float
    bind_address: str | None
    port: int
    key_file: str | None


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
            raise ValueError(f"{name} is {value!r}: {text}") from None


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
    known = {field.name for field in fields(ClusterOptions)}
    for name in options.keys() - known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"ClusterEnv has no option {name!r}{hint}")
    parsed = ClusterOptions(**options)
    launcher: Any = parsed.launcher
    if not isinstance(launcher, Launcher):
        launcher = parsed.make_launcher(log_dir)
        return parsed, launcher, parsed.check(launcher)
    kind = type(launcher).__name__
    if log_dir is not None or parsed.worker_prefix or parsed.worker_resources:
        raise ValueError(
            "log_dir, worker_prefix and worker_resources belong to the launcher: "
            f"{kind}(log_dir, prefix, resources)"
        )
    if launcher.num_workers:
        raise ValueError(f"a {kind} starts the workers of one ClusterEnv: make another")
    parsed.launcher = launcher.name
    return parsed, launcher, parsed.check(launcher)
