"""CartPole, registered with a vector version that resets in an episode's last step."""

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv

ENTRY_POINT = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"


def make(num_envs, max_episode_steps=500):
    return SyncVectorEnv(
        [lambda: gym.make("CartPole-v1", max_episode_steps=max_episode_steps)] * num_envs,
        autoreset_mode="SameStep",
    )


gym.register("VectorCartPole-v0", ENTRY_POINT, max_episode_steps=500, vector_entry_point=make)
