"""Shards that other regions process: which transfers to command, and when partitions may start.

A region that only sends its shard has no partition. Regions that receive shards start first; the others start once all
shards have arrived, so that no worker is paid for waiting.
"""

from __future__ import annotations

from dataclasses import replace

from control_plane.core._events import Reported, SendShard
from control_plane.core._meters import with_all_meters
from control_plane.core._state import ENDED_PARTITION, Copy, JobState, Link, Partition

__all__ = [
    "copies_ended",
    "copying",
    "forget_commands",
    "is_awaited",
    "links_needed",
    "transfer_commands",
    "unfinished",
    "waits_for_shards",
    "with_copy",
    "with_report",
]

_NOT_READY = ("pending", "assigned", "new", "preparing")
"""States of a partition whose workers have not started."""


def copying(state: JobState) -> bool:
    """Whether a region still waits for a shard."""
    receivers = {copy.destination for copy in state.copies}
    return any(part.region in receivers and not _supplied(part) for part in state.partitions)


def _supplied(part: Partition) -> bool:
    # The report may be of an earlier epoch; in state "preparing" it is of the present one.
    arrived = part.state == "preparing" and part.report is not None and part.report.shards_here
    return arrived or part.state not in _NOT_READY


def waits_for_shards(state: JobState, part: Partition) -> bool:
    """Whether a partition must not start until the job's shards have arrived."""
    receives = any(copy.destination == part.region for copy in state.copies)
    return bool(state.copies) and not state.copied and not receives


def transfer_commands(state: JobState) -> tuple[JobState, list[SendShard]]:
    """Return the transfers to command: to receivers whose address is new to the sender. Marks them as commanded."""
    commands = []
    for copy in state.copies:
        part = state.partition(copy.destination)
        address = part.report.shard_address if part is not None and part.report is not None else ""
        if part is not None and part.state == "preparing" and address and address != copy.told:
            state = with_copy(state, replace(copy, told=address))
            commands.append(SendShard(copy.source, copy.epoch, copy.destination, address))
    return state, commands


def is_awaited(state: JobState, copy: Copy) -> bool:
    """Whether the destination still waits for the shard at the address that the source was sent.

    After the shard has arrived, the port is closed and may be reused by another job, so that an error which the source
    reports then does not concern this job.
    """
    part = state.partition(copy.destination)
    if part is None or part.report is None or part.state != "preparing" or part.report.shards_here:
        return False
    return bool(copy.told) and part.report.shard_address == copy.told


def unfinished(state: JobState) -> list[Copy]:
    """Return the copies that were commanded and whose source has not reported an end."""
    return [copy for copy in state.copies if copy.told and copy.state not in (*ENDED_PARTITION, "sent")]


def with_report(state: JobState, copy: Copy, event: Reported) -> JobState:
    """Apply a source's report. If it failed while no receiver waits, it may be commanded again later."""
    last = copy.report
    if last is not None and copy.state == "stopped" and event.report.state != "stopped":
        # A stopped transfer has reported its last sums; a new one counts from zero.
        copy = replace(copy, report=None, counted_before=last.totals)
    before, report = with_all_meters(copy, event.report)
    given_up = report.state in ("failed", "refused") and not is_awaited(state, copy)
    told = "" if given_up else copy.told
    return with_copy(state, replace(copy, state=report.state, report=report, counted_before=before, told=told))


def forget_commands(state: JobState, region: str) -> JobState:
    """Forget the transfer commands to and from a restarted region, so that they are sent again."""
    for copy in state.copies:
        if copy.destination == region or (copy.source == region and copy.state != "sent"):
            state = with_copy(state, replace(copy, told=""))
    return state


def with_copy(state: JobState, changed: Copy) -> JobState:
    """Replace the copy that has the same source."""
    copies = tuple(changed if copy.source == changed.source else copy for copy in state.copies)
    return replace(state, copies=copies)


def copies_ended(state: JobState) -> bool:
    """Whether no region sends a shard any more."""
    return all(
        copy.link == "lost" or copy.state in ENDED_PARTITION or not (copy.told or copy.report) for copy in state.copies
    )


def links_needed(state: JobState) -> list[tuple[str, Link, float]]:
    """Return name, link state and its start time of each region that the job needs to continue."""
    found = [(part.region, part.link, part.since) for part in state.partitions]
    if not state.copied:
        found += [(copy.source, copy.link, copy.since) for copy in state.copies]
    return found
