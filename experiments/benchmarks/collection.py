"""Collection alone: `ClusterEnv.rollout` compared with processes that do not communicate.

    python -m experiments.benchmarks.collection --env-id LunarLander-v3

Both sides have the same number of processes, step the same environments, and sample the same policy
in the same way. They take turns, `--rounds` times. Prints the steps per second of both sides and
their ratio for each round, and the median ratio.
"""

import multiprocessing
import statistics
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from clusterenv_runtime import CategoricalPolicy, ClusterEnv, GaussianPolicy

from .single import distribution_for, make_env, mlp


@dataclass
class Args:
    env_id: str = "LunarLander-v3"
    """the environment to step"""
    num_workers: int = 2
    """processes on each side"""
    envs_per_worker: int = 32
    """environments per process"""
    num_steps: int = 128
    """steps per rollout"""
    num_rollouts: int = 20
    """rollouts per round"""
    rounds: int = 5
    """rounds; each measures both sides in turn"""


def make_policy(env_id):
    env = gym.make(env_id)
    torch.manual_seed(1)
    num_outputs, _, logstd = distribution_for(env.action_space)
    actor = mlp(env.observation_space.shape[0], num_outputs)
    return GaussianPolicy(actor, *logstd) if logstd else CategoricalPolicy(actor)


def alone(args, seed, pipe):
    """Step and act in one process. Keep a rollout's data, but do not send it."""
    torch.set_num_threads(1)
    envs = SyncVectorEnv(
        [make_env(args.env_id)] * args.envs_per_worker, autoreset_mode=AutoresetMode.SAME_STEP
    )
    policy, generator = make_policy(args.env_id), torch.Generator().manual_seed(seed)
    observations, _ = envs.reset(seed=seed)
    while pipe.recv():
        for _ in range(args.num_rollouts):
            kept, kept_params, kept_actions = [], [], []
            with torch.inference_mode():
                for step in range(args.num_steps):
                    params = policy(torch.Tensor(observations))
                    if step == 0:
                        noise = policy.noise(args.num_steps, params, generator)
                    actions = policy.act(params, noise[step])
                    kept.append(observations)
                    kept_params.append(params)
                    kept_actions.append(actions)
                    observations, *_ = envs.step(actions.numpy())
                np.stack(kept)
                policy.distribution(torch.stack(kept_params)).log_prob(torch.stack(kept_actions))
        pipe.send("done")


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.set_num_threads(1)  # as in ppo_clusterenv.py
    steps = args.num_rollouts * args.num_steps * args.num_workers * args.envs_per_worker
    context = multiprocessing.get_context("spawn")
    pipes = []
    for index in range(args.num_workers):
        ours, theirs = context.Pipe()
        context.Process(
            target=alone, args=(args, 1 + index * args.envs_per_worker, theirs), daemon=True
        ).start()
        pipes.append(ours)
    envs = ClusterEnv(
        [make_env(args.env_id)] * args.num_workers * args.envs_per_worker,
        num_workers=args.num_workers,
    )
    policy = make_policy(args.env_id)
    envs.reset(seed=1)
    envs.rollout(policy, args.num_steps)
    ratios = []
    for round_number in range(args.rounds + 1):
        start = time.perf_counter()
        for pipe in pipes:
            pipe.send(True)
        for pipe in pipes:
            pipe.recv()
        middle = time.perf_counter()
        for _ in range(args.num_rollouts):
            envs.rollout(policy, args.num_steps)
        end = time.perf_counter()
        if round_number == 0:
            continue  # warm-up
        alone_sps, cluster_sps = steps / (middle - start), steps / (end - middle)
        ratios.append(cluster_sps / alone_sps)
        print(
            f"alone {alone_sps:,.0f}  ClusterEnv {cluster_sps:,.0f} steps/s  ratio "
            f"{ratios[-1]:.2f}",
            flush=True,
        )
    for pipe in pipes:
        pipe.send(False)
    envs.close()
    print(
        f"median ratio {statistics.median(ratios):.2f} ({args.env_id}, {args.num_workers} x "
        f"{args.envs_per_worker})"
    )
