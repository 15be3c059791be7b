"""The scripts' computations, each function checked against definitions and closed forms."""

import importlib
from copy import deepcopy
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from clusterenv_runtime.arrays import Frames
from clusterenv_runtime.rollout import Rollout
from clusterenv_utils import FrameReplayBuffer
from scripts.ppo_continuous_clusterenv import Moments, Normalize, discount, scale_rewards

from .reference import advantages_by_definition
from .toys import spaces_of

PPO = [
    "ppo_clusterenv",
    "scripts.ppo_multilearner_clusterenv",
    "scripts.ppo_continuous_clusterenv",
    "scripts.ppo_lstm_clusterenv",
    "scripts.ppo_atari_clusterenv",
    "scripts.ppo_minatar_clusterenv",
]
DQN = ["dqn_clusterenv", "scripts.dqn_atari_clusterenv"]


def kind_of(name):
    """Return the kind of `toys` that a script trains on."""
    return {"continuous": "box", "minatar": "minatar", "atari": "atari"}.get(
        name.split("_")[1], "vector"
    )


@pytest.fixture(params=PPO)
def ppo(request):
    return importlib.import_module(request.param)


@pytest.fixture(params=DQN)
def dqn(request):
    return importlib.import_module(request.param)


# Advantages.


def compute(script, rewards, values, ends, final_values, gamma, gae_lambda):
    """Call a script's ``compute_gae``. ``ends`` are 0 (none), 1 (terminated) or 2 (truncated)."""
    as_float = [np.array(each, np.float32) for each in (rewards, values, final_values)]
    ends = np.array(ends)
    return script.compute_gae(*as_float, ends == 1, ends == 2, gamma, gae_lambda)


@pytest.mark.parametrize("share_of_ends", [0, 0.15, 0.5])
def test_advantages_are_the_discounted_sum_of_td_errors(ppo, share_of_ends):
    rng = np.random.default_rng(1)
    num_steps, num_envs = 17, 5
    rewards, values = (
        rng.normal(size=(num_steps, num_envs)),
        rng.normal(size=(num_steps + 1, num_envs)),
    )
    ends = rng.choice(
        3, size=rewards.shape, p=[1 - share_of_ends, share_of_ends / 2, share_of_ends / 2]
    )
    ends[:, 0] = 0  # an episode that lasts for the whole rollout, and longer
    final_values = rng.normal(size=np.count_nonzero(ends))
    next_values, finals = values[1:].copy(), iter(final_values)
    for step in range(num_steps):
        for env in range(num_envs):
            if ends[step, env]:
                next_values[step, env] = next(finals)
    expected = advantages_by_definition(
        rewards, values, next_values, ends == 1, ends == 2, 0.9, 0.7
    )
    advantages, returns = compute(ppo, rewards, values, ends, final_values, 0.9, 0.7)
    assert advantages.dtype == returns.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns, expected + values[:-1], rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["ppo_clusterenv", "scripts.ppo_continuous_clusterenv"])
def stale(request):
    return importlib.import_module(request.param)


def vtrace_targets(ratios, rewards, values, next_values, ends, gamma, lam):
    """Return the value targets of https://arxiv.org/abs/1802.01561, equation 1: for each step, a
    sum over this and the later steps, with rho and c truncated at 1.
    """
    targets = values[:-1].copy()
    for (first, env), _ in np.ndenumerate(rewards):
        for step in range(first, len(rewards)):
            rho = min(1, ratios[step, env])
            trace = np.prod([lam * min(1, ratios[i, env]) for i in range(first, step)])
            ahead = 0 if ends[step, env] == 1 else gamma * next_values[step, env]
            error = rho * (rewards[step, env] + ahead - values[step, env])
            targets[first, env] += gamma ** (step - first) * trace * error
            if ends[step, env]:
                break
    return targets


