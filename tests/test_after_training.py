"""After training: the file of a model, playing the model, and exporting it."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from clusterenv_runtime import Policy
from clusterenv_runtime.arrays import leaves
from clusterenv_runtime.messages import Collect
from clusterenv_runtime.policy.actor import Actor
from clusterenv_runtime.policy.tensors import flat_weights, numbers_of
from clusterenv_utils import ScriptError
from clusterenv_utils.checkpoint import save_model
from clusterenv_utils.errors import CheckpointError
from clusterenv_utils.trained import load_model
from tools.export import TOLERANCE, Acting, export

from . import scripts
from .scripts import ROOT, TINY

PPO = "ppo_clusterenv"
# Each script's environment, by its observation space and action space.
CASES = {
    PPO: (Box(-1, 1, (4,)), Discrete(3)),
    "scripts.ppo_multilearner_clusterenv": (Box(-1, 1, (4,)), Discrete(3)),
    "scripts.ppo_continuous_clusterenv": (Box(-5, 5, (7,), np.float64), Box(-0.1, 0.1, (3,))),
    "scripts.ppo_lstm_clusterenv": (Box(-1, 1, (2,)), Discrete(2)),
    "scripts.ppo_atari_clusterenv": (Box(0, 255, (4, 84, 84), np.uint8), Discrete(6)),
    "scripts.ppo_minatar_clusterenv": (Box(0, 1, (10, 10, 4), bool), Discrete(6)),
    "dqn_clusterenv": (Box(-1, 1, (8,)), Discrete(4)),
    "scripts.dqn_atari_clusterenv": (Box(0, 255, (4, 84, 84), np.uint8), Discrete(4)),
    "scripts.sac_clusterenv": (Box(-5, 5, (11,), np.float64), Box(-2, 1, (3,))),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a new working directory, and restore the import path afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def spaces(observation_space, action_space):
    return SimpleNamespace(
        single_observation_space=observation_space, single_action_space=action_space
    )


def leave_model(directory, monkeypatch, name=PPO, script=None, kind="", env=None, **flags):
    """Save an untrained model in a run's directory, and return its args."""
    module = importlib.import_module(name)
    args = module.Args(**flags)
    env = env or module.make_env(args.env_id, 0, False, "", **args.make_kwargs)()
    envs = spaces(env.observation_space, env.action_space)
    torch.manual_seed(1)
    model, _ = module.make_policy(args, envs)
    monkeypatch.setattr(sys, "argv", [script or f"{name.replace('.', '/')}.py"])
    directory.mkdir(parents=True, exist_ok=True)
    save_model(directory, model.state_dict(), args, kind)
    return args


