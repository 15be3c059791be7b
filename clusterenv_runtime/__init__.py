"""Keep your training loop; put its environments anywhere.

    from clusterenv_runtime import CategoricalPolicy, ClusterEnv

    envs = ClusterEnv([lambda: gym.make("CartPole-v1") for _ in range(8)], num_workers=2)
    policy = CategoricalPolicy(actor)  # any nn.Module: observations -> logits
    envs.reset(seed=1)
    for iteration in range(100):
        rollout = envs.rollout(policy, num_steps=128)  # workers act, and pull if they have diverged
        learn(rollout)  # your learner
        print(rollout.episodic_returns, envs.divergence, envs.pulls)
    envs.close()

A `ClusterEnv` is also a plain ``gymnasium.vector.VectorEnv``: ``envs.step(actions)``.
"""

from typing import TYPE_CHECKING, Any

from .arrays import Frames
from .env import ClusterEnv
from .errors import (
    ClusterEnvError,
    EnvError,
    Interrupted,
    ProtocolError,
    StartupError,
    WorkerDiedError,
)
from .launchers import Exit, ExternalLauncher, Launcher, LocalLauncher
from .rollout import Evaluation, Rollout

if TYPE_CHECKING:
    from .extras.policies import (
        CategoricalPolicy,
        EpsilonGreedyPolicy,
        GaussianPolicy,
        SquashedGaussianPolicy,
    )
    from .policy.base import Policy

__version__ = "0.1.0"
__all__ = [
    "CategoricalPolicy",
    "ClusterEnv",
    "ClusterEnvError",
    "EnvError",
    "EpsilonGreedyPolicy",
    "Evaluation",
    "Exit",
    "ExternalLauncher",
    "Frames",
    "GaussianPolicy",
    "Interrupted",
    "Launcher",
    "LocalLauncher",
    "Policy",
    "ProtocolError",
    "Rollout",
    "SquashedGaussianPolicy",
    "StartupError",
    "WorkerDiedError",
]


def __getattr__(name: str) -> Any:
    # The policies import torch, which a worker that only steps environments does not need.
    if name in __all__ and name.endswith("Policy"):
        from .extras import policies

        return getattr(policies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
