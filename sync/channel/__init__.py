"""Channels: the store in a region through which its stateless workers exchange tensors."""

from sync.channel._contract import Channel, Limits
from sync.channel._file import FileChannel
from sync.channel._keys import fence_key
from sync.channel._meter import Usage
from sync.channel._price import NODE_PRICES, REQUEST_PRICES, NodePrice, RequestPrices, cost_usd, node_cost_usd

__all__ = [
    "NODE_PRICES",
    "REQUEST_PRICES",
    "Channel",
    "FileChannel",
    "Limits",
    "NodePrice",
    "RequestPrices",
    "Usage",
    "cost_usd",
    "fence_key",
    "node_cost_usd",
    "open_channel",
]


_CLIENTS = {"redis": "redis", "s3": "boto3"}
"""The client package of each kind of store."""


def open_channel(kind: str, address: str) -> Channel:
    """Open the channel that a plan names. Raises ``GeofedError("CONFIG_INVALID")`` if the kind is unknown or its client
    is missing.

    The client of a store is imported with the first channel to it, not before.
    """
    if kind == "file":
        return FileChannel(address)
    from geofed_pb.errors import GeofedError

    try:
        if kind == "redis":
            from sync.channel._redis import RedisChannel

            return RedisChannel(address)
        if kind == "s3":
            from sync.channel._s3 import S3Channel

            return S3Channel(address)
    except ModuleNotFoundError as error:
        if error.name != _CLIENTS[kind]:
            raise
        text = f"the channel {kind!r} needs {error.name}"
        raise GeofedError("CONFIG_INVALID", text, hint=f"in a clone of geofed: pip install '.[{kind}]'") from None
    raise GeofedError("CONFIG_INVALID", f"unknown channel {kind!r}", hint="known: file, redis, s3")
