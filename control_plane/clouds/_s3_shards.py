"""List the shards of a dataset in an S3-compatible store."""

from __future__ import annotations

from typing import Any

from control_plane.clouds._boto import told
from control_plane.clouds._contract import Shard, ShardList
from geofed_pb.errors import GeofedError

MAX_SHARDS = 100_000
"""Limit of objects; more of them mean that the prefix is not a dataset's."""


def list_shards(client: Any, store: str, bucket: str, prefix: str, *, most: int = MAX_SHARDS) -> ShardList:
    """Return all objects under a prefix, and the bucket's region. Raises the errors of ``Cloud.shards``.

    Empty objects whose keys end in "/", by which some tools represent folders, are ignored.

    Args:
        store: name of the store, for messages.
    """
    shards: list[Shard] = []
    with told(store):
        region = _region_of(client, bucket)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            listed = page.get("Contents", ())
            shards.extend(Shard(held["Key"], held["Size"]) for held in listed if not held["Key"].endswith("/"))
            if len(shards) > most:
                text = f"more than {most} objects under s3://{bucket}/{prefix}"
                raise GeofedError("LIMIT_EXCEEDED", text, hint="give a longer prefix")
    return ShardList(bucket, prefix, region, tuple(sorted(shards, key=lambda shard: shard.key)))


def _region_of(client: Any, bucket: str) -> str:
    place = client.get_bucket_location(Bucket=bucket).get("LocationConstraint")
    # S3 returns nothing for its first region, and an old name for eu-west-1.
    return {None: "us-east-1", "": "us-east-1", "EU": "eu-west-1"}.get(place, str(place))