def command(tool, *flags):
    """Run one of the tools in this process. Return its one-line error, if any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{tool}.py", *map(str, flags)])
        patch.setattr(sys, "excepthook", sys.excepthook)
        try:
            runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")
        except ScriptError as error:
            assert "\n" not in str(error)
            return str(error)
    return None


def test_play_prints_the_same_returns_for_the_same_seed(here, monkeypatch, capsys):
    (here / "ppo_clusterenv.py").symlink_to(ROOT / "ppo_clusterenv.py")
    leave_model(here / "runs/x", monkeypatch, env_id="CartPole-v1", hidden_size=16)
    seen = []
    for flags in ([], [], ["--seed", 9], ["--deterministic"]):
        assert command("play", "runs/x", "--episodes", 3, *flags) is None
        said = capsys.readouterr().out
        returns = [float(found) for found in re.findall(r"episode \d: return (\S+) in", said)]
        assert len(returns) == 3 and f"mean return {np.mean(returns):.1f} of 3 episodes" in said
        seen.append(returns)
    assert seen[0] == seen[1] and seen[0] not in seen[2:] and seen[2] != seen[3]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("scripts.ppo_lstm_clusterenv", {}),
        ("scripts.ppo_continuous_clusterenv", {"env_id": "Pendulum-v1"}),
        pytest.param("dqn_clusterenv", {"env_kwargs": "sutton_barto_reward=true"}),
        pytest.param("scripts.sac_clusterenv", {"env_id": "Pendulum-v1"}, marks=pytest.mark.long),
        pytest.param("scripts.ppo_minatar_clusterenv", {}, marks=pytest.mark.long),
        pytest.param("scripts.ppo_atari_clusterenv", {}, marks=pytest.mark.long),
        pytest.param("scripts.dqn_atari_clusterenv", {}, marks=pytest.mark.long),
    ],
)
def test_a_model_of_each_script_is_played(here, monkeypatch, capsys, name, flags):
    (here / "scripts").symlink_to(ROOT / "scripts")
    (here / "dqn_clusterenv.py").symlink_to(ROOT / "dqn_clusterenv.py")
    leave_model(here / "runs/x", monkeypatch, name, **flags)
    again = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
    assert command("play", "runs/x", "--episodes", 1, *again) is None
    said = capsys.readouterr().out
    assert "mean return" in said
    if name == "dqn_clusterenv":  # a reward of -1, for the fall
        assert "episode 1: return -1.0" in said


@pytest.mark.long
def test_play_records_a_video_of_the_best_model(tmp_path):
    flags = [*TINY[f"{PPO}.py"], "--eval-interval", "64", "--run-name", "x"]
    folder, _ = scripts.train(PPO + ".py", tmp_path, *flags)
    result = subprocess.run(
        [sys.executable, ROOT / "tools/play.py", "runs/x", "--best", "--video",
         "--script", ROOT / "ppo_clusterenv.py", "--episodes", "2"],
        cwd=tmp_path, env=scripts.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "best.cleanrl_model" in result.stdout and (folder / "play.mp4").stat().st_size > 1000
    first = re.search(r"episode 1: (return \S+ in \d+ steps)", result.stdout)[1]
    assert first and "recorded runs/x/play.mp4" in result.stdout
    assert not list(folder.glob("*.parts")) and not (tmp_path / "videos").exists()


@pytest.mark.long
def test_a_resumed_run_keeps_earlier_videos(tmp_path):
    flags = [*TINY[f"{PPO}.py"], "--capture-video", "--run-name", "x"]
    scripts.train(PPO + ".py", tmp_path, *flags)
    before = {path: path.read_bytes() for path in tmp_path.glob("videos/x/*.mp4")}
    flags = ["--resume", "runs/x", "--total-timesteps", "640"]
    assert scripts.run(PPO + ".py", tmp_path, *flags).returncode == 0
    assert list(tmp_path.glob("videos/x/from-320/*.mp4")) and before
    assert all(path.read_bytes() == video for path, video in before.items())


class Unpickled:
    """Leaves a file if it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_nothing_in_a_model_file_is_executed(here, monkeypatch):
    leave_model(here / "run", monkeypatch, env_id="CartPole-v1")
    path = here / "run/ppo_clusterenv.cleanrl_model"
    script = "import os\nos.mkdir('executed')\nArgs = make_env = make_policy = None\n"
    (here / "elsewhere").mkdir()
    (here / "elsewhere/theirs.py").write_text(script)
    good = torch.load(path, weights_only=True)
    args = good["args"]
    for value, says in (
        (good | {"script": f"{here}/elsewhere/theirs.py"}, "the script 'theirs.py' is neither"),
        (good | {"script": "elsewhere/theirs.py"}, "the script 'theirs.py' is neither"),
        (good | {"script": "../run"}, "the script 'run' is neither"),
        (good | {"model": Unpickled()}, "is not a model of a run: UnpicklingError"),
        (good["model"], "is not a model of a run: KeyError"),
    ):
        torch.save(value, path)
        assert says in command("play", path)
    (here / "evil.py").write_text("import os\nos.mkdir('executed')\n")
    for flags, has in (
        ({"env_id": "evil:Evil-v0"}, "has --env-id 'evil:Evil-v0': a flag that can run someone's"),
        ({"env_kwargs": "a=1"}, "has --env-kwargs 'a=1': a flag that can run someone's code"),
        ({"epochs": 3}, "is from another script, or another version of it: it has --epochs"),
        ({"hidden_size": "x"}, "the flags in"),
    ):
        torch.save(good | {"args": args | flags}, path)
        says = command("play", path, "--script", ROOT / "ppo_clusterenv.py")
        assert has in says
    assert "evil.py has no Args" in command("play", path, "--script", "evil.py")
    assert not (here / "executed").exists()


