"""Sweeps without Weights & Biases, whose own package of this name on PyPI this one hides."""
