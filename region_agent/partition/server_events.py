"""What the parameter server tells once and people may want to read: decisions, and updates that it refused."""

from __future__ import annotations

import re

from geofed_pb.v1 import sync_pb2
from region_agent.partition.events import Happened

__all__ = ["ServerEvents"]

_ROUND = re.compile(r"round (\d+): (.*)", re.DOTALL)
_REMEMBERED = 1000
"""Texts; far more than a status repeats."""


class ServerEvents:
    """Finds in each status what those before it did not say, over all lives of the parameter server."""

    def __init__(self) -> None:
        self._decisions: list[str] = []
        """The last ones told."""
        self._refused: dict[str, int] = {}

    def server_started(self) -> None:
        """Its counters begin at zero again."""
        self._refused = {}

    def of(self, status: sync_pb2.PsStatus) -> list[Happened]:
        """What is new, in order."""
        fresh = [text for text in status.decisions if text not in self._decisions]
        self._decisions = (self._decisions + fresh)[-_REMEMBERED:]
        return [_decided(text) for text in fresh] + self._refusals(dict(status.refused))

    def _refusals(self, refused: dict[str, int]) -> list[Happened]:
        grown = {region: count - self._refused.get(region, 0) for region, count in sorted(refused.items())}
        self._refused = refused
        return [_refused(region, count) for region, count in grown.items() if count > 0]


def _decided(text: str) -> Happened:
    parts = _ROUND.fullmatch(text)
    return Happened("wan.decision", text, {"round": int(parts[1])} if parts else {})


def _refused(region: str, count: int) -> Happened:
    what = f"an update of {region} was" if count == 1 else f"{count} updates of {region} were"
    text = f"{what} not merged: not finite, or far larger than its usual ones (wan.guard); the log of ps says which"
    return Happened("update.refused", text, {"source": region, "count": count})