def test_each_mistake_is_one_line(here, monkeypatch):
    def says(*flags, tool="play"):
        return command(tool, *flags)

    (here / "ppo_clusterenv.py").symlink_to(ROOT / "ppo_clusterenv.py")
    run = here / "runs/x"
    assert says("runs/x") == "there is no run runs/x"
    run.mkdir(parents=True)
    assert says("runs/x").startswith("there is no model in runs/x: each checkpoint does")
    leave_model(run, monkeypatch, env_id="CartPole-v1")
    assert says("runs/x", "--best").startswith("there is no best model in runs/x")
    assert "cannot read a.py: No such file" in says("runs/x", "--script", "a.py")
    assert "Environment `Nowhere` doesn't exist" in says("runs/x", "--env-id", "Nowhere-v1")
    assert "No module named 'nowhere'" in says("runs/x", "--env-id", "nowhere:Mine-v0")
    assert "--env-kwargs" in says("runs/x", "--env-kwargs", "a")
    assert says("runs/x", "--seed", "-1").startswith("--seed must be at least 0")
    assert says("runs/x", "--episodes", "0").startswith("--episodes must be at least 1")
    unfit = says("runs/x", "--env-id", "Acrobot-v1")
    assert "does not fit ppo_clusterenv.py on Acrobot-v1: " in unfit and "size mismatch" in unfit
    assert "'Box' object has no attribute 'n'" in says("runs/x", "--env-id", "Pendulum-v1")
    assert "model.h5 must end with .onnx or .pt2" in says("runs/x", "model.h5", tool="export")
    leave_model(run, monkeypatch, env_id="CartPole-v1", exp_name="y")
    assert "there are several, name one" in says("runs/x")
    with pytest.raises(CheckpointError, match="cannot read .*: Is a directory"):
        load_model(run)


