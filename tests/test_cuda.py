"""A script's gradient step as one CUDA graph. Without a GPU, only tests of the plain step run."""

import copy
import io
import json
import operator
import re
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Distribution

from clusterenv_utils import CudaGraph, FrameReplayBuffer, ScriptError, device_with_room
from dqn_clusterenv import ReplayBuffer, make_transitions
from experiments.benchmarks.steps import SCRIPTS, loss_of, make

from . import scripts
from .algorithms.test_formulas import chunk_of, in_frames

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
STEPS = 10  # the first three are eager, and the fourth is captured
RATES = 2**-10, 2**-9, 2**-11  # learning rates, exact in float32, as a float or as a tensor


@pytest.fixture(autouse=True)
def as_in_the_scripts(monkeypatch):
    before, precision = Distribution._validate_args, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    Distribution.set_default_validate_args(False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    yield
    Distribution.set_default_validate_args(before)
    torch.set_float32_matmul_precision(precision)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def minibatch(learner, number):
    """Return a step's tensors: the learner's inputs, each shifted by its own number of rows."""
    named = enumerate(learner.inputs.items())
    return {name: value.roll(number * row, 0) for row, (name, value) in named}


def take(learner, step, numbers):
    """Take the steps with these numbers, each at its own learning rate. Return their losses."""
    torch.manual_seed(numbers[0])
    losses = []
    for number in numbers:
        learner.optimizer.param_groups[0]["lr"] = RATES[number % len(RATES)]
        losses.append(loss_of(step(minibatch(learner, number))))
    return torch.stack(losses)


def weights(learner):
    return torch.cat([value.detach().flatten() for value in learner.fixed[0].parameters()])


def assert_same(name, got, expected, before, most=0.01):
    """Assert that weights differ by at most a small share of the change that training made."""
    share = ((got - expected).abs().mean() / (expected - before).abs().mean()).item()
    print(f"{name}: a difference of {share:.1e} of the change")
    assert share <= most


@pytest.mark.parametrize("name", SCRIPTS)
def test_on_a_cpu_a_step_is_a_call_of_the_function(name):
    plain, wrapped = make(name, "cpu"), make(name, "cpu")
    number = 1 if "atari" in name else 3
    before = weights(plain)
    expected = take(plain, plain.step, range(number))
    assert torch.equal(take(wrapped, wrapped.graph(), range(number)), expected)
    assert torch.equal(weights(wrapped), weights(plain))
    assert not torch.equal(weights(plain), before)


class Graph(CudaGraph):
    """Captures on a CPU: its "graph" is the step itself, or another one."""

    def __init__(self, replays, *arguments):
        super().__init__(*arguments)
        self.replays = replays

    def _allocate(self, minibatch):
        self._inputs = {name: torch.empty_like(value) for name, value in minibatch.items()}
        self._rates = [torch.empty(()) for _ in self._optimizer.param_groups]

    def _run_eagerly(self):
        return self._step(self._inputs)

    def _capture(self):
        def replay():
            self._outputs = self.replays(self._step, self._inputs)

        return SimpleNamespace(replay=replay)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: None)


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_the_comparison_of_a_graph_changes_nothing(no_gpu, name):
    plain, compared = make(name, "cpu"), make(name, "cpu")
    expected = take(plain, plain.step, range(6))
    graph = Graph(lambda step, mb: step(mb), compared.update, compared.optimizer, *compared.fixed)
    compared.inputs = {key: value.as_subclass(OnGpu) for key, value in compared.inputs.items()}
    found = take(compared, graph, range(6))
    assert torch.equal(found.as_subclass(torch.Tensor), expected)
    assert torch.equal(weights(compared), weights(plain))


@pytest.mark.parametrize(
    ("replays", "is_right"),
    [
        (lambda step, mb: {name: 1.005 * each for name, each in step(mb).items()}, True),
        (lambda step, mb: {name: 1.1 * each for name, each in step(mb).items()}, False),
        (lambda step, mb: step({**mb, "returns": mb["returns"] + 1}), False),
    ],
    ids=["other kernels", "wrong", "other inputs"],
)
def test_a_graph_that_computes_something_else_ends_the_run_in_one_line(no_gpu, replays, is_right):
    learner = make("ppo", "cpu")
    graph = Graph(replays, learner.update, learner.optimizer, *learner.fixed)
    learner.inputs = {key: value.as_subclass(OnGpu) for key, value in learner.inputs.items()}
    take(learner, graph, range(3))
    if is_right:
        take(learner, graph, range(3, 5))
    else:
        with pytest.raises(
            ScriptError, match=r"of update is \S+ by its CUDA graph and \S+ without"
        ):
            take(learner, graph, range(3, 4))


