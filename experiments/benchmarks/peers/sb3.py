"""Stable-Baselines3: PPO on SubprocVecEnv (`subproc`) or DummyVecEnv (`dummy`).

    python -m experiments.benchmarks.peers.sb3 CartPole-v1 25 dummy

SubprocVecEnv has a process for each environment.
"""

import multiprocessing
import time

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from experiments.benchmarks import work


class Clock(BaseCallback):
    """A callback that records when each iteration begins."""

    def _init_callback(self):
        self.times = []

    def _on_rollout_start(self):
        self.times.append(time.perf_counter())

    def _on_step(self):
        return True


if __name__ == "__main__":
    env_id, iterations, (vector,) = work.arguments()
    torch.set_num_threads(1)
    # Otherwise the 64 processes import it one by one, which takes minutes, but does not change the
    # measurement.
    multiprocessing.set_forkserver_preload(["stable_baselines3"])
    envs = make_vec_env(
        env_id, work.NUM_ENVS, vec_env_cls={"subproc": SubprocVecEnv, "dummy": DummyVecEnv}[vector]
    )
    model = PPO(
        "MlpPolicy", envs, n_steps=work.NUM_STEPS, n_epochs=work.UPDATE_EPOCHS,
        batch_size=work.MINIBATCH_SIZE, learning_rate=work.LEARNING_RATE, gamma=work.GAMMA,
        gae_lambda=work.GAE_LAMBDA, clip_range=work.CLIP_COEF, ent_coef=work.ENT_COEF,
        vf_coef=work.VF_COEF, max_grad_norm=work.MAX_GRAD_NORM,
        policy_kwargs={"net_arch": {"pi": work.HIDDEN, "vf": work.HIDDEN}}, device="cpu",
    )  # fmt: skip
    clock = Clock()
    model.learn(iterations * work.BATCH_SIZE, callback=clock)
    work.report((iterations - 1) * work.BATCH_SIZE, time.perf_counter() - clock.times[1])
    envs.close()
