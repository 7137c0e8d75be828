"""Rerouting of a running job's updates if its links differ from what the plan assumed.

The plan's topology is the best one for the stated links. Parameter servers measure the links in use. If a link has been
much slower than stated for long enough, the topology is chosen again (`choose_again`), over the measurements and, for
links that are not in use, the stated values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler._link import PRIOR_MBPS, PRIOR_RTT_MS, LinkTable, Path, pace
from scheduler.topology._evaluate import Topology, choose_again, evaluate_topology

__all__ = ["LinkMeasurement", "Rerouting", "measured_path", "rerouted", "with_measurements"]

_SLOWER = 1.5
"""Ratio of measured to expected time, for an update or a round trip, above which a link counts as slower. It is a
choice: smaller differences are common jitter."""
_SLOWER_SECONDS = 0.1
"""Seconds that an update must take beyond `_SLOWER` times the expected time for its link to count as slower; a smaller
difference may be due to the receiver's disk."""
_LEAST_RTT_MS = 10.0
"""Shortest measured round trip, in ms, that is taken for the link's: below it processes take as long as the way."""
_LONGER = 2.0
"""Ratio of two measured round trips above which the way has become longer. A choice: a busy machine adds less."""
_ROUND_GAIN = 0.05
"""Share of a round's time that a rerouting must save. It saves nothing if the exchange is hidden behind compute."""
_LEAST_MBPS = 1e-3
"""Lower bound, in Mbit/s, of the search for a link's rate; a link that still carries updates is faster."""
_NAMED_LINKS = 3
"""Largest number of links in the reason for a rerouting, the worst first, so that the text stays on one line."""


@dataclass(frozen=True)
class LinkMeasurement:
    """Recent measurements of a directed link, reported by its sender."""

    mbps: float = 0.0
    """Payload rate of the last update, including the time of its acknowledgement; 0: unknown."""
    rtt_ms: float = 0.0
    """Round-trip time; 0: unknown."""
    down: bool = False
    """Whether the last attempt to reach the other side failed."""


@dataclass(frozen=True)
class Rerouting:
    """New routes, and their expected times."""

    topology: Topology
    before_seconds: float
    """Seconds of a round over the present routes with the measured links; infinite if one of them is down."""
    after_seconds: float
    """Seconds of a round over the new routes."""
    why: str
    """Text with the links of the present routes that are worst compared with their stated values."""


def with_measurements(
    stated: LinkTable,
    measurements: Mapping[tuple[str, str], LinkMeasurement],
    update_bytes: int,
    known: Iterable[tuple[str, str]] = (),
) -> dict[tuple[str, str], Path]:
    """Return the links with their measured values, or else their stated ones.

    ``stated`` has a path for every pair of regions that may have one (`link_table`). Paths in ``known`` are stated by
    an operator, or in use; the others are assumed, and are included only if they were measured. A sender's rate
    includes time that is not spent on the link, so a rate slightly below the stated one does not count as a slower
    link. Rates are rounded to two digits, so that tables of unchanged links are equal.
    """
    sure, table = set(known), {}
    for (source, to), path in stated.items():
        seen = measurements.get((source, to))
        if seen is None and (source, to) in sure:
            table[source, to] = path
        elif seen is not None and not seen.down:
            table[source, to] = _as_measured(path, seen, update_bytes)
    return table


def measured_path(seen: LinkMeasurement, update_bytes: int, known: Path | None = None) -> Path:
    """Return a link that nobody states, by a job's measurements of it.

    Processes that wait for a core make round trips longer, never shorter: the shortest one counts, until they take
    more than `_LONGER` times as long.

    Args:
        update_bytes: size of the updates of which ``seen`` tells the rate: small ones tell little of a link's.
        known: the link as earlier jobs have told; None: they have not.
    """
    rtt_ms = max(_LEAST_RTT_MS, _rounded(seen.rtt_ms)) if seen.rtt_ms else PRIOR_RTT_MS
    if known is not None and known.rtt_ms < rtt_ms <= _LONGER * known.rtt_ms:
        rtt_ms = known.rtt_ms
    path = Path(rtt_ms, known.mbps if known is not None else PRIOR_MBPS, 0.0)
    return _as_measured(path, replace(seen, rtt_ms=0.0), update_bytes)


def _as_measured(path: Path, seen: LinkMeasurement, update_bytes: int) -> Path:
    """Return a link with its measured round-trip time and rate, unless they are about the stated ones."""
    if seen.rtt_ms > path.rtt_ms * _SLOWER:
        path = replace(path, rtt_ms=_rounded(seen.rtt_ms))
    if not seen.mbps:
        return path
    if seen.mbps > path.mbps:
        return replace(path, mbps=_rounded(seen.mbps))
    took = update_bytes * 8 / 1e6 / seen.mbps
    if took <= _seconds(path, path.mbps, update_bytes) * _SLOWER + _SLOWER_SECONDS:
        return path
    low, high = _LEAST_MBPS, path.mbps
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _seconds(path, middle, update_bytes) > took else (low, middle)
    return replace(path, mbps=_rounded(high))


def _seconds(path: Path, mbps: float, update_bytes: int) -> float:
    """Return the seconds from an update's first byte to its acknowledgement."""
    return pace(replace(path, mbps=mbps), update_bytes).first_seconds + path.rtt_seconds


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def rerouted(
    current: Topology,
    tables: Sequence[LinkTable],
    stated: LinkTable,
    update_bytes: int,
    *,
    compute_seconds: float,
    background: bool,
) -> Rerouting | None:
    """Return new routes if they have been better for long enough; None: keep the present ones.

    ``tables``: links by successive measurements (`with_measurements`), the newest last. ``compute_seconds``: compute of
    a round.
    In addition to what `choose_again` requires, the round must become a twentieth shorter: in the background an
    exchange that is hidden behind compute costs nothing.
    """
    best = choose_again(current, tables, update_bytes)
    if best is None:
        return None
    now = evaluate_topology(current, tables[-1], update_bytes)
    before = _round_seconds(math.inf if now is None else now.seconds, compute_seconds, background)
    after = _round_seconds(best.seconds, compute_seconds, background)
    if after > (1 - _ROUND_GAIN) * before:
        return None
    return Rerouting(best, before, after, _reason(current, tables[-1], stated))


def _round_seconds(exchange: float, compute: float, background: bool) -> float:
    return max(exchange, compute) if background else exchange + compute


def _reason(current: Topology, table: LinkTable, stated: LinkTable) -> str:
    """Return a text that names the links that are worst compared with their stated values."""
    found = []
    for source, to in [*current.links, *((b, a) for a, b in current.links)]:
        path, meant = table.get((source, to)), stated.get((source, to))
        if path is None:
            found.append((0.0, f"{source}>{to} is down"))
        elif meant is not None and path.mbps < meant.mbps:
            found.append((path.mbps / meant.mbps, f"{source}>{to} carries {path.mbps:g} Mbit/s, not {meant.mbps:g}"))
        elif meant is not None and path.rtt_ms > meant.rtt_ms:
            found.append((meant.rtt_ms / path.rtt_ms, f"{source}>{to} takes {path.rtt_ms:g} ms, not {meant.rtt_ms:g}"))
    return ", ".join(text for _, text in sorted(found)[:_NAMED_LINKS]) or "other links are better than they were"
