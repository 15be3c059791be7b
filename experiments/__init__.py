"""Experiments with their recipes and results: benchmarks, figures and sweeps. Run them from the
root.
"""
