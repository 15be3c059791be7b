"""Rollouts: the workers' data must equal those of the same actions in this process."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import nn
from torch.distributions import Categorical, Normal

from clusterenv_runtime import (
    CategoricalPolicy,
    ClusterEnv,
    EpsilonGreedyPolicy,
    Frames,
    GaussianPolicy,
)
from clusterenv_runtime.arrays import map_space
from clusterenv_runtime.policy.tensors import to_tensors
from clusterenv_runtime.rollout import Rollout

from .envs import CountingEnv, EchoEnv, RandomEnv, Words, assert_same
from .nets import ImageNet, MixedNet, linear, params_at

VECTOR = spaces.Box(-1, 1, (3,))
ARRAYS = [
    name for name in Rollout.__dataclass_fields__ if name not in ("states", "extras", "infos")
]


class Reference:
    """The same environments in this process, which take given actions."""

    def __init__(self, env_fns, mode=AutoresetMode.SAME_STEP):
        self.envs, self.mode = SyncVectorEnv(env_fns, autoreset_mode=mode), AutoresetMode(mode)
        self.space = self.envs.single_observation_space

    def reset(self, seed):
        self.observations, _ = self.envs.reset(seed=seed)
        kinds = float, np.int64, bool
        self.returns, self.lengths, self.ended = (np.zeros(self.envs.num_envs, k) for k in kinds)
        return self.observations

    def step(self, actions):
        """Step in the given mode, and count episodes by hand."""
        dead = self.ended & (self.mode == AutoresetMode.NEXT_STEP)
        self.observations, rewards, terminations, truncations, infos = self.envs.step(actions)
        self.returns += rewards
        self.lengths += ~dead
        self.ended = terminations | truncations
        ended = [(self.returns[i], self.lengths[i]) for i in np.flatnonzero(self.ended)]
        self.returns[self.ended] = self.lengths[self.ended] = 0
        return (self.observations, rewards, terminations, truncations, infos), ended

    def abandon(self, mask):
        """Reset the rows where ``mask`` is True, in the middle of an episode or not."""
        self.observations, _ = self.envs.reset(options={"reset_mask": mask.copy()})
        self.returns[mask] = self.lengths[mask] = self.ended[mask] = 0

    def reset_ended(self):
        """Do the resets that DISABLED leaves to the user, as a rollout does before it begins."""
        if self.ended.any():
            self.abandon(self.ended.copy())

    def check(self, rollout):
        """Replay the rollout's actions, and compare all results of the environments."""
        mode = self.mode
        if mode != AutoresetMode.SAME_STEP:
            self.reset_ended()
        self.mode = self.envs.autoreset_mode = AutoresetMode.SAME_STEP
        finals, episodes = [], []
        assert_same(rollout.starts, self.lengths == 0, "starts")
        for step, actions in enumerate(rollout.actions):
            observations = map_space(lambda leaf: leaf[step], self.space, rollout.observations)  # noqa: B023
            assert_same(observations, self.observations, f"observations[{step}]")
            (_, rewards, terminations, truncations, infos), ended = self.step(actions)
            assert_same(rollout.rewards[step], rewards, f"rewards[{step}]")
            assert_same(rollout.terminations[step], terminations, f"terminations[{step}]")
            assert_same(rollout.truncations[step], truncations, f"truncations[{step}]")
            finals += [infos["final_obs"][i] for i in np.flatnonzero(terminations | truncations)]
            episodes += ended
        self.mode = self.envs.autoreset_mode = mode
        # The ended episodes have been reset, so the next step must not reset them again.
        if mode != AutoresetMode.SAME_STEP:
            self.envs._autoreset_envs[:] = self.ended[:] = False
        assert_same(rollout.next_observations, self.observations, "next_observations")
        expected = create_empty_array(self.space, len(finals))
        assert_same(
            rollout.final_observations,
            concatenate(self.space, finals, expected) if finals else expected,
        )
        assert_same(rollout.episodic_returns, np.array([float(r) for r, _ in episodes], np.float64))
        assert_same(rollout.episodic_lengths, np.array([n for _, n in episodes], np.int64))
        return len(episodes)


