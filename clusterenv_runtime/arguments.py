"""The command line of a training script: the runtime's flags, W&B's spellings of booleans, and --resume."""

import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, TypeVar

import gymnasium as gym
import zmq
from gymnasium.vector import SyncVectorEnv, VectorEnv

from .backends import make_vec
from .errors import CheckpointError, StartupError
from .head.transport import listening_address
from .launchers import Launcher, make_launcher
from .launchers.base import worker_flags
from .security import HeadKeys, check_security, read_key_file

T = TypeVar("T", bound="ClusterArgs")


def check(fine: Any, message: Any) -> None:
    """Exit with one line if something is not ``fine``."""
    if not fine:
        sys.exit(f"error: {message}")


@dataclass
class ClusterArgs:
    """Flags for where environments run, how policies are synchronized, and how a run goes on after an interruption."""

    num_workers: int = 2
    """the number of environment worker processes"""
    envs_per_worker: int = 32
    """the number of parallel game environments on each worker"""
    env_backend: Literal["gymnasium", "vector", "envpool"] = "gymnasium"
    """what steps a worker's environments: a loop over Gymnasium's, the environment's own vectorized version, if it
    has one, or EnvPool's (`pip install envpool`)"""
    env_threads: int = 1
    """with `--env-backend envpool`: the number of threads that step each worker's environments"""
    launcher: Literal["local", "slurm", "external"] = "local"
    """where workers run: `local` starts them on this machine, `slurm` as steps of the job that this runs in, `external`
    prints their commands and waits until you have run them"""
    worker_prefix: str = ""
    """goes before each worker's Python, as in `nice -n 19` or (with `--launcher slurm`) `apptainer exec image.sif`"""
    dry_run: bool = False
    """print the workers' commands, one a line, and start nothing"""
    sync_mode: Literal["kl", "interval", "always", "never"] = "kl"
    """when workers pull weights: by divergence (APS), every `--sync-interval` versions, every version, or once"""
    kl_threshold: float = 0.1
    """a worker pulls when the mean KL(its policy || the learner's) exceeds this, in nats"""
    sync_interval: int | None = None
    """with `--sync-mode interval`: pull every so many versions"""
    max_policy_lag: int | None = None
    """pull anyway when more than this many versions behind"""
    on_worker_loss: Literal["restart", "raise"] = "restart"
    """what happens when a worker dies or falls silent: another takes its place, or the run ends with an error"""
    max_worker_restarts: int = 3
    """the run ends when so many replacements of one worker in a row have died without an answer"""
    worker_timeout: float = 30.0
    """seconds of silence of a worker's process or link (not of a slow step) until it counts as dead"""
    startup_timeout: float = 60.0
    """seconds for the workers to start and to build their environments"""
    bind_address: str | None = None
    """listen for workers on this IP address over tcp; by default on a socket that only you can open, and with
    `--launcher slurm` on the address that the workers' nodes reach"""
    interface: str | None = None
    """instead of `--bind-address`: the network interface whose address to listen on"""
    port: int = 0
    """the tcp port to listen on; 0 for a random free one"""
    security: Literal["curve", "none"] = "curve"
    """over tcp: `curve` encrypts and admits only this run's workers, `none` does neither"""
    allow_insecure: bool = False
    """permit `--security none` on an address that other machines can reach"""
    key_file: str | None = None
    """over tcp: the keys, in a file of `python -m clusterenv_runtime.keys FILE`; by default each run makes its own"""
    run_name: str | None = None
    """the run goes to `runs/RUN_NAME`; by default it is named after environment, experiment, seed and time"""
    checkpoint_interval: float = 300.0
    """seconds between checkpoints; there is also one at the end, and at SIGTERM, SIGUSR1 and Ctrl-C"""
    resume: str | None = None
    """go on with this run (`runs/NAME`): its flags are the defaults, and those given here override them"""

    @property
    def named(self) -> str | None:
        """The run's name, in ``runs``: of that to go on with, or as given; None if that is left to the script."""
        return self.run_name if self.resume is None else os.path.relpath(self.resume, "runs")

    def begin(self, directory: str) -> None:
        """Make the run's directory, or exit with one line; with --dry-run print the workers' commands and exit.

        From here on, until `checkpoints` knows better, SIGTERM, SIGUSR1 and Ctrl-C end the process in order.
        """
        launcher = make_launcher(self.launcher, f"{directory}/workers", self.worker_prefix)
        if self.dry_run:
            print("\n".join(self.plan(launcher)))
            sys.exit()
        try:
            os.makedirs(directory, exist_ok=self.resume is not None or self.run_name is not None)
        except OSError as error:
            check(False, f"cannot write to {directory}: {error.strerror}")
        if self.resume is None:
            found = any(name.startswith("checkpoint-") for name in os.listdir(directory))
            check(not found, f"{directory} has begun already; to go on: --resume {directory}, else another --run-name")

        def end(number: int, _: Any) -> None:
            for other, handler in zip(
                numbers, (signal.SIG_IGN, signal.SIG_IGN, signal.default_int_handler), strict=True
            ):
                signal.signal(other, handler)  # a scheduler may tell this process twice, and amid its cleaning up
            print("interrupted", file=sys.stderr)
            sys.exit(130 if number == signal.SIGINT else 75)

        numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
        for number in numbers:
            signal.signal(number, end)

    def plan(self, launcher: Launcher) -> list[str]:
        """Return the workers' commands.

        PORT stands for a random one, KEYS for the directory that the head makes where the launcher wants it.
        """
        keys = os.path.join(launcher.directory or "", "KEYS")
        if not self.interface:
            bind_address = self.bind_address or launcher.address(self.num_workers)
        else:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
                probe.bind(f"tcp://{self.interface}:*")
                bind_address = probe.last_endpoint.decode().removeprefix("tcp://").rpartition(":")[0]
        key_file = f"{keys}/key" if bind_address and self.security == "curve" else None
        address = listening_address(bind_address, self.port or "PORT", keys)
        flags = worker_flags(address, key_file, self.startup_timeout, self.worker_timeout)
        launcher.prepare(self.num_workers, flags, keys)
        variables = [f"{name}={value}" for name, value in launcher.variables().items()]
        before = ["env", *variables] if variables else []
        return [shlex.join([*before, *launcher.command(index)]) for index in range(self.num_workers)]

    def env_fns(self, env_fns: list[Callable[[], gym.Env]]) -> Any:
        """Return what `ClusterEnv` takes: these, or with another --env-backend the one function that makes them all."""
        if self.env_backend == "gymnasium":
            return env_fns
        threads = {"num_threads": self.env_threads} if self.env_backend == "envpool" else {}
        return partial(make_vec, self.env_backend, self.env_id, **threads)

    def make_vec(self, env_fns: list[Callable[[], gym.Env]]) -> VectorEnv:
        """Make as many environments in this process, by these functions or by the --env-backend."""
        made = self.env_fns(env_fns)
        return made(len(env_fns)) if callable(made) else SyncVectorEnv(made)

    def cluster(self, directory: str) -> dict[str, Any]:
        """Return the arguments of `ClusterEnv` that these flags are, for a run in this directory."""
        names = "num_workers sync_mode kl_threshold sync_interval max_policy_lag on_worker_loss port security key_file "
        names += "max_worker_restarts worker_timeout startup_timeout allow_insecure"
        names += " min_workers" * hasattr(self, "min_workers")  # a flag of scripts that can begin with some of them
        arguments = {name: getattr(self, name) for name in names.split()}
        if self.env_backend != "gymnasium":
            arguments["num_envs"] = self.num_workers * self.envs_per_worker
        arguments["bind_address"] = self.bind_address or self.interface
        arguments["launcher"] = make_launcher(self.launcher, f"{directory}/workers", self.worker_prefix)
        return arguments

    def require(self, flags: str, fine: Callable[[Any], bool], text: str) -> None:
        """Exit with one line if one of these, separated by blanks, must be ``text`` and is not ``fine``; None is."""
        for flag in flags.split():
            value = getattr(self, flag)
            check(value is None or fine(value), f"{_flag(flag)} must be {text}, got {value}")

    def validate(self) -> None:
        """Exit with one line if a value is out of range."""
        self.require("num_workers envs_per_worker env_threads sync_interval", lambda value: value >= 1, "at least 1")
        self.require("max_policy_lag max_worker_restarts", lambda value: value >= 0, "at least 0")
        self.require("kl_threshold", lambda value: value >= 0, "a number of nats >= 0")
        self.require("worker_timeout startup_timeout", lambda value: value > 0, "a number of seconds > 0")
        self.require("checkpoint_interval", lambda value: value >= 0, "a number of seconds >= 0")
        self.require("port", lambda value: 0 <= value < 2**16, "from 0 to 65535")
        if hasattr(self, "min_workers"):
            up_to = f"from 1 to --num-workers, {self.num_workers}"
            self.require("min_workers", lambda value: 1 <= value <= self.num_workers, up_to)
        video = self.env_backend == "gymnasium" or not getattr(self, "capture_video", False)
        check(video, f"--capture-video needs --env-backend gymnasium, not {self.env_backend}")
        threaded = self.env_backend == "envpool" or self.env_threads == 1
        check(threaded, f"--env-threads needs --env-backend envpool, not {self.env_backend}")
        interval = self.sync_mode != "interval" or self.sync_interval is not None
        check(interval, "--sync-mode interval needs --sync-interval, in versions")
        check(not (self.bind_address and self.interface), "give either --bind-address or --interface, not both")
        address = self.bind_address or self.interface
        tcp = address or self.launcher == "slurm"
        check(tcp or self.port == 0, "--port needs --bind-address or --interface")
        check(tcp or self.launcher != "external", "--launcher external needs --bind-address or --interface")
        named = self.run_name is None or re.fullmatch(r"[\w+=-][\w.+=-]*", self.run_name)
        check(named, f"--run-name must be of letters, digits and -_.+=, not begin with a dot, got {self.run_name}")
        try:
            program = "".join(shlex.split(self.worker_prefix)[:1])
        except ValueError as error:
            check(False, f"--worker-prefix {self.worker_prefix}: {error}")
        there = self.launcher != "local" or not program or shutil.which(program)
        check(there, f"--worker-prefix begins with {program}, and there is no such program here")
        if self.key_file is not None:
            check(tcp and self.security == "curve", "--key-file is for tcp with --security curve")
        if self.interface:
            there = [name for _, name in socket.if_nameindex()]
            check(self.interface in there, f"--interface must be one of {', '.join(there)}, got {self.interface}")
        try:
            check_security(address, self.security, self.allow_insecure)
            if self.key_file is not None:
                read_key_file(self.key_file, HeadKeys)
            if tcp and not address:
                make_launcher(self.launcher).address(self.num_workers)
            if self.bind_address:
                socket.create_server((self.bind_address, self.port)).close()
        except StartupError as error:
            check(False, error)
        except ValueError as error:
            check(False, re.sub(r"\b(bind_address|security|allow_insecure)\b", lambda name: _flag(name[0]), str(error)))
        except OSError as error:
            check(False, f"cannot listen on --bind-address {self.bind_address}, port {self.port}: {error.strerror}")


