"""The gain of an update of continuous PPO, by the age of the policy that acted, in updates.

    python -m experiments.benchmarks.staleness --env-id Hopper-v5 --interval 8

Trains with all weights pulled every so many updates, and plays episodes with the policy before and
after each update. Prints for each lag the gain in percent of the run's mean return, and the
effective sample size of the importance weights between the learner's policy and the one that acted,
as a share of the batch: means over updates, then over seeds, with the standard error of the latter.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import SyncVectorEnv

from .scripts import ROOT, call

SCRIPT = ROOT / "scripts" / "ppo_continuous_clusterenv.py"
WEIGHTS = "b_weights = (proximal - b_logprobs).exp()"
AFTER = "            # TRY NOT TO MODIFY: record rewards for plotting purposes\n"


@dataclass
class Args:
    env_id: str = "Hopper-v5"
    """the environment"""
    interval: int = 8
    """versions between two pulls"""
    total_timesteps: int = 262_144
    """environment steps of each run"""
    seeds: int = 5
    """seeds, from 1"""
    episodes: int = 6
    """that are played after each update, of at most 1,000 steps"""


class Look:
    """Called after each update by a copy of the script; writes its results to looks.json."""

    def __init__(self, env_id, episodes):
        self.envs = SyncVectorEnv([lambda: gym.make(env_id)] * episodes)
        self.found = []

    @torch.no_grad()
    def __call__(self, lag, log_weights, act):
        weights = log_weights.exp()
        state = torch.get_rng_state()  # training goes on as if nothing had been drawn
        returns, running = np.zeros(self.envs.num_envs), np.ones(self.envs.num_envs, bool)
        obs, _ = self.envs.reset(seed=100_000 + len(self.found))
        for _ in range(1000):
            obs, rewards, terminations, truncations, _ = self.envs.step(act(torch.Tensor(obs)))
            returns += rewards * running
            running &= ~(terminations | truncations)
            if not running.any():
                break
        torch.set_rng_state(state)
        share = float(weights.sum() ** 2 / (weights**2).sum() / len(weights))
        self.found.append({"lag": int(lag), "share": share, "return": float(returns.mean())})
        Path("looks.json").write_text(json.dumps(self.found))


def looks(args, seed):
    """Train; return the lags, shares and returns after the updates, arrays."""
    text = SCRIPT.read_text()
    if text.count(WEIGHTS) != 1 or text.count(AFTER) != 1:
        raise SystemExit(f"{SCRIPT.name} has changed: it computes its weights otherwise")
    look = "            look((envs.policy_version - rollout.policy_versions).mean(), log_weights,\n"
    look += "                 lambda x: policy.to_env(agent.get_action_and_value(x)[0]).numpy())\n"
    text = text.replace(
        WEIGHTS,
        "log_weights = proximal - b_logprobs\n                    b_weights = log_weights.exp()",
    )
    text = text.replace(AFTER, look + AFTER)
    begin = "    with run.training(envs, agent, policy):\n"
    make = (
        f"    from experiments.benchmarks.staleness import Look\n    look = Look(args.env_id, "
        f"{args.episodes})\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, SCRIPT.name).write_text(text.replace(begin, make + begin))
        flags = [
            "--env-id",
            args.env_id,
            "--seed",
            str(seed),
            "--total-timesteps",
            str(args.total_timesteps),
        ]
        flags += [
            "--sync-mode",
            "interval",
            "--sync-interval",
            str(args.interval),
            "--weights",
            "float32",
        ]
        call(
            [sys.executable, SCRIPT.name, *flags, "--no-overlap", "--eval-episodes", "1"],
            directory,
            PYTHONPATH=str(ROOT),
        )
        found = json.loads(Path(directory, "looks.json").read_text())
    return [np.array([look[name] for look in found]) for name in ("lag", "share", "return")]


if __name__ == "__main__":
    args = tyro.cli(Args)
    gains, shares, means = [], [], []  # of each seed: by lag, and of the whole run
    for seed in range(1, args.seeds + 1):
        lags, share, returns = looks(args, seed)
        gained, of = 100 * np.diff(returns) / abs(returns.mean()), lags[1:]
        gains.append([gained[of == lag].mean() for lag in range(args.interval)])
        shares.append([share[lags == lag].mean() for lag in range(args.interval)])
        means.append(returns.mean())
        print(f"seed {seed}: mean return of the learned policies {returns.mean():.0f}", flush=True)
    errors = np.std(gains, 0, ddof=1) / np.sqrt(args.seeds)
    print("| lag | effective sample size | gain of an update, % |\n|---|---|---|")
    for lag, (share, gain, error) in enumerate(
        zip(np.mean(shares, 0), np.mean(gains, 0), errors, strict=True)
    ):
        print(f"| {lag} | {share:.2f} | {gain:.2f} ± {error:.2f} |")
    print(
        f"{args.env_id}, every {args.interval}, {args.seeds} seeds: mean return "
        f"{np.mean(means):.0f}"
    )
