"""Proof by search and by simulation that head and workers keep their promises; see
docs/verification.md.
"""
