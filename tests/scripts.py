"""Running the training scripts as a user runs them."""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import Distribution

from clusterenv_utils import ScriptError

from . import forked
from .patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
TIMES = int(os.environ.get("RESUME_TIMES", 1))  # how often a process is killed at a random moment

# Each script with tiny numbers, and how many gradient steps an off-policy one then takes.
BATCHES = "--envs-per-worker 2 --num-steps 16 --num-minibatches 2 --total-timesteps 320"
BATCHES += " --eval-episodes 2"
ATARI = "--env-id ALE/Breakout-v5 --envs-per-worker 1 --eval-episodes 1"
TINY = {
    "ppo_clusterenv.py": f"{BATCHES} --env-id CartPole-v1",
    "dqn_clusterenv.py": "--envs-per-worker 2 --num-steps 4 --learning-starts 100 --batch-size 16 "
    "--total-timesteps 800 --buffer-size 500 --eval-episodes 2 --sync-check-frequency 5",
    "scripts/sac_clusterenv.py": "--env-id Pendulum-v1 --num-steps 8 --learning-starts 64 "
    "--batch-size 8 --total-timesteps 160 --buffer-size 500 --eval-episodes 2",
    "scripts/ppo_continuous_clusterenv.py": f"{BATCHES} --env-id Pendulum-v1 --update-epochs 2",
    "scripts/ppo_lstm_clusterenv.py": f"{BATCHES} --hidden-size 8",
    "scripts/ppo_minatar_clusterenv.py": f"{BATCHES} --update-epochs 1",
    "scripts/ppo_multilearner_clusterenv.py": f"{BATCHES} --env-id CartPole-v1",
    "scripts/ppo_atari_clusterenv.py": f"{ATARI} --num-steps 16 --num-minibatches 2 "
    "--update-epochs 1 --total-timesteps 96",
    "scripts/dqn_atari_clusterenv.py": f"{ATARI} --num-steps 16 --learning-starts 64 "
    "--total-timesteps 192 --buffer-size 100 --target-network-frequency 40 --batch-size 8 "
    "--sync-check-frequency 5 --end-e 1",
}
TINY = {script: flags.split() for script, flags in TINY.items()}
PPO, DQN = "ppo_clusterenv.py", "dqn_clusterenv.py"
TRAINS = {
    "dqn_clusterenv.py": lambda summary: (summary["global_step"] - 100) // 10,
    "scripts/dqn_atari_clusterenv.py": lambda summary: (summary["global_step"] - 64) // 4,
    "scripts/sac_clusterenv.py": lambda summary: summary["global_step"] - 64,
}


# A CartPole whose runs last on any machine. After the first STEPS steps of an environment, each
# step takes SECONDS longer, until the file `go` exists in the working directory. The first reset
# writes the file `reset` there.
LASTING_ID = "lasting_env:Lasting-v0"
LASTING_ENV = """
import os, pathlib, time
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Lasting(CartPoleEnv):
    steps = 0

    def reset(self, **kwargs):
        if not os.path.exists("reset"):
            pathlib.Path("reset").touch()
        return super().reset(**kwargs)

    def step(self, action):
        self.steps += 1
        if self.steps > STEPS and not os.path.exists("go"):
            time.sleep(SECONDS)
        return super().step(action)

gym.register("Lasting-v0", Lasting, max_episode_steps=500)
"""


def environment(**extra):
    """Return the variables of scripts, which can import from their working directory."""
    wandb = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    wandb |= {"WANDB_X_SERVICE_WAIT": str(PATIENCE), "WANDB_INIT_TIMEOUT": str(PATIENCE)}
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}.", **wandb, **extra}


def lasting(directory, steps, seconds=0.05):
    """Write LASTING_ENV into a directory, and return the flags of a run with it there."""
    Path(directory, "lasting_env.py").write_text(
        f"STEPS, SECONDS = {steps}, {seconds}\n{LASTING_ENV}"
    )
    return ["--env-id", LASTING_ID]


def run(script, directory, *flags, **extra):
    """Run a script to its end, and return its exit code and output as a ``CompletedProcess``.

    ``extra`` variables need a new process, because Python itself may read them. Only PYTHONPATH
    does not.
    """
    if extra.keys() <= {"PYTHONPATH"}:
        return forked.run(ROOT / script, directory, flags, environment(**extra))
    command = [sys.executable, str(ROOT / script), *flags]
    return subprocess.run(
        command, cwd=directory, env=environment(**extra), capture_output=True, text=True
    )


