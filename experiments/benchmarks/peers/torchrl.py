"""TorchRL: PPO built from its components, with a synchronous collector of two worker processes.

    python -m experiments.benchmarks.peers.torchrl CartPole-v1 25

Each worker steps a wrapped SyncVectorEnv of Gymnasium, because TorchRL's own SerialEnv is several
times slower.
"""

import time
from functools import partial

import gymnasium as gym
import torch
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torchrl.collectors import MultiSyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import DoubleToFloat, GymWrapper
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from experiments.benchmarks import work


def make_envs(env_id):
    env_fns = [partial(gym.make, env_id)] * work.ENVS_PER_WORKER
    envs = gym.vector.SyncVectorEnv(env_fns, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    envs = GymWrapper(envs, categorical_action_encoding=True)
    return (
        envs.append_transform(DoubleToFloat())
        if envs.observation_spec["observation"].dtype.itemsize == 8
        else envs
    )


def mlp(num_inputs, num_outputs):
    return MLP(num_inputs, num_outputs, num_cells=work.HIDDEN, activation_class=torch.nn.Tanh)


if __name__ == "__main__":
    env_id, iterations, _ = work.arguments()
    torch.set_num_threads(1)
    env = gym.make(env_id)
    num_inputs, space = env.observation_space.shape[0], env.action_space
    if isinstance(space, gym.spaces.Discrete):
        net, keys, distribution = (
            mlp(num_inputs, int(space.n)),
            ["logits"],
            torch.distributions.Categorical,
        )
    else:
        net = torch.nn.Sequential(
            mlp(num_inputs, space.shape[0]), AddStateIndependentNormalScale(space.shape[0])
        )
        keys, distribution = ["loc", "scale"], IndependentNormal
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=keys),
        in_keys=keys, distribution_class=distribution, return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(mlp(num_inputs, 1), in_keys=["observation"])
    advantages = GAE(gamma=work.GAMMA, lmbda=work.GAE_LAMBDA, value_network=critic)
    loss_module = ClipPPOLoss(
        actor, critic, clip_epsilon=work.CLIP_COEF, entropy_coeff=work.ENT_COEF,
        critic_coeff=work.VF_COEF, loss_critic_type="l2", normalize_advantage=True,
    )  # fmt: skip
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=work.LEARNING_RATE, eps=1e-5)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(work.BATCH_SIZE),
        sampler=SamplerWithoutReplacement(),
        batch_size=work.MINIBATCH_SIZE,
    )
    collector = MultiSyncCollector(
        [partial(make_envs, env_id)] * work.NUM_WORKERS, actor, frames_per_batch=work.BATCH_SIZE,
        total_frames=iterations * work.BATCH_SIZE, num_threads=1, num_sub_threads=1, cat_results=0,
    )  # fmt: skip
    times, steps = [], 0
    for batch in collector:
        with torch.no_grad():
            advantages(batch)
        buffer.extend(batch.reshape(-1))
        for _ in range(work.UPDATE_EPOCHS):
            for minibatch in buffer:
                losses = loss_module(minibatch)
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), work.MAX_GRAD_NORM)
                optimizer.step()
        collector.update_policy_weights_()
        steps += batch.numel() if times else 0
        times.append(time.perf_counter())
    work.report(steps, times[-1] - times[0])
    collector.shutdown()
