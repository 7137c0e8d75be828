"""What runs inside a function: bounded invocations of a data-parallel worker."""
