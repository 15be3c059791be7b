"""SAC's computations, checked against definitions that are written out here."""

import importlib
import re
import runpy
import shutil
import subprocess
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import AffineTransform, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from clusterenv_runtime import SquashedGaussianPolicy
from clusterenv_utils.checkpoint import load_checkpoint
from tests import scripts

from .recording import record

SCRIPT = "scripts/sac_clusterenv.py"
sac = importlib.import_module("scripts.sac_clusterenv")
SPACE = gym.spaces.Box(np.array([-1, 0], np.float32), np.array([3, 0.5], np.float32))
SCALE, BIAS = torch.tensor([2.0, 0.25]), torch.tensor([1.0, 0.25])
ENVS = SimpleNamespace(
    single_observation_space=gym.spaces.Box(-1, 1, (3,)), single_action_space=SPACE
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


class Fixed(nn.Module):
    """An actor with fixed means and logarithms of standard deviations, whatever it sees."""

    def __init__(self, mean, log_std):
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(mean))
        self.log_std = nn.Parameter(torch.tensor(log_std))

    def forward(self, x):
        shape = *x.shape[:-1], len(self.mean)
        return self.mean.expand(shape), self.log_std.expand(shape)


def squashed(mean, log_std):
    transforms = [TanhTransform(), AffineTransform(BIAS, SCALE)]
    return Independent(TransformedDistribution(Normal(mean, log_std.exp()), transforms), 1)


def test_actions_are_squashed_into_the_space_and_have_their_log_probabilities():
    actor = Fixed([0.3, -0.6], [-1.0, 0.2])
    actions, log_pi = sac.get_action(actor, torch.zeros(2000, 3), SCALE, BIAS)
    assert all(SPACE.contains(action) for action in actions.detach().numpy())
    expected = squashed(actor.mean, actor.log_std).log_prob(actions)
    near = (actions - BIAS).div(SCALE).abs().amax(-1) < 0.99  # rounding is small there
    torch.testing.assert_close(log_pi[near], expected[near], rtol=1e-3, atol=1e-3)
    assert log_pi.shape == (2000,) and near.sum() > 1800


def test_the_actor_is_as_cleanrls_and_keeps_deviations_within_bounds():
    actor = sac.Actor(ENVS)
    mean, log_std = actor(100 * torch.randn(64, 3))
    assert mean.shape == log_std.shape == (64, 2)
    assert -5 <= log_std.min() < log_std.max() <= 2
    with torch.no_grad():
        actor.fc_logstd.weight.zero_()
        actor.fc_logstd.bias.zero_()
    assert (actor(torch.randn(4, 3))[1] == -1.5).all()


def parts(autotune=True):
    """Return networks, optimizers and a batch like the script's."""
    actor = sac.Actor(ENVS)
    qfs, targets = (nn.ModuleList([sac.SoftQNetwork(ENVS) for _ in "12"]) for _ in "ab")
    log_alpha = nn.Parameter(torch.tensor(-0.3))
    q_optimizer = torch.optim.SGD(qfs.parameters(), lr=0.1)
    groups = [{"params": list(actor.parameters()), "lr": 0.1}]
    groups += [{"params": [log_alpha], "lr": 0.01}] * autotune
    args = SimpleNamespace(gamma=0.9, autotune=autotune)
    batch = {
        "obs": torch.randn(8, 3), "actions": torch.rand(8, 2), "next_obs": torch.randn(8, 3),
        "rewards": torch.randn(8), "dones": torch.arange(8.0) % 2,
    }  # fmt: skip
    fixed = actor, log_alpha, (SCALE, BIAS), args
    return q_optimizer, torch.optim.SGD(groups), qfs, targets, fixed, batch


def weights(*modules):
    return torch.cat([p.detach().reshape(-1).clone() for m in modules for p in m.parameters()])


