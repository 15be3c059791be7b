"""RLlib: PPO with two env runners, and the learner in the main process.

    python -m experiments.benchmarks.peers.rllib CartPole-v1 25

The parts of its loss that ours lacks are turned off: a KL penalty, and a clipped value loss.
"""

import os
import tempfile
import time

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from experiments.benchmarks import work

if __name__ == "__main__":
    env_id, iterations, _ = work.arguments()
    torch.set_num_threads(1)
    model = DefaultModelConfig(
        fcnet_hiddens=work.HIDDEN, fcnet_activation="tanh", vf_share_layers=False
    )
    config = (
        PPOConfig()
        .environment(env_id)
        .env_runners(
            num_env_runners=work.NUM_WORKERS,
            num_envs_per_env_runner=work.ENVS_PER_WORKER,
            rollout_fragment_length=work.NUM_STEPS,
        )
        .learners(num_learners=0)
        .rl_module(model_config=model)
        .training(
            train_batch_size_per_learner=work.BATCH_SIZE,
            num_epochs=work.UPDATE_EPOCHS,
            minibatch_size=work.MINIBATCH_SIZE,
            lr=work.LEARNING_RATE,
            gamma=work.GAMMA,
            lambda_=work.GAE_LAMBDA,
            clip_param=work.CLIP_COEF,
            entropy_coeff=work.ENT_COEF,
            vf_loss_coeff=work.VF_COEF,
            grad_clip=work.MAX_GRAD_NORM,
            use_kl_loss=False,
            vf_clip_param=1e9,
        )  # fmt: skip
    )
    with tempfile.TemporaryDirectory(
        prefix="", dir=os.getcwd()
    ) as directory:  # a short path, because it holds sockets
        ray.init(num_cpus=work.NUM_WORKERS + 1, include_dashboard=False, _temp_dir=directory)
        algorithm = config.build_algo()
        sampled = [algorithm.train()["env_runners"]["num_env_steps_sampled_lifetime"]]
        start = time.perf_counter()
        for _ in range(iterations - 1):
            sampled.append(algorithm.train()["env_runners"]["num_env_steps_sampled_lifetime"])
        work.report(sampled[-1] - sampled[0], time.perf_counter() - start)
        algorithm.stop()
        ray.shutdown()