class Own(Policy):
    """A user's policy with two observations, and a memory whose initial state is learned."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.first = nn.GRUCell(5, 6), nn.Linear(6, 3), nn.Linear(1, 6)

    def initial_state(self, num_envs):
        return {"memory": self.first(torch.ones(num_envs, 1, device=self.device)).detach().cpu()}

    def forward(self, observations, state):
        inputs = torch.cat([observations["far"], observations["near"].float()], -1)
        memory = self.cell(inputs, state["memory"])
        return self.head(memory), {"memory": memory}

    def noise(self, num_steps, params, generator):
        return torch.randn(num_steps, *params.shape, generator=generator)

    def act(self, params, noise):
        return params + noise

    def to_env(self, actions):
        return (actions.tanh() + 1) * 3

    def distribution(self, params):
        return Independent(Normal(params, 1), 1)


OWN = Dict({"near": Box(0, 9, (2,), np.int64), "far": Box(-1, 1, (3,), np.float64)})


def made(name):
    """Return a policy with random weights, and its observation space."""
    torch.manual_seed(2)
    if name == "own":
        return Own(), OWN
    module = importlib.import_module(name)
    model, policy = module.make_policy(module.Args(), spaces(*CASES[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer in model.buffers():
            buffer.add_(torch.rand_like(buffer))
    return policy.eval(), CASES[name][0]


def acted(policy, observations, starts):
    """Return the actions that environments get in each step from a worker that evaluates this
    policy.
    """
    actor = Actor(takes_mode=True)
    actor.load(policy, [part.numpy() for part in flat_weights(policy)])
    request = Collect(len(starts), 0, 0, 0.0, numbers_of(policy))
    actor.start(request, range(len(starts[0])), starts[0])
    return [leaves(actor.act(*step)) for step in zip(observations, starts, strict=True)]


QUICK = PPO, "scripts.ppo_continuous_clusterenv", "scripts.ppo_lstm_clusterenv", "own"
EACH = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in [*CASES, "own"]
]


@pytest.mark.parametrize("name", EACH)
def test_an_exported_policy_acts_as_on_a_worker(tmp_path, name):
    onnxruntime = pytest.importorskip("onnxruntime")
    policy, space = made(name)
    path = str(tmp_path / "model.onnx")
    export(policy, space, path)
    session = onnxruntime.InferenceSession(path)
    names = [given.name for given in session.get_inputs()]
    rng = np.random.default_rng(3)
    space = gym.vector.utils.batch_space(space, 20)
    space.seed(4)
    observations = [space.sample() for _ in range(5)]  # 100 in all
    starts = [np.ones(20, bool), *(rng.random(20) < 0.3 for _ in range(4))]
    shapes = {given.name: given.shape[1:] for given in session.get_inputs()}
    state = {name: np.zeros((20, *shapes[name]), np.float32) for name in names if "state" in name}
    for observation, start, expected in zip(
        observations, starts, acted(policy, observations, starts), strict=True
    ):
        parts = observation
        if not isinstance(observation, dict):
            parts = {"": observation}
        given = {f"observation.{key}".strip("."): part for key, part in parts.items()}
        given |= {"starts": start, **state} if state else {}
        actions, *state_after = session.run(None, given)
        assert actions.dtype == expected[0].dtype
        np.testing.assert_allclose(actions, expected[0], rtol=1e-5, atol=1e-5)
        state = dict(zip(state, state_after, strict=True))
    assert os.listdir(tmp_path) == ["model.onnx"]


@pytest.mark.parametrize(
    "name",
    ["own", "scripts.sac_clusterenv", pytest.param("dqn_clusterenv", marks=pytest.mark.long)],
)
def test_an_exported_policy_draws_the_same_actions_from_the_same_noise(tmp_path, name):
    onnxruntime = pytest.importorskip("onnxruntime")
    policy, space = made(name)
    path = str(tmp_path / "model.onnx")
    export(policy, space, path, stochastic=True)
    acting = Acting(policy, space, stochastic=True)
    inputs = acting.example(100)
    session = onnxruntime.InferenceSession(path)
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    actions, *_ = session.run(None, arrays)
    noise = inputs.get("noise", tuple(inputs.get(f"noise.{part}") for part in range(3)))
    with torch.no_grad():
        if name == "own":
            observation = {
                "near": inputs["observation.near"], "far": inputs["observation.far"].float()
            }  # fmt: skip
            state = {"memory": inputs["state.memory"]}
            params, _ = policy(observation, policy.started(state, inputs["starts"]))
        else:
            params = policy(inputs["observation"].float())
        expected = policy.to_env(policy.act(params, noise))
    # A drawn action is a float32 number times a standard deviation of up to e². ONNX computes it by
    # other kernels.
    np.testing.assert_allclose(actions, expected.numpy(), rtol=TOLERANCE, atol=TOLERANCE)


class Odd(Policy):
    """A policy that adds a random number to its parameters, and may have no mode."""

    def __init__(self, adds=0.0, has_mode=True):
        super().__init__()
        self.actor, self.adds, self.has_mode = nn.Linear(2, 3), adds, has_mode

    def forward(self, observations):
        return self.actor(observations) + self.adds * torch.rand(1)

    def distribution(self, params):
        return Categorical(logits=params) if self.has_mode else Distribution(validate_args=False)


def test_a_failed_export_leaves_the_previous_file(tmp_path):
    pytest.importorskip("onnxruntime")
    space = Box(-1, 1, (2,))
    path = tmp_path / "model.pt2"
    export(Odd(), space, str(path))
    before = path.read_bytes()
    policy = Odd()
    policy.forward = lambda observations: policy.actor(observations) * (1 + torch.rand(1) * 100)
    policy.distribution = lambda params: Independent(Normal(params, 1), 1)
    with pytest.raises(ValueError, match="the file's action differs from the policy's"):
        export(policy, space, str(path))
    with pytest.raises(NotImplementedError):
        export(Odd(has_mode=False), space, str(path))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.pt2"]


PROGRAMS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/after_training.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize("program", PROGRAMS, ids=["script", "package", "onnx"])
def test_the_programs_of_the_page_act(here, monkeypatch, program):
    directory = here / "runs/NAME"
    leave_model(directory, monkeypatch, env_id="CartPole-v1")
    if "onnxruntime" in program:
        pytest.importorskip("onnxruntime")
        flags = directory, "model.onnx", "--script", ROOT / "ppo_clusterenv.py"
        assert command("export", *flags) is None
        program = f"import sys\nsys.modules['torch'] = None\n{program}"
    (here / "program.py").write_text(program)
    result = scripts.run(here / "program.py", here)
    assert result.returncode == 0, result.stderr
    assert 0 < float(result.stdout.splitlines()[-1]) <= 500
