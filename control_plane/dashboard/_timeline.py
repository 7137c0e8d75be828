"""Where the time of a job's rounds goes, from the views of its events: for each region compute, merge, exchange, wait,
evaluate, and the rest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from control_plane._view import Data, seconds_text

__all__ = ["PARTS", "RoundSpan", "grouped", "means_of", "reason_of", "timeline_of", "took_text"]

PARTS = ("compute", "merge", "exchange", "wait", "evaluate", "other")
"""Parts of a round. "other" is what no part counts: starting workers, storing models, stages of a pipeline waiting for
each other."""
_WAITS = 0.1
"""Least share of a region's round that is said to be spent on waiting for the slowest region."""
_PHRASES = {
    "compute": "mostly computing",
    "merge": "mostly merging its workers' steps",
    "exchange": "mostly exchanging updates",
    "wait": "mostly waiting for others",
    "evaluate": "mostly evaluating",
    "other": "mostly other: start-up, storage",
}
_ALONE = "mostly its optimiser's steps"
"""Instead of merging, of one worker."""
_PAUSE = 5.0
"""Rounds that take more than so many times the median of the region's are a pause or a failure."""


@dataclass(frozen=True)
class RoundSpan:
    """One round of a region, or several of which no report came in between."""

    first: int
    last: int
    begin: float
    """Unix seconds."""
    seconds: float
    parts: tuple[float, ...]
    """Seconds, in the order of `PARTS`. Their sum is `seconds`."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.last - self.first + 1


def timeline_of(events: Iterable[Data]) -> dict[str, list[RoundSpan]]:
    """Return each region's rounds in their order, of those that have reported what they took."""
    found: dict[str, list[RoundSpan]] = {}
    last: dict[str, tuple[int, float]] = {}
    for event in sorted((one for one in events if one["kind"] == "partition.round"), key=lambda one: one["cursor"]):
        region, data, end = event["region"], event["data"], datetime.fromisoformat(event["at"]).timestamp()
        before, last[region] = last.get(region), (data["round"], end)
        if "compute_seconds" not in data:
            continue
        counted = [max(0.0, float(data.get(f"{name}_seconds", 0.0))) for name in PARTS[:-1]]
        first, begin = (before[0] + 1, before[1]) if before is not None else (data["round"], end - sum(counted))
        seconds = end - begin
        if seconds <= 0 or first > data["round"]:
            continue
        # What is counted in the region can exceed what passes between two of its reports here.
        scale = min(1.0, seconds / (sum(counted) or 1.0))
        parts = [part * scale for part in counted]
        span = RoundSpan(first, data["round"], begin, seconds, (*parts, max(0.0, seconds - sum(parts))))
        found.setdefault(region, []).append(span)
    return dict(sorted(found.items()))


def grouped(spans: Sequence[RoundSpan], most: int) -> list[RoundSpan]:
    """Return at most ``most`` spans, each the sum of neighbours."""
    size = -(-len(spans) // most) or 1
    return [_sum(spans[start : start + size]) for start in range(0, len(spans), size)]


def means_of(timeline: dict[str, list[RoundSpan]], rounds: int) -> dict[str, tuple[float, ...]]:
    """Return the mean seconds of a round by part, of about the last ``rounds`` rounds of each region.

    Left out are its first rounds, in which all starts and whose begin may not be known, and pauses; unless there are no
    others.
    """
    found = {}
    for region, spans in timeline.items():
        usual = statistics.median_low([span.seconds / span.rounds for span in spans])
        rounds_only = [span for span in spans if span.seconds <= _PAUSE * usual * span.rounds]
        kept = [span for span in rounds_only if span is not spans[0]] or rounds_only
        counted, number = list[RoundSpan](), 0
        for span in reversed(kept):
            if number >= rounds:
                break
            counted.append(span)
            number += span.rounds
        found[region] = tuple(math.fsum(one) / number for one in zip(*(span.parts for span in counted), strict=True))
    return found


def reason_of(means: dict[str, tuple[float, ...]], workers: Mapping[str, int]) -> str:
    """Return in sentences which region the rounds wait for, and what takes its time; empty: nothing is known.

    Args:
        workers: of all regions of the job, also of those that are not in ``means``.
    """
    wait = PARTS.index("wait")
    if not means:
        return ""
    unknown = sorted({*workers} - {*means})
    slowest = max(means, key=lambda region: sum(means[region]) - means[region][wait])
    own = dict(zip(PARTS, means[slowest], strict=True))
    # The others wait for the slowest region, also where it waits longest: a link of its own may be slow.
    part = max((name for name in own if name != "wait" or len(means) == 1), key=lambda name: own[name])
    phrase = _ALONE if part == "merge" and workers.get(slowest) == 1 else _PHRASES[part]
    text = f"A round takes {took_text(sum(own.values()))}."
    among = " of those with figures" if unknown else ""
    which = f"{slowest} is the slowest region{among}" if len(means) > 1 else slowest
    text += f" {which}: {phrase} ({took_text(own[part])})."
    waiting = [
        f"{region} {took_text(parts[wait])}"
        for region, parts in means.items()
        if region != slowest and parts[wait] > _WAITS * sum(parts)
    ]
    text += f" Waiting for others: {', '.join(waiting)}." if waiting else ""
    return text + (f" No figures yet: {', '.join(unknown)}." if unknown else "")


def took_text(seconds: float) -> str:
    """Format the time of a part of a round: 0.042 s, 4.2 s, 3 min 20 s."""
    return f"{seconds:.2g} s" if seconds < 1 else seconds_text(seconds)


def _sum(spans: Sequence[RoundSpan]) -> RoundSpan:
    end = spans[-1].begin + spans[-1].seconds
    parts = tuple(math.fsum(one) for one in zip(*(span.parts for span in spans), strict=True))
    gaps = max(0.0, end - spans[0].begin - sum(parts))
    parts = (*parts[:-1], parts[-1] + gaps)
    return RoundSpan(spans[0].first, spans[-1].last, spans[0].begin, sum(parts), parts)