def test_an_update_of_the_q_networks_moves_them_down_their_own_errors_and_nothing_else():
    q_optimizer, _, qfs, targets, fixed, batch = parts()
    actor, log_alpha, bounds, args = fixed
    obs, actions, next_obs, rewards, dones = batch.values()
    others = weights(actor, *targets)
    state = torch.get_rng_state()
    next_actions, next_log_pi = sac.get_action(actor, next_obs, *bounds)
    values = [target(next_obs, next_actions) for target in targets]
    smaller = torch.min(*values) - log_alpha.exp() * next_log_pi
    wanted = (rewards + args.gamma * smaller * (1 - dones)).detach()
    expected = []
    for qf in qfs:
        gradients = torch.autograd.grad((qf(obs, actions) - wanted).pow(2).mean(), qf.parameters())
        pairs = zip(qf.parameters(), gradients, strict=True)
        expected += [(p - 0.1 * g).detach().reshape(-1) for p, g in pairs]
    torch.set_rng_state(state)
    losses = sac.update_q(q_optimizer, qfs, targets, *fixed, sac.q_loss, batch)
    torch.testing.assert_close(weights(*qfs), torch.cat(expected))
    assert torch.equal(weights(actor, *targets), others) and log_alpha.item() == pytest.approx(-0.3)
    assert losses.keys() == {"qf1_values", "qf2_values", "qf1_loss", "qf2_loss"}


@pytest.mark.parametrize("autotune", [True, False])
def test_an_update_of_the_actor_moves_it_and_alpha_and_nothing_else(autotune):
    _, optimizer, qfs, targets, fixed, batch = parts(autotune)
    actor, log_alpha, bounds, args = fixed
    others = weights(*qfs, *targets)
    state = torch.get_rng_state()
    pi, log_pi = sac.get_action(actor, batch["obs"], *bounds)
    loss = (
        log_alpha.exp().detach() * log_pi - torch.min(*(qf(batch["obs"], pi) for qf in qfs))
    ).mean()
    gradients = torch.autograd.grad(loss, actor.parameters())
    pairs = zip(actor.parameters(), gradients, strict=True)
    expected = torch.cat([(p - 0.1 * g).detach().reshape(-1) for p, g in pairs])
    # The target of the mean log probability is 2, because actions have two dimensions.
    change = 0.01 * np.exp(-0.3) * (log_pi.mean().item() - 2)
    torch.set_rng_state(state)
    losses = sac.update_actor(optimizer, qfs, *fixed, sac.pi_loss, batch)
    torch.testing.assert_close(weights(actor), expected)
    assert torch.equal(weights(*qfs, *targets), others)
    assert log_alpha.item() == pytest.approx(-0.3 + autotune * change, rel=1e-4)
    assert losses["actor_loss"].item() == pytest.approx(loss.item())


# The workers' policy.


def test_the_divergence_is_that_of_the_squashed_actions():
    one, other = (
        (torch.tensor([0.3, -0.6]), torch.tensor([-0.7, 0.2])),
        (torch.tensor([0.1, 0.4]), torch.tensor([-0.2, 0.1])),
    )
    policy = SquashedGaussianPolicy(Fixed([0.0, 0.0], [0.0, 0.0]), SPACE)
    found = policy.kl(torch.cat(one)[None], torch.cat(other)[None]).item()
    actions = squashed(*one).sample((200_000,))
    ratio = squashed(*one).log_prob(actions) - squashed(*other).log_prob(actions)
    ratio = ratio[ratio.isfinite()]
    assert found == pytest.approx(ratio.mean().item(), abs=4 * ratio.std().item() / 400)


def test_the_policy_acts_as_the_learner_thinks_that_it_does():
    policy = SquashedGaussianPolicy(Fixed([0.3, -0.6], [-1.0, 0.2]), SPACE)
    params = policy(torch.zeros(5000, 3))
    noise = policy.noise(1, params, torch.Generator().manual_seed(3))
    drawn = policy.act(params, tuple(leaf[0] for leaf in noise))
    assert drawn.mean(0).tolist() == pytest.approx([0.3, -0.6], abs=0.05)
    assert drawn.std(0).log().tolist() == pytest.approx([-1.0, 0.2], abs=0.03)
    given = policy.to_env(drawn)
    torch.testing.assert_close(given, drawn.tanh() * SCALE + BIAS)
    assert policy.distribution(params).mode[0].tolist() == pytest.approx([0.3, -0.6])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_action_leaves_the_bounds_by_rounding(dtype):
    low = np.random.default_rng(1).uniform(-2, 0, 1000).astype(dtype)
    space = gym.spaces.Box(low, low + dtype(1.7), dtype=dtype)
    policy = SquashedGaussianPolicy(Fixed([0.0] * 1000, [0.0] * 1000), space)
    for end, bound in (-20.0, space.low), (20.0, space.high):
        given = policy.to_env(torch.full((1, 1000), end)).numpy()[0].astype(dtype)
        assert space.contains(given)
        np.testing.assert_allclose(given, bound, atol=1e-6)


