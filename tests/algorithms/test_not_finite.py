"""Observations that are not finite. If one of them terminates an episode, no script learns from it.
Elsewhere, the run reports it.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from clusterenv_runtime import Interrupted
from clusterenv_utils.checkpoint import load_checkpoint
from clusterenv_utils.errors import check_finite
from tests import scripts

ENDS = """
import gymnasium as gym
import numpy as np

class Ends(gym.Env):
    \"\"\"Ends its episodes after five steps, with observations that are not numbers.\"\"\"

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = ACTIONS
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        seen = np.full(3, self.steps if self.steps < 5 else np.nan, np.float32)
        return seen, 1.0, self.steps == 5, False, {}

gym.register("Ends-v0", Ends)
"""
MORE = {
    "ppo": "--num-minibatches 2",
    "others": "--learning-starts 32 --batch-size 8 --buffer-size 320",
}


@pytest.mark.parametrize(
    ("script", "space"),
    [
        ("ppo_clusterenv.py", "gym.spaces.Discrete(2)"),
        ("scripts/ppo_lstm_clusterenv.py", "gym.spaces.Discrete(2)"),
        ("scripts/ppo_continuous_clusterenv.py", "gym.spaces.Box(-1, 1, (2,))"),
        ("dqn_clusterenv.py", "gym.spaces.Discrete(2)"),
        ("scripts/sac_clusterenv.py", "gym.spaces.Box(-1, 1, (2,))"),
    ],
)
def test_no_script_learns_from_the_observation_that_terminates_an_episode(tmp_path, script, space):
    (tmp_path / "ends.py").write_text(ENDS.replace("ACTIONS", space))
    flags = "--env-id ends:Ends-v0 --envs-per-worker 2 --num-steps 16 --eval-episodes 1 "
    flags += MORE["ppo" if "ppo" in script else "others"]
    folder, summary = scripts.train(script, tmp_path, *flags.split(), "--total-timesteps", "320")
    assert summary["mean_return_100"] == 5
    parts = load_checkpoint(folder)["parts"]
    networks = parts.keys() & {"agent", "q_network", "actor", "qfs"}
    assert networks and all(
        value.isfinite().all() for name in networks for value in parts[name].values()
    )


@pytest.mark.parametrize(
    ("script", "space"),
    [
        ("ppo_clusterenv.py", "gym.spaces.Discrete(2)"),
        ("dqn_clusterenv.py", "gym.spaces.Discrete(2)"),
    ],
)
def test_a_truncation_at_an_observation_that_is_not_finite_ends_the_run(tmp_path, script, space):
    text = ENDS.replace("ACTIONS", space).replace(
        "self.steps == 5, False", "False, self.steps == 5"
    )
    (tmp_path / "ends.py").write_text(text)
    flags = "--env-id ends:Ends-v0 --envs-per-worker 2 --num-steps 16 --total-timesteps 320 "
    flags += MORE["ppo" if "ppo" in script else "others"]
    result = scripts.run(script, tmp_path, *flags.split())
    assert result.returncode == 1 and "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: environments [") and "that are not finite; to resume: " in line


def test_nothing_is_normalized_by_observations_that_are_not_finite(tmp_path):
    text = ENDS.replace("ACTIONS", "gym.spaces.Box(-1, 1, (2,))").replace(
        "self.steps if", "np.inf if"
    )
    (tmp_path / "ends.py").write_text(text)
    flags = (
        "--env-id ends:Ends-v0 --envs-per-worker 2 --num-steps 16 --num-minibatches 2 "
        "--total-timesteps 320"
    )
    result = scripts.run("scripts/ppo_continuous_clusterenv.py", tmp_path, *flags.split())
    assert result.returncode == 1 and "Traceback" not in result.stderr
    says = "error: environments [0, 1, 2, 3] gave observations that are not finite; to resume: "
    assert result.stderr.splitlines()[-1].startswith(says)


@pytest.mark.parametrize("name", ["observations", "next_observations", "final_observations"])
def test_the_environment_that_gave_an_observation_that_is_not_finite_is_named(name):
    ends = np.array([[False, False], [True, False], [False, True]])
    rollout = SimpleNamespace(
        rows=np.array([4, 5]), terminations=np.zeros((3, 2), bool), truncations=ends,
        observations=np.zeros((3, 2, 1)), next_observations=np.zeros((2, 1)),
        final_observations=np.zeros((2, 1)),
    )  # fmt: skip
    check_finite(rollout)
    getattr(rollout, name)[..., -1, 0] = 1e39  # infinite as float32
    with pytest.raises(Interrupted, match=r"environments \[5\] gave observations"):
        check_finite(rollout)
