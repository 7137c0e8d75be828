"""Replicas as Jobs of a Kubernetes cluster, which connect to the gateway."""
