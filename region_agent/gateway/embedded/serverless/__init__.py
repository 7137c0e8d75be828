"""Replicas as invocations of a cloud's functions, which connect to the gateway."""
