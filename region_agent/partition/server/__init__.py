"""The parameter server of a partition: its process, its runs and its events."""
