"""The channel ``redis``: values are keys of a Redis server, which announces them to waiting workers."""

from __future__ import annotations

from sync.channel._contract import ChannelKind

__all__ = ["METHODS"]

METHODS = (ChannelKind("redis", "sync.channel_clients._redis:RedisChannel", client="redis"),)
