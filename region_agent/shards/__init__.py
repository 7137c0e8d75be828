"""Datasets of this region, and shards on their way between regions."""
