"""Makes keys ahead of a run, for workers elsewhere: ``python -m clusterenv_runtime.keys FILE``.

FILE is the head's (``--key-file FILE``) and holds the server's secret, which is not for workers:
theirs is FILE.worker.
"""

import argparse
import sys

from .wire.security import HeadKeys, write_key_file


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(
        prog="clusterenv_runtime.keys", description="Makes the keys of a run ahead of it."
    )
    parser.add_argument(
        "file", metavar="FILE", help="the head's key file; the workers' will be FILE.worker"
    )
    file, keys = parser.parse_args().file, HeadKeys.make()
    try:
        write_key_file(file, keys)
        write_key_file(f"{file}.worker", keys.workers())
    except OSError as error:
        sys.exit(f"error: cannot write {error.filename}: {error.strerror}")
    print(f"{file} is for the head, {file}.worker for the workers")


if __name__ == "__main__":
    main()
