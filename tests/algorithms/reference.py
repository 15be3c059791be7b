"""PPO and DQN computed a second time, from their definitions: sums instead of recursions, networks
and Adam by hand, in float64.

Nothing here imports a script. Each function goes through a `Recording` of a script's run. It
returns the values that the script must have computed from the same rollouts and the same random
numbers.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch


def dense(weights, prefix, x, activation=torch.tanh):
    """Apply the linear layers of a Sequential, with an activation in between."""
    layers = [
        name for name in weights if name.startswith(f"{prefix}.") and name.endswith(".weight")
    ]
    numbers = sorted(int(name.split(".")[1]) for name in layers)
    for number in numbers:
        x = x @ weights[f"{prefix}.{number}.weight"].T + weights[f"{prefix}.{number}.bias"]
        x = activation(x) if number != numbers[-1] else x
    return x


def relu(x):
    return torch.where(x > 0, x, torch.zeros_like(x))


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def convolved(weights, prefix, x, layers):
    """Apply convolutions with ReLU after each, and return vectors.

    ``layers`` are the number in a Sequential and the stride of each convolution.
    """
    for number, stride in layers:
        kernel, bias = weights[f"{prefix}.{number}.weight"], weights[f"{prefix}.{number}.bias"]
        x = relu(torch.conv2d(x, kernel, bias, stride=stride))
    return x.flatten(1)


NATURE = (0, 4), (2, 2), (4, 1)  # https://www.nature.com/articles/nature14236


class Vector:
    """The networks of `ppo_clusterenv.py`."""

    def __call__(self, weights, x):
        """Return the parameters of the actions' distribution, and the values."""
        return dense(weights, "actor", x), dense(weights, "critic", x)[:, 0]

    def logprob_and_entropy(self, weights, params, actions):
        probs = params.exp() / params.exp().sum(-1, keepdim=True)
        chosen = torch.gather(probs, -1, actions.long()[..., None])[..., 0]
        return chosen.log(), -(probs * probs.log()).sum(-1)


class Continuous(Vector):
    """The networks of `ppo_continuous_clusterenv.py`."""

    def __call__(self, weights, x):
        x = ((x - weights["normalize.mean"]) * weights["normalize.scale"]).clamp(-10, 10)
        return dense(weights, "actor_mean", x), dense(weights, "critic", x)[:, 0]

    def logprob_and_entropy(self, weights, params, actions):
        logstd = weights["actor_logstd"]
        logprobs = (
            -0.5 * ((actions - params) / logstd.exp()) ** 2 - logstd - 0.5 * np.log(2 * np.pi)
        )
        entropy = (0.5 + 0.5 * np.log(2 * np.pi) + logstd).sum()
        return logprobs.sum(-1), entropy.expand(len(params))


class MinAtar(Vector):
    def __call__(self, weights, x):
        hidden = convolved(weights, "network", x.permute(0, 3, 1, 2), [(1, 1)])
        hidden = relu(linear(weights, "network.4", hidden))
        return linear(weights, "actor", hidden), linear(weights, "critic", hidden)[:, 0]


class Atari(Vector):
    def __call__(self, weights, x):
        hidden = relu(linear(weights, "network.7", convolved(weights, "network", x / 255, NATURE)))
        return linear(weights, "actor", hidden), linear(weights, "critic", hidden)[:, 0]


