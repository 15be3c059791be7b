"""Functions that run a script in a temporary directory, and read its measurements."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]


def call(command, directory, timeout=None, stop=None, **variables):
    """Run a command with these environment variables. Return its output.

    At the end, all processes that the command has started are killed. ``stop`` is called each
    second, and the command is killed once it returns True.

    Raises:
        RuntimeError: the command has failed, or has not ended within ``timeout`` seconds.
    """
    # SIGTERM ends this process as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A pipe would stay open as long as any process that the command leaves behind.
    output = Path(directory, "output.txt")
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=directory, env={**os.environ, **variables}, start_new_session=True,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while stop and not stop() and process.poll() is None:
                time.sleep(1)
            is_over = stop and process.poll() is None
            code = 0 if is_over else process.wait(timeout)
            how = f"failed with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            how = f"had not ended after {timeout:g} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = output.read_text(errors="replace")
    if how:
        last = "\n".join(text.splitlines()[-15:])
        raise RuntimeError(f"{shlex.join(map(str, command))} {how}:\n{last}")
    return text


def import_path(directory):
    """Return a PYTHONPATH of this directory, followed by this process's own."""
    return os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])


def torchrun(number):
    """Return Python's arguments, before a script, that start ``number`` learners."""
    return "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)


def on_envpool(script, directory, threads):
    """Write a copy of a script whose environments are EnvPool's, as docs/training.md says.

    Return its path. ``threads`` is the number of EnvPool's threads in each worker.
    """
    text = script.read_text()
    games = ", episodic_life=True, reward_clip=True" if "atari" in script.name else ""
    made = f"EnvPoolVectorEnv(args.env_id, number, num_threads={threads}{games})"
    import_line = "from clusterenv_runtime.extras.envpool import EnvPoolVectorEnv"
    for line, new in (
        ("from clusterenv_runtime import ", f"{import_line}\nfrom clusterenv_runtime import "),
        ("ClusterEnv(env_fns, ", f"ClusterEnv(lambda number: {made}, num_envs=args.num_envs, "),
    ):
        if text.count(line) != 1:
            raise ValueError(f"{script} has {line!r} {text.count(line)} times, not once")
        text = text.replace(line, new)
    path = Path(directory, script.name)
    path.write_text(text)
    return path


def train(script, *flags, python=sys.executable, launcher=(), timeout=None, stop=None, **variables):
    """Run a training script. Return a function from a tag to its scalars, and the run's summary.

    The summary is None if the script writes none. The script is killed once ``stop`` returns True,
    which is called each second with the run's directory. If there is a ``launcher``, Python runs
    it, and it runs the script; see `torchrun`. The flag ``--envpool=THREADS`` is of this function:
    see `on_envpool`.
    """
    script = Path(script).resolve()
    paths = import_path(script.parent.parent)
    pools = [flag for flag in flags if flag.startswith("--envpool=")]
    flags = [flag for flag in flags if flag not in pools]
    with tempfile.TemporaryDirectory() as directory:
        if pools:
            script = on_envpool(script, directory, pools[-1].removeprefix("--envpool="))
        # A CleanRL script may import cleanrl_utils, which is beside the script's folder.
        call(
            [str(python), *launcher, str(script), *flags],
            directory,
            timeout,
            stop and partial(stop, Path(directory)),
            PYTHONPATH=paths,
            **variables,
        )
        (folder,) = Path(directory, "runs").iterdir()
        events = EventAccumulator(str(folder))
        events.Reload()
        summary = folder / "summary.json"
        return events.Scalars, json.loads(summary.read_text()) if summary.exists() else None


def run(script, *flags, **arguments):
    """Run a training script. Return its last charts/SPS, and its summary or None."""
    scalars, summary = train(script, *flags, **arguments)
    return scalars("charts/SPS")[-1].value, summary


def steady(script, *flags, **arguments):
    """Run a training script. Return its environment steps and seconds in steady state.

    The first and the last iteration are left out. The last one does not overlap with a next one.
    Without it, the others are as in an endless run, except that with both --overlap and --compile,
    the first of them finds its rollout ready. That is worth up to 2% in 25 iterations.
    """
    scalars, _ = train(script, *flags, **arguments)
    first, *_, last, _ = scalars("charts/SPS")
    return last.step - first.step, last.wall_time - first.wall_time


def measure(module, *arguments, python=sys.executable, timeout=None):
    """Run a benchmark module that ends with `work.report`. Return its steps and seconds."""
    with tempfile.TemporaryDirectory() as directory:
        # Some libraries write their logs to HOME.
        variables = {"PYTHONPATH": import_path(ROOT), "HOME": directory, "OMP_NUM_THREADS": "1"}
        text = call(
            [str(python), "-m", module, *map(str, arguments)], directory, timeout, **variables
        )
    (line,) = (line for line in text.splitlines() if line.startswith('{"steps"'))
    report = json.loads(line)
    return report["steps"], report["seconds"]