@pytest.mark.parametrize("lam", [1, 0.7])
def test_value_targets_of_vtrace_are_the_papers(stale, lam):
    rng = np.random.default_rng(2)
    shape = 9, 4
    rewards, values = rng.normal(size=shape), rng.normal(size=(10, 4))
    ratios, ends = np.exp(rng.normal(size=shape)), rng.choice(3, size=shape, p=[0.8, 0.1, 0.1])
    ends[:, 0] = 0
    final_values, next_values = rng.normal(size=np.count_nonzero(ends)), values[1:].copy()
    next_values[ends > 0] = final_values
    arguments = rewards, values, final_values, ends == 1, ends == 2, 0.9, lam
    advantages, targets = stale.compute_vtrace(ratios, *arguments)
    expected = vtrace_targets(ratios, rewards, values, next_values, ends, 0.9, lam)
    np.testing.assert_allclose(targets, expected)
    if lam == 1:  # the paper's advantage: the reward and the next target, minus the value
        after = np.concatenate([expected[1:], values[-1:]])
        after[ends > 0] = final_values
        after[ends == 1] = 0
        np.testing.assert_allclose(advantages, rewards + 0.9 * after - values[:-1])
    # Nothing is corrected where the learner is at least as likely to act in the same way.
    for found, same in zip(
        stale.compute_vtrace(np.full(shape, 1.5), *arguments),
        stale.compute_gae(*arguments),
        strict=True,
    ):
        np.testing.assert_allclose(found, same)
    # Actions that the learner would never take teach nothing.
    _, targets = stale.compute_vtrace(np.zeros(shape), *arguments)
    np.testing.assert_allclose(targets, values[:-1])


def test_advantages_in_closed_form(ppo):
    ones = np.ones((4, 1))
    # With lambda 1, the return is the discounted sum of the rewards and of the value after the
    # last step: 1 + g + g^2 + g^3 + g^4 V.
    _, returns = compute(ppo, ones, 10 * np.ones((5, 1)), 0 * ones, [], 0.5, 1)
    np.testing.assert_allclose(returns[:, 0], [1.875 + 0.625, 1.75 + 1.25, 1.5 + 2.5, 1 + 5])
    # With lambda 0, an advantage is one TD error.
    advantages, _ = compute(ppo, ones, [[0], [1], [2], [3], [4]], 0 * ones, [], 0.5, 0)
    np.testing.assert_allclose(advantages[:, 0], [1.5, 1, 0.5, 0])


def test_a_termination_is_worth_nothing_and_a_truncation_its_final_value(ppo):
    rewards, values = [[1, 1], [1, 1]], [[0, 0], [7, 7], [0, 0]]
    advantages, _ = compute(ppo, rewards, values, [[1, 2], [0, 0]], [100, 20], 0.5, 1)
    np.testing.assert_allclose(advantages, [[1, 1 + 10], [-6, -6]])


def test_the_computation_of_advantages_leaves_its_arguments_unchanged(ppo):
    rewards, values, ends = (
        np.ones((2, 1), np.float32),
        np.ones((3, 1), np.float32),
        np.array([[True], [False]]),
    )
    ppo.compute_gae(rewards, values, np.zeros(1, np.float32), ends, np.zeros_like(ends), 0.9, 0.9)
    assert (
        rewards.tolist() == [[1], [1]]
        and values.tolist() == [[1], [1], [1]]
        and ends.tolist() == [[True], [False]]
    )


# PPO's loss.

ARGS = {"clip_coef": 0.2, "norm_adv": False, "clip_vloss": False, "ent_coef": 0.0, "vf_coef": 0.0}


def loss_of(
    script, logprob, old, advantages, *, value=0.0, returns=0.0, old_values=0.0, entropy=0.0,
    weights=1.0, **args,
):  # fmt: skip
    """Call a script's loss, with a stand-in for its networks.

    Return the loss, its logged values, and the inputs with gradients.
    """
    number = len(logprob)
    new, entropy, value = (
        torch.tensor(np.broadcast_to(np.float32(each), number).copy(), requires_grad=True)
        for each in (logprob, entropy, value)
    )
    others = (
        torch.tensor(np.broadcast_to(np.float32(each), number).copy())
        for each in (old, advantages, returns, old_values, weights)
    )
    says = (new, entropy, value[:, None])
    is_recurrent = script.__name__ == "scripts.ppo_lstm_clusterenv"
    agent = SimpleNamespace(get_action_and_value=lambda *_: says if is_recurrent else (None, *says))
    names = "logprobs", "advantages", "returns", "values", "weights"
    mb = dict(zip(names, others, strict=True))
    if hasattr(script, "normalize") and args.get("norm_adv"):  # over all learners' samples
        mb["advantages"] = script.normalize(mb["advantages"])
    # A recurrent network also gets its states, and where episodes begin.
    mb |= dict.fromkeys(("obs", "actions", "hidden", "cell", "starts"))
    loss, logged = script.ppo_loss(agent, SimpleNamespace(**{**ARGS, **args}), mb)
    return loss, {name: value.item() for name, value in logged.items()}, (new, entropy, value)


