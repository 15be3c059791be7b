"""The number of a sweep's runs that this machine can carry at once."""

import os
import re
from pathlib import Path

WORKERS = 2  # a script's default number of workers
GIB = 2**30
MEMORY = 2 * GIB  # bytes per run: PPO on two workers takes 0.5 GiB; a GPU or a replay buffer adds


def words_of(path):
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def cores_here():
    """Return the number of cores for this process. A container can limit it in two ways."""
    cores = len(os.sched_getaffinity(0))
    quota = words_of("/sys/fs/cgroup/cpu.max")
    if quota and quota[0] != "max":
        cores = min(cores, int(quota[0]) // int(quota[1]))
    return max(cores, 1)


def memory_here():
    """Return the bytes of memory that are free for this process."""
    words = words_of("/proc/meminfo")
    free = int(words[words.index("MemAvailable:") + 1]) * 1024
    limit, used = words_of("/sys/fs/cgroup/memory.max"), words_of("/sys/fs/cgroup/memory.current")
    if limit and limit[0] != "max":
        free = min(free, int(limit[0]) - int(used[0]))
    return free


def workers_of(sweep):
    """Return the number of workers of a sweep's largest run."""
    found = [
        int(number)
        for number in re.findall(r"--num[-_]workers[= ](\d+)", " ".join(map(str, sweep["command"])))
    ]
    for path in ("num_workers",), ("num-workers",):
        _, keys = sweep["flat"].get(path, ("", {}))
        values = [*keys.get("values", []), keys.get("value"), keys.get("max")]
        found += [value for value in values if type(value) is int]
    return max(found, default=WORKERS)


def jobs_for(sweep, waiting):
    """Return how many of the `waiting` runs go at once, and a line that says why."""
    workers, cores, memory = workers_of(sweep), cores_here(), memory_here()
    jobs = max(min(cores // (1 + workers), memory // MEMORY, waiting), 1)
    why = (
        f"a run takes {1 + workers} cores, for its head and {workers} workers, and "
        f"{MEMORY // GIB} GiB, of {cores} cores and {memory / GIB:.0f} GiB"
    )
    return jobs, why
