"""Sweeps without Weights & Biases. This package hides W&B's own of this name on PyPI."""
