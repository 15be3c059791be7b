"""Adaptive Policy Synchronization, both ends: the policy that travels, when it does, and what of
it.
"""