def loss_in_numpy(logprob, old, advantages, value, returns, old_values, entropy, weights, args):
    """Return PPO's loss, computed sample by sample from https://arxiv.org/abs/1707.06347, equations
    7 and 9, its two parts, and the share of clipped ratios.
    """
    if args["norm_adv"]:
        advantages = (advantages - np.mean(advantages)) / (np.std(advantages, ddof=1) + 1e-8)
    total, value_total, fraction = 0.0, 0.0, 0
    for number in range(len(logprob)):
        ratio = np.exp(logprob[number]) / np.exp(old[number])
        low, high = 1 - args["clip_coef"], 1 + args["clip_coef"]
        clipped = low if ratio < low else high if ratio > high else ratio
        total += weights[number] * min(ratio * advantages[number], clipped * advantages[number])
        fraction += not low <= ratio <= high
        errors = [value[number] - returns[number]]
        if args["clip_vloss"]:
            change = np.clip(
                value[number] - old_values[number], -args["clip_coef"], args["clip_coef"]
            )
            errors.append(old_values[number] + change - returns[number])
        value_total += max(error**2 for error in errors)
    number = len(logprob)
    policy_loss, value_loss = -total / number, value_total / number / 2
    loss = policy_loss + args["vf_coef"] * value_loss - args["ent_coef"] * np.mean(entropy)
    return loss, policy_loss, value_loss, fraction / number


@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_the_loss_is_that_of_the_paper(ppo, norm_adv, clip_vloss):
    rng = np.random.default_rng(2)
    args = {
        "clip_coef": 0.2,
        "norm_adv": norm_adv,
        "clip_vloss": clip_vloss,
        "ent_coef": 0.3,
        "vf_coef": 0.7,
    }
    old = rng.normal(size=200) - 1
    values = {name: rng.normal(size=200) for name in ("value", "returns", "old_values", "entropy")}
    logprob, advantages, weights = (
        old + 0.3 * rng.normal(size=200),
        1 + rng.normal(size=200),
        rng.uniform(0, 2, 200),
    )
    expected = loss_in_numpy(logprob, old, advantages, **values, weights=weights, args=args)
    loss, logged, _ = loss_of(ppo, logprob, old, advantages, **values, weights=weights, **args)
    found = loss.item(), logged["policy_loss"], logged["value_loss"], logged["clipfrac"]
    assert found == pytest.approx(expected, rel=1e-4)
    assert logged["entropy"] == pytest.approx(values["entropy"].mean(), rel=1e-4)
    ratio = np.exp(logprob - old)
    assert logged["old_approx_kl"] == pytest.approx((old - logprob).mean(), abs=1e-5)
    assert logged["approx_kl"] == pytest.approx((ratio - 1 - (logprob - old)).mean(), abs=1e-5)


def test_the_loss_falls_as_good_actions_become_likelier_and_stops_at_the_clip(ppo):
    inside, above, below = 0.0, np.log(1.5), np.log(0.5)
    loss, _, (new, _, _) = loss_of(
        ppo, [inside, above, below] * 2, [0.0] * 6, [1, 1, 1, -1, -1, -1]
    )
    loss.backward()
    # A ratio that has gone too far in its good direction gets no gradient. One that has gone the
    # wrong way does.
    expected = np.array([-1, 0, -0.5, 1, 1.5, 0]) / 6
    np.testing.assert_allclose(new.grad, expected, atol=1e-6)


