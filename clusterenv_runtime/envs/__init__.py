"""The environments of a ClusterEnv, and how workers build them."""