@pytest.mark.parametrize("size", [1e-5, 1, 1e5])
def test_a_wrong_loss_is_found_if_all_losses_are_small_or_large(no_gpu, size):
    def update(optimizer, minibatch):
        return {"loss": size * minibatch["rewards"].mean()}

    def replays(step, minibatch):
        return {"loss": 1.1 * step(minibatch)["loss"]}

    learner = make("ppo", "cpu")
    graph = Graph(replays, update, learner.optimizer)
    rewards = torch.ones(4).as_subclass(OnGpu)
    for _ in range(3):
        graph({"rewards": rewards})
    with pytest.raises(ScriptError, match="loss of update is"):
        graph({"rewards": rewards})


@on_gpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_steps_of_a_graph_equal_eager_steps(name):
    eager, replayed = make(name, "cuda"), make(name, "cuda")
    before = weights(eager)
    expected = take(eager, eager.step, range(STEPS))
    got = take(replayed, replayed.graph(), range(STEPS))
    most = 0.05 if "atari" in name else 0.01  # convolutions may use other algorithms
    print(f"{name}: losses differ by {(got - expected).abs().max().item():.1e}")
    torch.testing.assert_close(got, expected, rtol=most, atol=most)
    assert_same(name, weights(replayed), weights(eager), before, most)


@on_gpu
def test_the_steps_of_a_graph_of_the_compiled_loss_equal_eager_steps():
    eager, replayed = make("ppo", "cuda"), make("ppo", "cuda", compiled=True)
    before = weights(eager)
    take(eager, eager.step, range(STEPS))
    take(replayed, replayed.graph(), range(STEPS))
    assert_same("ppo, compiled", weights(replayed), weights(eager), before, most=0.05)


@on_gpu
@pytest.mark.parametrize("name", ["ppo", "ppo_lstm", "dqn"])
def test_a_resumed_optimizer_goes_on_at_its_rate(name):
    whole, first, resumed = (make(name, "cuda") for _ in range(3))
    before = weights(whole)
    take(whole, whole.graph(), range(2 * STEPS))
    take(first, first.graph(), range(STEPS))
    file = io.BytesIO()
    state = {"network": first.fixed[0].state_dict(), "optimizer": first.optimizer.state_dict()}
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, map_location="cpu", weights_only=True)
    (group,) = state["optimizer"]["param_groups"]
    assert group["lr"] == RATES[(STEPS - 1) % len(RATES)] and not group["capturable"]
    resumed.fixed[0].load_state_dict(state["network"])
    resumed.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    take(resumed, resumed.graph(), range(STEPS, 2 * STEPS))
    assert_same(name, weights(resumed), weights(whole), before)
    # The checkpoint of a run on a GPU can be resumed on the CPU.
    on_cpu = make(name, "cpu")
    on_cpu.optimizer.load_state_dict(state["optimizer"])
    take(on_cpu, on_cpu.graph(), range(2))


@on_gpu
@pytest.mark.parametrize("name", ["ppo", "ppo_continuous", "ppo_lstm", "dqn", "dqn_atari", "sac"])
def test_nothing_in_a_step_waits_for_the_gpu(name):
    learner = make(name, "cuda")
    step = learner.graph()
    take(learner, step, range(1))  # the first step allocates
    batches = [minibatch(learner, number) for number in range(STEPS)]
    for number, batch in enumerate(batches, start=2):
        # The capture, in the fourth step, waits for all earlier work.
        torch.cuda.set_sync_debug_mode("default" if number == 4 else "error")
        step(batch)
    torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_tensors_of_another_shape_are_refused():
    learner = make("dqn", "cuda")
    step = learner.graph()
    step(learner.inputs)
    with pytest.raises(ValueError, match=r"got a minibatch of .*\[1, 8\].* expected .*\[128, 8\]"):
        step({name: value[:1] for name, value in learner.inputs.items()})


