"""Measurements, run as `python -m experiments.benchmarks.NAME` in the root."""
