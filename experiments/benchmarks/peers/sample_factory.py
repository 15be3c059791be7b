"""Sample Factory: APPO with two rollout workers.

    python -m experiments.benchmarks.peers.sample_factory CartPole-v1 25

APPO is PPO whose workers never wait for the learner. It trains on the trajectories that have
arrived, so a few are older than in plain PPO. One inference process acts for both workers. Sample
Factory needs a Gymnasium without LunarLander-v3 and HalfCheetah-v5. LunarLander-v2 and
HalfCheetah-v4 take their place, and cost much the same.
"""

import sys
import time

import gymnasium as gym
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from experiments.benchmarks import work


class Clock(AlgoObserver):
    """An observer that records when each iteration ends."""

    def __init__(self):
        self.times = []

    def on_training_step(self, runner, training_iteration_since_resume):
        self.times.append(time.perf_counter())


def make_env(env_id, cfg=None, env_config=None, render_mode=None):
    return gym.make(env_id, render_mode=render_mode)


if __name__ == "__main__":
    env_id, iterations, _ = work.arguments()
    env_id = {"LunarLander-v3": "LunarLander-v2", "HalfCheetah-v5": "HalfCheetah-v4"}.get(
        env_id, env_id
    )
    register_env(env_id, make_env)
    flags = {
        "env": env_id, "train_dir": ".", "device": "cpu",
        "train_for_env_steps": iterations * work.BATCH_SIZE - 1, "num_workers": work.NUM_WORKERS,
        "num_envs_per_worker": work.ENVS_PER_WORKER, "rollout": work.NUM_STEPS,
        "batch_size": work.MINIBATCH_SIZE, "num_batches_per_epoch": work.NUM_MINIBATCHES,
        "num_epochs": work.UPDATE_EPOCHS, "learning_rate": work.LEARNING_RATE, "gamma": work.GAMMA,
        "gae_lambda": work.GAE_LAMBDA, "ppo_clip_ratio": work.CLIP_COEF,
        "exploration_loss_coeff": work.ENT_COEF, "value_loss_coeff": work.VF_COEF,
        "max_grad_norm": work.MAX_GRAD_NORM, "use_rnn": False, "encoder_mlp_layers": work.HIDDEN,
        "nonlinearity": "tanh", "actor_critic_share_weights": False, "normalize_input": False,
        "normalize_returns": False,
    }  # fmt: skip
    argv = ["--algo=APPO"]
    for name, value in flags.items():
        argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    parser, _ = parse_sf_args(argv)
    _, runner = make_runner(parse_full_cfg(parser, argv))
    clock = Clock()
    runner.register_observer(clock)
    runner.init()
    status = runner.run()
    work.report((len(clock.times) - 1) * work.BATCH_SIZE, clock.times[-1] - clock.times[0])
    sys.exit(status)