class Recurrent(Vector):
    """The networks of `ppo_lstm_clusterenv.py`, with gates in the order of torch's LSTMCell."""

    def step(self, weights, x, state):
        hidden, cell = state
        x = torch.tanh(linear(weights, "network.0", x))
        gates = x @ weights["lstm.weight_ih"].T + weights["lstm.bias_ih"]
        gates = gates + hidden @ weights["lstm.weight_hh"].T + weights["lstm.bias_hh"]
        enter, forget, candidate, leave = gates.chunk(4, dim=-1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
        return leave.sigmoid() * cell.tanh(), cell

    def heads(self, weights, hidden):
        return linear(weights, "actor", hidden), linear(weights, "critic", hidden)[..., 0]


def array(values):
    """Return a float64 tensor of an array or of stacks of frames, for example ``(num_steps,
    num_envs, ...)``.
    """
    values = values.frames[values.index] if hasattr(values, "frames") else values
    return torch.from_numpy(np.asarray(values).astype(np.float64))


class Adam:
    """Algorithm 1 of https://arxiv.org/abs/1412.6980, after clipping the norm of all gradients.

    `step` returns the norm before it is clipped.
    """

    def __init__(self, parameters, eps):
        self.parameters, self.eps, self.time = parameters, eps, 0
        self.mean, self.square = ([torch.zeros_like(each) for each in parameters] for _ in range(2))

    def step(self, loss, learning_rate, max_norm=np.inf):
        gradients = torch.autograd.grad(loss, self.parameters)
        norm = float(sum((gradient**2).sum() for gradient in gradients).sqrt())
        scale = min(1.0, max_norm / (norm + 1e-6))
        self.time += 1
        with torch.no_grad():
            for number, (parameter, gradient) in enumerate(
                zip(self.parameters, gradients, strict=True)
            ):
                self.mean[number] = 0.9 * self.mean[number] + 0.1 * gradient * scale
                self.square[number] = 0.999 * self.square[number] + 0.001 * (gradient * scale) ** 2
                mean = self.mean[number] / (1 - 0.9**self.time)
                square = self.square[number] / (1 - 0.999**self.time)
                parameter -= learning_rate * mean / (square.sqrt() + self.eps)
        return norm


def is_of_normalizer(name):
    return name.endswith((".mean", ".scale"))


def parameters_of(state):
    """Return float64 copies of the tensors in a `state_dict`: all of them, and the learned ones."""
    weights = {name: value.double().clone() for name, value in state.items()}
    learned = [
        value.requires_grad_() for name, value in weights.items() if not is_of_normalizer(name)
    ]
    return weights, learned


def advantages_by_definition(
    rewards, values, next_values, terminations, truncations, gamma, gae_lambda, ratios=None
):
    """Return the sums of discounted TD errors up to the end of the episode or of the rollout,
    https://arxiv.org/abs/1506.02438.

    All arrays are ``(num_steps, num_envs)``. ``next_values`` are the values of the observations
    after each step. With ``ratios`` of probabilities, each error is multiplied by the ratios of the
    actions that led to it, each truncated at 1, https://arxiv.org/abs/1802.01561.
    """
    num_steps, num_envs = rewards.shape
    advantages = np.zeros((num_steps, num_envs))
    for env in range(num_envs):
        for first in range(num_steps):
            for step in range(first, num_steps):
                bootstrap = 0.0 if terminations[step, env] else gamma * next_values[step, env]
                error = rewards[step, env] + bootstrap - values[step, env]
                between = slice(first + 1, step + 1)
                trace = 1.0 if ratios is None else np.prod(np.minimum(ratios[between, env], 1))
                advantages[first, env] += (gamma * gae_lambda) ** (step - first) * trace * error
                if terminations[step, env] or truncations[step, env]:
                    break
    return advantages


def ppo_objective(
    args, reached, new, entropy, value, old, advantages, returns, old_values, weights
):
    """Return PPO's loss for a minibatch, https://arxiv.org/abs/1707.06347, and its logged values.

    Add the cases of the objective that occur to the set ``reached``.
    """
    if args.norm_adv:
        variance = ((advantages - advantages.mean()) ** 2).sum() / (advantages.numel() - 1)
        advantages = (advantages - advantages.mean()) / (variance.sqrt() + 1e-8)
    ratio = (new - old).exp()
    low, high = (torch.full_like(ratio, 1 + sign * args.clip_coef) for sign in (-1, 1))
    unclipped = ratio * advantages
    clipped = torch.minimum(torch.maximum(ratio, low), high) * advantages
    objective = (weights * torch.minimum(unclipped, clipped)).mean()
    reached |= {"ratio clipped"} if (clipped < unclipped).any() else set()
    error = (value - returns) ** 2
    if args.clip_vloss:
        low, high = old_values - args.clip_coef, old_values + args.clip_coef
        clipped = (torch.minimum(torch.maximum(value, low), high) - returns) ** 2
        reached |= {"value clipped"} if (clipped > error).any() else set()
        error = torch.maximum(error, clipped)
    value_loss = error.mean() / 2
    loss = -objective + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
    logged = {
        "policy_loss": -objective, "value_loss": value_loss, "entropy": entropy.mean(),
        "old_approx_kl": (old - new).mean(), "approx_kl": (ratio - 1 - (new - old)).mean(),
        "clipfrac": (abs(ratio - 1) > args.clip_coef).double().mean(),
    }  # fmt: skip
    return loss, {name: value.item() for name, value in logged.items()}


def moments(seen):
    """Return the mean and variance over all arrays ``(steps, envs, ...)`` that were seen."""
    values = np.concatenate([each.reshape(-1, *each.shape[2:]) for each in seen])
    return values.mean(0), values.var(0)


def ppo(recording, network):
    """Return the weights after training, the lists of logged values by name, and the set of the
    algorithm's cases that occur, for example "ratio clipped".

    Under "lag", the logs have for each iteration the largest distance between the actions' log
    probabilities and those under the learner's policy.
    """
    args = SimpleNamespace(**recording.args)
    weights, learned = parameters_of(recording.calls[0].networks["agent"])
    adam, logged, reached = Adam(learned, eps=1e-5), defaultdict(list), set()
    observed, discounted, running = [], [], defaultdict(float)
    is_recurrent, is_continuous = isinstance(network, Recurrent), isinstance(network, Continuous)
    for iteration, call in enumerate(recording.calls):
        rollout = call.rollout
        num_steps, num_envs = rollout.rewards.shape
        learning_rate = args.learning_rate * (
            1 - iteration / len(recording.calls) if args.anneal_lr else 1
        )
        obs, actions = array(rollout.observations), array(rollout.actions)
        behavior = array(rollout.logprobs)
        ends = rollout.terminations | rollout.truncations

        rewards = rollout.rewards * getattr(args, "reward_scale", 1)
        if is_continuous:
            for column, row in enumerate(rollout.rows.tolist()):  # a row may have several columns
                for step in range(num_steps):
                    running[row] = args.gamma * running[row] + rollout.rewards[step, column]
                    discounted.append(np.full((1, 1), running[row]))
                    running[row] *= not ends[step, column]
            rewards = np.clip(rollout.rewards / np.sqrt(moments(discounted)[1] + 1e-8), -10, 10)

        # The outputs of the policy and the critic at the beginning of the update.
        with torch.no_grad():
            if is_recurrent:
                params, values, next_values = _look_recurrent(network, weights, rollout, obs)
            else:
                params, values = network(weights, obs.flatten(0, 1))
                params = params.view(num_steps, num_envs, -1)
                values = values.view(num_steps, num_envs)
                after = network(weights, array(rollout.next_observations))[1]
                next_values = torch.cat([values[1:], after[None]])
                finals = iter(network(weights, array(rollout.final_observations))[1])
                for step, env in zip(*ends.nonzero(), strict=True):
                    next_values[step, env] = next(finals)
            flat_actions = actions.reshape(num_steps * num_envs, *actions.shape[2:])
            proximal, _ = network.logprob_and_entropy(weights, params.flatten(0, 1), flat_actions)
            proximal = proximal.view(num_steps, num_envs)
        logged["lag"].append((proximal - behavior).abs().max().item())
        logged["charts/episodic_return"].append(rollout.episodic_returns.mean())
        logged["charts/episodic_length"].append(rollout.episodic_lengths.mean())
        ratio = (proximal - behavior).exp()
        is_vtrace = getattr(args, "vtrace", False)
        advantages = torch.from_numpy(
            advantages_by_definition(
                rewards, values.numpy(), next_values.numpy(), rollout.terminations,
                rollout.truncations, args.gamma, args.gae_lambda,
                ratio.numpy() if is_vtrace else None,
            )
        )  # fmt: skip
        returns = values + (ratio.clamp(max=1) * advantages if is_vtrace else advantages)
        old = proximal if args.decoupled else behavior
        importance = torch.ones_like(behavior)
        if args.decoupled:
            importance = torch.minimum(ratio, torch.full_like(ratio, args.clip_rho))
            reached |= {"weight truncated"} if (ratio > args.clip_rho).any() else set()

        generator = torch.Generator()
        generator.set_state(call.torch_state)
        number = num_envs if is_recurrent else num_steps * num_envs
        fractions = []
        for _ in range(args.update_epochs):
            inds = torch.randperm(number, generator=generator)
            for batch in inds.chunk(args.num_minibatches):
                if is_recurrent:
                    pick = [
                        each[:, batch].flatten()
                        for each in (old, advantages, returns, values, importance)
                    ]
                    params_, value = _unroll(network, weights, rollout, obs, batch)
                    new, entropy = network.logprob_and_entropy(
                        weights, params_, actions[:, batch].flatten()
                    )
                else:
                    pick = [
                        each.flatten()[batch]
                        for each in (old, advantages, returns, values, importance)
                    ]
                    params_, value = network(weights, obs.flatten(0, 1)[batch])
                    new, entropy = network.logprob_and_entropy(
                        weights, params_, flat_actions[batch]
                    )
                loss, last = ppo_objective(args, reached, new, entropy, value, *pick)
                fractions.append(last["clipfrac"])
                norm = adam.step(loss, learning_rate, args.max_grad_norm)
                reached.add(
                    "gradient clipped" if norm > args.max_grad_norm else "gradient not clipped"
                )
            if args.target_kl is not None:
                is_far = last["approx_kl"] > args.target_kl
                reached.add("stopped" if is_far else "not stopped")
                if is_far:
                    break
        last |= {
            "clipfrac": np.mean(fractions),
            "explained_variance": 1 - (returns - values).numpy().var() / returns.numpy().var(),
        }
        for name, value in last.items():
            logged[f"losses/{name}"].append(value)
        logged["charts/learning_rate"].append(learning_rate)
        if is_continuous:
            observed.append(obs.numpy())
            mean, variance = moments(observed)
            for name in filter(is_of_normalizer, weights):
                is_mean = name.endswith(".mean")
                weights[name].copy_(
                    torch.from_numpy(mean if is_mean else 1 / np.sqrt(variance + 1e-8))
                )
    return weights, logged, reached


def _starts(rollout):
    """Return which steps begin episodes, except the first, whose state came with the rollout."""
    ends = rollout.terminations | rollout.truncations
    return np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])


