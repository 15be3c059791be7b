"""Stacks of frames: a rollout that sends each frame once returns the environments' stacks."""

import os
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TransformObservation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, Frames
from clusterenv_runtime.arrays import fold, join

from .envs import assert_same


class Screens(gym.Env):
    """Observes frames of noise, some of which are black. Episodes end often."""

    observation_space, action_space = spaces.Box(0, 255, (3, 2), np.uint8), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._see(), {}

    def step(self, action):
        terminated, truncated = self.np_random.random(2) < 0.1
        return self._see(), float(action), bool(terminated), bool(truncated), {}

    def _see(self):
        return self.np_random.integers(0, 256, (3, 2), np.uint8) * np.uint8(
            self.np_random.random() < 0.8
        )

    def pid(self):
        return os.getpid()


def stacked(padding="reset"):
    return FrameStackObservation(Screens(), 4, padding_type=padding)


def with_speed():
    """Return an environment that observes a Dict of a stack of frames, a stack of vectors, and a
    vector.
    """
    space = spaces.Dict(
        screen=spaces.Box(0, 255, (4, 3, 2), np.uint8),
        last=spaces.Box(0, 255, (4, 2), np.float32),
        bottom=spaces.Box(0, 255, (2,), np.uint8),
    )
    return TransformObservation(
        stacked(),
        lambda x: {"screen": x, "last": x[:, -1].astype(np.float32), "bottom": x[-1, -1]},
        space,
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 2)

    def forward(self, observations):
        screens = observations["screen"] if isinstance(observations, dict) else observations
        return self.linear(screens.flatten(1) / 255)