def train(script, directory, *flags, **extra):
    """Run a script to its end, and return the run's folder and summary."""
    result = run(script, directory, *flags, **extra)
    assert result.returncode == 0, result.stderr
    (folder,) = Path(directory, "runs").iterdir()
    return folder, json.loads((folder / "summary.json").read_text())


def events_of(folder):
    """Return a run's TensorBoard logs."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder, tag):
    return [event.value for event in events_of(folder).Scalars(tag)]


def children_of(pid):
    """Return the pids of a process's children."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def fork_server_of(pid):
    """Return the pid of a head's fork server, or None if there is none."""
    for child in children_of(pid):
        if any(b"clusterenv_runtime.launchers.fork_server" in each for each in command_of(child)):
            return child
    return None


def workers_of(pid):
    """Return the pids of a head's worker processes, forked or not, numbered in their order.

    These numbers are the workers' indices as long as none is replaced.
    """
    server = fork_server_of(pid)
    workers = [child for child in children_of(pid) if b"--index" in command_of(child)]
    workers += [] if server is None else children_of(server)
    return dict(enumerate(sorted(workers)))


def ranks_of(pid, variable):
    """Return the pids of the processes that torchrun or mpirun has started, by rank.

    ``variable`` is the environment variable that holds a process's rank.
    """
    ranks, begins = {}, f"{variable}=".encode()
    for child in children_of(pid):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks |= {int(each[len(begins) :]): child for each in variables if each.startswith(begins)}
    return ranks


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_and_await_training(script, directory, *flags):
    """Start a run that lasts, see LASTING_ENV, and wait until it trains.

    Return its process and its workers' pids.
    """
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *flags, *lasting(directory, 80)],
        cwd=directory, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step"):
            break
    return process, list(workers_of(process.pid).values())


SLOW_ENV = """
import os
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
from tests.patience import wait_until

def takes_it():
    try:
        open("slow", "x").close()
        return True
    except FileExistsError:
        return False

class Slow(CartPoleEnv):
    steps = 0
    is_slow = None  # of all in this process

    def step(self, action):
        if Slow.is_slow is None:
            Slow.is_slow = takes_it()
        if self.is_slow and self.steps == 2:
            wait_until(lambda: os.path.exists("far"))
        self.steps += 1
        if not self.is_slow and self.steps == FAR:
            open("far", "w").close()
        return super().step(action)

gym.register("Slow-v0", Slow, max_episode_steps=500)
"""


def write_slow_env(directory, far):
    """Write the module of a slow environment into a directory, and return the environment's id.

    In its first chunk, one worker waits until an environment of another worker has made ``far``
    steps.
    """
    Path(directory, "slow_env.py").write_text(SLOW_ENV.replace("FAR", str(far)))
    return "slow_env:Slow-v0"


def parameters(scripts, later):
    """Return these scripts as a test's parameters, those in ``later`` only for `make test-all`."""
    return [pytest.param(each, marks=[pytest.mark.long] * (each in later)) for each in scripts]


def check_refusal(result, says):
    """Check that a run ended before it began, with one line."""
    assert result.returncode != 0
    assert (
        says in result.stderr
        and result.stderr.startswith("error: ")
        and result.stderr.count("\n") == 1
    )


def check_refusal_here(monkeypatch, script, directory, flags, says):
    """Check the same in this process, which has imported everything already."""
    with monkeypatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", [script, *flags])
        patch.setattr(sys, "excepthook", sys.excepthook)
        with pytest.raises(ScriptError) as raised:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    Distribution.set_default_validate_args(__debug__)  # as scripts set it otherwise
    line = str(raised.value)
    del raised
    gc.collect()  # closes workers that the script may have started
    assert says in line and "\n" not in line
    assert os.listdir(directory) == []


def check_interruption(process, workers, number=signal.SIGINT, code=130):
    """Check that a signal interrupts a run cleanly, with a line that says how to resume it.

    Return the run's folder.
    """
    assert len(workers) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    (line,) = errors.splitlines()
    assert line.startswith(
        f"interrupted; to resume: python {process.args[1]} --env-id={LASTING_ID} --resume runs/"
    )
    assert not any(alive(pid) for pid in workers)
    return line.rpartition(" ")[2]


def check_loss_of_worker_1(process, workers):
    """Check that a killed worker ends a run with ``--on-worker-loss raise``, and is named."""
    os.kill(workers[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    saved, line = errors.splitlines()
    assert saved.startswith("saved; to resume: python ")
    assert line.startswith("error: worker 1 ") and "SIGKILL" in line and "worker-1.log" in line
    assert not any(alive(pid) for pid in workers)
