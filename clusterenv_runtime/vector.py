"""The rows of a vector environment, on workers: Gymnasium's vector API, with actions chosen at the head."""

from __future__ import annotations

import multiprocessing
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from .errors import DeadlineError
from .head import Head, Link
from .launchers import LAUNCHERS, Launcher, make_launcher
from .protocol import Call, Message, Reply, Reset, SetAttr
from .recovery import Recovery
from .security import HeadKeys, check_security, read_key_file
from .spaces import check_reset_mask, map_space, observation_spaces
from .sync import PolicyStore


class WorkerVectorEnv(VectorEnv):
    """What `ClusterEnv` shares with ``SyncVectorEnv``, step for step; see there for the arguments."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]] | Callable[[int], VectorEnv],
        num_workers: int,
        *,
        num_envs: int | None,
        copy: bool,
        observation_mode: str | tuple[gym.Space, gym.Space],
        autoreset_mode: str | AutoresetMode,
        launcher: str | Launcher | None,
        on_worker_loss: str,
        max_worker_restarts: int,
        min_workers: int | None,
        startup_timeout: float,
        worker_timeout: float,
        bind_address: str | None,
        port: int,
        security: str,
        allow_insecure: bool,
        key_file: str | None,
        log_dir: str | None,
        settings: dict[str, Any],
    ) -> None:
        self.closed = True  # until there is something to close
        self._together = callable(env_fns)  # a worker's rows are one vector environment, which only a policy acts in
        if self._together:
            self.env_fns = env_fns
            if num_envs is None or num_envs < 1:
                raise ValueError(f"one function for all environments needs num_envs, at least 1, got {num_envs}")
            self.num_envs = num_envs
        else:
            self.env_fns = list(env_fns)
            self.num_envs = len(self.env_fns)
            if self.num_envs < 1:
                raise ValueError("env_fns must hold at least one function, got none")
            if num_envs not in (None, self.num_envs):
                raise ValueError(f"num_envs is {num_envs}, but there are {self.num_envs} env_fns")
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        if isinstance(launcher, Launcher):
            if log_dir is not None:
                raise ValueError(f"log_dir belongs to the launcher: {type(launcher).__name__}(log_dir)")
            if launcher.started:
                raise ValueError(f"a {type(launcher).__name__} starts the workers of one ClusterEnv: make another")
        elif launcher not in (None, *LAUNCHERS):
            names = ", ".join(map(repr, LAUNCHERS))
            raise ValueError(f"launcher must be one of {names} or a Launcher, got {launcher!r}")
        else:
            launcher = make_launcher(launcher or "local", log_dir)
        self.num_workers = min(num_workers, self.num_envs)
        bind_address = bind_address or launcher.address(self.num_workers)
        check_security(bind_address, security, allow_insecure)
        if not worker_timeout > 0:  # also NaN
            raise ValueError(f"worker_timeout must be a number of seconds > 0, got {worker_timeout}")
        if on_worker_loss not in ("restart", "raise"):
            raise ValueError(f"on_worker_loss must be 'restart' or 'raise', got {on_worker_loss!r}")
        if max_worker_restarts < 0:
            raise ValueError(f"max_worker_restarts must be at least 0, got {max_worker_restarts}")
        self._min_workers = self.num_workers if min_workers is None else min_workers
        if not 1 <= self._min_workers <= self.num_workers:
            raise ValueError(f"min_workers must be 1 to {self.num_workers}, got {min_workers}")
        self.copy, self.observation_mode, self.autoreset_mode = copy, observation_mode, AutoresetMode(autoreset_mode)
        if self._together and observation_mode != "same":
            raise ValueError(f"one function for all environments has observation_mode 'same', got {observation_mode!r}")
        env = self.env_fns(1) if self._together else self.env_fns[0]()
        if self._together:
            observation_space, action_space = env.single_observation_space, env.single_action_space
        else:
            observation_space, action_space = env.observation_space, env.action_space
        mode = {} if self._together else {"autoreset_mode": self.autoreset_mode}
        self.metadata, self.render_mode = {**env.metadata, **mode}, env.render_mode
        self.single_action_space, self.action_space = action_space, batch_space(action_space, self.num_envs)
        env.close()
        self.single_observation_space, self.observation_space = observation_spaces(
            observation_mode, observation_space, self.num_envs, self.env_fns
        )

        shares = np.array_split(range(self.num_envs), self.num_workers)
        rows = [slice(int(share[0]), int(share[-1]) + 1) for share in shares]
        settings = {
            **settings,
            "observation_mode": observation_mode,
            "autoreset_mode": self.autoreset_mode,
            "single_observation_space": self.single_observation_space,
            "single_action_space": self.single_action_space,
            # What the user registered here, a worker does not know.
            "registry": {k: v for k, v in gym.registry.items() if not str(v.entry_point).startswith("gymnasium.")},
        }
        setups = []
        for part in rows:
            together = {"env_fns": self.env_fns, "num_envs": part.stop - part.start}
            mine = together if self._together else {"env_fns": self.env_fns[part]}
            setups.append(cloudpickle.dumps({**mine, **settings}))
        self._store = PolicyStore(self.num_workers, self.single_observation_space)
        self._recovery = Recovery(
            rows, setups, [path for path in sys.path if path], self._store, self.single_observation_space
        )
        self._observations: Any = None
        self._state = AsyncState.DEFAULT
        self._pending: list[int | None] = []  # what each worker is to answer; None for one that is not asked
        self._was_reset, self._warned = False, set()
        self._head = Head(
            rows, launcher, self._recovery, self._store.answer, self._min_workers,
            max_worker_restarts if on_worker_loss == "restart" else 0,
            startup_timeout, worker_timeout, bind_address, port, security,
            None if key_file is None else read_key_file(key_file, HeadKeys),
        )  # fmt: skip
        self._finalizer = weakref.finalize(self, self._head.close, timeout=2)
        self.closed = False

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """One dict for each worker process that was replaced: worker, time (Unix), reason, its environments' seeds."""
        return list(self._recovery.restarts)

    def reset(self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset all environments, or those where ``options["reset_mask"]`` is True; return observations and infos."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        self._assert_idle("reset_async")
        if options is not None and "reset_mask" in options:
            self._assert_one_by_one()
        if seed is None:
            seed = [None] * self.num_envs
        elif isinstance(seed, int):
            seed = [seed + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got "
                f"length={len(seed)}."
            )
        mask = None
        if options is not None and "reset_mask" in options:
            mask = options.pop("reset_mask")
            check_reset_mask(mask, self.num_envs)
        self._was_reset, self._mask = True, mask
        if mask is None:
            self._recovery.reset(seed, options)

        def request(link: Link) -> tuple[Message, tuple[bytes]]:
            part = None if mask is None else mask[link.rows]
            return Reset(0, mask is not None), (cloudpickle.dumps((seed[link.rows], options, part)),)

        self._start(AsyncState.WAITING_RESET, request)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        replies = self._finish(AsyncState.WAITING_RESET, timeout)
        parts = []
        for link, reply in zip(self._head.links, replies, strict=True):
            mask = None if self._mask is None else self._mask[link.rows]
            parts.append(self._recovery.saw(link.index, reply.value, mask=mask))
        return self._join_observations(parts), self._join_infos(replies)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every environment; return observations, rewards, terminations, truncations and infos."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        self._assert_idle("step_async")
        self._assert_one_by_one()
        if not (
            isinstance(actions, np.ndarray) and actions.ndim and isinstance(self.action_space, Box | MultiDiscrete)
        ):
            actions = list(iterate(self.action_space, actions))
        if len(actions) != self.num_envs:
            raise ValueError(f"Expected {self.num_envs} actions, one for each environment, got {len(actions)}")
        self._start(AsyncState.WAITING_STEP, lambda link: self._recovery.step(link.index, actions[link.rows]))

    def step_wait(self, timeout: float | None = None) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        replies = self._finish(AsyncState.WAITING_STEP, timeout)
        observations, rewards, terminations, truncations = zip(*(reply.value for reply in replies), strict=True)
        for worker, (terminated, truncated) in enumerate(zip(terminations, truncations, strict=True)):
            ended = (terminated | truncated) & (self.autoreset_mode != AutoresetMode.SAME_STEP)
            self._recovery.saw(worker, observations[worker], ended)
        return (
            self._join_observations(observations),
            np.concatenate(rewards),
            np.concatenate(terminations),
            np.concatenate(truncations),
            self._join_infos(replies),
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call each environment's method ``name``, or read its attribute; the results must be what `pack` takes."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        self._assert_idle("call_async")
        self._assert_one_by_one()
        argument = cloudpickle.dumps((args, kwargs))
        self._start(AsyncState.WAITING_CALL, lambda _: (Call(0, name), (argument,)))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        replies = self._finish(AsyncState.WAITING_CALL, timeout)
        return tuple(result for reply in replies for result in reply.value)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return attribute ``name`` of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set attribute ``name`` of each environment, to one value or to a list or tuple of one for each."""
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._assert_idle("set_attr")
        self._assert_one_by_one()
        self._start(AsyncState.WAITING_CALL, lambda link: (SetAttr(0, name), (cloudpickle.dumps(values[link.rows]),)))
        self._finish(AsyncState.WAITING_CALL, None)
        self._recovery.attributes[name] = list(values)

    def render(self) -> tuple[Any, ...]:
        """Return the environments' frames."""
        return self.call("render")

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:
        """The environments' random number generators (copies of them)."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:
        """The environments' seeds."""
        return self.get_attr("np_random_seed")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers: ask them, after ``timeout`` (3) seconds terminate, then kill them."""
        if self._state != AsyncState.DEFAULT:
            gym.logger.warn(f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete.")
        self._finalizer.detach()
        self._head.close(0 if terminate else 3 if timeout is None else timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _assert_one_by_one(self) -> None:
        if self._together:
            raise ValueError("environments that step together are for a policy to act in: `rollout`, `send` and `recv`")

    def _assert_idle(self, method: str) -> None:
        self._assert_is_running()
        if self._state != AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `{self._state.value}` to complete.",
                str(self._state.value),
            )

    def _start(self, state: AsyncState, request: Callable[[Link], tuple[Message, tuple[bytes]]]) -> None:
        self._pending = []
        for link in self._head.links:
            # With fewer workers than there may be, those that have not come yet are reset when they do.
            whole = state == AsyncState.WAITING_RESET and self._mask is None
            if whole and not link.came and self._min_workers < self.num_workers:
                self._pending.append(None)
                continue
            message, buffers = request(link)
            self._pending.append(self._head.ask(link.index, message, *buffers))
        self._state = state

    def _finish(self, state: AsyncState, timeout: float | None) -> list[Reply]:
        """Return the replies, one for each link."""
        self._assert_is_running()
        if self._state != state:
            raise NoAsyncCallError(
                f"Calling `{state.value}_wait` without any prior call to `{state.value}_async`.", state.value
            )
        try:
            replies = self._head.gather([seq for seq in self._pending if seq is not None], timeout)
        except DeadlineError as error:
            raise multiprocessing.TimeoutError(
                f"The call to `{state.value}_wait` has timed out after {timeout} second(s). {error}"
            ) from None
        finally:
            self._state = AsyncState.DEFAULT
        for key in {key for reply in replies for key in reply.dropped} - self._warned:
            self._warned.add(key)
            gym.logger.warn(
                f"Info {key} is left out: only arrays, numbers, strings and their containers leave a worker."
            )
        for link, seq in zip(self._head.links, self._pending, strict=True):
            if seq is None:
                nothing = create_empty_array(self.single_observation_space, link.rows.stop - link.rows.start)
                replies.insert(link.index, Reply(0, nothing, []))
        return replies

    def _join_observations(self, parts: Sequence[Any]) -> Any:
        def join(*leaves: Any) -> Any:
            if isinstance(leaves[0], np.ndarray):
                return np.concatenate(leaves)
            return tuple(item for leaf in leaves for item in leaf)

        def join_into(out: Any, *leaves: Any) -> Any:
            return np.concatenate(leaves, out=out) if isinstance(out, np.ndarray) else join(*leaves)

        if self.copy or self._observations is None:
            self._observations = map_space(join, self.single_observation_space, *parts)
        else:  # the same arrays each time, as Gymnasium does
            self._observations = map_space(join_into, self.single_observation_space, self._observations, *parts)
        return self._observations

    def _join_infos(self, replies: Sequence[Reply]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for link, reply in zip(self._head.links, replies, strict=True):
            for env, info in reply.infos:
                infos = self._add_info(infos, info, link.rows.start + env)
        return infos