@st.composite
def timelines(draw):
    """Draw the stacks of all steps, the final stacks, and the ends of episodes.

    Most stacks continue the previous one, and some do not.
    """
    num_steps, num_envs, size = (draw(st.integers(1, most)) for most in (6, 3, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ended = rng.random((num_steps, num_envs)) < 0.3
    stacks = np.empty((num_steps + 1, num_envs, size, 2), np.uint8)
    finals = []
    for step, env in np.ndindex(num_steps + 1, num_envs):
        # There are so few values that different frames are often equal.
        frame = rng.integers(0, 3, (1, 2), np.uint8)
        kind = draw(st.sampled_from(["goes on", "goes on", "repeats", "is new"]))
        if kind == "goes on" and step:
            stack = np.concatenate([stacks[step - 1, env, 1:], frame])
        elif kind == "is new":
            stack = rng.integers(0, 3, (size, 2), np.uint8)
        else:
            stack = frame.repeat(size, 0)
        stacks[step, env] = stack
        if step < num_steps and ended[step, env]:
            goes_on = np.concatenate([stack[1:], frame])
            finals.append(goes_on if draw(st.booleans()) else stack[::-1])
    return stacks, np.array(finals, np.uint8).reshape(-1, size, 2), ended


@settings(max_examples=200, deadline=None)
@given(timelines())
def test_any_stacks_are_restored(timeline):
    stacks, finals, ended = timeline
    frames, index, final_index = fold(*timeline)
    assert_same(np.asarray(Frames(frames, index)), stacks)
    assert_same(frames[final_index], finals)
    assert len(frames) <= (len(stacks) * stacks.shape[1] + len(finals)) * stacks.shape[2]


def test_numbers_are_restored_to_the_bit():
    stacks = np.array([[[[-0.0], [0.0]]], [[[0.0], [np.nan]]]], np.float32)
    frames, index, _ = fold(stacks, stacks[0, :0], np.zeros((1, 1), bool))
    assert np.asarray(Frames(frames, index)).tobytes() == stacks.tobytes() and len(frames) == 3


def test_a_stack_that_continues_adds_one_frame_and_so_does_an_episode():
    clip = np.arange(9, dtype=np.uint8)[:, None]
    first, second = clip[:4], clip[1:5]
    begins = clip[8:9].repeat(4, 0)
    stacks = np.stack([first, second, begins])[:, None]
    frames, index, final_index = fold(stacks, clip[None, 2:6], np.array([[False], [True]]))
    assert frames[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert index[:, 0].tolist() == [[0, 1, 2, 3], [1, 2, 3, 4], [6, 6, 6, 6]]
    assert final_index.tolist() == [[2, 3, 4, 5]]


@pytest.mark.parametrize(
    "make_env", [stacked, partial(stacked, "zero"), with_speed], ids=["reset", "zero", "dict"]
)
def test_rollouts_with_stacks_equal_those_without(make_env):
    torch.manual_seed(1)
    net, rollouts = Net(), []
    for frames in ({}, {"frame_stack": 4}):
        with ClusterEnv([make_env] * 5, 2, **frames, weights="float32") as envs:
            envs.reset(seed=1)
            policy = CategoricalPolicy(net)
            found = [envs.rollout(policy, 20, overlap=number < 3) for number in range(4)]
            envs.send(7)
            found += [envs.recv(worker)[1] for worker in range(2)]
            found.append(envs.step(np.ones(5, np.int64))[0])  # `step` folds nothing
            rollouts.append(found)
    for plain, folded in zip(*rollouts, strict=True):
        if isinstance(plain, np.ndarray | dict):
            assert_same(folded, plain)
            continue
        seen = folded.observations
        screens = seen["screen"] if isinstance(seen, dict) else seen
        assert isinstance(screens, Frames) and len(screens.frames) < screens.index.size
        folded.observations = (
            {key: np.asarray(leaf) for key, leaf in seen.items()}
            if isinstance(seen, dict)
            else np.asarray(seen)
        )
        for name in vars(plain):
            assert_same(getattr(folded, name), getattr(plain, name))
    assert sum(len(rollout.final_observations) for rollout in rollouts[0][:4]) > 0


def test_a_text_beside_stacks_can_be_stepped():
    def make_env():
        space = spaces.Dict(screen=stacked().observation_space, mission=spaces.Text(8))
        return TransformObservation(stacked(), lambda x: {"screen": x, "mission": "go"}, space)

    with ClusterEnv([make_env] * 2, 1, frame_stack=4) as envs:
        assert envs.reset(seed=1)[0]["mission"] == ("go", "go")
        assert envs.step(np.zeros(2, np.int64))[0]["screen"].shape == (2, 4, 3, 2)


def test_frames_behave_like_an_array_of_stacks():
    frames = np.arange(12).reshape(6, 2)
    index = np.array([[[0, 1], [1, 2]], [[2, 3], [5, 5]], [[3, 4], [0, 0]]])
    stacks = Frames(frames, index)
    whole = np.asarray(stacks)
    assert stacks.shape == whole.shape == (3, 2, 2, 2)
    assert (stacks.dtype, len(stacks)) == (frames.dtype, 3)
    flat = stacks.reshape(-1, *stacks.shape[2:])
    which = np.array([4, 0, 5])
    assert_same(flat[which], whole.reshape(6, 2, 2)[which])
    assert_same(stacks[1], whole[1])
    assert_same(stacks[:, 1], whole[:, 1])
    for some, number in ((which, 4), (which[1:2], 2), (np.arange(6), 6)):
        few = flat.only(some)
        assert_same(np.asarray(few), flat[some])
        assert len(few.frames) == number and not np.shares_memory(few.frames, frames)
    tensors = flat.to("cpu")
    assert torch.equal(tensors[torch.as_tensor(which)], torch.as_tensor(flat[which]))
    assert torch.equal(tensors[2:4], torch.as_tensor(whole.reshape(6, 2, 2)[2:4]))
    both = join([stacks, Frames(frames + 100, index)], axis=1)
    assert_same(np.asarray(both), np.concatenate([whole, whole + 100], 1))
    for key in ((..., 0), (..., -1, slice(None))):
        with pytest.raises(IndexError, match="stacks are indexed from their first axis on"):
            stacks[key]
    with pytest.raises(
        ValueError, match=r"stacks are \(2, 2\): they cannot be reshaped to \(3, 8\)"
    ):
        stacks.reshape(3, 8)


@pytest.mark.parametrize(
    ("frame_stack", "says"),
    [
        (3, "frame_stack is 3, but no observation is a stack of 3 arrays: "),
        (0, "frame_stack must be an integer from 1, got 0"),
        (True, "frame_stack must be an integer from 1, got True"),
        ("4", "frame_stack must be an integer from 1, got '4'"),
    ],
)
def test_a_wrong_frame_stack_is_refused_in_one_line(frame_stack, says):
    with pytest.raises(ValueError, match=says):
        ClusterEnv([stacked], frame_stack=frame_stack)
