"""A script's environments: how workers make them, and the errors if they cannot."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from clusterenv_runtime.errors import EnvError, one_line

from .checks import ATARI, check

if TYPE_CHECKING:
    from .run import Run

EnvFn = Callable[[], gym.Env]
# Wrappers that do not change steps.
NEUTRAL = "RecordEpisodeStatistics", "PassiveEnvChecker", "OrderEnforcing"


class BackendError(ValueError):
    """A backend's environments would differ from those that the script's make_env makes."""


def by_backend(
    args: Any,
    env_fns: list[EnvFn],
    make_env: Callable[..., EnvFn],
    of_envpool: Collection[str] = (),
    **envpool: Any,
) -> Any:
    """Return the first argument of `ClusterEnv`.

    With --env-backend gymnasium it is ``env_fns``, otherwise a function that makes a worker's
    environments by the backend, in one `VectorEnv`.

    Args:
        args: the script's flags.
        env_fns: the functions that ``make_env`` has returned, one for each environment.
        make_env: the script's function. A backend does not call it, so a worker checks that it does
            no more than the backend.
        of_envpool: the wrappers that ``make_env`` puts around Atari games and whose work EnvPool
            does itself.
        envpool: keyword arguments for EnvPool's environments, which --env-kwargs overrides.
    """
    backend, env_id, kwargs = args.env_backend, args.env_id, args.make_kwargs
    if backend == "gymnasium":
        return env_fns
    wrappers, arguments = (), kwargs
    if backend == "envpool":
        wrappers = of_envpool
        arguments = {"num_threads": args.env_threads, **envpool, **kwargs}
    checks = partial(check_plain, make_env, env_id, kwargs, wrappers)
    return partial(_make_checked, checks, partial(make_vec, backend, env_id, **arguments))


def _make_checked(
    checks: Callable[[], None], make: Callable[[int], VectorEnv], num_envs: int
) -> VectorEnv:
    checks()
    return make(num_envs)


def make_vec(backend: str, env_id: str, num_envs: int, **kwargs: Any) -> VectorEnv:
    """Make environments that step together, with the backend "vector" or "envpool".

    ``kwargs`` go to the constructor of the environments. With "vector", the environment must have
    a vector version, registered as Gymnasium's `vector_entry_point`. Atari games (ALE) have one in
    C++, which gets one thread by default, as EnvPool does, and resets in an episode's last step.
    Gymnasium's own vector version, of CartPole, supports only next-step autoreset, so `ClusterEnv`
    refuses it.

    Raises:
        gymnasium.error.Error: there is no such environment, or it has no vector version.
        ModuleNotFoundError: EnvPool is not installed.
    """
    if backend == "envpool":
        if importlib.util.find_spec("envpool") is None:
            raise ModuleNotFoundError("EnvPool is not installed: pip install envpool")
        from clusterenv_runtime.extras.envpool import EnvPoolVectorEnv

        return EnvPoolVectorEnv(env_id, num_envs, **kwargs)
    if "ale_py" in str(getattr(gym.registry.get(env_id), "vector_entry_point", None)):
        kwargs = {"num_threads": 1, "autoreset_mode": AutoresetMode.SAME_STEP, **kwargs}
    return gym.make_vec(env_id, num_envs, "vector_entry_point", **kwargs)


@contextmanager
def env_setup(run: Run) -> Iterator[None]:
    """Make a run's environments in this block, and check their spaces.

    If flags are wrong, remove the directory of a new run, and exit with a one-line error.
    """
    try:
        with one_line_for_environments(run.args, run.args.env_backend != "gymnasium"):
            yield
    except SystemExit:
        run.directory.remove()
        raise


@contextmanager
def one_line_for_environments(args: Any, by_backend: bool = False) -> Iterator[None]:
    """Exit with a one-line error if environments cannot be made in this block because of flags.

    ``by_backend`` says whether --env-backend makes them.
    """
    module, colon, _ = args.env_id.rpartition(":")
    is_file = "/" in module or module.endswith(".py")
    says = "the part before the colon is a module, as in an import: my_env for the file my_env.py"
    check(not is_file, f"--env-id {args.env_id}: {says}")
    flags = [f"--env-backend {args.env_backend}"] if by_backend else []
    flags += [f"--env-kwargs {args.env_kwargs}"] if args.env_kwargs else []
    flags += ["--capture-video"] if args.capture_video else []
    try:
        yield
    except ModuleNotFoundError as error:
        where = "install it, or put it beside the script or into the current directory"
        says = str(error).rstrip(".")
        check(False, f"{says}; --env-id {args.env_id}: {where}")
    except gym.error.Error as error:
        hint = ""
        if args.env_id.startswith("ALE/"):
            hint = f" Atari's games need ale-py, and {ATARI}"
        elif isinstance(error, gym.error.UnregisteredEnv) and colon:
            hint = f" The module {module} registers no environment of this name"
        elif isinstance(error, gym.error.UnregisteredEnv):
            example = f"--env-id my_env:{args.env_id}"
            hint = f" If it is your own, name the module that registers it, too: {example}"
        check(False, f"{error}{hint}")
    except BackendError as error:
        check(False, f"--env-backend {args.env_backend} {error}")
    except Exception as error:
        is_of_env = isinstance(error, EnvError) or isinstance(error.__cause__, EnvError)
        if not (flags and is_of_env):
            raise
        check(False, f"{' '.join(flags)}: {one_line(error)}")


@contextmanager
def of_environment() -> Iterator[None]:
    """Mark an error of an environment that is made in this process, as if it came from a worker."""
    try:
        yield
    except (gym.error.Error, ModuleNotFoundError):
        raise
    except Exception as error:
        raise error from EnvError(one_line(error))


def check_plain(
    make_env: Callable[..., EnvFn],
    env_id: str,
    kwargs: dict[str, Any],
    but_for: Collection[str] = (),
) -> None:
    """Raise BackendError if ``make_env`` does more than `gym.make` and the wrappers ``but_for``."""
    another, arguments = ("ALE/Pong-v5", {"frameskip": 1}) if but_for else ("CartPole-v1", {})
    if another not in gym.registry:
        return  # ale-py is not installed, so there is no game to check with
    is_another = False
    try:
        plain = gym.make(env_id, **kwargs)
    except gym.error.Error:  # only the backend has it, so check make_env on another one
        is_another = True
        env_id, kwargs = another, {}
        plain = gym.make(another, **arguments)
    try:
        changes = _changes(make_env(env_id, 1, False, "", **kwargs)(), plain, but_for)
    except Exception as error:
        if not is_another:
            raise
        changes = [f"{type(error).__name__} on {env_id}"]
    if changes:
        without = f"without what make_env does ({', '.join(changes)})"
        instead = "use --env-backend gymnasium, or take that out of make_env"
        raise BackendError(f"makes the environments itself, {without}: {instead}")


def _changes(env: gym.Env, plain: gym.Env, but_for: Collection[str]) -> list[str]:
    """Return the names of what differs between two environments.

    They are wrappers and arguments, or if there are none, spaces.
    """
    ours, theirs = _parts(env), _parts(plain) + Counter(but_for)
    changes = [*(ours - theirs), *(f"no {part}" for part in theirs - ours if "=" not in part)]
    spaces = () if but_for else ("observation_space", "action_space")
    return changes or [
        f"another {name}" for name in spaces if getattr(env, name) != getattr(plain, name)
    ]


def _parts(env: gym.Env) -> Counter[str]:
    """Count an environment's wrappers, outermost first, itself, and its arguments, by name."""
    parts, inner = Counter[str](), env
    while isinstance(inner, gym.Wrapper):
        parts[type(inner).__name__] += type(inner).__name__ not in NEUTRAL
        inner = inner.env
    arguments = (
        {**env.spec.kwargs, "max_episode_steps": env.spec.max_episode_steps} if env.spec else {}
    )
    given = (f"{name}={value}" for name, value in arguments.items() if name != "render_mode")
    return parts + Counter([type(inner).__name__, *given])
