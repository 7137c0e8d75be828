"""Processes of functions: the warm parent, and the replicas that are forked from it."""
