"""Experiments with their recipes and results: benchmarks, figures and sweeps; run from the root."""
