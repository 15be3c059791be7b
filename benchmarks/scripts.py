"""Running a training script, ours or CleanRL's, in a directory that is then removed."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent


def run(script, *flags, python=sys.executable, **variables):
    """Run a script with these environment variables; return its last charts/SPS, and its summary if it leaves one."""
    script = Path(script).resolve()
    with tempfile.TemporaryDirectory() as directory:
        # A script of CleanRL's may import cleanrl_utils, which lies beside its folder.
        path = os.pathsep.join([str(script.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, **variables}
        command = [str(python), str(script), *flags]
        subprocess.run(command, cwd=directory, env=env, check=True, stdout=subprocess.DEVNULL)
        (folder,) = Path(directory, "runs").iterdir()
        events = EventAccumulator(str(folder))
        events.Reload()
        summary = folder / "summary.json"
        return events.Scalars("charts/SPS")[-1].value, json.loads(summary.read_text()) if summary.exists() else None
