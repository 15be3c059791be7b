"""A script's environments: who makes them, what they look like, and episodes in them to evaluate a policy."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv

from ..backends import make_vec
from ..errors import one_line
from .arguments import check

EnvFn = Callable[[], gym.Env]
NEUTRAL = "RecordEpisodeStatistics", "PassiveEnvChecker", "OrderEnforcing"  # wrappers that change no step


def by_backend(args: Any, env_fns: list[EnvFn], **envpool: Any) -> Any:
    """Return what `ClusterEnv` takes: these, or with another --env-backend the one function that makes them all.

    ``envpool`` are arguments of EnvPool's environments, unless --env-kwargs has others.
    """
    if args.env_backend == "gymnasium":
        return env_fns
    arguments = {"num_threads": args.env_threads, **envpool} if args.env_backend == "envpool" else {}
    return partial(make_vec, args.env_backend, args.env_id, **{**arguments, **args.make_kwargs})


def make_here(args: Any, env_fns: list[EnvFn]) -> VectorEnv:
    """Make as many environments in this process, by these functions or by the --env-backend."""
    made = by_backend(args, env_fns)
    return made(len(env_fns)) if callable(made) else SyncVectorEnv(made)


def read_spaces(args: Any, make_env: Callable[..., EnvFn], like_envpool: bool = False) -> tuple[gym.Space, gym.Space]:
    """Return the spaces of an environment's observations and actions; if there can be none, exit with one line.

    ``like_envpool``: what ``make_env`` does to an environment, EnvPool does to its own.
    """
    kwargs = args.make_kwargs
    try:
        env = make_here(args, [make_env(args.env_id, 1, False, "", **kwargs)])
        if args.env_backend != "gymnasium" and not (like_envpool and args.env_backend == "envpool"):
            check_plain(args, make_env)
    except (ModuleNotFoundError, gym.error.Error) as error:
        check(False, error)
    except Exception as error:
        if not kwargs:
            raise
        check(False, f"--env-kwargs {args.env_kwargs}: {one_line(error)}")
    if args.capture_video:
        modes = env.metadata.get("render_modes", ())
        check("rgb_array" in modes, f"--capture-video: {args.env_id} renders no pictures")
        check(importlib.util.find_spec("moviepy"), "--capture-video needs MoviePy: pip install moviepy")
    env.close()
    return env.single_observation_space, env.single_action_space


def check_plain(args: Any, make_env: Callable[..., EnvFn]) -> None:
    """Exit with one line if ``make_env`` does more than `gym.make`: another --env-backend does not call it."""
    env_id, kwargs = args.env_id, args.make_kwargs
    try:
        plain = gym.make(env_id, **kwargs)
    except gym.error.Error:  # the backend's alone; what make_env does, it may do to another
        env_id, kwargs = "CartPole-v1", {}
        plain = gym.make(env_id)
    try:
        changes = _changes(make_env(env_id, 1, False, "", **kwargs)(), plain)
    except Exception as error:
        if env_id == args.env_id:
            raise
        changes = [f"{type(error).__name__} on {env_id}"]
    without = f"without what make_env does ({', '.join(changes)})"
    instead = "use --env-backend gymnasium, or take that out of make_env"
    check(not changes, f"--env-backend {args.env_backend} makes the environments itself, {without}: {instead}")


def _changes(env: gym.Env, plain: gym.Env) -> list[str]:
    """Name the wrappers and arguments that one environment has and the other has not; or the spaces that differ."""
    ours, theirs = _parts(env), _parts(plain)
    changes = [*(ours - theirs), *(f"no {part}" for part in theirs - ours if "=" not in part)]
    spaces = "observation_space", "action_space"
    return changes or [f"another {name}" for name in spaces if getattr(env, name) != getattr(plain, name)]


def _parts(env: gym.Env) -> Counter[str]:
    """Return the names of an environment and of its wrappers, innermost last, and its arguments."""
    parts, inner = Counter[str](), env
    while isinstance(inner, gym.Wrapper):
        parts[type(inner).__name__] += type(inner).__name__ not in NEUTRAL
        inner = inner.env
    arguments = {**env.spec.kwargs, "max_episode_steps": env.spec.max_episode_steps} if env.spec else {}
    return parts + Counter([type(inner).__name__, *(f"{name}={value}" for name, value in arguments.items())])


@torch.no_grad()
def evaluate(args: Any, make_env: Callable[..., EnvFn], act: Callable[[Any], np.ndarray]) -> np.ndarray:
    """Let ``act`` play one episode in each of `eval_episodes` new environments, of this process; return the returns."""
    if not args.eval_episodes:
        return np.empty(0)
    envs = make_here(args, [make_env(args.env_id, 1, False, "", **args.make_kwargs) for _ in range(args.eval_episodes)])
    obs, _ = envs.reset(seed=args.seed + 100_000)
    returns, running, steps = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool), 0
    while running.any() and (steps := steps + 1) <= 10_000:  # not every environment ends its episodes
        obs, reward, terminations, truncations, _ = envs.step(act(obs))
        returns += reward * running
        running &= ~(terminations | truncations)
    envs.close()
    return returns
