"""Custom policies: the freedom of their contract, and what is refused before any worker acts."""

import os
import re
import signal
import subprocess
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Independent,
    Normal,
    OneHotCategorical,
    StudentT,
    kl_divergence,
)

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, GaussianPolicy, Policy

from .envs import CountingEnv, EchoEnv, assert_same
from .nets import change, divergence_of, linear, params_at
from .patience import PATIENCE
from .scripts import ROOT, environment

EXACT = {"weights": "float32", "sync_mode": "always"}


class Recurrent(Policy):
    """A GRU policy for two actions. Its state also counts the steps since the initial state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.memory, self.actor = nn.GRUCell(1, 8), nn.Linear(8, 2)

    def initial_state(self, num_envs):
        return {"memory": torch.full((num_envs, 8), 0.5), "steps": torch.zeros(num_envs, 1)}

    def forward(self, observations, state):
        memory, steps = self.memory(observations, state["memory"]), state["steps"] + 1
        return {"logits": self.actor(memory), "steps": steps}, {"memory": memory, "steps": steps}

    def noise(self, num_steps, params, generator):
        return torch.rand(num_steps, len(params["logits"]), generator=generator)

    def act(self, params, noise):
        return (noise < params["logits"].softmax(-1)[:, 1]).long()

    def distribution(self, params):
        return Categorical(logits=params["logits"])

    def extras(self, params, actions):
        return {"steps": params["steps"][..., 0], "entropy": self.distribution(params).entropy()}


def seen_by(policy, rollout):
    """Return the parameters that the learner computes for a rollout."""
    ends = rollout.terminations | rollout.truncations
    starts = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])
    state = {name: torch.tensor(leaf) for name, leaf in rollout.states.items()}
    with torch.no_grad():
        return policy.unroll(torch.tensor(rollout.observations), torch.tensor(starts), state)[0]


def together(mode, lengths, num_envs):
    return SyncVectorEnv(
        [partial(CountingEnv, length) for length in lengths[:num_envs]], autoreset_mode=mode
    )


LENGTHS = [2, 3, 5, 7]
TOGETHER = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
MAKERS = {"one by one": [partial(CountingEnv, length) for length in LENGTHS]}
MAKERS |= {f"together, {mode.value}": partial(together, mode, LENGTHS) for mode in TOGETHER}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_states_are_initial_exactly_at_episode_starts_and_the_learner_gets_the_same_logprobs(make):
    num_workers = 1 if callable(make) else 2
    with ClusterEnv(make, num_workers, num_envs=4, **EXACT) as envs:
        envs.reset(seed=1)
        policy, ends = Recurrent(), 0
        for _ in range(4):
            rollout = envs.rollout(policy, 9)
            assert_same(rollout.extras["steps"], rollout.observations[..., 0] + 1)
            assert_same(rollout.starts, rollout.observations[0, :, 0] == 0)
            assert (rollout.states["memory"][rollout.starts] == 0.5).all()
            params = seen_by(policy, rollout)
            logprobs = policy.distribution(params).log_prob(torch.tensor(rollout.actions))
            assert np.abs(logprobs.numpy() - rollout.logprobs).max() < 1e-5
            ends += rollout.truncations.sum()
            change(policy, 0.1)
        assert ends > 20


def test_the_divergence_of_a_policy_with_a_state_is_measured_over_sequences():
    with ClusterEnv(MAKERS["one by one"], 2, **EXACT) as envs:
        envs.reset(seed=1)
        policy = Recurrent()
        rollout = envs.rollout(policy, 9)
        before = policy.distribution(seen_by(policy, rollout))
        change(policy, 0.3)
        envs.publish(policy)
        kl = kl_divergence(before, policy.distribution(seen_by(policy, rollout))).mean(0)
        assert envs.divergence.tolist() == pytest.approx(
            [kl[:2].mean().item(), kl[2:].mean().item()], rel=1e-3
        )
        assert envs.divergence.min() > 1e-4
        envs.publish(Recurrent())  # the first weights again
        assert envs.divergence.max() < 1e-6


def test_a_replacement_begins_with_fresh_states(workers):
    with ClusterEnv([partial(CountingEnv, 50)] * 2, 2, **EXACT) as envs:
        envs.reset(seed=1)
        policy = Recurrent()
        envs.rollout(policy, 9)
        os.kill(next(iter(workers())), signal.SIGKILL)
        rollout = envs.rollout(policy, 9)
        assert sorted(rollout.starts.tolist()) == [False, True]
        assert_same(rollout.extras["steps"], rollout.observations[..., 0] + 1)
        envs.reset(seed=2)
        assert envs.rollout(policy, 9).extras["steps"][0].tolist() == [1, 1]


class Mixed(Policy):
    """A policy with a Dict of actions (move, jump, speak), each with its own parameters."""

    def __init__(self):
        super().__init__()
        self.move, self.jump, self.speak = nn.Linear(7, 4), nn.Linear(7, 2), nn.Linear(7, 6)

    def forward(self, observations):
        return {
            "move": self.move(observations),
            "jump": self.jump(observations),
            "speak": self.speak(observations),
        }

    def noise(self, num_steps, params, generator):
        size = num_steps, len(params["move"])
        return torch.randn(*size, 2, generator=generator), torch.rand(*size, 2, generator=generator)

    def act(self, params, noise):
        mean, logstd = params["move"].chunk(2, -1)
        jump = noise[1] < params["jump"].sigmoid()
        speak = params["speak"].view(-1, 2, 3).argmax(-1)
        return {"move": mean + logstd.exp() * noise[0], "jump": jump.to(torch.int8), "speak": speak}

    def to_env(self, actions):
        return actions | {"move": actions["move"].tanh()}

    def distribution(self, params):
        return Joint(params)


class Joint:
    """The distribution of the actions of `Mixed`, with only the method that the runtime needs."""

    def __init__(self, params):
        mean, logstd = params["move"].chunk(2, -1)
        self.parts = {
            "move": Independent(Normal(mean, logstd.exp()), 1),
            "jump": Independent(Bernoulli(logits=params["jump"]), 1),
        }

    def log_prob(self, actions):
        return sum(part.log_prob(actions[name].float()) for name, part in self.parts.items())


class Obedient(gym.Env):
    """Observes its last action."""

    observation_space = spaces.Box(-np.inf, np.inf, (7,))
    action_space = spaces.Dict(
        move=spaces.Box(-1, 1, (2,)), jump=spaces.MultiBinary(2), speak=spaces.MultiDiscrete([3, 3])
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(7, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        flat = np.concatenate([action["move"], action["jump"], action["speak"], [1]])
        return flat.astype(np.float32), 0.0, False, False, {}


def test_actions_may_be_trees():
    with ClusterEnv([Obedient] * 3, 2, **EXACT) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(Mixed(), 6)
        actions = rollout.actions
        told = np.concatenate(
            [np.tanh(actions["move"]), actions["jump"], actions["speak"]], -1
        ).astype(np.float32)
        after = np.concatenate([rollout.observations[1:], rollout.next_observations[None]])
        np.testing.assert_allclose(after[..., :6], told, rtol=1e-6)
        assert actions["jump"].dtype == np.int8 and actions["speak"].shape == (6, 3, 2)
        assert np.isinf(envs.divergence).all()  # the policy has no divergence, and none was needed


class Hot(CategoricalPolicy):
    """Takes action 1 when its temperature is above 30."""

    numbers = ("temperature",)

    def __init__(self):
        super().__init__(linear(1, 2))
        self.temperature, self.offset = 0, 0

    def act(self, params, noise):
        return torch.full((len(params),), int(self.temperature > 30) + self.offset)


def test_numbers_travel_with_each_request_and_other_attributes_are_part_of_the_structure():
    with ClusterEnv([CountingEnv], 1, kl_threshold=100.0) as envs:
        envs.reset()
        policy = Hot()
        assert envs.rollout(policy, 4).actions.max() == 0
        policy.temperature = 40
        assert envs.rollout(policy, 4).actions.min() == 1
        assert envs.pulls.tolist() == [1]
        policy.temperature, policy.offset = 0, 1
        assert envs.rollout(policy, 4).actions.min() == 1
        assert envs.pulls.tolist() == [2]


class Heavy(GaussianPolicy):
    """A policy whose distribution has heavy tails."""

    def distribution(self, params):
        mean, logstd = params.chunk(2, -1)
        return Independent(StudentT(5.0, mean, logstd.exp()), 1)


def test_a_divergence_that_torch_does_not_know_is_estimated_with_one_warning(caplog):
    torch.manual_seed(1)
    policy = Heavy(linear(3, 1), nn.Parameter(torch.zeros(1, 1)))
    observations = np.random.default_rng(1).normal(size=(256, 3)).astype(np.float32)
    old = params_at(policy, observations)
    change(policy, 0.1)
    grid = torch.linspace(-100, 100, 20_001).view(-1, 1, 1)
    before, after = (
        policy.distribution(each).log_prob(grid) for each in (old, params_at(policy, observations))
    )
    exact = (before.exp() * (before - after)).sum(0).mean().item() * 0.01
    state = torch.get_rng_state()
    for _ in range(2):
        assert divergence_of(policy, [observations], [old]).item() == pytest.approx(exact, rel=0.1)
    assert exact > 0.01 and torch.equal(torch.get_rng_state(), state)
    assert [record.getMessage() for record in caplog.records] == [
        "the divergence is estimated, unless the policy defines kl: No KL(p || q) is implemented "
        "for p type StudentT and q type StudentT"
    ]


class OneHot(CategoricalPolicy):
    """A policy whose actions have more dimensions than those of the environments."""

    def act(self, params, noise):
        return nn.functional.one_hot(super().act(params, noise), 2)

    def to_env(self, actions):
        return actions.argmax(-1)

    def distribution(self, params):
        return OneHotCategorical(logits=params)


SQUARE = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("policy", "env_fn", "dimensions"),
    [
        (OneHot(linear(1, 2)), CountingEnv, 1),
        (
            GaussianPolicy(nn.Linear(2, 2), nn.Parameter(torch.zeros(1, 2))),
            partial(EchoEnv, SQUARE, SQUARE),
            2,
        ),
    ],
    ids=["one-hot", "Gaussian"],
)
def test_the_divergence_is_per_dimension_of_the_environments_actions(policy, env_fn, dimensions):
    with ClusterEnv([env_fn] * 2, 1, **EXACT) as envs:
        envs.reset(seed=1)
        seen = envs.rollout(policy, 8).observations.reshape(16, -1)
        before = params_at(policy, seen)
        change(policy, 0.3)
        envs.publish(policy)
        whole = policy.kl(before, params_at(policy, seen)).mean().item()
        assert envs.divergence.tolist() == pytest.approx([whole / dimensions], rel=1e-4)


class Telling(CountingEnv):
    """Reports its progress in every second step, and at the end whether it has succeeded."""

    def step(self, action):
        result = super().step(action)
        infos = {"progress": np.array([self.count, 1.5])} if self.count % 2 == 0 else {}
        if self.count == self.length:
            infos["success"] = self.length > 3
        return *result[:-1], infos | {"more": "text"}


def telling(mode, num_envs):
    return SyncVectorEnv(
        [partial(Telling, length) for length in LENGTHS[:num_envs]], autoreset_mode=mode
    )


TELLERS = {"one by one": [partial(Telling, length) for length in LENGTHS]}
TELLERS |= {f"together, {mode.value}": partial(telling, mode) for mode in TOGETHER}


@pytest.mark.parametrize("make", TELLERS.values(), ids=TELLERS)
def test_requested_infos_come_in_rollouts(make):
    num_workers = 1 if callable(make) else 2
    keys = ("success", "progress", "never")
    with ClusterEnv(make, num_workers, num_envs=4, info_keys=keys) as envs:
        envs.reset(seed=1)
        for _ in range(2):
            rollout = envs.rollout(CategoricalPolicy(linear(1, 2)), 8)
            steps, infos = rollout.observations[..., 0] + 1, rollout.infos
            assert set(infos) == {*keys, *(f"_{key}" for key in keys)}
            assert infos["never"].shape == (8, 4) and not infos["_never"].any()
            assert not infos["never"].any()
            assert_same(infos["_success"], rollout.truncations)
            succeeded = rollout.truncations & (np.array(LENGTHS) > 3)
            assert_same(infos["success"], succeeded.astype(np.float64))
            assert_same(infos["_progress"], steps % 2 == 0)
            assert infos["progress"].shape == (8, 4, 2)
            np.testing.assert_array_equal(
                infos["progress"][..., 0], np.where(steps % 2 == 0, steps, 0)
            )


def test_infos_that_a_rollout_lacks_are_zeros_of_the_known_shape():
    with ClusterEnv([partial(Telling, 4)] * 2, 1, info_keys=("progress",)) as envs:
        envs.reset()
        policy = CategoricalPolicy(linear(1, 2))
        # Only the second step has an info.
        infos = [envs.rollout(policy, 1).infos for _ in range(3)]
    assert [each["progress"].shape for each in infos] == [(1, 2), (1, 2, 2), (1, 2, 2)]
    assert [each["_progress"].any() for each in infos] == [False, True, False]
    assert not infos[2]["progress"].any()


class Odd(CountingEnv):
    """Has an info whose size depends on ``length``."""

    def step(self, action):
        return *super().step(action)[:-1], {"odd": np.zeros(self.length), "even": 1.0}


def test_infos_of_several_shapes_are_an_error():
    policy = CategoricalPolicy(linear(1, 2))
    for num_workers, says in (
        (1, "in all steps, got "),
        (2, r"in all environments, got \(2,\) and \(3,\)"),
    ):
        env_fns = [partial(Odd, length) for length in (3, 2)]
        with ClusterEnv(env_fns, num_workers, info_keys=("odd", "even")) as envs:
            envs.reset()
            with pytest.raises(ValueError, match=f"info 'odd' must have the same shape {says}"):
                envs.rollout(policy, 4)


def test_infos_that_cannot_come_in_a_rollout_are_an_error():
    with ClusterEnv(TELLERS["one by one"], 2, info_keys=("more",)) as envs:
        envs.reset()
        with pytest.raises(
            ValueError, match="info 'more' has no place in a rollout: it is neither"
        ):
            envs.rollout(CategoricalPolicy(linear(1, 2)), 8)
    with pytest.raises(TypeError, match="info_keys must be a tuple of strings, got 'success'"):
        ClusterEnv([CountingEnv], 1, info_keys="success")


class Window(CategoricalPolicy):
    """Remembers the last three observations in a state that it updates in place."""

    def initial_state(self, num_envs):
        return torch.zeros(num_envs, 3)

    def forward(self, observations, state):
        state[:, :-1] = state[:, 1:].clone()
        state[:, -1] = observations[:, 0]
        return self.actor(state), state


def test_a_state_that_is_updated_in_place_is_recorded_before_the_first_step():
    with ClusterEnv([partial(CountingEnv, length=100)] * 2, 1, **EXACT) as envs:
        envs.reset(seed=1)
        policy = Window(linear(3, 2))
        envs.rollout(policy, 5)
        rollout = envs.rollout(policy, 5)
        assert rollout.states.tolist() == [[2, 3, 4]] * 2
        starts = torch.zeros(5, 2, dtype=torch.bool)
        params, _ = policy.unroll(
            torch.tensor(rollout.observations), starts, torch.tensor(rollout.states)
        )
        logprobs = (
            policy.distribution(params).log_prob(torch.tensor(rollout.actions)).detach().numpy()
        )
        np.testing.assert_allclose(rollout.logprobs, logprobs, atol=1e-6)


def test_the_policys_state_is_initial_after_steps_of_the_head():
    with ClusterEnv([partial(CountingEnv, length=4)] * 2, 1, **EXACT) as envs:
        envs.reset(seed=1)
        policy = Window(linear(3, 2))
        envs.rollout(policy, 3)
        for _ in range(4):  # past the end of the episode
            envs.step(np.zeros(2, np.int64))
        assert envs.rollout(policy, 1).states.tolist() == [[0, 0, 0]] * 2


PAGE = (ROOT / "docs" / "policies.md").read_text()
PROGRAMS = dict(re.findall(r"## ([^\n]*)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_of_the_page_print_what_they_say(tmp_path, name):
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    command = [sys.executable, "program.py"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    printed = re.search(r"print\(.*\)  # ([^\n]*)", PROGRAMS[name], re.DOTALL)[1]
    assert (result.stdout.strip(), result.returncode) == (printed, 0), result.stderr
