"""What head and workers say to each other, and how it becomes bytes."""
