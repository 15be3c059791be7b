"""Both ends of Adaptive Policy Synchronization: the policy, when workers pull it, and what a pull
carries.
"""