def _states(network, weights, rollout, obs, env):
    """Yield the network's memory after each step of an environment."""
    state = tuple(array(part)[env] for part in rollout.states)
    for step, begins in enumerate(_starts(rollout)[:, env]):
        if begins:
            state = tuple(torch.zeros_like(part) for part in state)
        state = network.step(weights, obs[step, env], state)
        yield state


def _unroll(network, weights, rollout, obs, envs):
    """Return the parameters and values of these environments, by step and then environment."""
    by_env = [
        torch.stack([hidden for hidden, _ in _states(network, weights, rollout, obs, env)])
        for env in envs
    ]
    return network.heads(weights, torch.stack(by_env, dim=1).flatten(0, 1))


def _look_recurrent(network, weights, rollout, obs):
    """Return the parameters, the values, and the values of the observations after each step."""
    num_steps, num_envs = rollout.rewards.shape
    states = [list(_states(network, weights, rollout, obs, env)) for env in range(num_envs)]
    params = torch.zeros(num_steps, num_envs, len(weights["actor.bias"]), dtype=torch.float64)
    values, next_values = (torch.zeros(num_steps, num_envs, dtype=torch.float64) for _ in range(2))
    finals = iter(array(rollout.final_observations))
    for step in range(num_steps):
        for env in range(num_envs):
            params[step, env], values[step, env] = network.heads(weights, states[env][step][0])
            if rollout.terminations[step, env] or rollout.truncations[step, env]:
                after = next(finals)
            else:
                after = (
                    obs[step + 1, env]
                    if step + 1 < num_steps
                    else array(rollout.next_observations)[env]
                )
            hidden, _ = network.step(weights, after, states[env][step])
            next_values[step, env] = network.heads(weights, hidden)[1]
    return params, values, next_values


