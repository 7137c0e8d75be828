"""Datasets of this region, and the transfer of shards between regions."""
