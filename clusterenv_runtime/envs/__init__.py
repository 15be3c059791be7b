"""What a ClusterEnv consists of, and how workers build it."""
