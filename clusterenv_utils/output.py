"""Lines for the user on the standard output."""

import contextlib
import os
import sys
from collections.abc import Iterator


def print_line(text: str) -> None:
    """Print a line, even if the output's encoding lacks some of its characters.

    Raises:
        OSError: the line cannot be written.
    """
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        sys.stdout.buffer.write(os.fsencode(f"{text}\n"))
        sys.stdout.buffer.flush()


@contextlib.contextmanager
def until_pipe_closes() -> Iterator[None]:
    """Exit quietly if the reader of the output, for example `head`, closes the pipe."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest
        sys.exit()
