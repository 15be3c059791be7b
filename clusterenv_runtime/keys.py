"""The command that makes a run's keys in advance: ``python -m clusterenv_runtime.keys FILE``.

The keys are for workers that cannot read the head's files. FILE is the head's key file
(``--key-file FILE``). It holds the server's secret key, which workers must not have. The workers'
key file is FILE.worker.
"""

import argparse
import sys

from .security import HeadKeys, write_key_file


def main() -> None:
    """Write both key files."""
    parser = argparse.ArgumentParser(prog="clusterenv_runtime.keys", description=__doc__)
    parser.add_argument("file", metavar="FILE")
    file, keys = parser.parse_args().file, HeadKeys.make()
    try:
        write_key_file(file, keys)
        write_key_file(f"{file}.worker", keys.workers())
    except OSError as error:
        sys.exit(f"error: cannot write {error.filename}: {error.strerror}")
    print(f"{file} is for the head, {file}.worker for the workers")


if __name__ == "__main__":
    main()
