"""What the region holds for tasks, besides data."""
