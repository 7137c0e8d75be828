"""Money and bytes that a region's meters have counted, summed over restarts of its agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from control_plane.core._state import Charge, Copy, JobState, MeterTotals, Partition, Report

__all__ = ["with_all_meters", "with_late_charges"]


def with_all_meters(part: Partition | Copy, report: Report) -> tuple[MeterTotals, Report]:
    """Add the totals of earlier meters to a new report; return these totals and the summed report.

    A report has the sums of one meter since it began. If the meter differs from the last report's, the old meter was
    lost, and its last sums are added to the totals.
    """
    last, before = part.report, part.counted_before
    if last is not None and last.meter and not report.meter:
        # The agent does not know the partition any more, so its zeros are not a count.
        return before, replace(report, totals=last.totals, meter=last.meter)
    if last is not None and last.meter and report.meter and last.meter != report.meter:
        before = last.totals
    if before == MeterTotals():
        return before, report
    now = report.totals
    totals = MeterTotals(
        money=_charges(before.money, now.money),
        sent_bytes=_sums(before.sent_bytes, now.sent_bytes),
        received_bytes=_sums(before.received_bytes, now.received_bytes),
    )
    return before, replace(report, totals=totals)


def with_late_charges(state: JobState, region: str, report: Report) -> JobState:
    """Return an ended job's state with the charges that a region reports after the end; all else stays.

    Interrupted calls and transfers are reported once they have stopped, or once a lost region is back. Reports of older
    epochs count, too, since their resources were used.
    """
    held = state.copy_from(region) or state.partition(region)
    if held is None or not report.meter:
        return state
    before, whole = with_all_meters(held, report)
    last = held.report or replace(report, state=held.state, condition="", error=None)
    speed = replace(last.speed, compute_seconds=whole.speed.compute_seconds, wait_seconds=whole.speed.wait_seconds)
    account = replace(last, totals=whole.totals, speed=speed, meter=whole.meter)
    changed = replace(held, state=report.state, report=account, counted_before=before)
    if isinstance(changed, Copy):
        return replace(state, copies=tuple(changed if c.source == region else c for c in state.copies))
    return replace(state, partitions=tuple(changed if p.region == region else p for p in state.partitions))


def _sums(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: before.get(name, 0) + now.get(name, 0) for name in {**before, **now}}


def _charges(before: Sequence[Charge], now: Sequence[Charge]) -> tuple[Charge, ...]:
    found = {(charge.item, charge.unit, charge.source): charge for charge in before}
    for charge in now:
        key = charge.item, charge.unit, charge.source
        old = found.get(key, Charge(charge.item, 0.0, charge.unit, 0.0, charge.source))
        found[key] = replace(charge, quantity=old.quantity + charge.quantity, usd=old.usd + charge.usd)
    return tuple(found.values())
