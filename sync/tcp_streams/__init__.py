"""Parallel, resumable TLS streams, over which large files travel between sites."""
