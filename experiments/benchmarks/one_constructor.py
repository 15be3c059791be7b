"""A check that CleanRL's scripts learn exactly the same with one constructor changed.

    python -m experiments.benchmarks.one_constructor --cleanrl path/to/cleanrl

CleanRL is not part of this repository: clone https://github.com/vwxyzjn/cleanrl and pass its
directory. Each of five scripts runs once with `gym.vector.SyncVectorEnv`, and once with
`ClusterEnv` in its place. Prints the number of scalars that they log. Fails unless all weights and
all scalars, except the speed, are equal to the last bit.
"""

import hashlib
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .scripts import ROOT, call

SCRIPTS = {  # CleanRL's scripts, with flags that make them short
    "ppo.py": "--env-id CartPole-v1 --num-envs 4 --total-timesteps 2048",
    "ppo_continuous_action.py": (
        "--env-id Hopper-v5 --num-envs 2 --num-steps 256 --total-timesteps 2048"
    ),
    "dqn.py": "--env-id CartPole-v1 --learning-starts 500 --total-timesteps 2000",
    "c51.py": "--env-id CartPole-v1 --learning-starts 500 --total-timesteps 2000",
    "sac_continuous_action.py": "--env-id Hopper-v5 --learning-starts 300 --total-timesteps 800",
}


CONSTRUCTOR = "gym.vector.SyncVectorEnv("


@dataclass
class Args:
    cleanrl: Path
    """directory of a clone of CleanRL"""
    scripts: tuple[str, ...] = tuple(SCRIPTS)
    """CleanRL's scripts to run"""
    num_workers: int = 2
    """worker processes of the second run"""


def run_script(num_workers, script):
    """Run a script in this process, and print a digest of the weights of its networks.

    With ``num_workers`` of 0, the script is unchanged.
    """
    from torch import nn

    sys.path.insert(0, str(Path(script).parent.parent))  # the folder that contains cleanrl_utils
    text = Path(script).read_text()
    # Gymnasium 1 also needs the observation space.
    text = text.replace("np.clip(obs, -10, 10))", "np.clip(obs, -10, 10), env.observation_space)")
    if num_workers:
        from clusterenv_runtime import ClusterEnv

        assert text.count(CONSTRUCTOR) == 1, f"{script} has {text.count(CONSTRUCTOR)} {CONSTRUCTOR}"
        text = text.replace(CONSTRUCTOR, "ClusterEnv(")
        sys.modules["__main__"].ClusterEnv = partial(ClusterEnv, num_workers=num_workers)
    variables = sys.modules["__main__"].__dict__
    exec(compile(text, script, "exec"), variables)
    digest = hashlib.sha256()
    for _, network in sorted(
        (name, each) for name, each in variables.items() if isinstance(each, nn.Module)
    ):
        for weight in network.state_dict().values():
            digest.update(weight.numpy().tobytes())
    print(f"\ndigest {digest.hexdigest()}")


def learn(script, num_workers, flags):
    """Run a script in its own process. Return its scalars and the digest of its weights.

    The scalars do not include the speed.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "experiments.benchmarks.one_constructor",
            "--run",
            str(num_workers),
            str(script),
            *flags,
        ]
        text = call(command, directory, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        (folder,) = Path(directory, "runs").iterdir()
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        tags = sorted(tag for tag in events.Tags()["scalars"] if tag != "charts/SPS")
        return {
            tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags
        }, text.split()[-1]


def main():
    """Compare the scripts."""
    args = tyro.cli(Args)
    unequal = []
    for name in args.scripts:
        script = (args.cleanrl / "cleanrl" / name).resolve()
        (own, digest), (ours, our_digest) = (
            learn(script, workers, SCRIPTS[name].split()) for workers in (0, args.num_workers)
        )
        is_equal = own == ours and digest == our_digest and len(own) > 0
        unequal += [name] * (not is_equal)
        numbers = sum(map(len, own.values()))
        print(
            f"{name}: {numbers} scalars and all weights {'are equal' if is_equal else 'DIFFER'}",
            flush=True,
        )
    sys.exit(f"error: not equal: {', '.join(unequal)}" if unequal else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _, _, workers, script, *flags = sys.argv
        sys.argv = [script, *flags]
        run_script(int(workers), script)
    else:
        main()
