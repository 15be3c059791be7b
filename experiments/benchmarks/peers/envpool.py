"""EnvPool: the loop of experiments/benchmarks/single.py on C++ environments, stepped by threads.

python -m experiments.benchmarks.peers.envpool CartPole-v1 25
"""

import envpool

from experiments.benchmarks import work
from experiments.benchmarks.single import train

if __name__ == "__main__":
    env_id, iterations, _ = work.arguments()
    # EnvPool chooses the number of threads.
    envs = envpool.make_gymnasium(env_id, num_envs=work.NUM_ENVS, seed=1)
    work.report(*train(envs, envs.reset()[0], iterations))
