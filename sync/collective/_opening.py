"""Creation of the collective that a plan names."""

from __future__ import annotations

from collections.abc import Callable

from geofed_pb.errors import GeofedError
from sync.channel import Channel
from sync.collective._contract import Collective, Settings
from sync.collective._members import Member
from sync.collective._reducing import Reducing
from sync.collective._sharing import Sharing

__all__ = ["check", "open_collective"]

_CODECS = {"isp": ("fp32", "bf16", "fp8", "int4")}


def open_collective(
    settings: Settings,
    member: Member,
    channel: Channel,
    place: str,
    size: int,
    patience: Callable[[], float] | None = None,
) -> Collective:
    """Create a worker's side of the collective for vectors of ``size`` elements.

    ``place`` is the prefix of all keys, the same for all workers of the partition; whoever starts a new attempt must
    delete ``place/<attempt>`` of the old one. ``patience`` returns the timeout in seconds of an exchange that begins
    now; None: always ``settings.timeout_seconds``. Raises ``GeofedError("CONFIG_INVALID")`` for inconsistent settings.
    """
    check(settings, member.workers)
    if settings.pattern == "isp":
        return Sharing(settings, member, channel, place, size, patience)
    return Reducing(settings, member, channel, place, size, patience)


def check(settings: Settings, workers: int) -> None:
    """Raise ``GeofedError("CONFIG_INVALID")`` for inconsistent settings."""
    if settings.pattern not in ("all-reduce", "scatter-reduce", "pipelined-scatter-reduce", "k-reduce", "isp"):
        raise GeofedError("CONFIG_INVALID", f"unknown collective {settings.pattern!r}")
    codecs = _CODECS.get(settings.pattern, ("fp32", "bf16", "int8", "fp8", "int4"))
    if settings.codec not in codecs:
        text = f"{settings.pattern} does not support codec {settings.codec!r}"
        raise GeofedError("CONFIG_INVALID", text, hint=f"known: {', '.join(codecs)}")
    if settings.chunks is not None and settings.pattern not in ("k-reduce", "isp"):
        raise GeofedError("CONFIG_INVALID", f"{settings.pattern} does not accept a number of chunks")
    if settings.chunks is not None and not 1 <= settings.chunks <= workers:
        raise GeofedError("CONFIG_INVALID", f"{settings.chunks} chunks for {workers} workers")
    if settings.groups < 1 or (settings.groups > 1 and (settings.pattern != "k-reduce" or settings.staleness)):
        text = f"{settings.pattern} in {settings.groups} groups with a staleness of {settings.staleness}"
        raise GeofedError("CONFIG_INVALID", text, hint="k-reduce merges in groups, without staleness")
    if settings.staleness < 0 or (settings.staleness and settings.pattern != "k-reduce"):
        raise GeofedError("CONFIG_INVALID", f"{settings.pattern} with a staleness of {settings.staleness}")
    if not settings.significance >= 0:
        raise GeofedError("CONFIG_INVALID", f"a significance of {settings.significance}")
