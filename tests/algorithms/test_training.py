"""A script's training equals the algorithm's definition, from the rollouts to the weights and the
logs.

Each script trains for a few iterations, with workers whose policy is out of date, on an environment
whose episodes terminate or are truncated, in the middle of rollouts and across them. `reference`
computes the same from the recorded rollouts.
"""

import importlib
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from . import reference
from .recording import record
from .toys import spaces_of

PPO = {
    "ppo_clusterenv.py": ("vector", reference.Vector()),
    "scripts/ppo_multilearner_clusterenv.py": ("vector", reference.Vector()),
    "scripts/ppo_continuous_clusterenv.py": ("box", reference.Continuous()),
    "scripts/ppo_lstm_clusterenv.py": ("vector", reference.Recurrent()),
    "scripts/ppo_minatar_clusterenv.py": ("minatar", reference.MinAtar()),
    "scripts/ppo_atari_clusterenv.py": ("atari", reference.Atari()),
}
DQN = {
    "dqn_clusterenv.py": ("vector", reference.q_vector),
    "scripts/dqn_atari_clusterenv.py": ("atari", reference.q_atari),
}
# With these flags every number matters: some weights are truncated, some ratios clipped, and some
# gradients' norms limited.
PPO_FLAGS = "--num-workers 2 --envs-per-worker 2 --num-steps 7 --eval-episodes 0 --weights float32"
PPO_FLAGS += " --num-minibatches 2 --update-epochs 3 --gamma 0.9 --gae-lambda 0.8 --clip-coef 0.05"
PPO_FLAGS += " --ent-coef 0.1 --vf-coef 0.7 --max-policy-lag None --no-overlap"
ON = "--anneal-lr --norm-adv"  # whatever the defaults are
WAYS = {  # flags, and the cases of the algorithm that occur
    "decoupled": (
        f"{ON} --decoupled --sync-mode never --clip-rho 1.02 --clip-vloss --max-grad-norm 0.2",
        {"ratio clipped", "weight truncated", "value clipped", "gradient clipped"},
    ),
    "stale": (
        f"{ON} --sync-mode never --no-decoupled --max-grad-norm 0.2",
        {"ratio clipped", "gradient clipped"},
    ),
    "overlap": (
        f"{ON} --decoupled --sync-mode always --overlap --clip-rho 1.02 --max-grad-norm 9",
        {"ratio clipped", "weight truncated"},
    ),
    "vtrace": (
        f"{ON} --decoupled --sync-mode never --vtrace --clip-rho 1.02 --max-grad-norm 9",
        {"ratio clipped", "weight truncated"},
    ),
    # An iteration's chunks may come from any workers.
    "stream": (
        f"{ON} --decoupled --sync-mode always --stream --clip-rho 1.02 --max-grad-norm 9",
        {"ratio clipped", "weight truncated"},
    ),
    "plain": (
        "--sync-mode always --no-decoupled --no-clip-vloss --no-norm-adv --no-anneal-lr "
        "--target-kl 0.002 --max-grad-norm 90",
        {"gradient not clipped", "stopped", "not stopped"},
    ),
}
DQN_FLAGS = "--num-workers 2 --envs-per-worker 2 --num-steps 5 --eval-episodes 0 --deterministic"
DQN_FLAGS += " --learning-starts 37 --target-network-frequency 12 --batch-size 8 --gamma 0.9"
DQN_FLAGS += " --learning-rate 0.003 --tau 0.6 --start-e 0.9 --end-e 0.3 --exploration-fraction 0.4"
DQN_FLAGS += " --sync-check-frequency 5 --sync-mode always --weights float32"
# A share of the change by training. float32 and float64 differ by less, and mistakes by more.
TOLERANCE = 0.01
# In large networks, an activation may lie at a kink, on one side of it in float32 and on the other
# in float64. Then the weights differ by some hundredths, otherwise by less than a ten-thousandth.
# Whether that happens depends on the seed and on the processor. A mistake shows with all of these
# seeds.
SEEDS = {"atari": (3, 4, 5)}


class FarWeightsError(AssertionError):
    pass


def with_some_seed(check, kind, tmp_path, *of_what):
    """Check with one seed after another, until the weights are as defined with one of them."""
    *seeds, last = SEEDS.get(kind, (1,))
    for seed in seeds:
        own = tmp_path / str(seed)
        own.mkdir()
        try:
            return check(own, seed, *of_what)
        except FarWeightsError as error:
            print(f"seed {seed}: {error}")
    return check(tmp_path, last, *of_what)


def flags_of(kind, seed, *flags):
    env_id = f"tests.algorithms.toys:Clockwork-{kind}-v0"
    return ["--env-id", env_id, "--seed", str(seed), *" ".join(flags).split()]


