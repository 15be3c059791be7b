"""Recordings of a script's training, with everything that an independent computation needs to
repeat it. `record` returns one.

As a program, this module runs a script and records its calls of `ClusterEnv`.
"""

import json
import pickle
import runpy
import signal
import sys
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import forked, scripts

ACTS = 500  # how often the evaluated policy acts on each observation
NETWORKS = "agent", "q_network", "target_network", "actor"


@dataclass
class Call:
    """A call that returned a rollout or a chunk, and the script's state at the time of the call."""

    rollout: Any  # the returned value
    torch_state: torch.Tensor  # the state of torch's random numbers
    networks: dict[str, dict[str, torch.Tensor]]  # the networks' `state_dict`, by name


@dataclass
class Recording:
    args: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    # The epsilon with which each chunk was requested.
    epsilons: list[float] = field(default_factory=list)
    # The newest version of the policy when each chunk was requested.
    newest: list[int] = field(default_factory=list)
    # The seeds with which the environments were reset.
    seeds: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # the published versions of the policy
    # The networks at the time of each publication.
    published: list[dict[str, dict[str, torch.Tensor]]] = field(default_factory=list)
    # The parts that a checkpoint would have at the beginning of training.
    parts: dict[str, Any] = field(default_factory=dict)
    # The networks after training.
    networks: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    scalars: dict[str, list[float]] = field(default_factory=dict)  # the logged scalars
    steps: dict[str, list[int]] = field(default_factory=dict)  # the steps at which they were logged
    summary: dict[str, Any] = field(default_factory=dict)
    # The evaluated policy's observations: (number, ...), or with memory (steps, number, ...).
    acted_on: np.ndarray | None = None
    # The evaluated policy's actions at the last step: (ACTS, number, ...).
    acts: np.ndarray | None = None


def record(script, directory, *flags, interrupt=None):
    """Run a script in a directory, with a run named `x`, and return its Recording.

    If ``interrupt`` is given, a SIGTERM comes in this iteration, before its update.
    """
    output = Path(directory, "recording.pickle")
    number = "" if interrupt is None else str(interrupt)
    flags = [*flags] if "--resume" in flags else [*flags, "--run-name", "x"]
    arguments = [str(output), str(scripts.ROOT / script), number, *flags]
    result = forked.run(Path(__file__), directory, arguments, scripts.environment())
    assert result.returncode == (0 if interrupt is None else 75), result.stderr
    recording = pickle.loads(output.read_bytes())
    if interrupt is None:
        (summary,) = Path(directory, "runs").glob("*/summary.json")
        recording.summary = json.loads(summary.read_text())
    return recording


def evaluated(policy, rollout):
    """Return observations of a rollout, and the evaluated policy's actions on them, drawn ACTS
    times.
    """
    from clusterenv_runtime.arrays import map_tree

    generator = torch.Generator().manual_seed(1)
    obs = rollout.next_observations
    in_sequence = policy.initial_state(1) is not None
    if in_sequence:
        obs = rollout.observations[:2]
    elif obs.ndim == 2:
        obs = np.concatenate([*rollout.observations, obs])
    steps = torch.as_tensor(obs if in_sequence else obs[None])
    steps = steps.float() if policy.float_observations else steps
    starts = torch.zeros(steps.shape[:2], dtype=bool)
    params, _ = policy.unroll(steps, starts, policy.initial_state(steps.shape[1]))
    noise = policy.noise(ACTS, params[-1], generator)
    each = [map_tree(itemgetter(step), noise) for step in range(ACTS)]
    return obs, np.stack([policy.to_env(policy.act(params[-1], one)).numpy() for one in each])


def main(output, script, interrupt, *flags):
    import clusterenv_utils as harness
    from clusterenv_runtime import ClusterEnv, Rollout
    from clusterenv_utils import Run
    from clusterenv_utils.logs import LearningCurve

    recording, kept = Recording(), {}
    original = {
        name: getattr(ClusterEnv, name) for name in ("rollout", "recv", "send", "reset", "publish")
    }
    keep, add, evaluates = Run.keep, LearningCurve.add_episodes, harness.evaluate
    joins = Rollout.concatenate
    add_scalars = torch.utils.tensorboard.SummaryWriter.add_scalar

    def script_variables():
        frame = sys._getframe(2)
        while frame.f_globals["__name__"] != "__main__":  # skip the harness's frames
            frame = frame.f_back
        return frame.f_globals

    def networks(variables):
        return {
            name: deepcopy(variables[name].state_dict()) for name in NETWORKS if name in variables
        }

    def collect(name):
        def call(envs, *args, **kwargs):
            state = torch.get_rng_state(), networks(script_variables())
            result = original[name](envs, *args, **kwargs)
            rollout = result[1] if name == "recv" else result
            recording.calls.append(Call(deepcopy(rollout), *state))
            return result

        return call

    def concatenate(chunks):
        """Join the chunks that were received last, and record the rollout in their place."""
        rollout = joins(chunks)
        recording.calls[-len(chunks) :] = [replace(recording.calls[-1], rollout=deepcopy(rollout))]
        return rollout

    def send(envs, *args, **kwargs):
        policy = script_variables()["policy"]
        recording.epsilons += [getattr(policy, name) for name in policy.numbers[:1]]
        recording.newest.append(envs.policy_version)
        return original["send"](envs, *args, **kwargs)

    def reset(envs, *, seed=None, **kwargs):
        recording.seeds.append(seed)
        return original["reset"](envs, seed=seed, **kwargs)

    def publish(envs, *args, **kwargs):
        if not recording.versions:
            recording.parts = {name: deepcopy(part.state_dict()) for name, part in kept.items()}
        original["publish"](envs, *args, **kwargs)
        recording.versions.append(envs.policy_version)
        recording.published.append(networks(script_variables()))

    def add_episodes(curve, returns, lengths):
        add(curve, returns, lengths)
        if interrupt and len(recording.calls) == int(interrupt):
            signal.raise_signal(signal.SIGTERM)

    def keep_noted(run, name, part, *more):
        kept[name] = part
        return keep(run, name, part, *more)

    def evaluate(args, envs, policy):
        kept["evaluated"] = policy
        return evaluates(args, envs, policy)

    def add_scalar(writer, tag, value, step, **kwargs):
        recording.scalars.setdefault(tag, []).append(float(value))
        recording.steps.setdefault(tag, []).append(step)
        return add_scalars(writer, tag, value, step, **kwargs)

    ClusterEnv.rollout, ClusterEnv.recv = collect("rollout"), collect("recv")
    ClusterEnv.send, ClusterEnv.reset, ClusterEnv.publish = send, reset, publish
    Rollout.concatenate = concatenate
    Run.keep, LearningCurve.add_episodes = keep_noted, add_episodes
    harness.evaluate = evaluate
    torch.utils.tensorboard.SummaryWriter.add_scalar = add_scalar
    torch.set_num_threads(1)  # several threads wait for each other on a busy machine
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    try:
        variables = runpy.run_path(script, run_name="__main__")
        recording.args, recording.networks = vars(variables["args"]), networks(variables)
        with torch.no_grad():
            if "target_network" in variables:  # a script that acts by it now acts differently
                for parameter in list(variables["target_network"].parameters())[-2:]:
                    parameter.neg_()
            recording.acted_on, recording.acts = evaluated(
                kept["evaluated"], recording.calls[-1].rollout
            )
    finally:
        Path(output).write_bytes(pickle.dumps(recording))


if __name__ == "__main__":
    # So pickles refer to a module that other processes can import.
    from tests.algorithms import recording as this

    this.main(*sys.argv[1:])
