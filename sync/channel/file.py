"""The channel ``file``: values are files in a folder, by default in shared memory; all workers are on one machine."""

from __future__ import annotations

from sync.channel._contract import ChannelKind

__all__ = ["METHODS"]

METHODS = (ChannelKind("file", "sync.channel_clients._file:FileChannel", in_memory=True),)
