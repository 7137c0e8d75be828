"""The shards of a dataset in an S3-compatible store."""

from __future__ import annotations

from typing import Any

from control_plane.clouds._boto import told
from control_plane.clouds._contract import Shard, ShardList
from geofed_pb.errors import GeofedError

MAX_SHARDS = 100_000
"""More objects than any dataset that a region serves; the prefix is then not one dataset's."""


def list_shards(client: Any, store: str, bucket: str, prefix: str, *, most: int = MAX_SHARDS) -> ShardList:
    """All objects under a prefix, page by page, and the bucket's region.

    Raises as ``Cloud.shards`` does. ``store`` is who is asked, for messages. Folders, which some tools keep as empty
    objects whose keys end in "/", are no shards.
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
    # S3 answers nothing for its first region, and an old name for one of the next.
    return {None: "us-east-1", "": "us-east-1", "EU": "eu-west-1"}.get(place, str(place))
