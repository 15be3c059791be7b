"""Measurements, run as `python -m benchmarks.NAME` in the root. TorchRL installs a `benchmarks`,
too: this hides it.
"""
