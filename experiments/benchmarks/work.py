"""The work of every throughput measurement: PPO on 64 environments, and the report of its speed.

The modules of other libraries import this module in their own virtual environments, so it needs
only the standard library.
"""

import json
import sys

NUM_WORKERS, ENVS_PER_WORKER = 2, 32
NUM_ENVS = NUM_WORKERS * ENVS_PER_WORKER
NUM_STEPS = 128
BATCH_SIZE = NUM_ENVS * NUM_STEPS
UPDATE_EPOCHS, NUM_MINIBATCHES = 4, 4
MINIBATCH_SIZE = BATCH_SIZE // NUM_MINIBATCHES
HIDDEN = [64, 64]  # hidden layers of the actor and of the critic
# The same for all: learning decides how long episodes last, and therefore the cost of a step.
LEARNING_RATE = 2.5e-4
GAMMA, GAE_LAMBDA = 0.99, 0.95
CLIP_COEF, ENT_COEF, VF_COEF, MAX_GRAD_NORM = 0.2, 0.01, 0.5, 0.5

FLAGS = [  # flags of ppo_clusterenv.py
    "--num-workers", str(NUM_WORKERS), "--envs-per-worker", str(ENVS_PER_WORKER), "--num-steps",
    str(NUM_STEPS), "--update-epochs", str(UPDATE_EPOCHS), "--num-minibatches",
    str(NUM_MINIBATCHES), "--learning-rate", str(LEARNING_RATE), "--eval-episodes", "1",
    "--no-cuda",
]  # fmt: skip


def arguments():
    """Return the environment's id, the number of iterations, and a list of further arguments."""
    env_id, iterations, *rest = sys.argv[1:]
    return env_id, int(iterations), rest


def report(steps, seconds):
    """Print the steady state's environment steps and seconds, without the first iteration."""
    print("\n" + json.dumps({"steps": steps, "seconds": seconds}), flush=True)