def logprobs_by_hand(policy, space, rollout):
    """Return the log-probabilities of the rollout's actions by torch's distributions."""
    observations = map_space(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), space, rollout.observations
    )
    with torch.no_grad():
        params = policy(to_tensors(observations, policy)).view(*rollout.actions.shape[:2], -1)
    actions = torch.as_tensor(rollout.actions)
    if isinstance(policy, GaussianPolicy):
        mean, logstd = params.chunk(2, -1)
        return Normal(mean, logstd.exp()).log_prob(actions).sum(-1).numpy()
    if isinstance(policy, EpsilonGreedyPolicy):
        greedy = nn.functional.one_hot(params.argmax(-1), params.shape[-1])
        params = ((1 - policy.epsilon) * greedy + policy.epsilon / params.shape[-1]).log()
    return Categorical(logits=params).log_prob(actions).numpy()


def gaussian(actor_mean):
    return GaussianPolicy(actor_mean, nn.Parameter(torch.tensor([[0.1, -1.0]])))


IMAGE = spaces.Box(0, 255, (2, 4, 4), np.uint8)
DICT = spaces.Dict(
    small=spaces.Box(0, 9, (2,), np.int16),
    more=spaces.Tuple([spaces.Box(0, 1, (1,)), spaces.MultiBinary(2)]),
)
TUPLE = spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1, (2, 2), np.float64)])


def image_policy():
    network = ImageNet(2, 3)
    network(torch.zeros(1, 2, 4, 4))
    return CategoricalPolicy(network)


CASES = {
    "vector": (
        VECTOR,
        None,
        [lambda: CategoricalPolicy(linear()), lambda: EpsilonGreedyPolicy(linear(), epsilon=0.4)],
    ),
    "image": (IMAGE, None, [image_policy]),
    "Dict": (DICT, None, [lambda: CategoricalPolicy(MixedNet(5, 3))]),
    "Tuple": (TUPLE, spaces.Box(-1, 1, (2,)), [lambda: gaussian(MixedNet(5, 2))]),
}


@pytest.mark.parametrize(
    "observation_space, action_space, make_policies", CASES.values(), ids=CASES
)
def test_equals_a_replay_in_this_process(observation_space, action_space, make_policies):
    env_fns = [partial(RandomEnv, observation_space, action_space, end=0.05)] * 5
    reference = Reference(env_fns)
    with ClusterEnv(env_fns, 2, sync_mode="always", weights="float32") as envs:
        assert_same(envs.reset(seed=4)[0], reference.reset(seed=4))
        for policy in (make_policy() for make_policy in make_policies):
            num_episodes = 0
            for num_steps in (9, 1, 30):
                rollout = envs.rollout(policy, num_steps)
                num_episodes += reference.check(rollout)
                expected = logprobs_by_hand(policy, observation_space, rollout)
                assert rollout.logprobs.dtype == np.float32
                assert rollout.logprobs.shape == (num_steps, 5)
                np.testing.assert_allclose(rollout.logprobs, expected, rtol=1e-5, atol=1e-5)
                assert_same(rollout.policy_versions, np.full(5, envs.policy_version))
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.add_(0.1 * torch.randn_like(parameter))
            assert num_episodes > 5
        assert envs.policy_version == 3 * len(make_policies)


@pytest.fixture(scope="module")
def twins():
    """Return two equal clusters, except that one's first and the other's last worker is slow."""
    clusters = []
    for slow in (range(3), range(3, 5)):
        env_fns = [partial(RandomEnv, VECTOR, delay=0.01 if i in slow else 0) for i in range(5)]
        clusters.append(ClusterEnv(env_fns, 2, kl_threshold=0.01, weights="float32"))
    yield clusters
    for envs in clusters:
        envs.close()


def a_few_rollouts(envs, seed):
    """Return rollouts of a policy that changes as in training, sometimes too little for a pull."""
    envs.reset(seed=seed)
    policy, rollouts = CategoricalPolicy(linear()), []
    for change in (0, 0.01, 0.5, 0.01):
        with torch.no_grad():
            policy.actor[-1].weight += change
            policy.actor[-1].weight[0] -= 2 * change
        rollouts.append(envs.rollout(policy, 8))
    return rollouts


def fields(rollouts):
    """Return all fields except the version numbers, which continue from one run to the next."""
    names = [name for name in Rollout.__dataclass_fields__ if name != "policy_versions"]
    return [{name: getattr(rollout, name) for name in names} for rollout in rollouts]


