"""Checks of a script's flags, spaces and observations.

A check that fails ends the process with a one-line error, or in `check_finite` the training.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np

from clusterenv_runtime.arrays import not_finite
from clusterenv_runtime.errors import Interrupted, printable
from clusterenv_runtime.rollout import Rollout

logger = logging.getLogger(__name__)

ATARI = "scripts/ppo_atari_clusterenv.py or scripts/dqn_atari_clusterenv.py"


def check(fine: Any, message: Any) -> None:
    """Exit with a one-line error, the message, if something is not ``fine``.

    Control characters in the message are escaped, because parts of it may come from a stranger's
    checkpoint.
    """
    if not fine:
        sys.exit(f"error: {printable(str(message), most=10_000)}")


@contextmanager
def one_line_for(*kinds: type[Exception], text: str = "") -> Iterator[None]:
    """Exit with a one-line error, ``text`` and its message, if this block raises one of these."""
    try:
        yield
    except kinds as error:
        says = (isinstance(error, OSError) and error.strerror) or error
        check(False, f"{text}: {says}" if text else says)


def check_batches(args: Any, of_whole_envs: bool = False) -> None:
    """Check that a PPO script's run has a batch, and that the batch divides into minibatches.

    ``of_whole_envs`` says whether a minibatch holds all steps of its environments.
    """
    batch = f"the batch of {args.num_envs} environments x {args.num_steps} steps"
    minibatches = f"--num-minibatches {args.num_minibatches}"
    has_whole_envs = not of_whole_envs or args.num_envs % args.num_minibatches == 0
    check(has_whole_envs, f"{minibatches} must divide the {args.num_envs} environments")
    is_whole = args.batch_size % args.num_minibatches == 0
    check(is_whole, f"{minibatches} must divide {batch} = {args.batch_size}")
    of_one = "leaves one sample in each, whose advantage cannot be normalized"
    has_several = args.minibatch_size > 1 or not args.norm_adv
    check(has_several, f"{minibatches} {of_one}; use fewer, or --no-norm-adv")
    total = f"--total-timesteps {args.total_timesteps}"
    check(args.num_iterations >= 1, f"{total} must be at least {batch} = {args.batch_size}")


def check_stream(args: Any) -> None:
    """Check that all chunks of a PPO script's batch have the same size, if it streams."""
    if args.stream:
        _check_rows(args)


def _check_rows(args: Any) -> None:
    multiple = f"a multiple of --num-workers {args.num_workers}: all chunks have the same size"
    check(args.num_envs % args.num_workers == 0, f"--num-envs {args.num_envs} must be {multiple}")


def check_chunks(args: Any) -> None:
    """Check that chunks for a replay buffer have one size, and fit into the run and the buffer."""
    _check_rows(args)
    rows = args.num_envs // args.num_workers
    chunk = f"a chunk of {rows} environments x {args.num_steps} steps = {args.chunk_size}"
    total = f"--total-timesteps {args.total_timesteps}"
    check(args.num_iterations >= 1, f"{total} must be at least {chunk}")
    has_room = args.buffer_size >= args.chunk_size
    check(has_room, f"--buffer-size {args.buffer_size} must be at least {chunk}")
    steps = args.num_iterations * args.chunk_size
    if args.learning_starts >= steps:
        text = "nothing is learned in %d steps, because --learning-starts is %d"
        logger.warning(text, steps, args.learning_starts)


def check_memory(args: Any, num_bytes: int) -> None:
    """Check that this machine has enough memory for a replay buffer."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    takes = f"takes {num_bytes / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f}"
    check(num_bytes < memory, f"--buffer-size {args.buffer_size} {takes}")


def check_discrete(args: Any, space: gym.Space[Any]) -> None:
    """Check that actions are discrete and start at 0."""
    is_discrete = isinstance(space, gym.spaces.Discrete) and space.start == 0
    other = "; scripts/ppo_continuous_clusterenv.py is for continuous actions"
    hint = other if isinstance(space, gym.spaces.Box) else ""
    check(is_discrete, f"actions must be discrete, from 0, not {space}: {args.env_id}{hint}")


def check_game(args: Any) -> None:
    """Check that the environment is an Atari game, is not registered here, or is EnvPool's."""
    spec = gym.registry.get(args.env_id)
    is_game = spec is None or "ale_py" in str(spec.entry_point)
    game = f"--env-id must be an Atari game, such as ALE/Pong-v5, got {args.env_id}"
    check(is_game or args.env_backend == "envpool", game)


def check_stacks(
    args: Any, obs_space: gym.Space[Any], action_space: gym.Space[Any], frame_stack: int
) -> None:
    """Check that the spaces are those of Atari games: stacks of frames, and discrete actions."""
    check_discrete(args, action_space)
    shape = frame_stack, 84, 84
    stacks = f"observations must be {shape}, as in Atari games, not {obs_space}"
    check(obs_space.shape == shape, stacks)


def check_vectors(space: gym.Space[Any]) -> None:
    """Check that observations are vectors."""
    hint = "wrap the environment in FlattenObservation in make_env"
    if len(space.shape or ()) == 3:
        hint += f", or use {ATARI} for Atari's games"
    is_vector = len(space.shape or ()) == 1
    check(is_vector, f"observations must be vectors, not {space}; {hint}")


def check_finite(rollout: Rollout, first_row: int = 0) -> None:
    """Raise Interrupted if observations are not finite.

    Final observations of terminations do not count, because nothing follows them. ``first_row`` is
    the first environment's number.
    """
    wrong = not_finite(rollout.observations, 2).any(0) | not_finite(rollout.next_observations, 1)
    steps, envs = np.nonzero(rollout.terminations | rollout.truncations)
    goes_on = ~rollout.terminations[steps, envs]
    wrong[envs[goes_on & not_finite(rollout.final_observations, 1)]] = True
    if wrong.any():
        rows = (np.unique(rollout.rows[wrong]) + first_row).tolist()
        raise Interrupted(f"environments {rows} gave observations that are not finite")
