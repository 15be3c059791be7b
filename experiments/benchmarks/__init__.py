"""Benchmarks, run as `python -m experiments.benchmarks.NAME` in the repository's root."""
