"""Searches and simulations that check the promises of head and workers: docs/verification.md."""