def q_vector(weights, x):
    return dense(weights, "network", x, relu)


def q_atari(weights, x):
    hidden = relu(linear(weights, "network.7", convolved(weights, "network", x / 255, NATURE)))
    return linear(weights, "network.9", hidden)


def linear_epsilon(args, step):
    """Return epsilon, which goes from `start_e` to `end_e` within a fraction of all steps, and
    stays there.
    """
    done = step / (args.exploration_fraction * args.total_timesteps)
    return args.end_e if done >= 1 else (1 - done) * args.start_e + done * args.end_e


def epsilon_greedy(q_values, epsilon):
    """Return the probabilities of the actions, https://arxiv.org/abs/1312.5602."""
    greedy = torch.nn.functional.one_hot(q_values.argmax(-1), q_values.shape[-1]).double()
    return epsilon / q_values.shape[-1] + (1 - epsilon) * greedy


def dqn(recording, q_values, newest_first=False):
    """Return both networks' weights after training, and the logged values.

    With ``newest_first``, drawn numbers count transitions from the newest one on, otherwise in the
    order of the buffer.
    """
    args = SimpleNamespace(**recording.args)
    weights, learned = parameters_of(recording.calls[0].networks["q_network"])
    target, _ = parameters_of(recording.calls[0].networks["target_network"])
    adam, logged, kept = Adam(learned, eps=1e-8), defaultdict(list), []
    inserted = gradient_steps = 0
    for call in recording.calls:
        chunk = call.rollout
        torch.set_rng_state(call.torch_state)
        obs, nexts = array(chunk.observations), array(chunk.next_observations)
        finals = iter(array(chunk.final_observations))
        num_steps, num_envs = chunk.rewards.shape
        for step in range(num_steps):
            for env in range(num_envs):
                has_ended = chunk.terminations[step, env] or chunk.truncations[step, env]
                follows = nexts[env] if step + 1 == num_steps else obs[step + 1, env]
                follows = next(finals) if has_ended else follows
                bootstraps = 0.0 if chunk.terminations[step, env] else 1.0
                reward = float(chunk.rewards[step, env])
                kept.append(
                    (obs[step, env], int(chunk.actions[step, env]), follows, reward, bootstraps)
                )
                inserted += 1
        held = min(inserted, args.buffer_size)
        while gradient_steps < (inserted - args.learning_starts) // args.train_frequency:
            draws = torch.randint(held, (args.batch_size,)).tolist()
            if newest_first:
                batch = [kept[-1 - draw] for draw in draws]
            else:  # the transition at this place in a ring
                batch = [
                    kept[draw + (inserted - 1 - draw) // args.buffer_size * args.buffer_size]
                    for draw in draws
                ]
            before, after = (torch.stack([row[column] for row in batch]) for column in (0, 2))
            actions = torch.tensor([row[1] for row in batch])
            with torch.no_grad():
                best = q_values(target, after).max(dim=1).values
                wanted = torch.tensor([row[3] for row in batch]).double()
                wanted = wanted + args.gamma * torch.tensor([row[4] for row in batch]) * best
            chosen = q_values(weights, before)[torch.arange(len(batch)), actions]
            loss = ((chosen - wanted) ** 2).mean()
            adam.step(loss, args.learning_rate)
            gradient_steps += 1
            if gradient_steps * args.train_frequency % args.target_network_frequency == 0:
                for name in target:
                    target[name] = (
                        args.tau * weights[name].detach() + (1 - args.tau) * target[name].detach()
                    )
            last = loss.item(), chosen.mean().item()
        logged["charts/epsilon"].append(linear_epsilon(args, inserted))
        logged["throughput/replay_ratio"].append(gradient_steps * args.batch_size / inserted)
        if gradient_steps:
            logged["losses/td_loss"].append(last[0])
            logged["losses/q_values"].append(last[1])
    return weights, target, logged
