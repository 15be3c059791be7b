"""The worker process: ``python -m clusterenv_runtime.worker --connect ADDRESS --index I``.

It dials the head, is handed its environments, and answers one request after another until told to close or the link
to the head is lost. torch is imported only when the first policy arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import zmq
import zmq.utils.monitor
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from . import protocol
from .errors import StartupError
from .protocol import Error, Hello, Pull, Reply, Request, Weights
from .security import WorkerKeys, read_key_file
from .spaces import map_space
from .sync import SyncRule, sampled_states

logger = logging.getLogger(__name__)


class EnvSlice(SyncVectorEnv):
    """A worker's rows: Gymnasium's SyncVectorEnv, with infos kept per environment for the head to merge."""

    def __init__(
        self,
        env_fns: list[Any],
        observation_mode: Any,
        autoreset_mode: AutoresetMode,
        single_observation_space: gym.Space,
        single_action_space: gym.Space,
        rule: SyncRule,
        registry: dict[str, Any],
    ) -> None:
        for env_id, spec in registry.items():
            gym.registry[env_id] = spec
        self.rule = rule
        self.infos: list[tuple[int, dict[str, Any]]] = []  # (environment, info) in the order they arose
        mode = observation_mode if observation_mode == "same" else (gym.spaces.Discrete(1), single_observation_space)
        env_fns = [partial(_build, env_fn, i) for i, env_fn in enumerate(env_fns)]
        super().__init__(env_fns, observation_mode=mode, autoreset_mode=autoreset_mode)
        for name in ("observation", "action"):
            expected = {"observation": single_observation_space, "action": single_action_space}[name]
            space = getattr(self, f"single_{name}_space")
            if space != expected:
                raise RuntimeError(
                    f"ClusterEnv(..., observation_mode={observation_mode!r}) however the sub-environments {name} "
                    f"spaces are not equivalent. Environment 0 has {expected}, another has {space}."
                    + (" If this is intentional, use `observation_mode='different'` instead." * (name == "observation"))
                )
        # The head has iterated over the actions already; a Box makes `step` take what it is given, item by item.
        self.action_space = gym.spaces.Box(0, 1, (self.num_envs,))
        # Environments that count their own episodes (RecordEpisodeStatistics) know better than the sum of rewards.
        keys = [env.has_wrapper_attr("_stats_key") and env.get_wrapper_attr("_stats_key") for env in self.envs]
        self._stats_key = keys[0] if all(keys) else None
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        if "final_obs" in env_info:  # an environment may reuse these arrays in the reset that follows
            env_info = _copy_arrays(env_info)
        if env_info:
            self.infos.append((env_num, env_info))
        return vector_infos

    def take_infos(self) -> list[tuple[int, dict[str, Any]]]:
        infos, self.infos = self.infos, []
        return infos

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        mask = (options or {}).get("reset_mask", slice(None))
        self._returns[mask] = self._lengths[mask] = 0
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        ended = self._autoreset_envs  # with their last step: they have been reset then, or are in this one
        result = super().step(actions)
        self._returns[ended] = self._lengths[ended] = 0
        self._returns += result[1]
        self._lengths += ~ended if self.autoreset_mode == AutoresetMode.NEXT_STEP else 1
        return result

    def collect(self, actor: Any, num_steps: int) -> dict[str, Any]:
        """Act and step ``num_steps`` times; return this worker's part of a `Rollout`, see `Rollout.join`."""
        ended, self._autoreset_envs = self._autoreset_envs, np.zeros(self.num_envs, bool)
        self._returns[ended] = self._lengths[ended] = 0
        if self.autoreset_mode != AutoresetMode.SAME_STEP and ended.any():
            self.reset(options={"reset_mask": ended})  # from here on an episode is reset within its last step
        self.infos.clear()
        space, shape = self.single_observation_space, (num_steps, self.num_envs)
        observations = map_space(
            lambda leaf: np.empty((num_steps + 1, *leaf.shape), leaf.dtype), space, self._observations
        )
        rewards, terminations, truncations = np.empty(shape), np.zeros(shape, bool), np.zeros(shape, bool)
        final_observations: list[Any] = []
        episodes: list[tuple[int, float, int]] = []  # (step * num_envs + environment, return, length)
        actor.start(*shape)
        for step in range(num_steps + 1):
            now = map_space(lambda leaf: leaf[step], space, observations)  # noqa: B023
            concatenate(space, self._env_obs, now)
            if step == num_steps:
                break
            i = None  # while the policy acts: see _failed_env
            for i, (env, action) in enumerate(zip(self.envs, actor.act(now), strict=True)):
                self._env_obs[i], reward, terminated, truncated, info = env.step(action)
                rewards[step, i] = reward
                if terminated or truncated:
                    terminations[step, i], truncations[step, i] = terminated, truncated
                    final_observations.append(deepcopy(self._env_obs[i]))  # the reset may write to it
                    if self._stats_key is None:
                        counted = {"r": self._returns[i] + reward, "l": self._lengths[i] + 1}
                    else:
                        counted = info.get(self._stats_key)
                    if counted is not None:
                        episodes.append((step * self.num_envs + i, float(counted["r"]), int(counted["l"])))
                    self._env_obs[i], _ = env.reset()
            self._returns += rewards[step]
            self._lengths += 1
            ended = terminations[step] | truncations[step]
            self._returns[ended] = self._lengths[ended] = 0
        self._observations = deepcopy(now)
        actions, logprobs, params = actor.finish(sampled_states(rewards.size))
        return {
            "observations": map_space(lambda leaf: leaf[:-1], space, observations),
            "actions": actions,
            "logprobs": logprobs,
            "rewards": rewards,
            "terminations": terminations,
            "truncations": truncations,
            "final_observations": _stack(space, final_observations),
            "next_observations": now,
            "episodes": np.array([episode[0] for episode in episodes], np.int64),
            "episodic_returns": np.array([episode[1] for episode in episodes], np.float64),
            "episodic_lengths": np.array([episode[2] for episode in episodes], np.int64),
            "params": params,
        }