def parse(script_args: type[T], fixed: Iterable[str] = ()) -> tuple[T, dict[str, Any]]:
    """Read the command line; with --resume also the checkpoint to go on from, else an empty one.

    That is a state of `save_checkpoint` with the run's arguments under "args". ``fixed`` are those that must stay as
    they were, besides the number of workers and of their environments. Mistakes end the process with one line.
    """
    import tyro

    # W&B agents write booleans as --flag=True; tyro's spelling is --flag and --no-flag
    booleans = "|".join(field.name.replace("_", "[-_]") for field in fields(script_args) if field.type is bool)
    argv = [re.sub(rf"^--({booleans})=[Tt]rue$", r"--\1", arg) for arg in sys.argv[1:]]
    argv = [re.sub(rf"^--({booleans})=[Ff]alse$", r"--no-\1", arg) for arg in argv]
    args, saved = tyro.cli(script_args, args=argv), {}
    if args.resume is not None:
        from .checkpoint import load_checkpoint

        check(
            not args.named.startswith("."), f"--resume must be runs/NAME, of the working directory, got {args.resume}"
        )
        try:
            saved = load_checkpoint(args.resume)
        except CheckpointError as error:
            check(False, error)
        unknown = set(saved["args"]) - {field.name for field in fields(script_args)}
        check(
            not unknown,
            f"{args.resume} is of another script, or version of it: it has {', '.join(map(_flag, unknown))}",
        )
        args = tyro.cli(script_args, args=argv, default=script_args(**saved["args"]))
        for name in ("num_workers", "envs_per_worker", *fixed):
            before, now = saved["args"].get(name), getattr(args, name)
            check(before == now, f"{_flag(name)} cannot change on the way: {args.resume} has {before}, got {now}")
    args.validate()
    return args, saved


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
