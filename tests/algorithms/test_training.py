"""A script's training equals the algorithm's definition, from the rollouts to the weights and the logs.

Each script trains for a few iterations on an environment whose episodes end in both ways, amid rollouts and across
them, with workers whose policy is out of date. `reference` computes the same from the recorded rollouts.
"""

import numpy as np
import pytest
import torch

from . import reference
from .recording import record

PPO = {
    "ppo_clusterenv.py": ("vector", reference.Vector()),
    "ppo_continuous_clusterenv.py": ("box", reference.Continuous()),
    "ppo_lstm_clusterenv.py": ("vector", reference.Recurrent()),
    "ppo_minatar_clusterenv.py": ("minatar", reference.MinAtar()),
    "ppo_atari_clusterenv.py": ("atari", reference.Atari()),
}
DQN = {"dqn_clusterenv.py": ("vector", reference.q_vector), "dqn_atari_clusterenv.py": ("atari", reference.q_atari)}
# Every number is one that matters: a weight is truncated, a ratio clipped, a gradient's norm limited.
PPO_FLAGS = "--num-workers 2 --envs-per-worker 2 --num-steps 7 --eval-episodes 0"
PPO_FLAGS += " --num-minibatches 2 --update-epochs 3 --gamma 0.9 --gae-lambda 0.8 --clip-coef 0.05"
PPO_FLAGS += " --ent-coef 0.1 --vf-coef 0.7 --max-grad-norm 0.2 --max-policy-lag None"
WAYS = {
    "decoupled": "--sync-mode never --weights float32 --clip-rho 1.02 --clip-vloss",
    "stale": "--sync-mode never --weights float32 --no-decoupled",
    "plain": "--sync-mode always --weights float32 --no-decoupled --no-clip-vloss --no-norm-adv --no-anneal-lr"
    " --target-kl 0.002",
}
DQN_FLAGS = "--num-workers 2 --envs-per-worker 2 --num-steps 5 --eval-episodes 0 --deterministic"
DQN_FLAGS += " --learning-starts 37 --target-network-frequency 12 --batch-size 8 --gamma 0.9"
DQN_FLAGS += " --learning-rate 0.003 --tau 0.6 --start-e 0.9 --end-e 0.3 --exploration-fraction 0.4"
DQN_FLAGS += " --sync-check-frequency 5"
TOLERANCE = 0.01  # of what training has changed: float32 and float64 differ by less, and mistakes by more


def flags_of(kind, *flags):
    return ["--env-id", f"tests.algorithms.toys:Clockwork-{kind}-v0", *" ".join(flags).split()]


def assert_same_weights(found, expected, before):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        change, error = (torch.linalg.norm(expected[name] - other.double()) for other in (before[name], value))
        assert error <= TOLERANCE * change, f"{name}: {error:.3g} of a change of {change:.3g}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", PPO)
def test_ppo_is_as_defined(tmp_path, script, way):
    kind, network = PPO[script]
    scale = "--reward-scale 0.3" if script in ("ppo_clusterenv.py", "ppo_lstm_clusterenv.py") else ""
    number, rate = (3, 0.001) if kind == "atari" else (5, 0.01)
    length = f"--total-timesteps {28 * number} --learning-rate {rate}"
    recording = record(script, tmp_path, *flags_of(kind, PPO_FLAGS, WAYS[way], scale, length))
    assert len(recording.moments) == number
    weights, logged = reference.ppo(recording, network)
    assert_same_weights(recording.networks["agent"], weights, recording.moments[0].networks["agent"])
    # The first version acts as the learner would, and with --sync-mode always each does.
    lag = logged.pop("lag")
    assert max(lag if way == "plain" else lag[:1]) < 1e-4 and (way == "plain" or min(lag[1:]) > 1e-3)
    for tag, values in logged.items():
        assert recording.scalars[tag] == pytest.approx(values, rel=1e-3, abs=1e-4), tag
    assert recording.summary["global_step"] == 28 * number and recording.summary["updates"] == number
    check_episodes(recording)
    if recording.acts is not None:
        check_acts(recording, network, weights)