def test_the_same_seed_gives_the_same_rollouts_whichever_worker_answers_first(twins):
    first, second = (a_few_rollouts(envs, seed=1) for envs in twins)
    assert_same(first[-1].policy_versions, second[-1].policy_versions)
    assert_same(fields(first), fields(second))
    # Some versions were pulled, not all.
    assert 1 < twins[0].pulls.min() <= twins[0].pulls.max() < 4
    again = a_few_rollouts(twins[0], seed=1)
    assert_same(fields(again), fields(first))
    other = a_few_rollouts(twins[0], seed=2)
    assert (other[0].actions != first[0].actions).any()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_steps_and_rollouts_may_alternate_in_every_autoreset_mode(mode):
    env_fns = [partial(RandomEnv, VECTOR, end=0.1)] * 4
    policy, reference = CategoricalPolicy(linear()), Reference(env_fns, mode)
    with ClusterEnv(env_fns, 2, autoreset_mode=mode) as envs:
        assert_same(envs.reset(seed=8)[0], reference.reset(seed=8))
        num_episodes = 0
        for num_steps, num_rollout_steps in [(0, 6), (0, 4), (5, 3), (1, 4), (6, 7), (3, 9)]:
            for _ in range(num_steps):
                if mode == AutoresetMode.DISABLED and reference.ended.any():
                    mask = reference.ended.copy()
                    reference.reset_ended()
                    assert_same(envs.reset(options={"reset_mask": mask})[0], reference.observations)
                actions = envs.action_space.sample()
                (*expected, _), _ = reference.step(actions)
                assert_same(envs.step(actions)[:-1], tuple(expected))
            num_episodes += reference.check(envs.rollout(policy, num_rollout_steps))
        assert num_episodes > 5
        mask = np.array([True, False, False, True])
        reference.abandon(mask)
        assert_same(envs.reset(options={"reset_mask": mask})[0], reference.observations)
        reference.check(envs.rollout(policy, 12))


@pytest.mark.parametrize("frame_stack", [None, 4])
def test_large_arrays_use_the_messages_memory_and_belong_to_the_user(frame_stack):
    env_fns = [partial(RandomEnv, spaces.Box(-1, 1, (4, 50, 50)))] * 2
    policy = CategoricalPolicy(nn.Sequential(nn.Flatten(), linear(10000)))
    frames = {"frame_stack": frame_stack}
    with ClusterEnv(env_fns, 1, **frames) as envs, ClusterEnv(env_fns, 1, **frames) as untouched:
        for cluster in (envs, untouched):
            cluster.reset(seed=1)
        for _ in range(3):
            rollout, expected = envs.rollout(policy, 8), untouched.rollout(policy, 8)
            assert_same(envs.divergence, untouched.divergence)
            for name in ARRAYS:
                found, other = getattr(rollout, name), getattr(expected, name)
                if isinstance(found, Frames):
                    assert_same(found.index, other.index)
                    found, other = found.frames, other.frames
                assert_same(found, other)
                assert name != "observations" or not found.flags.owndata
                found[...] = 0
            nn.init.normal_(policy.actor[1][0].weight)


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Dict(a=VECTOR, b=spaces.Graph(VECTOR, None)), Words()]
)
def test_observations_that_are_not_arrays_are_refused(space):
    with ClusterEnv([partial(RandomEnv, space)] * 2, 2) as envs:
        with pytest.raises(
            ValueError, match="a policy needs observations that become arrays, got "
        ):
            envs.publish(CategoricalPolicy(linear()))
        envs.reset()
        with pytest.raises(
            ValueError, match="a policy needs observations that become arrays, got "
        ):
            envs.rollout(CategoricalPolicy(linear()), 5)
        assert envs.policy_version == 0


class Rewarding(CountingEnv):
    """Rewards each step with ``reward``."""

    def __init__(self, reward):
        super().__init__()
        self.reward = reward

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.reward, *rest


