"""Loads the worker's shard and draws batches of it."""