def test_actions_are_drawn_evenly_before_learning_starts():
    policy = SquashedGaussianPolicy(Fixed([2.0, -2.0], [-3.0, -3.0]), SPACE, uniform=1.0)
    params = policy(torch.zeros(4000, 3))
    noise = policy.noise(1, params, torch.Generator().manual_seed(3))
    given = policy.to_env(policy.act(params, tuple(leaf[0] for leaf in noise)))
    for column, low, high in zip(given.T, SPACE.low, SPACE.high, strict=True):
        counts = torch.histc(column, 10, float(low), float(high))
        assert counts.sum() == 4000 and (counts - 400).abs().max() < 100


def test_a_space_without_bounds_is_refused():
    with pytest.raises(ValueError, match="actions are scaled to bounds"):
        SquashedGaussianPolicy(Fixed([0.0], [0.0]), gym.spaces.Box(-np.inf, 1, (1,)))


FORMS = """
import gymnasium as gym
import numpy as np

class Form(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,))

    def __init__(self, space):
        self.action_space = eval(space, {"Box": gym.spaces.Box, "inf": np.inf})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, False, {}

gym.register("Form-v0", Form, max_episode_steps=5)
"""
OF_FORMS = ["--env-id", "form:Form-v0", "--num-workers", "1", "--eval-episodes", "0"]


@pytest.mark.parametrize("space", ["Box(-1,1,(2,),int)", "Box(-1,1,(2,1))", "Box(-1,inf,(2,))"])
def test_other_actions_are_refused_in_one_line(tmp_path, space):
    (tmp_path / "form.py").write_text(FORMS)
    result = scripts.run(SCRIPT, tmp_path, *OF_FORMS, "--env-kwargs", f"space='{space}'")
    scripts.check_refusal(result, "actions must be bounded continuous vectors, not Box(")


def test_the_loop_takes_its_steps_when_they_are_due(tmp_path):
    flags = "--env-id tests.algorithms.toys:Corridor-box-v0 --num-workers 1 --envs-per-worker 2 "
    flags += "--num-steps 5 --total-timesteps 60 --learning-starts 30 --batch-size 4 --utd 0.7 "
    flags += "--policy-frequency 3 --target-network-frequency 2 --tau 0.25 --buffer-size 60 "
    flags += "--sync-check-frequency 10 --eval-episodes 0 --deterministic --no-cuda"
    box = "low=-1 high=3"
    recording = record(SCRIPT, tmp_path, *flags.split(), "--env-kwargs", box)
    parts = load_checkpoint(tmp_path / "runs" / "x")["parts"]
    # Each chunk of ten steps is requested when the previous one has arrived. The first chunks are
    # random.
    assert recording.epsilons == [1, 1, 1, 0, 0, 0]
    drawn = np.concatenate([call.rollout.actions for call in recording.calls]).reshape(60, -1)
    np.testing.assert_allclose(parts["rb"]["actions"], 2 * np.tanh(drawn) + 1, atol=1e-6)

    # The same gradient steps from the same state, in a separate loop.
    space = gym.spaces.Box(-1, 3, drawn.shape[1:])
    obs_space = gym.spaces.Box(-1, 1, parts["rb"]["obs"].shape[1:])
    envs = SimpleNamespace(single_observation_space=obs_space, single_action_space=space)
    actor = sac.Actor(envs)
    qfs, targets = (nn.ModuleList([sac.SoftQNetwork(envs) for _ in "12"]) for _ in "ab")
    nets = {"actor": actor, "qfs": qfs, "targets": targets}
    for name, net in nets.items():
        net.load_state_dict(recording.parts[name])
    assert torch.equal(weights(qfs), weights(targets))
    assert not torch.equal(weights(qfs[0]), weights(qfs[1]))
    assert recording.parts["entropy"]["log_alpha"] == 0
    log_alpha = nn.Parameter(torch.zeros(()))
    bounds = torch.full(drawn.shape[1:], 2.0), torch.ones(drawn.shape[1])
    args = SimpleNamespace(gamma=0.99, autotune=True)
    q_adam = torch.optim.Adam(qfs.parameters(), lr=1e-3, fused=True)
    groups = [{"params": list(actor.parameters()), "lr": 3e-4}, {"params": [log_alpha], "lr": 1e-3}]
    adam = torch.optim.Adam(groups, fused=True)
    rb, number = sac.ReplayBuffer(60), 0
    acting = []
    for chunk, (first, call) in enumerate(zip((0, 0, 0, 0, 7, 14), recording.calls, strict=True)):
        call.rollout.actions = 2 * np.tanh(call.rollout.actions) + 1
        rb.add(sac.make_transitions(call.rollout))
        torch.set_rng_state(call.torch_state)
        drawn = rb.sample(7 if chunk > 2 else 0, 4, torch.device("cpu"))
        for values in zip(*drawn.values(), strict=True):
            batch = dict(zip(drawn, values, strict=True))
            rest = actor, log_alpha, bounds, args
            sac.update_q(q_adam, qfs, targets, *rest, sac.q_loss, batch)
            number += 1
            for _ in range(3 if number % 3 == 0 else 0):
                sac.update_actor(adam, qfs, *rest, sac.pi_loss, batch)
            if number % 2 == 0:
                for slow, fast in zip(targets.parameters(), qfs.parameters(), strict=True):
                    slow.data = 0.75 * slow.data + 0.25 * fast.data
        if first // 10 < number // 10:
            acting.append(weights(actor))
    for name, net in nets.items():
        for key, value in net.state_dict().items():
            torch.testing.assert_close(parts[name][key], value, rtol=1e-4, atol=3e-5)
    torch.testing.assert_close(parts["entropy"]["log_alpha"], log_alpha.data)
    published = [each["actor"] for each in recording.published[1:]]
    assert len(published) == len(acting) == 2
    for found, expected in zip(published, acting, strict=True):
        found = torch.cat([value.reshape(-1) for value in found.values()])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5)
    assert recording.steps["losses/alpha"] == [40, 50, 60]


