"""End a job without regions that stay lost, so that another one continues its model without them.

The other regions end at once, each with the last round that it has merged; the model is that of the furthest one. So no
round is left of which one of them has the result, and which is made again without the regions that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from control_plane.core._events import SendPeers
from control_plane.core._shard_copies import links_needed
from control_plane.core._state import JobState, Partition

__all__ = ["furthest", "halting", "lost_for_long", "why_not_without"]


def lost_for_long(state: JobState, at: float) -> list[str]:
    """Return the regions, needed and not left out, that have been lost for longer than the job waits."""
    return [
        name
        for name, link, since in links_needed(state)
        if link == "lost" and at - since > state.lost_limit_seconds and name not in state.left_out
    ]


def why_not_without(state: JobState, names: Iterable[str]) -> str:
    """Return why a job cannot end without these regions; empty: it can."""
    gone = set(names)
    if state.phase != "running" or not state.started_at:
        return "it is not running"
    if state.left_out:
        return f"it ends without {', '.join(state.left_out)} already"
    if not gone <= {part.region for part in state.partitions}:
        return "the region's shard is needed elsewhere"
    if not state.most_left_out:
        return "it exchanges in the background, or an agent is of an earlier version"
    if len(gone) > state.most_left_out:
        return "with secure aggregation only one region can be left out: more could tell each other's updates"
    return ""


def halting(state: JobState) -> tuple[JobState, list[SendPeers]]:
    """Return the state and the commands by which the regions that have not been told so end at once."""
    untold = [part for part in state.remaining if not part.told_to_halt and part.state != "pending"]
    commands = [SendPeers(part.region, part.epoch, (), state.routes, finish=True, halt=True) for part in untold]
    told = {part.region for part in untold}
    parts = tuple(
        replace(part, told_to_halt=part.told_to_halt or part.region in told) for part in state.partitions
    )  # fmt: skip
    return replace(state, partitions=parts), commands


def furthest(state: JobState) -> list[Partition]:
    """Return the partitions whose model is the job's."""
    if not state.left_out:
        return list(state.partitions)
    return [part for part in state.remaining if part.report is not None and part.report.round == state.rounds_done]
