"""The worker's shard, and the batches that it is cut into."""
