"""Short trainings of each script, which show whether it learns, and how much it returns with a
mistake in it.

    python -m tests.algorithms.learning --seeds 10  # prints returns by script and mistake

The environment is `toys.Corridor`, `toys.Cells`, or `toys.Recall` for the script with memory.
Walking to the end returns 3, and leaving at once returns 1. Episodes are cut off after one or two
steps, so a policy that is trained without bootstrapping leaves.
"""

import argparse
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import scripts
from tests.algorithms.recording import record

MOST = 3  # the most that an episode can return
REACHED = 2.4  # every script's evaluation returns more than this, and no mistaken script's does
PPO = "--num-workers 1 --envs-per-worker 16 --num-steps 16 --num-minibatches 4 --update-epochs 4"
PPO += " --gamma 0.95 --eval-episodes 100"
LONG = "--num-steps 32 --num-minibatches 8"
SMALL = "--num-steps 8 --num-minibatches 2 --update-epochs 2 --eval-episodes 20"
DQN = "--deterministic --num-workers 1 --envs-per-worker 8 --num-steps 8 --learning-starts 128"
DQN += " --gamma 0.95 --exploration-fraction 0.6 --end-e 0.02 --eval-episodes 100"
TRAININGS = {  # the environment, and flags
    "ppo_clusterenv.py": (
        "Corridor-vector",
        f"{PPO} --total-timesteps 10240 --learning-rate 0.005 --reward-scale 1",
    ),
    "scripts/ppo_multilearner_clusterenv.py": (
        "Corridor-vector",
        f"{PPO} --total-timesteps 10240 --learning-rate 0.005 --reward-scale 1",
    ),
    "scripts/ppo_continuous_clusterenv.py": (
        "Corridor-box",
        f"{PPO} --total-timesteps 20480 --learning-rate 0.003 --ent-coef 0.06",
    ),
    "scripts/ppo_lstm_clusterenv.py": (
        "Recall-vector",
        f"{PPO} --total-timesteps 20480 --learning-rate 0.005 --reward-scale 1 {LONG}",
    ),
    "scripts/ppo_minatar_clusterenv.py": (
        "Corridor-minatar",
        f"{PPO} --total-timesteps 10240 --learning-rate 0.003",
    ),
    "scripts/ppo_atari_clusterenv.py": (
        "Corridor-atari",
        f"{PPO} --total-timesteps 3072 --learning-rate 0.001 {SMALL}",
    ),
    "dqn_clusterenv.py": (
        "Cells-vector",
        f"{DQN} --total-timesteps 10240 --learning-rate 0.002 --train-frequency 4 "
        f"--target-network-frequency 64",
    ),
    "scripts/dqn_atari_clusterenv.py": (
        "Corridor-atari",
        f"{DQN} --total-timesteps 3200 --learning-rate 0.001 --buffer-size 4000 --train-frequency 8"
        " --target-network-frequency 64 --eval-episodes 20",
    ),
    "scripts/sac_clusterenv.py": (
        "Corridor-box",
        "--deterministic --num-workers 1 --envs-per-worker 8 --num-steps 4 --learning-starts 256 "
        "--total-timesteps 4096 --utd 0.25 --batch-size 64 --q-lr 0.003 --policy-lr 0.003 "
        "--tau 0.05 --gamma 0.95 --buffer-size 4096 --eval-episodes 100",
    ),
}
# The tests' seeds, if they are not 1. With seed 1, untrained DQN on Atari walks by chance.
SEEDS = {"scripts/dqn_atari_clusterenv.py": 2}
LATE = "--learning-starts 1000000"
MISTAKES = {  # a piece of the script and its replacement, or flags
    "none": {"ppo": "", "dqn": "", "sac": ""},
    "untrained": {"ppo": "--learning-rate 1e-30", "dqn": LATE, "sac": LATE},
    "flipped sign": {
        "ppo": ('pg_loss = (mb["weights"]', 'pg_loss = -(mb["weights"]'),
        "dqn": ("return rewards + gamma", "return -rewards + gamma"),
        "sac": ("return rewards + (1", "return -rewards + (1"),
    },
    "no bootstrap": {
        "ppo": ("nextvalues[dones] = final_values", "nextvalues[dones] = 0"),
        **dict.fromkeys(
            ("dqn", "sac"),
            (
                "in run.stream(envs, explore):\n",
                "in run.stream(envs, explore):\n"
                "            chunk.terminations[:] |= chunk.truncations\n",
            ),
        ),
    },
}


def learn(script, directory, seed=1, mistake="none"):
    """Train with a mistake in the script, and return the evaluation's mean return."""
    env, flags = TRAININGS[script]
    change = MISTAKES[mistake][Path(script).name[:3]]
    path = scripts.ROOT / script
    if isinstance(change, tuple):
        text, (old, new) = path.read_text(), change
        if text.count(old) != 1:
            raise ValueError(f"{script} has {old!r} {text.count(old)} times, not once")
        path = Path(directory, Path(script).name)
        path.write_text(text.replace(old, new))
        change = ""
    flags = [*f"--env-id tests.algorithms.toys:{env}-v0 --seed {seed} {flags} {change}".split()]
    return record(path, directory, *flags).summary["eval_return_mean"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--scripts", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--mistakes", nargs="+", choices=MISTAKES, default=list(MISTAKES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel trainings")
    args = parser.parse_args()

    def one(run):
        with tempfile.TemporaryDirectory() as directory:
            return learn(run[0], directory, run[2], run[1])

    with ThreadPoolExecutor(args.jobs) as pool:
        pairs = list(itertools.product(args.scripts, args.mistakes))
        runs = [(*pair, seed) for pair in pairs for seed in range(1, args.seeds + 1)]
        returns = pool.map(one, runs)
        for script, mistake in pairs:
            found = list(itertools.islice(returns, args.seeds))
            each = " ".join(f"{value:.2f}" for value in found)
            print(f"{script}, {mistake}: {min(found):.2f} to {max(found):.2f} ({each})", flush=True)


if __name__ == "__main__":
    main()