def check_episodes(recording):
    """All episodes of the run count in its mean return: they are fewer than a hundred."""
    returns = np.concatenate([moment.rollout.episodic_returns for moment in recording.moments])
    assert 5 < len(returns) < 100
    assert recording.summary["mean_return_100"] == pytest.approx(returns.mean())


def check_acts(recording, network, weights):
    """The evaluation acts by the trained policy, with its noise."""
    obs = reference.array(recording.moments[-1].rollout.next_observations)
    with torch.no_grad():
        params, _ = network(weights, obs)
        if recording.acts.ndim == 3:  # continuous, and clipped
            mean = params.numpy()
            deviation = np.broadcast_to(np.exp(weights["actor_logstd"].detach().numpy()), mean.shape)
            noise = np.random.default_rng(1).normal(size=(20_000, *mean.shape))
            expected = np.clip(mean + deviation * noise, -1, 1)
            np.testing.assert_allclose(recording.acts.mean(0), expected.mean(0), atol=0.2)
            np.testing.assert_allclose(recording.acts.std(0), expected.std(0), atol=0.1)
            assert np.abs(recording.acts).max() <= 1
        else:
            np.testing.assert_allclose(recording.acts.mean(0), params.softmax(-1)[:, 1], atol=0.1)


@pytest.mark.parametrize("script", DQN)
def test_dqn_is_as_defined(tmp_path, script):
    kind, q_values = DQN[script]
    is_atari = script == "dqn_atari_clusterenv.py"
    total, every = (100, 3) if is_atari else (200, 1)  # environment steps, and those to a gradient step
    size = "--buffer-size 1000" if is_atari else "--buffer-size 60"
    recording = record(
        script, tmp_path, *flags_of(kind, DQN_FLAGS, size, f"--total-timesteps {total} --train-frequency {every}")
    )
    first = recording.moments[0].networks
    assert all(torch.equal(value, first["target_network"][name]) for name, value in first["q_network"].items())
    weights, target, kept, logged = reference.dqn(recording, q_values, newest_first=is_atari)
    for name, expected in (("q_network", weights), ("target_network", target)):
        assert_same_weights(recording.networks[name], expected, recording.moments[0].networks[name])
    for tag, values in logged.items():
        assert recording.scalars[tag] == pytest.approx(values, rel=1e-3, abs=1e-4), tag
    args = reference.SimpleNamespace(**recording.args)
    # The first chunks are of the untrained network.
    for moment in recording.moments[: args.num_workers]:
        obs, actions = (reference.array(each) for each in (moment.rollout.observations, moment.rollout.actions))
        before = {name: value.double() for name, value in moment.networks["q_network"].items()}
        probs = reference.epsilon_greedy(q_values(before, obs.flatten(0, 1)), args.start_e)
        chosen = probs[torch.arange(len(probs)), actions.flatten().long()]
        torch.testing.assert_close(reference.array(moment.rollout.logprobs).flatten(), chosen.log(), atol=1e-4, rtol=0)
    # The evaluation acts by the trained network, and explores as little as the workers do in the end.
    with torch.no_grad():
        probs = reference.epsilon_greedy(
            q_values(weights, reference.array(recording.moments[-1].rollout.next_observations)), args.end_e
        )
    np.testing.assert_allclose(recording.acts.mean(0), probs[:, 1], atol=0.1)
    assert recording.summary["gradient_steps"] == (total - 37) // every
    assert recording.summary["global_step"] == recording.summary["transitions_inserted"] == total
    check_episodes(recording)
    waited = recording.scalars["time/learner_waiting"]
    assert waited[0] > 0 and waited == sorted(waited) and waited[-1] < recording.summary["wall_seconds"]
    # The first chunks are asked for before anything is learned; each further one after another has come.
    steps = [0] * args.num_workers + list(range(10, total - 10, 10))
    assert recording.epsilons == pytest.approx([reference.linear_epsilon(args, step) for step in steps])
    assert recording.versions == list(range(1, 2 + (total - 37) // every // 5))
