"""Creation of the collective that a plan names."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from geofed_pb.errors import GeofedError
from sync.channel import Channel
from sync.collective import Collective, Settings, collective_named
from sync.merging._members import Member

__all__ = ["check", "open_collective"]


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
    worker = collective_named(settings.pattern).worker
    create = pkgutil.resolve_name(worker) if isinstance(worker, str) else worker
    collective: Collective = create(settings, member, channel, place, size, patience)
    return collective


def check(settings: Settings, workers: int) -> None:
    """Raise ``GeofedError("CONFIG_INVALID")`` for inconsistent settings."""
    method = collective_named(settings.pattern)
    if not method.worker:
        raise GeofedError("CONFIG_INVALID", f"{method.name} is not a collective of workers")
    if settings.codec not in method.merge_codecs:
        text = f"{method.name} does not support codec {settings.codec!r}"
        raise GeofedError("CONFIG_INVALID", text, hint=f"known: {', '.join(method.merge_codecs)}")
    if settings.chunks is not None and not method.takes_k:
        raise GeofedError("CONFIG_INVALID", f"{method.name} does not accept a number of chunks")
    if settings.chunks is not None and not 1 <= settings.chunks <= workers:
        raise GeofedError("CONFIG_INVALID", f"{settings.chunks} chunks for {workers} workers")
    if settings.groups < 1 or (settings.groups > 1 and (not method.takes_groups or settings.staleness)):
        text = f"{method.name} in {settings.groups} groups with a staleness of {settings.staleness}"
        raise GeofedError("CONFIG_INVALID", text, hint="k-reduce merges in groups, without staleness")
    if settings.staleness < 0 or (settings.staleness and not method.takes_staleness):
        raise GeofedError("CONFIG_INVALID", f"{method.name} with a staleness of {settings.staleness}")
    if not settings.significance >= 0:
        raise GeofedError("CONFIG_INVALID", f"a significance of {settings.significance}")
