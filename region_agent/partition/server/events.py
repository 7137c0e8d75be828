"""Events of a parameter server for the job's history: its decisions, and updates that it refused."""

from __future__ import annotations

import re

from geofed_pb.bounds import clean
from geofed_pb.v1 import sync_pb2
from region_agent.partition.events import RecordEvent

__all__ = ["ServerEvents"]

_ROUND = re.compile(r"round (\d+): (.*)", re.DOTALL)
"""A decision of the parameter server, with its round."""
_MAX_REMEMBERED = 1000
"""Decisions that are remembered as recorded; far more than one status repeats."""
_REASON_BYTES = 300
"""Longest reason of a refusal in an event."""


class ServerEvents:
    """Finds what is new in each status, also after restarts of the parameter server."""

    def __init__(self) -> None:
        self._decisions: list[str] = []
        """Texts of the last recorded decisions."""
        self._refused: dict[str, int] = {}
        self._faults: dict[tuple[str, str], int] = {}
        """Messages of other regions that were refused, by region and code."""

    def server_started(self) -> None:
        """Reset the counters: those of a restarted server begin at zero."""
        self._refused, self._faults = {}, {}

    def new_in(self, status: sync_pb2.PsStatus) -> list[RecordEvent]:
        """Return the events that are new in a status, in order."""
        fresh = [text for text in status.decisions if text not in self._decisions]
        self._decisions = (self._decisions + fresh)[-_MAX_REMEMBERED:]
        return [_decided(text) for text in fresh] + self._refusals(status) + self._peer_faults(status)

    def _refusals(self, status: sync_pb2.PsStatus) -> list[RecordEvent]:
        grown = {region: count - self._refused.get(region, 0) for region, count in sorted(status.refused.items())}
        self._refused = dict(status.refused)
        reasons = status.refusal_reasons
        return [_refused(region, count, reasons.get(region, "")) for region, count in grown.items() if count > 0]

    def _peer_faults(self, status: sync_pb2.PsStatus) -> list[RecordEvent]:
        """Return an event whenever the number of a region's refused messages has at least doubled, since a hostile
        region may send any number."""
        events = []
        for fault in status.peer_faults:
            key = fault.region, fault.code
            if fault.count >= max(1, 2 * self._faults.get(key, 0)):
                self._faults[key] = fault.count
                text = f"refused {fault.count} message{'s' * (fault.count > 1)} of {fault.region}: {fault.text}"
                data = {"source": fault.region, "code": fault.code, "count": fault.count}
                events.append(RecordEvent("peer.refused", text, data))
        return events


def _decided(text: str) -> RecordEvent:
    parts = _ROUND.fullmatch(text)
    return RecordEvent("wan.decision", text, {"round": int(parts[1])} if parts else {})


def _refused(region: str, count: int, reason: str) -> RecordEvent:
    updates = f"an update of {region} was" if count == 1 else f"{count} updates of {region} were"
    text = f"{updates} not merged: {clean(reason, _REASON_BYTES)}"
    return RecordEvent("update.refused", text, {"source": region, "count": count})
