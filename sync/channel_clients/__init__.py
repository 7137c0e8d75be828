"""Clients of the stores behind channels: files, Redis, S3-compatible object stores."""

import pkgutil

from geofed_pb.errors import GeofedError, install_hint
from sync.channel import Channel, channel_kind
from sync.channel_clients._buffer_pool import BufferPool
from sync.channel_clients._file import FileChannel
from sync.channel_clients._keys import fence_key

__all__ = ["BufferPool", "FileChannel", "fence_key", "open_channel"]


def open_channel(kind: str, address: str) -> Channel:
    """Open the channel that a plan names. Raises ``GeofedError("CONFIG_INVALID")`` if the kind is unknown or its client
    is missing.

    The client of a store is imported with the first channel to it, not before.
    """
    known = channel_kind(kind)
    try:
        channel: Channel = pkgutil.resolve_name(known.opens)(address)
    except ModuleNotFoundError as error:
        if error.name != known.client:
            raise
        text = f"the channel {kind!r} needs {error.name}"
        raise GeofedError("CONFIG_INVALID", text, hint=install_hint(kind)) from None
    return channel
