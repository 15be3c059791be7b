"""Searches and simulations prove that head and workers keep their promises; see
docs/verification.md.
"""