def test_importance_weights_multiply_the_policys_loss_alone(ppo):
    sides = {"value": [1.0, 3.0], "returns": 0.0, "entropy": 0.5, "ent_coef": 0.1, "vf_coef": 0.5}
    batch = [0.0, 0.0], [0.0, 0.0], [2.0, 4.0]
    plain, before, _ = loss_of(ppo, *batch, **sides)
    weighted, after, (new, entropy, value) = loss_of(ppo, *batch, weights=[2.0, 0.5], **sides)
    assert before["policy_loss"] == -3 and after["policy_loss"] == -3
    assert before["value_loss"] == after["value_loss"] == 2.5
    assert plain.item() == weighted.item() == pytest.approx(-3 - 0.05 + 1.25)
    weighted.backward()
    np.testing.assert_allclose(new.grad, [-2, -1])
    np.testing.assert_allclose(entropy.grad, [-0.05, -0.05])  # more entropy means less loss
    np.testing.assert_allclose(value.grad, [0.25, 0.75])  # vf_coef * (value - return) / number


# Continuous PPO's normalization.


def test_discounted_returns_begin_with_their_episode_and_go_on_in_the_next_rollout():
    rewards, dones = np.ones((3, 2)), np.array([[False, False], [True, False], [False, False]])
    starts = np.zeros(2, bool)
    returns, last = discount(rewards, starts, dones, 0.5, np.array([0.0, 4.0]))
    np.testing.assert_allclose(returns, [[1, 3], [1.5, 2.5], [1, 2.25]])
    np.testing.assert_allclose(last, [1, 2.25])
    _, last = discount(rewards, starts, ~dones, 0.5, last)
    np.testing.assert_allclose(last, [0, 0])


def test_discounted_returns_begin_anew_where_a_lost_workers_environments_did():
    rewards, dones = np.ones((2, 2)), np.zeros((2, 2), bool)
    returns, _ = discount(rewards, np.array([True, False]), dones, 0.5, np.array([4.0, 4.0]))
    np.testing.assert_allclose(returns, [[1, 3], [1.5, 2.5]])


def test_rewards_are_scaled_by_the_deviation_of_returns_and_clipped():
    scaled = scale_rewards(np.array([1.0, -4.0, 23.0, -23.0]), 4.0)
    np.testing.assert_allclose(scaled, [0.5, -2, 10, -10])
    # This is the case before any returns differ.
    assert scale_rewards(np.array([1.0]), 0.0) == 10


def test_moments_are_those_of_all_values():
    rng, moments, seen = np.random.default_rng(3), Moments((2,)), []
    for number in range(1, 6):
        seen.append(1000 + rng.normal(size=(7 * number, 2)).astype(np.float32))
        moments.update(seen[-1])
    everything = np.concatenate(seen).astype(np.float64)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-9)
    assert moments.count == len(everything)
    again = Moments((2,))
    again.load_state_dict(moments.state_dict())
    assert (
        (again.mean == moments.mean).all()
        and (again.var == moments.var).all()
        and again.count == moments.count
    )


def test_observations_are_normalized_and_clipped():
    normalize = Normalize(2)
    x = torch.tensor([[3.0, -50.0]])
    assert normalize(x).tolist() == [[3, -10]] and normalize(-x).tolist() == [[-3, 10]]
    normalize.load(SimpleNamespace(mean=np.array([1.0, 2.0]), var=np.array([4.0, 100.0])))
    torch.testing.assert_close(normalize(x), torch.tensor([[1.0, -5.2]]))
    # The statistics of observations that have never changed.
    normalize.load(SimpleNamespace(mean=np.array([3.0, 0.0]), var=np.zeros(2)))
    assert normalize(x).tolist() == [[0, -10]]


# Atari's frames.


@pytest.mark.parametrize("name", ["scripts.ppo_atari_clusterenv", "scripts.dqn_atari_clusterenv"])
def test_an_observation_is_the_last_four_frames_the_newest_last(name):
    script = importlib.import_module(name)
    env = script.make_env("tests.algorithms.toys:Corridor-atari-v0", 0, False, "")()
    observation, _ = env.reset(seed=100_000)  # at the beginning of the corridor

    def places(stack):
        """Return which of the five columns are bright in each frame. Check that frames are black
        and white.
        """
        columns = np.stack([stack[:, 42, 8 + 17 * place] for place in range(5)], 1)
        assert set(np.unique(columns)) <= {0, 255}
        return [list(np.flatnonzero(frame)) for frame in columns]

    assert observation.shape == (4, 84, 84) and observation.dtype == np.uint8
    assert places(observation) == [[0]] * 4
    # A walk to the next place, which happens in the last of the game's four frames.
    after, reward, *_ = env.step(1)
    # A frame is the maximum of the last two.
    assert places(after) == [[0], [0], [0], [0, 1]] and reward == 0
    for place in (2, 3, 4, 5):
        after, reward, terminated, _, _ = env.step(1)
        assert (reward, terminated) == (place >= 3, place == 5)
    assert places(after)[:3] == [[1, 2], [2, 3], [3, 4]]
    env.close()


