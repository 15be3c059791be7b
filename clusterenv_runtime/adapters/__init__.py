"""`ClusterEnv` as other libraries want their vector environments, a module for each; see docs/any_learner.md."""