def test_the_pages_diff_makes_td3_of_the_script(tmp_path):
    diff = re.search(r"```diff\n(.*?)```", (scripts.ROOT / "docs/sac.md").read_text(), re.S)[1]
    assert len(re.findall(r"^\+[^+\n]", diff, re.M)) == 28
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(scripts.ROOT / "scripts/sac_clusterenv.py", tmp_path / "scripts")
    subprocess.run(["patch", "-p0"], cwd=tmp_path, input=diff, text=True, check=True)
    flags = "--env-id tests.algorithms.toys:Corridor-box-v0 --num-workers 2 --envs-per-worker 1 "
    flags += "--num-steps 5 --total-timesteps 100 --learning-starts 10 --batch-size 4 "
    flags += "--buffer-size 200 --eval-episodes 2"
    _, summary = scripts.train(script, tmp_path, *flags.split())
    assert summary["gradient_steps"] == 90

    td3 = SimpleNamespace(**runpy.run_path(script))
    actor, qfs = Fixed([0.3, -0.95], [0.0, 0.0]), [lambda obs, a: a.sum(-1), lambda obs, a: 0]
    actions, log_pi = td3.get_action(actor, torch.zeros(500, 3), SCALE, BIAS, policy_noise=0.2)
    noise = (
        (actions - BIAS) / SCALE - actor.mean
    ).detach()  # clipped at 0.5, and at the actions' bounds
    assert (noise.abs().amax(0) <= 0.5 + 1e-6).all() and noise[:, 0].std() > 0.15
    assert noise[:, 1].min() == pytest.approx(-0.05) and not log_pi.any()
    pi, _ = td3.get_action(actor, torch.zeros(4, 3), SCALE, BIAS)
    torch.testing.assert_close(pi, (actor.mean * SCALE + BIAS).expand(4, 2))
    loss, _ = td3.pi_loss(qfs, actor, torch.zeros(()), (SCALE, BIAS), torch.zeros(4, 3))
    assert loss.item() == pytest.approx(-pi[0].sum().item())
    policy = td3.NoisyPolicy(td3.Actor(ENVS), SPACE)
    params = policy(torch.zeros(4000, 3)).detach()
    drawn, even, _ = policy.noise(1, params, torch.Generator().manual_seed(3))
    acts = policy.act(params, (drawn[0], even[0], torch.ones(4000, 1)))
    mean = params[:, :2]
    assert (acts - mean).std(0).tolist() == pytest.approx([0.1, 0.1], rel=0.1)
    assert all(SPACE.contains(action) for action in policy.to_env(3 * acts).detach().numpy())