def assert_same_weights(found, expected, before):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        change, error = (
            torch.linalg.norm(expected[name] - other.double()) for other in (before[name], value)
        )
        if error > TOLERANCE * change:
            raise FarWeightsError(f"{name}: {error:.3g} of a change of {change:.3g}")


def assert_same_logs(recording, expected):
    """Assert that the expected values are logged, each at the step at which it is known."""
    for tag, values in expected.items():
        assert recording.scalars[tag] == pytest.approx(values, rel=1e-3, abs=1e-4), tag
        steps = np.cumsum([call.rollout.rewards.size for call in recording.calls])
        assert recording.steps[tag] == steps[-len(values) :].tolist(), tag


# The first script is tried in most ways, the others in one. Only `make test-all` tries these.
LATER = {
    "scripts/ppo_atari_clusterenv.py",
    "scripts/ppo_minatar_clusterenv.py",
    "scripts/ppo_multilearner_clusterenv.py",
}
FIRST = "ppo_clusterenv.py"
LATER_WAYS = {"plain", "stale"}
STREAMING = {"ppo_clusterenv.py", "scripts/ppo_continuous_clusterenv.py"}
CASES = [
    pytest.param(
        script,
        way,
        marks=[pytest.mark.long]
        * (way in LATER_WAYS or script in LATER or (script != FIRST and way != "decoupled")),
    )
    for script in PPO
    for way in WAYS
    if way not in ("stream", "vtrace") or script in STREAMING
]


@pytest.mark.parametrize(("script", "way"), CASES)
def test_ppo_is_as_defined(tmp_path, script, way):
    with_some_seed(check_ppo, PPO[script][0], tmp_path, script, way)


def check_ppo(tmp_path, seed, script, way):
    kind, network = PPO[script]
    flags, cases = WAYS[way]
    scale = "--reward-scale 0.3" if kind == "vector" else ""
    number, rate = (3, 0.001) if kind == "atari" else (5, 0.01)
    length = f"--total-timesteps {28 * number} --learning-rate {rate}"
    recording = record(script, tmp_path, *flags_of(kind, seed, PPO_FLAGS, flags, scale, length))
    assert len(recording.calls) == number
    assert_first_networks(recording, script, "agent")
    weights, logged, reached = reference.ppo(recording, network)
    assert cases <= reached
    assert_same_weights(recording.networks["agent"], weights, recording.calls[0].networks["agent"])
    # The first policy version acts as the learner would. With --sync-mode always, each version
    # does, or the previous version if the rollouts overlap.
    lag = logged.pop("lag")
    assert max(lag if way == "plain" else lag[:1]) < 1e-4 and (
        way in ("plain", "stream") or min(lag[1:]) > 1e-3
    )
    versions = [call.rollout.policy_versions.tolist() for call in recording.calls]
    if way == "stream":  # some chunks were requested while others were outstanding
        assert all(0 <= max(each) - versions[0][0] <= at for at, each in enumerate(versions))
        assert max(lag) > 1e-3
    else:
        newer = {"plain": range(number), "overlap": [0, *range(number - 1)]}.get(way, [0] * number)
        assert versions == [[versions[0][0] + number] * 4 for number in newer]
    assert_same_logs(recording, logged)
    assert (
        recording.summary["global_step"] == 28 * number and recording.summary["updates"] == number
    )
    # Each update shuffles differently.
    assert len({call.torch_state.numpy().tobytes() for call in recording.calls}) == number
    check_episodes(recording)
    check_acts(recording, network, weights)


def assert_first_networks(recording, script, name):
    """Assert that a script's network begins like one that is made with the run's seed."""
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    args = SimpleNamespace(**recording.args)
    envs = spaces_of(module.make_env(args.env_id, 0, False, "")())
    torch.manual_seed(args.seed)
    sizes = [args.hidden_size] if hasattr(args, "hidden_size") else []
    network = module.Agent(envs, *sizes) if name == "agent" else module.QNetwork(envs)
    for key, value in network.state_dict().items():
        torch.testing.assert_close(recording.calls[0].networks[name][key], value, msg=key)


def check_episodes(recording):
    """Check that all episodes count in the run's mean return, because they are fewer than 100."""
    returns = np.concatenate([call.rollout.episodic_returns for call in recording.calls])
    assert 5 < len(returns) < 100
    assert recording.summary["mean_return_100"] == pytest.approx(returns.mean())


