"""Mistakes that are put into the runtime, one at a time, for `verification.simulate` to find.

    python -m verification.mutations

Each mistake goes into a copy of the code, in its own directory.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# For each mistake: the file, a piece of it, and its replacement. Some were once in the runtime.
MUTATIONS = {
    "until d016c55: messages that a wait has posted are left unsent": (
        "head/pool.py",
        "if self._messenger.outbox:  # weights, for example, that a worker waits for",
        "if False:",
    ),
    "until b661e7f: Ctrl-C raises where something is half done": (
        "head/interrupts.py",
        "        _under_way = interrupt\n",
        "",
    ),
    "until 851c8d7: a pull before the first publication ends the run": (
        "head/worker.py",
        "return may and 0 <= held < published",
        "return True",
    ),
    "a replacement is believed to hold its predecessor's weights": (
        "head/recovery.py",
        "worker.copy.forget()",
        "pass",
    ),
    "a replacement gets no outstanding requests": (
        "head/messenger.py",
        "self.recovery.orders(worker, self.requests.of(worker))",
        "self.recovery.orders(worker, [])",
    ),
    "a replacement does not get the policy's structure": (
        "head/recovery.py",
        "if self._store.structure:",
        "if False:",
    ),
    "the end of a lost episode is not reported": (
        "head/recovery.py",
        "            worker.episodes.lost()\n",
        "",
    ),
    "until 8cddea0: an episode lost after the response to a step is not reported": (
        "head/stepping.py",
        "for worker in self._lost:",
        "for worker in []:",
    ),
    "an episode lost after the response to a rollout's request is not reported": (
        "head/collect.py",
        "            worker.episodes.lost()",
        "            pass",
    ),
    "the head still waits for a worker that is given up": (
        "head/pool.py",
        "                self._requests.forget_worker(worker)\n                raise",
        "                raise",
    ),
    "messages after a wrong response are believed": (
        "head/supervisor.py",
        "worker.process.is_refused = True",
        "pass",
    ),
    "a worker responds for another": (
        "head/messenger.py",
        "case _ if seq not in worker.process.asked:",
        "case _ if False:",
    ),
    "an interrupted call is not given up": (
        "head/pool.py",
        "            self._requests.forget(seqs)\n            raise",
        "            raise",
    ),
    "late and duplicate responses are kept": (
        "head/requests.py",
        "request = self.outstanding.pop(seq)\n",
        "request = self.outstanding[seq]\n",
    ),
    "a pull for a request that was given up gets no weights": (
        "head/messenger.py",
        "if process.state in CONNECTED:\n            weights",
        "if process.state in CONNECTED and seq in self.requests.outstanding:\n            weights",
    ),
    "a worker that pulls handles a new structure too late": (
        "worker/worker.py",
        "if isinstance(message, Structure):",
        "if False:",
    ),
    "messages that came during a pull are handled in reverse": (
        "worker/worker.py",
        "self._later.popleft()",
        "self._later.pop()",
    ),
    "a worker that was still building is not reset with the others": (
        "head/stepping.py",
        "self._pool.forget([seq])",
        "pass",
    ),
    "weights are those of the previous version": (
        "policy/versions.py",
        "self._weights = weights",
        "self._weights = self._weights or weights",
    ),
    "two workers that hold different weights share a difference": (
        "policy/versions.py",
        "self._updates[copy.weights] = self._encode(copy)",
        "held = [each.weights for each in self._copies]\n"
        "            self._updates |= dict.fromkeys(held, self._encode(copy))",
    ),
    "a worker may report any version": (
        "head/responses.py",
        "if policy is None or response.version != policy.version:",
        "if policy is None:",
    ),
    "an invalid message is dropped, but its sender is kept": (
        "head/messenger.py",
        'self._refuse(worker, f"it sent {message}")',
        "pass",
    ),
    "a row does not say that it starts an episode": (
        "worker/one_by_one.py",
        "starts = self._lengths == 0",
        "starts = self._lengths < 0",
    ),
    "final observations of several chunks stay in the order of the chunks": (
        "rollout.py",
        "if len(parts) > 1:",
        "if counted and len(parts) > 1:",
    ),
    "the steps of a replacement's first rollout are too few": (
        "worker/one_by_one.py",
        "for step in range(num_steps + 1):",
        "for step in range(num_steps):",
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
    lines = (result.stdout.strip() or result.stderr.strip()).splitlines()
    return result.returncode == 1, next(
        (line for line in lines if line.startswith("seed")), lines[0]
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
