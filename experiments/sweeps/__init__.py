"""Sweeps without Weights & Biases. This package hides W&B's package of the same name on PyPI."""