@pytest.mark.parametrize("name", ["scripts.ppo_atari_clusterenv", "scripts.dqn_atari_clusterenv"])
def test_an_episode_is_a_life_that_begins_by_firing_and_counts_in_the_games_return(name):
    script = importlib.import_module(name)
    env = script.make_env("tests.algorithms.toys:Lives-atari-v0", 0, False, "")()
    env.reset(seed=1)
    for life in (2, 1):
        assert env.unwrapped.lives() == life and env.unwrapped.steps == 1  # it has fired
        steps = [env.step(0) for _ in range(3)]
        assert [reward for _, reward, *_ in steps] == [-1, 1, -1]
        assert [terminated for _, _, terminated, _, _ in steps] == [False, False, True]
        episodes = [info["episode"] for *_, info in steps if "episode" in info]
        if life == 1:
            # Rewards are not clipped.
            assert [episode["r"] for episode in episodes] == [2 * (-0.5 - 0.5 + 5 - 0.5)]
        else:
            assert not episodes
            env.reset()
    env.reset()
    assert env.unwrapped.lives() == 2  # a new game
    env.close()


# Networks before training.


@pytest.mark.parametrize("name", PPO)
def test_layers_begin_orthogonal_with_cleanrls_gains(name):
    script = importlib.import_module(name)
    kind = kind_of(name)
    envs = spaces_of(script.make_env(f"tests.algorithms.toys:Clockwork-{kind}-v0", 0, False, "")())
    agent = script.Agent(envs) if kind in ("minatar", "atari") else script.Agent(envs, 64)
    for key, value in agent.named_parameters():
        if "bias" in key or key == "actor_logstd":
            assert not value.any(), key
            continue
        matrix = value.detach().flatten(1).double()
        matrix = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
        number, outputs = len(matrix), len(value)
        gain = 1.0 if "lstm" in key or outputs == 1 else np.sqrt(2)
        gain = 0.01 if outputs == 2 and "lstm" not in key else gain  # the actor's last layer
        torch.testing.assert_close(
            matrix @ matrix.T, gain**2 * torch.eye(number).double(), atol=1e-5, rtol=1e-4
        )


# DQN's target, loss and exploration.


def test_a_td_target_stops_at_terminations_alone(dqn):
    network = torch.nn.Linear(1, 2, bias=False)
    network.weight.data = torch.tensor([[1.0], [3.0]])  # Q-values x and 3 x
    next_obs, dones = torch.tensor([[2.0], [2.0], [-1.0]]), torch.tensor([0, 1, 0])
    target = dqn.compute_td_target(network, next_obs, torch.ones(3), dones, 0.5)
    assert target.tolist() == [1 + 0.5 * 6, 1, 1 - 0.5] and not target.requires_grad


def test_the_td_loss_is_the_mean_squared_error_of_the_actions_taken(dqn):
    network = torch.nn.Linear(1, 2, bias=False)
    network.weight.data = torch.tensor([[1.0], [3.0]])
    obs, actions = torch.tensor([[2.0], [1.0]]), torch.tensor([[0], [1]])
    batch, target = {"obs": obs, "actions": actions}, torch.tensor([5.0, 2.0])
    is_of_frames = dqn.__name__ == "scripts.dqn_atari_clusterenv"
    given = (batch, target) if is_of_frames else ({**batch, "td_target": target},)
    loss, old_val = dqn.td_loss(network, *given)
    assert old_val.tolist() == [2, 3] and loss.item() == (9 + 1) / 2
    loss.backward()
    assert network.weight.grad.tolist() == [[-6], [1]]  # 2 (Q - target) x / 2