@pytest.mark.parametrize("reward", [np.nan, -np.inf])
def test_a_reward_that_is_not_finite_stops_the_run_and_names_the_worker(reward):
    with ClusterEnv([partial(Rewarding, 1.0), partial(Rewarding, reward)], 2) as envs:
        envs.reset()
        with pytest.raises(
            ValueError, match="not all rewards are finite from step 0 .*: environment 1$"
        ) as caught:
            envs.rollout(CategoricalPolicy(linear(1, 2)), 5)
        assert "environment 1 on worker 1 " in str(caught.value.__cause__) and not envs.restarts


class Unknowing(CountingEnv):
    """Observes ``number`` after step ``at``, where 0 is the reset."""

    def __init__(self, at, number):
        super().__init__()
        self.at = at
        self.number = number

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return observation if self.at else np.full_like(observation, self.number), info

    def step(self, action):
        observation, *rest = super().step(action)
        return np.where(self.count == self.at, self.number, observation).astype(np.float32), *rest


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_an_observation_that_is_not_finite_is_not_blamed_on_the_policy(at, number):
    with ClusterEnv([partial(Unknowing, each, number) for each in (9, 9, at, 9, at)], 2) as envs:
        envs.reset()
        text = "not all observations are finite from step {} of the rollout on: environment {}"
        with pytest.raises(ValueError, match="not all observations") as caught:
            envs.rollout(CategoricalPolicy(torch.nn.Linear(1, 2)), 5)
        assert str(caught.value).startswith((text.format(at, 2), text.format(at, 4)))
        assert not envs.restarts
    with ClusterEnv([partial(Unknowing, each, number) for each in (at, 9, at)], 1) as envs:
        envs.reset()
        with pytest.raises(ValueError, match=text.format(at, "0, 2")):
            envs.rollout(CategoricalPolicy(torch.nn.Linear(1, 2)), 5)


@pytest.mark.parametrize(
    "policy",
    [CategoricalPolicy(nn.Identity()), EpsilonGreedyPolicy(nn.Identity(), 0.3)],
    ids=["categorical", "epsilon"],
)
def test_discrete_policies_draw_from_their_distribution(policy):
    draws, params = 40_000, torch.tensor([0.5, 2.0, -1.0, 0.0])
    noise = policy.noise(1, params.expand(draws, 4), torch.Generator().manual_seed(1))[0]
    actions = policy.act(params.expand(draws, 4), noise)
    probabilities = policy.distribution(params).probs
    errors = (actions.bincount(minlength=4) / draws - probabilities) / (
        probabilities * (1 - probabilities) / draws
    ).sqrt()
    assert errors.abs().max() < 4  # standard deviations


def test_environments_get_actions_as_to_env_converts_them():
    space, seen = spaces.Box(-0.5, 0.25, (2,)), spaces.Box(-np.inf, np.inf, (2,))
    policy = GaussianPolicy(nn.Linear(2, 2), nn.Parameter(torch.zeros(1, 2)), space)
    with ClusterEnv([partial(EchoEnv, seen, space)], 1, weights="float32") as envs:
        envs.reset()
        rollout = envs.rollout(policy, 20)
        # The recorded actions are the Gaussian's own.
        assert (rollout.actions > 0.25).any() and (rollout.actions < -0.5).any()
        after = np.concatenate([rollout.observations[1:], rollout.next_observations[None]])
        assert_same(after, rollout.actions.clip(-0.5, 0.25))
        logprobs = policy.distribution(params_at(policy, rollout.observations[:, 0])).log_prob(
            torch.tensor(rollout.actions[:, 0])
        )
        assert logprobs.tolist() == pytest.approx(rollout.logprobs[:, 0].tolist(), abs=1e-5)


def test_gaussian_policy_draws_from_its_distribution():
    policy = GaussianPolicy(nn.Identity(), nn.Parameter(torch.tensor([[-1.0, 0.5]])))
    draws, mean = 40_000, torch.tensor([[3.0, -2.0]])
    params = policy(mean.expand(draws, 2))
    with torch.no_grad():
        actions = policy.act(params, policy.noise(1, params, torch.Generator().manual_seed(1))[0])
    standard = (actions - mean) / torch.tensor([-1.0, 0.5]).exp()
    assert standard.mean(0).abs().max() < 4 / draws**0.5
    assert (standard.std(0) - 1).abs().max() < 4 / (2 * draws) ** 0.5
    assert standard.T.corrcoef()[0, 1].abs() < 4 / draws**0.5