def _copy_arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(map(_copy_arrays, value))
    return {key: _copy_arrays(item) for key, item in value.items()} if isinstance(value, dict) else value


def _stack(space: gym.Space, items: list[Any]) -> Any:
    empty = create_empty_array(space, len(items), np.empty)
    return concatenate(space, items, empty) if items else empty


def _build(env_fn: Callable[[], gym.Env], i: int) -> gym.Env:
    return env_fn()


def _failed_env(error: BaseException) -> int | None:
    """Return which environment raised: the ``i`` of SyncVectorEnv's loops and of `_build`, read from the traceback."""
    files = (__file__, gym.vector.sync_vector_env.__file__)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename in files]
    return next((frame.f_locals["i"] for frame in frames if "i" in frame.f_locals), None)


class _End(BaseException):
    """There is nothing more to do: the head has said so, perhaps instead of sending weights, or a request failed."""


class Worker:
    """One link to the head, and the requests that come over it."""

    def __init__(self, address: str, index: int, head_timeout: float, keys: WorkerKeys | None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 5000  # the last message may be why we die
        protocol.set_limits(self._socket, head_timeout)
        if keys is not None:
            keys.secure(self._socket)
        monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        threading.Thread(target=_exit_with_head, args=(monitor,), daemon=True).start()
        self._socket.connect(address)
        hello = Hello(protocol.PROTOCOL_VERSION, index, socket.gethostname(), os.getpid(), protocol.library_versions())
        self._socket.send_multipart(protocol.frames(hello))
        self._later: deque[tuple[Request, list[Any]]] = deque()  # requests that arrived while waiting for weights
        self._envs: EnvSlice | None = None
        self._first_row = 0
        self._actor: Any = None
        self._version = 0  # of the policy held; 0 for none
        self._waited = 0.0  # seconds, for the head since it was last told
        self._seed: list[int] | None = None
        self._generator: Any = None  # of the policy's noise; a torch.Generator once torch is here

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
        self._socket.close()
        self._context.term()

    def run(self, startup_timeout: float) -> None:
        """Answer requests until `_End`."""
        if not self._socket.poll(startup_timeout * 1000):
            raise SystemExit(f"no answer from the head within {startup_timeout:g} s")
        while True:
            self._answer(*(self._later.popleft() if self._later else self._receive()))

    def _answer(self, request: Request, buffers: list[Any]) -> None:
        try:
            dropped: list[str] = []
            answer_buffers: list[Any] = []
            value = protocol.pack(self._handle(request, buffers), answer_buffers)
            infos = protocol.pack(self._envs.take_infos(), answer_buffers, dropped)
            reply = Reply(request.seq, value, infos, dropped)
            self._socket.send_multipart(protocol.frames(reply, *answer_buffers), copy=False)
        except (Exception, SystemExit) as error:
            # An environment that raised while it was built, reset or stepped is in no state to go on.
            fatal = not isinstance(request, protocol.Call | protocol.SetAttr)
            env = _failed_env(error)
            reply = Error(
                request.seq,
                env=None if env is None else self._first_row + env,
                kind=f"{type(error).__module__}.{type(error).__qualname__}",
                message=str(error.args[0]) if len(error.args) == 1 else str(error),
                traceback=traceback.format_exc(),
                fatal=fatal,
            )
            self._socket.send_multipart(protocol.frames(reply))
            if fatal:
                raise _End from error

    def _receive(self) -> tuple[Request, list[Any]]:
        start, request = time.perf_counter(), None
        while request is None or isinstance(request, protocol.Ping):
            header, *buffers = self._socket.recv_multipart(copy=False)
            try:
                request = protocol.decode_request(header.buffer)
            except Exception as error:  # whatever bytes make msgspec raise
                logger.warning("dropped a malformed message: %s", error)
        self._waited += time.perf_counter() - start
        if isinstance(request, protocol.Close):
            raise _End
        return request, [buffer.buffer for buffer in buffers]

    def _handle(self, request: Request, buffers: list[Any]) -> Any:
        match request:
            case protocol.Setup():
                sys.path.extend(path for path in request.sys_path if path not in sys.path)
                self._first_row = request.first_row
                self._envs = EnvSlice(**pickle.loads(buffers[0]))
            case protocol.Reset():
                seeds, options, mask = pickle.loads(buffers[0])
                if mask is not None:
                    options = {**options, "reset_mask": mask}
                # A reset mask with no row here would be Gymnasium's error; nothing is to be done then.
                observations = self._envs._observations
                if mask is None or mask.any():
                    observations, _ = self._envs.reset(seed=seeds, options=options)
                self._waited = 0.0  # from here on the head may have work
                if seeds[0] is not None:
                    self._seed = [seeds[0], self._first_row]
                    self._seed_generator()
                return observations
            case protocol.Step():
                return self._envs.step(pickle.loads(buffers[0]))[:4]
            case protocol.Call():
                args, kwargs = pickle.loads(buffers[0])
                return self._envs.call(request.name, *args, **kwargs)
            case protocol.SetAttr():
                self._envs.set_attr(request.name, pickle.loads(buffers[0]))
            case protocol.Structure():
                import torch  # which a worker that only steps does not need

                from .policy import Actor

                if self._generator is None:
                    self._generator = torch.Generator()
                    self._seed_generator()
                self._actor, self._version = Actor(pickle.loads(buffers[0]), self._generator), 0
            case protocol.Collect():
                if self._envs.rule.wants_pull(self._version, request):
                    self._pull(request.seq)
                if hasattr(self._actor.policy, "epsilon"):
                    self._actor.policy.epsilon = request.epsilon
                waited, self._waited = self._waited, 0.0
                part = self._envs.collect(self._actor, request.num_steps)
                return {"version": self._version, "waited": waited, **part}
        return None

    def _pull(self, seq: int) -> None:
        self._socket.send_multipart(protocol.frames(Pull(seq, self._version)))
        while True:
            message, buffers = self._receive()
            if isinstance(message, Weights):
                break
            if isinstance(message, protocol.Structure):  # the weights to come are its
                self._answer(message, buffers)
            else:
                self._later.append((message, buffers))
        self._actor.policy.load_flat_weights(buffers[0])
        self._version = message.version

    def _seed_generator(self) -> None:
        if self._generator is not None:
            self._generator.manual_seed(int(np.random.SeedSequence(self._seed).generate_state(1, np.uint64)[0]))


def _exit_with_head(monitor: zmq.Socket[bytes]) -> None:
    """End this process, whatever its environments are doing, if there is no head at the other end, or no longer."""
    connected = False
    with contextlib.suppress(zmq.ContextTerminated):
        while True:
            event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED or not (connected or event == zmq.EVENT_CONNECTED):
                logger.error("there is no head at the other end: exiting")
                os._exit(1)
            connected = True
    monitor.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="clusterenv_runtime.worker", description="A ClusterEnv environment worker.")
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="the head's address, as ZeroMQ writes it")
    parser.add_argument("--index", required=True, type=int, help="which of the head's workers this is, from 0")
    parser.add_argument("--startup-timeout", type=float, default=60, help="seconds to wait for the head's first answer")
    parser.add_argument("--head-timeout", type=float, default=30, help="seconds of a silent link before giving up")
    parser.add_argument("--key-file", metavar="FILE", help="the run's keys, for tcp; only its owner may read it")
    args = parser.parse_args()
    logging.basicConfig(format=f"worker {args.index}: %(message)s")
    try:
        keys = None if args.key_file is None else read_key_file(args.key_file)
    except StartupError as error:
        sys.exit(f"error: {error}")
    worker = Worker(args.connect, args.index, args.head_timeout, keys)
    try:
        with contextlib.suppress(_End):
            worker.run(args.startup_timeout)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