WAITS = """
import runpy, sys, warnings, torch
def show(message, category, filename, lineno, file=None, line=None):
    if "synchronizing" in str(message):
        print("waits", filename, lineno, file=sys.stderr)
warnings.showwarning = show
warnings.simplefilter("always")
torch.cuda.set_sync_debug_mode("warn")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = "--num-workers 2 --envs-per-worker 4 --total-timesteps 4096 --eval-episodes 0 --cuda"
LOOPS = {  # flags, and the first and last line of the part that must not wait
    "ppo_clusterenv.py": ("", "# Optimizing", "clipfracs +="),
    "scripts/ppo_continuous_clusterenv.py": ("", "# Optimizing", "clipfracs +="),
    "scripts/ppo_lstm_clusterenv.py": ("", "# Optimizing", "clipfracs +="),
    "dqn_clusterenv.py": ("--learning-starts 512", "while count.gradient_steps", "lerp_"),
    "scripts/sac_clusterenv.py": (
        "--env-id Pendulum-v1 --total-timesteps 1024 --learning-starts 512",
        "for step in range(number)", "lerp_",
    ),
}  # fmt: skip


@on_gpu
@pytest.mark.parametrize("script", LOOPS)
def test_between_the_advantages_and_the_report_nothing_waits(tmp_path, script):
    flags, first, last = LOOPS[script]
    command = [sys.executable, "-c", WAITS, str(scripts.ROOT / script)]
    command += [*SMALL.split(), *flags.split()]
    result = subprocess.run(
        command, cwd=tmp_path, env=scripts.environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    waits = re.findall(r"^waits (.*) (\d+)$", result.stderr, re.M)
    assert waits  # for the values, before the advantages
    lines = (scripts.ROOT / script).read_text().split("\n")
    start, end = (
        min(number for number, line in enumerate(lines, 1) if text in line)
        for text in (first, last)
    )
    assert start < end
    of_script = {int(number) for path, number in waits if path.endswith(script)}
    assert not [lines[number - 1] for number in of_script if start <= number <= end]
    for path, number in waits:  # chunks come from the host, and batches are drawn on the GPU
        assert not path.endswith("cuda_graph.py"), number


@on_gpu
def test_a_replay_buffer_is_on_the_gpu_if_it_fits_there(monkeypatch, capsys):
    gpu = torch.device("cuda")
    rows = {"obs": torch.zeros(2, 256), "dones": torch.zeros(2, 256)}  # 2 KiB each
    assert device_with_room(rows, 2**9, gpu) == gpu
    assert "1.0 MiB on the cuda" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**40))
    assert device_with_room(rows, 2**9, gpu) == torch.device("cpu")
    assert "on the cpu" in capsys.readouterr().out


@on_gpu
@pytest.mark.parametrize("has_frames", [False, True])
def test_a_replay_buffer_on_a_gpu_holds_what_one_in_memory_does(has_frames):
    space = gym.spaces.Box(0, 255, (4, 1, 1), np.uint8)

    def make(device):
        return FrameReplayBuffer(30, 200, space, device) if has_frames else ReplayBuffer(30, device)

    here, there, back = make("cpu"), make("cuda"), make("cpu")
    for number in range(6):
        for buffer in (here, there):
            chunk = chunk_of(8 * number, 4, 2, (4, 1, 1))
            buffer.add(in_frames(chunk) if has_frames else make_transitions(chunk))
    back.load_state_dict(there.state_dict())
    for name, value in here.state_dict().items():
        equal = torch.equal if torch.is_tensor(value) else operator.eq
        assert equal(value, back.state_dict()[name]), name
    numbers = (1000,) if has_frames else (1, 1000)
    sample = there.sample(*numbers, torch.device("cuda"))
    assert all(value.is_cuda for value in sample.values())
    rewards = set(sample["rewards"].flatten().tolist())
    again = here.sample(*numbers, torch.device("cpu"))
    assert rewards == set(again["rewards"].flatten().tolist())


@on_gpu
def test_two_learners_share_a_gpu(tmp_path):
    """NCCL refuses to share a GPU, so the learners use Gloo. They compare their models after each
    rollout.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "0", str(scripts.ROOT / "scripts/ppo_multilearner_clusterenv.py")]
    flags = "--cuda --num-workers 2 --envs-per-worker 4 --num-steps 32 --eval-episodes 2"
    result = subprocess.run(
        [*command, *flags.split(), "--total-timesteps", "1024"],
        cwd=tmp_path, env=scripts.environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["updates"] == 4


@on_gpu
def test_a_run_goes_on_from_gpu_to_cpu_and_back(tmp_path):
    flags = "--env-id CartPole-v1 --num-workers 1 --envs-per-worker 8 --num-steps 32"
    flags += " --num-minibatches 4 --update-epochs 2 --eval-episodes 2"
    steps = 8 * 32

    def train(*flags):  # in a new process, without this one's CUDA state
        return scripts.train("ppo_clusterenv.py", tmp_path, *flags, CUDA_MODULE_LOADING="LAZY")

    folder, _ = train(*flags.split(), "--total-timesteps", str(3 * steps), "--cuda")
    for number, where in ((6, "--no-cuda"), (9, "--cuda")):
        more = ["--resume", f"runs/{folder.name}", "--total-timesteps", str(number * steps), where]
        folder, summary = train(*more)
        assert summary["global_step"] == number * steps
    losses = scripts.scalars(folder, "losses/value_loss")
    assert len(losses) == 9 and all(0 < loss < 1000 for loss in losses)
