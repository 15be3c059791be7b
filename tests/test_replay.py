"""The replay buffer of DQN and SAC, and that of DQN on Atari, which stores each frame once."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from clusterenv_runtime import CategoricalPolicy, ClusterEnv
from clusterenv_utils import FrameReplayBuffer, ScriptError
from dqn_clusterenv import ReplayBuffer, make_transitions

from .test_frames import Net, stacked

SPACE = stacked().observation_space


def test_a_researchers_own_value_of_a_transition_is_sampled_and_resumed():
    rb, other = ReplayBuffer(4), ReplayBuffer(4)
    transitions = {"rewards": np.ones(3, np.float32), "priorities": np.arange(3.0)}
    rb.add(transitions)
    other.load_state_dict(rb.state_dict())
    for each in (rb, other):
        assert each.sample(1, 50, "cpu")["priorities"].unique().tolist() == [0, 1, 2]


def test_the_rows_of_a_sample_can_be_given_new_priorities():
    rb = ReplayBuffer(40)
    rb.add({"rewards": np.arange(40, dtype=np.float32), "priorities": np.zeros(40)})
    drawn = rb.sample(2, 8, "cpu")
    rb.columns["priorities"][rb.inds] = drawn["rewards"].double()
    changed = rb.columns["priorities"].nonzero().flatten().tolist()
    assert changed == sorted({*drawn["rewards"].int().flatten().tolist()} - {0})


def test_a_resumed_buffer_is_in_memory_if_the_gpu_has_no_room(monkeypatch):
    rb, resumed = ReplayBuffer(4), ReplayBuffer(4, "cuda")
    rb.add({"rewards": np.ones(3, np.float32)})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2**40))
    resumed.load_state_dict(rb.state_dict())
    assert resumed.device.type == resumed.columns["rewards"].device.type == "cpu"


def test_a_buffer_that_no_memory_has_room_for_is_refused():
    with pytest.raises(ScriptError, match="takes 372529.0 GiB, this machine has"):
        ReplayBuffer(10**14).add({"rewards": np.ones(3, np.float32)})


def rollouts(frame_stack):
    """Yield chunks of both workers in turn. They are the same with frame stacks and without."""
    torch.manual_seed(1)
    policy = CategoricalPolicy(Net())
    with ClusterEnv([stacked] * 4, 2, frame_stack=frame_stack, sync_mode="never") as envs:
        envs.reset(seed=1)
        envs.publish(policy)
        for number in range(12):
            envs.send(10, number % 2)
            yield envs.recv(number % 2)[1]


@pytest.mark.parametrize(("num_frames", "all_fit"), [(290, True), (90, False)])
def test_the_buffer_holds_the_last_transitions_and_each_frame_once(num_frames, all_fit):
    ours, dense = FrameReplayBuffer(75, num_frames, SPACE), ReplayBuffer(75)
    assert len(ours.frames) < 2 * 4 * 75 / 2
    for with_frames, without in zip(rollouts(4), rollouts(None), strict=True):
        ours.add(with_frames)
        dense.add(make_transitions(without))
        num = min(ours.inserted - ours.chunks[0][0], 75)
        assert num == min(ours.inserted, 75) if all_fit else 20 <= num < 75
        last = torch.arange(ours.inserted - num, ours.inserted) % 75
        before, after = ours.frames[ours.stacks[last] % num_frames].unbind(1)
        assert torch.equal(before, dense.columns["obs"][last])
        assert torch.equal(after, dense.columns["next_obs"][last])
        for column in ("actions", "rewards", "dones"):
            assert torch.equal(getattr(ours, column)[last], dense.columns[column][last])

    drawn = ours.sample(600, "cpu")
    assert drawn["obs"].shape == (600, 4, 3, 2) and drawn["obs"].dtype == torch.uint8
    assert drawn["rewards"].shape == (600,)

    def keys(*columns):
        rows = torch.cat([column.reshape(len(columns[0]), -1).double() for column in columns], 1)
        return set(map(tuple, rows.tolist()))

    names = "obs", "next_obs", "actions", "rewards", "dones"
    found = keys(*(drawn[name] for name in names))
    # The sample happens to have all.
    assert found == keys(*(dense.columns[name][last] for name in names))


def test_a_buffer_of_frames_goes_on_with_other_workers_which_leave_room_for_other_frames():
    space = spaces.Box(0, 255, (4, 3, 3), np.uint8)
    buffer, other = FrameReplayBuffer(8, 30, space), FrameReplayBuffer(8, 40, space)
    buffer.frames += 1
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(other.frames, buffer.frames)
    wide = FrameReplayBuffer(8, 30, spaces.Box(0, 255, (4, 3, 5), np.uint8))
    with pytest.raises(ValueError, match="frames of another size"):
        wide.load_state_dict(buffer.state_dict())