def test_epsilon_falls_in_a_line_and_stays(dqn):
    schedule = [
        dqn.linear_schedule(1.0, 0.2, 100, step) for step in (0, 25, 50, 99, 100, 101, 10_000)
    ]
    assert schedule == pytest.approx([1, 0.8, 0.6, 0.208, 0.2, 0.2, 0.2])


# The replay buffers.


def chunk_of(first, num_steps, num_envs, shape=()):
    """Return a chunk in which step number n, from ``first`` on, sees n, leads to n + 0.5, and has
    the reward n.

    One in three steps terminates an episode, and one in three truncates it. With stacks, each frame
    holds these numbers.
    """
    numbers = np.arange(first, first + num_steps * num_envs).reshape(num_steps, num_envs)
    kind = numbers % 3
    ends = kind > 0
    led_to = numbers + 0.5

    def observed(values):
        return np.broadcast_to(
            np.reshape(values, (*np.shape(values), *[1] * len(shape))), (*np.shape(values), *shape)
        )

    observations = observed(numbers).astype(np.float32).copy()
    # Where no episode ends, the next step's observation is the one after this step.
    observations[1:][~ends[:-1]] = observed(led_to[:-1][~ends[:-1]])
    return Rollout(
        rows=np.arange(num_envs), starts=np.zeros(num_envs, bool), observations=observations,
        actions=numbers % 5, logprobs=np.zeros(numbers.shape), states=None, extras={}, infos={},
        rewards=numbers.astype(np.float64), terminations=kind == 1, truncations=kind == 2,
        final_observations=observed(led_to[ends]).astype(np.float32),
        next_observations=observed(led_to[-1]).astype(np.float32),
        policy_versions=np.ones(num_envs, np.int64), episodic_returns=np.empty(0),
        episodic_lengths=np.empty(0, np.int64),
    )  # fmt: skip


def in_frames(chunk):
    """Turn a chunk's stacks of four frames into `Frames`, and return the chunk."""
    flat = chunk.observations.reshape(-1, *chunk.observations.shape[3:])
    index = np.arange(len(flat)).reshape(chunk.observations.shape[:3])
    chunk.observations = Frames(flat.astype(np.uint8), index)
    chunk.final_observations = chunk.final_observations.astype(np.uint8)
    chunk.next_observations = chunk.next_observations.astype(np.uint8)
    return chunk


def check_drawn(drawn, inserted, held):
    """Check that all of the last transitions are drawn, that no others are, and that each is
    consistent. Return the observations, the next observations, and the transitions' numbers.
    """
    names = "obs", "actions", "next_obs", "rewards", "dones"
    obs, actions, next_obs, rewards, dones = (drawn[name].double().numpy() for name in names)
    numbers = rewards.astype(int)
    assert set(numbers) == set(range(inserted - held, inserted))
    np.testing.assert_array_equal(actions.reshape(len(numbers)), numbers % 5)
    np.testing.assert_array_equal(dones, numbers % 3 == 1)  # a truncation is not the end
    return obs.reshape(len(numbers), -1)[:, 0], next_obs.reshape(len(numbers), -1)[:, 0], numbers


@pytest.mark.parametrize("size", [24, 25, 30, 31])
def test_the_buffer_holds_the_newest_transitions_whole_and_each_once(size):
    script = importlib.import_module("dqn_clusterenv")
    buffer = script.ReplayBuffer(size)
    torch.manual_seed(1)
    for number in range(12):
        buffer.add(script.make_transitions(chunk_of(8 * number, 4, 2, (1,))))
        inserted = 8 * (number + 1)
        held = min(inserted, size)
        assert buffer.inserted == inserted
        drawn = buffer.sample(100, held, torch.device("cpu"))  # by chance, all of them
        obs, next_obs, numbers = check_drawn(
            {name: column.flatten(0, 1) for name, column in drawn.items()}, inserted, held
        )
        saw = np.array(
            [
                number if number % 8 < 2 or (number - 2) % 3 else number - 2 + 0.5
                for number in numbers
            ]
        )
        np.testing.assert_array_equal(obs, saw)
        np.testing.assert_array_equal(next_obs, numbers + 0.5)
        counts = np.bincount(numbers - (inserted - held))
        assert counts.min() > 0.5 * 100 and counts.max() < 1.6 * 100  # each is equally likely
    shapes = [tuple(each.shape) for each in buffer.sample(3, 7, torch.device("cpu")).values()]
    assert shapes == [(3, 7, 1), (3, 7, 1), (3, 7, 1), (3, 7), (3, 7)]


