"""The messages between head and workers, and their encoding."""