def check_acts(recording, network, weights):
    """Check that the evaluation acts by the trained policy, with its noise."""
    obs = reference.array(recording.acted_on)
    with torch.no_grad():
        if isinstance(network, reference.Recurrent):
            state = [
                torch.zeros(obs.shape[1], recording.args["hidden_size"]).double() for _ in range(2)
            ]
            for each in obs:
                state = network.step(weights, each, state)
            params, _ = network.heads(weights, state[0])
        else:
            params, _ = network(weights, obs)
    if recording.acts.ndim == 3:  # continuous actions, which are clipped
        mean = params.numpy()
        deviation = np.broadcast_to(np.exp(weights["actor_logstd"].detach().numpy()), mean.shape)
        noise = np.random.default_rng(1).normal(size=(20_000, *mean.shape))
        expected = np.clip(mean + deviation * noise, -1, 1)
        np.testing.assert_allclose(recording.acts.mean(0), expected.mean(0), atol=0.2)
        np.testing.assert_allclose(recording.acts.std(0), expected.std(0), atol=0.1)
        assert np.abs(recording.acts).max() <= 1
    else:
        np.testing.assert_allclose(recording.acts.mean(0), params.softmax(-1)[:, 1], atol=0.12)


@pytest.mark.parametrize(
    ("script", "every"),
    [
        pytest.param("dqn_clusterenv.py", 1, marks=pytest.mark.long),
        ("dqn_clusterenv.py", 3),
        pytest.param("scripts/dqn_atari_clusterenv.py", 3, marks=pytest.mark.long),
    ],
)
def test_dqn_is_as_defined(tmp_path, script, every):
    with_some_seed(check_dqn, DQN[script][0], tmp_path, script, every)


def check_dqn(tmp_path, seed, script, every):
    kind, q_values = DQN[script]
    is_atari = script == "scripts/dqn_atari_clusterenv.py"
    # Environment steps. There is one gradient step for every ``every`` of them.
    total = 100 if is_atari else 200
    size = "--buffer-size 1000" if is_atari else "--buffer-size 60"
    length = f"--total-timesteps {total} --train-frequency {every}"
    recording = record(
        script,
        tmp_path,
        *flags_of(kind, seed, DQN_FLAGS, size, length),
    )
    assert_first_networks(recording, script, "q_network")
    first = recording.calls[0].networks
    assert all(
        torch.equal(value, first["target_network"][name])
        for name, value in first["q_network"].items()
    )
    weights, target, logged = reference.dqn(recording, q_values, newest_first=is_atari)
    for name, expected in (("q_network", weights), ("target_network", target)):
        assert_same_weights(recording.networks[name], expected, first[name])
    assert_same_logs(recording, logged)
    args = SimpleNamespace(**recording.args)
    # Workers act by the newest version of the trained network, and explore with the requested
    # epsilon.
    checks = [max(step - 37, 0) // every // 5 for step in range(0, total + 1, 10)]
    published = sum(now > before for before, now in pairwise(checks))  # at most once per chunk
    assert recording.versions == list(range(1, 2 + published))
    assert recording.newest[-1] > 1
    for call, epsilon, newest in zip(
        recording.calls, recording.epsilons, recording.newest, strict=True
    ):
        rollout = call.rollout
        obs, actions, found = map(
            reference.array, (rollout.observations, rollout.actions, rollout.logprobs)
        )
        version = int(rollout.policy_versions[0])
        assert newest <= version and (rollout.policy_versions == version).all()
        acting = {
            name: value.double()
            for name, value in recording.published[version - 1]["q_network"].items()
        }
        probs = reference.epsilon_greedy(q_values(acting, obs.flatten(0, 1)), epsilon)
        chosen = probs[torch.arange(len(probs)), actions.flatten().long()]
        torch.testing.assert_close(found.flatten(), chosen.log(), atol=1e-4, rtol=0)
    # The evaluation acts by the trained network, and explores as little as the workers do at the
    # end.
    with torch.no_grad():
        probs = reference.epsilon_greedy(
            q_values(weights, reference.array(recording.acted_on)), args.end_e
        )
    np.testing.assert_allclose(recording.acts.mean(0), probs[:, 1], atol=0.12)
    assert recording.summary["gradient_steps"] == (total - 37) // every
    assert recording.summary["global_step"] == recording.summary["transitions_inserted"] == total
    check_episodes(recording)
    waited = recording.scalars["time/learner_waiting"]
    assert (
        waited[0] > 0
        and waited == sorted(waited)
        and waited[-1] < recording.summary["wall_seconds"]
    )
    # The first chunks are requested before anything is learned, and each further chunk after
    # another one has arrived.
    steps = [0] * args.num_workers + list(range(10, total - 10, 10))
    assert recording.epsilons == pytest.approx(
        [reference.linear_epsilon(args, step) for step in steps]
    )
