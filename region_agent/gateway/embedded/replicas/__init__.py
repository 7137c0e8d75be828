"""Processes of functions: the warm parent (zygote), and the replicas that are forked from it."""
