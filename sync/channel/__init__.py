"""The region-local store through which stateless workers exchange tensors."""

from sync.channel._contract import Channel, Usage
from sync.channel._file import FileChannel

__all__ = ["Channel", "FileChannel", "Usage", "open_channel"]


def open_channel(kind: str, address: str) -> Channel:
    """Open the channel that a plan names; raises ``GeofedError("CONFIG_INVALID")`` for one that is not known."""
    if kind == "file":
        return FileChannel(address)
    from geofed_pb.errors import GeofedError

    raise GeofedError("CONFIG_INVALID", f"unknown channel {kind!r}", hint="known: file")
