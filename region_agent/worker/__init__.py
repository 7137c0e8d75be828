"""The worker function: bounded invocations of a data-parallel worker."""
