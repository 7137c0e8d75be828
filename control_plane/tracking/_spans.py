"""The trace of a job from its events: which spans there are, and when each begins and ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from geofed_pb.tracing import partition_key, round_key

_MAX_NOTES = 1000
"""Events that one span has at most; of a job that runs for weeks, later ones are counted only."""
_ENDED_BY = {
    "job.planned": "plan", "job.running": "start", "shard.moved": "move shards", "job.succeeded": "publish",
}  # fmt: skip
"""Kinds of events that end a part of a job, by the name of its span."""
_BEGUN_BY = {
    "job.submitted": "plan", "job.starting": "start", "shard.moves": "move shards", "job.publishing": "publish",
}  # fmt: skip
"""Kinds of events with which a part of a job begins."""
_ERRORS = {"job.failed", "worker-failed", "ps-ended", "setback", "region.lost", "update.refused", "peer.refused"}
"""Kinds of events that are told as errors."""


@dataclass(frozen=True)
class Note:
    """Something that happened during a span."""

    at: float
    """Unix seconds."""
    name: str
    attributes: Mapping[str, str | bool | int | float]


@dataclass
class Span:
    """A part of a job with its beginning and end, in Unix seconds."""

    key: str
    """Names the span within its job: the same each time that the job's events are read."""
    parent: str | None
    """Key of the span that it is part of; None: the whole job."""
    name: str
    start: float
    end: float = 0.0
    attributes: dict[str, str | bool | int | float] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    error: str = ""
    """Why it failed; empty: it did not."""


class Spans:
    """Makes spans of the views of a job's events, which come in their order.

    The whole job is ``job``. Its parts are ``plan``, ``move shards``, ``start`` and ``publish``, and for each region a
    ``partition`` with ``prepare``, once for each time that it starts, and each ``round``. Other events are notes of the
    region's span, or of the job's. If the oldest events are not kept any more, the job begins with the first one.
    """

    def __init__(self) -> None:
        self._open: dict[str, Span] = {}
        self._last: dict[str, float] = {}
        """When the last event of each region was, by its span's key."""
        self._round_began: dict[str, float] = {}
        self._preparations: Counter[str] = Counter()

    def add(self, event: Mapping[str, Any]) -> list[Span]:
        """Take an event; return the spans that have ended with it."""
        kind, region, at = str(event["kind"]), str(event["region"]), datetime.fromisoformat(event["at"]).timestamp()
        ended: list[Span] = []
        self._begin("", None, "job", at, {"geofed.job": event["job"]})
        if name := _BEGUN_BY.get(kind):
            self._begin(name, "", name, at)
        if name := _ENDED_BY.get(kind):
            ended += self._ended(name, at)
        if kind in ("partition.state", "partition.round"):
            key = partition_key(region)
            self._begin(key, "", "partition", at, {"geofed.region": region})
            if kind == "partition.state":
                ended += self._state(key, region, event, at)
            else:
                ended.append(self._round(key, region, event["data"], at))
        if kind != "partition.round":
            self._note(kind, region, at, event)
        if region:
            self._last[partition_key(region)] = at
        if event["terminal"]:
            ended += self._all(kind, event["text"], at)
        return ended

    def _begin(
        self,
        key: str,
        parent: str | None,
        name: str,
        at: float,
        attributes: Mapping[str, str | bool | int | float] = {},
    ) -> None:
        self._open.setdefault(key, Span(key, parent, name, at, attributes=dict(attributes)))

    def _ended(self, key: str, at: float) -> list[Span]:
        span = self._open.pop(key, None)
        if span is None:
            return []
        span.end = at
        return [span]

    def _state(self, key: str, region: str, event: Mapping[str, Any], at: float) -> list[Span]:
        if error := event["data"].get("error"):
            self._open[key].error = f"{error.get('code')}: {error.get('message')}"
        prepares = f"{key}/prepare/{self._preparations[key]}"
        if event["data"].get("state") == "preparing":
            if prepares not in self._open:
                self._preparations[key] += 1
                prepares = f"{key}/prepare/{self._preparations[key]}"
                self._begin(prepares, key, "prepare", at, {"geofed.region": region})
            return []
        ended = self._ended(prepares, at)
        if ended:
            # The next round begins where the preparation has ended, also after an outage.
            self._round_began[key] = at
        return ended

    def _round(self, key: str, region: str, data: Mapping[str, Any], at: float) -> Span:
        began = self._round_began.get(key, self._open[key].start)
        self._round_began[key] = at
        return Span(
            round_key(region, data["round"]), key, "round", began, at, {"geofed.region": region, **_attributes(data)}
        )

    def _note(self, kind: str, region: str, at: float, event: Mapping[str, Any]) -> None:
        span = self._open.get(partition_key(region), self._open[""])
        if len(span.notes) >= _MAX_NOTES:
            span.attributes["geofed.left_out"] = int(span.attributes.get("geofed.left_out", 0)) + 1
            return
        told = {"geofed.text": str(event["text"]), "geofed.error": kind in _ERRORS, **_attributes(event["data"])}
        span.notes.append(Note(at, kind, told))

    def _all(self, kind: str, text: str, at: float) -> list[Span]:
        """End all that is open with the job, the parts before what they are parts of."""
        ended: list[Span] = []
        for key in sorted(self._open, key=lambda key: (key == "", -len(key))):
            ended += self._ended(key, self._last.get(key, at))
        job = ended[-1]
        job.attributes["geofed.state"] = kind.removeprefix("job.")
        job.error = text if kind == "job.failed" else ""
        return ended


def _attributes(data: Mapping[str, Any]) -> dict[str, str | bool | int | float]:
    """Return the plain values of an event's data; lists and objects are left out."""
    return {f"geofed.{name}": value for name, value in data.items() if isinstance(value, str | bool | int | float)}
