"""The worker process: ``python -m clusterenv_runtime.worker --connect ADDRESS --index I``."""
