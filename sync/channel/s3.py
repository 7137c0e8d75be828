"""The channel ``s3``: values are objects of an S3-compatible object store, which bills every request for them."""

from __future__ import annotations

from sync.channel._contract import ChannelKind

__all__ = ["METHODS"]

METHODS = (ChannelKind("s3", "sync.channel_clients._s3:S3Channel", client="boto3", announces=False),)
