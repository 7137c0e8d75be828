"""Shards that are processed elsewhere: who is told to hand over what, and when the others may begin.

A region that only hands its shard over has no partition. The regions that take shards begin first; the others begin
once all shards have come, so that no worker is paid for waiting.
"""

from __future__ import annotations

from dataclasses import replace

from control_plane.core._events import Reported, SendShard
from control_plane.core._meters import with_all_meters
from control_plane.core._state import ENDED_PARTITION, Copy, Counted, JobState, Link, Partition

__all__ = [
    "copies_ended",
    "copying",
    "held_back",
    "links_needed",
    "orders",
    "reported",
    "unfinished",
    "waited_for",
    "with_copy",
    "without_told",
]

_NOT_READY = ("pending", "assigned", "new", "preparing")


def copying(state: JobState) -> bool:
    """Whether a region still waits for a shard."""
    takers = {copy.destination for copy in state.copies}
    return any(part.region in takers and not _supplied(part) for part in state.partitions)


def _supplied(part: Partition) -> bool:
    # Until a new life of the taker has spoken, what the one before has said counts for nothing.
    here = part.state == "preparing" and part.report is not None and part.report.shards_here
    return here or part.state not in _NOT_READY


def held_back(state: JobState, part: Partition) -> bool:
    """Whether a partition is not to begin yet."""
    takes = any(copy.destination == part.region for copy in state.copies)
    return bool(state.copies) and not state.copied and not takes


def orders(state: JobState) -> tuple[JobState, list[SendShard]]:
    """What regions must be told to hand over, to addresses that they have not been told."""
    told = []
    for copy in state.copies:
        part = state.partition(copy.destination)
        address = part.report.shard_address if part is not None and part.report is not None else ""
        if part is not None and part.state == "preparing" and address and address != copy.told:
            state = with_copy(state, replace(copy, told=address))
            told.append(SendShard(copy.source, copy.epoch, copy.destination, address))
    return state, told


def waited_for(state: JobState, copy: Copy) -> bool:
    """Whether the shard is wanted where its source was told to bring it.

    Once it is there that port is closed, and may be another job's: what the source meets then is no word of this one.
    """
    part = state.partition(copy.destination)
    if part is None or part.report is None or part.state != "preparing" or part.report.shards_here:
        return False
    return bool(copy.told) and part.report.shard_address == copy.told


def unfinished(state: JobState) -> list[Copy]:
    """Those whose source was told to send, and has not said that it is done."""
    return [copy for copy in state.copies if copy.told and copy.state not in (*ENDED_PARTITION, "sent")]


def reported(state: JobState, copy: Copy, event: Reported) -> JobState:
    """A region says how far its shard is. One that gave up where nobody waits is told again should it be wanted."""
    last = copy.report
    if last is not None and copy.state == "stopped" and event.report.state != "stopped":
        # What has been stopped is not counted on from: the source has told its last sums, and begins again with none.
        copy = replace(copy, report=None, counted_before=Counted(last.money, last.sent_bytes, last.received_bytes))
    before, report = with_all_meters(copy, event.report)
    given_up = report.state in ("failed", "refused") and not waited_for(state, copy)
    told = "" if given_up else copy.told
    return with_copy(state, replace(copy, state=report.state, report=report, counted_before=before, told=told))


def without_told(state: JobState, region: str) -> JobState:
    """A region has begun anew: it may wait for shards again, or, as their source, have forgotten what it was told."""
    for copy in state.copies:
        if copy.destination == region or (copy.source == region and copy.state != "sent"):
            state = with_copy(state, replace(copy, told=""))
    return state


def with_copy(state: JobState, changed: Copy) -> JobState:
    copies = tuple(changed if copy.source == changed.source else copy for copy in state.copies)
    return replace(state, copies=copies)


def copies_ended(state: JobState) -> bool:
    """Whether no region hands anything over any more."""
    return all(
        copy.link == "lost" or copy.state in ENDED_PARTITION or not (copy.told or copy.report) for copy in state.copies
    )


def links_needed(state: JobState) -> list[tuple[str, Link, float]]:
    """Of the regions that a job cannot continue without: name, link and since when it is so."""
    found = [(part.region, part.link, part.since) for part in state.partitions]
    if not state.copied:
        found += [(copy.source, copy.link, copy.since) for copy in state.copies]
    return found
