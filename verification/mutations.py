"""Mistakes that are put into the runtime, one at a time, for `verification.simulate` to find.

    python -m verification.mutations

Each mistake goes into a copy of the code, in its own directory.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# For each mistake: the file, a piece of it, and its replacement. Some were once in the runtime.
MUTATIONS = {
    "a replacement is believed to hold its predecessor's weights": (
        "head/recovery.py",
        "worker.copy.forget()",
        "pass",
    ),
    "a replacement gets no outstanding requests": (
        "head/pool.py",
        "for request in self._requests_of(worker):\n            self.post(",
        "for request in []:\n            self.post(",
    ),
    "until 851c8d7: a pull before the first publication ends the run": (
        "head/pool.py",
        "case messages.Pull() if self.store.weights:",
        "case messages.Pull():",
    ),
    "until 8cddea0: an episode lost after the response to a step is not reported": (
        "head/pool.py",
        "if request.process_is_gone:\n",
        "if False:\n",
    ),
    "the end of a lost episode is not reported": (
        "head/recovery.py",
        "yield messages.CutOff(worker.seen, worker.ended)",
        "pass",
    ),
    "an episode lost after the response to a rollout's request is not reported": (
        "head/acting.py",
        "self._pool.note_seen(request, part.next_observations, np.zeros(worker.num_envs, bool))",
        "pass",
    ),
    "a replacement does not get the policy's structure": (
        "head/recovery.py",
        "if self.store.structure:",
        "if False:",
    ),
    "a replacement does not get the attributes that were set": (
        "head/recovery.py",
        "for name, values in self.attributes.items():",
        "for name, values in ():",
    ),
    "the head still waits for a worker that is given up": (
        "head/pool.py",
        "super().end(worker, because)\n        self.forget([request.seq",
        "super().end(worker, because)\n        self.forget([0",
    ),
    "an interrupted call is not given up": (
        "head/pool.py",
        "            self.forget(seqs)\n            raise",
        "            raise",
    ),
    "Ctrl-C does not close what is half done": (
        "head/pool.py",
        "            self.close(LEAVE_S)\n",
        "",
    ),
    "late and duplicate responses are kept": (
        "head/pool.py",
        "        del self.outstanding[seq]\n",
        "",
    ),
    "a pull for a request that was given up gets no weights": (
        "head/pool.py",
        "case messages.Pull() if self.store.weights:",
        "case messages.Pull() if seq in self.outstanding:",
    ),
    "a worker that pulls handles a new structure too late": (
        "worker/worker.py",
        "if isinstance(message, messages.Structure):  #",
        "if False:  #",
    ),
    "messages that came during a pull are handled in reverse": (
        "worker/worker.py",
        "self._later.popleft()",
        "self._later.pop()",
    ),
    "environments go on with the episodes of an evaluation": (
        "worker/worker.py",
        "self._envs.reset(request.seeds)",
        "pass",
    ),
    "weights are those of the previous version": (
        "policy/versions.py",
        "self.weights = weights",
        "self.weights = self.weights or weights",
    ),
    "two workers that hold different weights share a difference": (
        "policy/versions.py",
        "self._updates[copy.weights] = self._encode(copy)",
        "held = [each.weights for each in self._copies]\n"
        "            self._updates |= dict.fromkeys(held, self._encode(copy))",
    ),
    "a row does not say that it starts an episode": (
        "worker/envs.py",
        "starts = self._lengths == 0",
        "starts = self._lengths < 0",
    ),
    "final observations of several chunks stay in the order of the chunks": (
        "rollout.py",
        "if len(parts) > 1:",
        "if episodes and len(parts) > 1:",
    ),
    "the steps of a rollout are too few": (
        "worker/envs.py",
        "for step in range(num_steps):",
        "for step in range(num_steps - 1):",
    ),
}


def find(name: str, schedules: int) -> tuple[bool, str]:
    """Return whether this many schedules find a mistake, and a line of the output that shows it."""
    file, old, new = MUTATIONS[name]
    with tempfile.TemporaryDirectory() as directory:
        for package in ("clusterenv_runtime", "verification"):
            shutil.copytree(
                ROOT / package,
                Path(directory, package),
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        path = Path(directory, "clusterenv_runtime", file)
        text = path.read_text()
        if text.count(old) != 1:
            sys.exit(f"error: {old!r} is in {file} {text.count(old)} times, not once")
        path.write_text(text.replace(old, new))
        command = [
            sys.executable,
            "-m",
            "verification.simulate",
            "--schedules",
            str(schedules),
            "--until-failure",
        ]
        result = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=1800
        )
    lines = (result.stdout + result.stderr).splitlines() + [f"exit code {result.returncode}"]
    # An error of torch on a worker may crash the process: torch walks the stack of a greenlet.
    return result.returncode in (1, -signal.SIGSEGV), next(
        (line for line in lines if line.startswith("seed")), lines[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Put mistakes into the runtime, and let the simulation find them."
    )
    parser.add_argument(
        "--schedules", type=int, default=12000, help="maximum number of schedules per mistake"
    )
    args = parser.parse_args()
    missed = 0
    for name in MUTATIONS:
        is_found, text = find(name, args.schedules)
        missed += not is_found
        print(f"{name}: {text if is_found else 'NOT FOUND'}"[:160], flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
