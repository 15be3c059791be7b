"""A script's environments: how they are made, and their spaces."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv, VectorEnv

from ..errors import one_line
from ..extras.backends import make_vec
from ..extras.together import AutoresetError, Together
from .checks import ATARI, check

EnvFn = Callable[[], gym.Env]
# Wrappers that change no step.
NEUTRAL = "RecordEpisodeStatistics", "PassiveEnvChecker", "OrderEnforcing"


def by_backend(args: Any, env_fns: list[EnvFn], **envpool: Any) -> Any:
    """Return the first argument of `ClusterEnv`: the functions, or one that makes all environments
    if --env-backend is another one.

    ``envpool`` are arguments of EnvPool's environments, unless --env-kwargs has others.
    """
    if args.env_backend == "gymnasium":
        return env_fns
    arguments = {"num_threads": args.env_threads, **envpool}
    if args.env_backend != "envpool":
        arguments = {}
    arguments |= args.make_kwargs
    return Together(partial(make_vec, args.env_backend, args.env_id, **arguments))


def make_here(args: Any, env_fns: list[EnvFn], **envpool: Any) -> VectorEnv:
    """Make the environments in this process, with these functions or with the --env-backend."""
    made = by_backend(args, env_fns, **envpool)
    return made(len(env_fns)) if callable(made) else SyncVectorEnv(made)


def read_spaces(
    args: Any, make_env: Callable[..., EnvFn], of_envpool: Collection[str] = ()
) -> tuple[gym.Space, gym.Space]:
    """Return the spaces of an environment's observations and actions; if there can be none, exit
    with one line.

    ``of_envpool`` are wrappers of Atari's games by ``make_env`` whose work EnvPool does itself.
    """
    kwargs = args.make_kwargs
    try:
        env = make_here(args, [make_env(args.env_id, 1, False, "", **kwargs)])
        if args.env_backend != "gymnasium":
            check_plain(args, make_env, of_envpool if args.env_backend == "envpool" else ())
    except ModuleNotFoundError as error:
        where = "install it, or put it beside the script or into the current directory"
        says = str(error).rstrip(".")
        check(False, f"{says}; --env-id {args.env_id}: {where}")
    except gym.error.Error as error:
        is_game = args.env_id.startswith("ALE/")
        check(False, f"{error} Atari's games need ale-py, and {ATARI}" if is_game else error)
    except AutoresetError as error:
        check(False, f"--env-backend {args.env_backend}: {error}")
    except Exception as error:
        if not kwargs:
            raise
        check(False, f"--env-kwargs {args.env_kwargs}: {one_line(error)}")
    if args.capture_video:
        modes = env.metadata.get("render_modes", ())
        check("rgb_array" in modes, f"--capture-video: {args.env_id} renders no pictures")
        check(
            importlib.util.find_spec("moviepy"),
            "--capture-video needs MoviePy: pip install moviepy",
        )
    env.close()
    return env.single_observation_space, env.single_action_space


def check_plain(args: Any, make_env: Callable[..., EnvFn], but_for: Collection[str] = ()) -> None:
    """Exit with one line if ``make_env`` does more than `gym.make`: another --env-backend does not
    call it.

    That is more than ``but_for``, wrappers of Atari's games.
    """
    env_id, kwargs = args.env_id, args.make_kwargs
    another, arguments = ("ALE/Pong-v5", {"frameskip": 1}) if but_for else ("CartPole-v1", {})
    if another not in gym.registry:
        return  # ale-py is not here, and there is no game to see it by
    try:
        plain = gym.make(env_id, **kwargs)
    except gym.error.Error:  # the backend's alone; what make_env does, it may do to another
        env_id, kwargs, plain = another, {}, gym.make(another, **arguments)
    try:
        changes = _changes(make_env(env_id, 1, False, "", **kwargs)(), plain, but_for)
    except Exception as error:
        if env_id == args.env_id:
            raise
        changes = [f"{type(error).__name__} on {env_id}"]
    without = f"without what make_env does ({', '.join(changes)})"
    instead = "use --env-backend gymnasium, or take that out of make_env"
    check(
        not changes,
        f"--env-backend {args.env_backend} makes the environments itself, {without}: {instead}",
    )


def _changes(env: gym.Env, plain: gym.Env, but_for: Collection[str]) -> list[str]:
    """Name the wrappers and arguments that one environment has and the other has not; or the spaces
    that differ.
    """
    ours, theirs = _parts(env), _parts(plain) + Counter(but_for)
    changes = [*(ours - theirs), *(f"no {part}" for part in theirs - ours if "=" not in part)]
    spaces = () if but_for else ("observation_space", "action_space")
    return changes or [
        f"another {name}" for name in spaces if getattr(env, name) != getattr(plain, name)
    ]


def _parts(env: gym.Env) -> Counter[str]:
    """Return the names of an environment and of its wrappers, innermost last, and its arguments."""
    parts, inner = Counter[str](), env
    while isinstance(inner, gym.Wrapper):
        parts[type(inner).__name__] += type(inner).__name__ not in NEUTRAL
        inner = inner.env
    arguments = (
        {**env.spec.kwargs, "max_episode_steps": env.spec.max_episode_steps} if env.spec else {}
    )
    given = (f"{name}={value}" for name, value in arguments.items() if name != "render_mode")
    return parts + Counter([type(inner).__name__, *given])
