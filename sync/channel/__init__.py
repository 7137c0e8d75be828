"""Channels: the store in a region through which its stateless workers exchange tensors.

Each kind is a module of this package, which opens nothing: clients of the stores are in `sync.channel_clients`.
"""

from collections.abc import Callable

from geofed_pb.errors import GeofedError
from sync.channel import file, redis, s3
from sync.channel._contract import Buffer, Channel, ChannelKind, ChannelLimits, RangedValue
from sync.channel._usage import Usage

__all__ = [
    "DEFAULT",
    "Buffer",
    "Channel",
    "ChannelKind",
    "ChannelLimits",
    "RangedValue",
    "Usage",
    "channel_kind",
    "channel_kinds",
]

DEFAULT = "file"
"""The channel of a region whose file gives none."""

_KINDS: dict[str, ChannelKind] = {kind.name: kind for kind in (*file.METHODS, *redis.METHODS, *s3.METHODS)}


def channel_kinds(having: Callable[[ChannelKind], object] = lambda _: True) -> tuple[str, ...]:
    """Return the names of the kinds that have a trait."""
    return tuple(kind.name for kind in _KINDS.values() if having(kind))


def channel_kind(name: str) -> ChannelKind:
    """Return the kind of that name. Raises ``GeofedError("CONFIG_INVALID")`` if it is unknown."""
    if name in _KINDS:
        return _KINDS[name]
    raise GeofedError("CONFIG_INVALID", f"unknown channel {name!r}", hint=f"known: {', '.join(_KINDS)}")