@pytest.mark.parametrize("size", [24, 25, 30, 31])
def test_the_buffer_of_frames_holds_the_newest_transitions_whole(size):
    space = gym.spaces.Box(0, 255, (4, 1, 1), np.uint8)
    num_frames = 4 * 8 * 4 + 200  # room for the frames of more than four chunks
    buffer = FrameReplayBuffer(size, num_frames, space)
    torch.manual_seed(1)
    for number in range(12):
        # Numbers are small enough for a pixel, which cuts the half off: the observation after a
        # step has the step's number, too.
        buffer.add(in_frames(chunk_of(8 * number, 4, 2, (4, 1, 1))))
        inserted = 8 * (number + 1)
        held = min(inserted, size)
        assert buffer.inserted == inserted
        drawn = buffer.sample(100 * held, torch.device("cpu"))
        obs, next_obs, numbers = check_drawn(drawn, inserted, held)
        saw = np.array(
            [number if number % 8 < 2 or (number - 2) % 3 else number - 2 for number in numbers]
        )
        np.testing.assert_array_equal(obs, saw)
        np.testing.assert_array_equal(next_obs, numbers)
        counts = np.bincount(numbers - (inserted - held))
        assert counts.min() > 0.5 * 100 and counts.max() < 1.6 * 100


def test_a_chunk_whose_frames_have_been_written_over_is_drawn_no_more():
    space = gym.spaces.Box(0, 255, (4, 1, 1), np.uint8)
    buffer = FrameReplayBuffer(1000, 150, space)  # room for the frames of three chunks
    torch.manual_seed(1)
    for number in range(12):
        buffer.add(in_frames(chunk_of(8 * number, 4, 2, (4, 1, 1))))
        drawn = buffer.sample(1000, torch.device("cpu"))
        obs, numbers = drawn["obs"], drawn["rewards"].numpy().astype(int)
        oldest = min(numbers)
        assert 8 * (number + 1) - oldest in (8 * min(number + 1, 2), 8 * min(number + 1, 3))
        saw = [number if number % 8 < 2 or (number - 2) % 3 else number - 2 for number in numbers]
        assert obs[:, 0, 0, 0].tolist() == saw


@pytest.mark.parametrize(("size", "num_frames"), [(7, 90), (40, 50)])
def test_a_buffer_of_frames_takes_as_many_bytes_as_it_says(size, num_frames):
    space = gym.spaces.Box(0, 255, (4, 3, 2), np.uint8)
    tensors = filter(torch.is_tensor, vars(FrameReplayBuffer(size, num_frames, space)).values())
    needed = FrameReplayBuffer.num_bytes(size, num_frames, space)
    assert needed == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("has_frames", [True, False])
def test_a_checkpoint_holds_the_buffer_or_nothing_of_it(has_frames):
    space = gym.spaces.Box(0, 255, (4, 1, 1), np.uint8)
    script = importlib.import_module("dqn_clusterenv")
    chunks = [chunk_of(8 * number, 4, 2, (4, 1, 1)) for number in range(6)]
    prepare = in_frames if has_frames else script.make_transitions
    chunks = [prepare(chunk) for chunk in chunks]
    before, after, without = (
        FrameReplayBuffer(30, 200, space, keeps)
        if has_frames
        else script.ReplayBuffer(30, in_checkpoints=keeps)
        for keeps in (True, True, False)
    )
    for chunk in chunks[:5]:
        before.add(chunk)
        without.add(chunk)
    after.load_state_dict(deepcopy(before.state_dict()))
    assert without.state_dict() == {}
    drawn = []
    for buffer in (before, after):
        buffer.add(chunks[5])
        torch.manual_seed(4)
        number = (50,) if has_frames else (1, 50)
        drawn.append(buffer.sample(*number, torch.device("cpu")))
    for name, values in drawn[0].items():
        assert torch.equal(values, drawn[1][name])
