"""Checks of a sweep file. A mistake in the file ends the sweep with one line."""

import sys


def check(fine, message):
    if not fine:
        sys.exit(f"error: {message}")


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)
