"""What a region's meters have counted, over the lives of its agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from control_plane.core._state import Charge, Copy, Counted, JobState, Partition, Report

__all__ = ["settled", "with_all_meters"]


def with_all_meters(part: Partition | Copy, report: Report) -> tuple[Counted, Report]:
    """A new report with what earlier meters have counted, and that.

    Sums of a report are those of one meter since it began. Another meter than before means that the old one is lost;
    what it told last stays in the account.
    """
    last, before = part.report, part.counted_before
    if last is not None and last.meter and not report.meter:
        # An agent that knows no more of the partition has counted nothing; that it says so is no account.
        kept = replace(report, money=last.money, sent_bytes=last.sent_bytes, received_bytes=last.received_bytes)
        return before, replace(kept, meter=last.meter)
    if last is not None and last.meter and report.meter and last.meter != report.meter:
        before = Counted(last.money, last.sent_bytes, last.received_bytes)
    if before == Counted():
        return before, report
    whole = replace(
        report,
        money=_charges(before.money, report.money),
        sent_bytes=_sums(before.sent_bytes, report.sent_bytes),
        received_bytes=_sums(before.received_bytes, report.received_bytes),
    )
    return before, whole


def settled(state: JobState, region: str, report: Report) -> JobState:
    """An ended job with what a region's meters say after its end: it stays as it is but for the account.

    Calls and shards that were cut off are charged when they have stopped, and by a region that was away when it is
    back: also what an agent says under an older epoch was used.
    """
    held = state.copy_from(region) or state.partition(region)
    if held is None or not report.meter:
        return state
    before, whole = with_all_meters(held, report)
    last = held.report or replace(report, state=held.state, condition="", error=None)
    account = replace(
        last,
        money=whole.money,
        sent_bytes=whole.sent_bytes,
        received_bytes=whole.received_bytes,
        compute_seconds=whole.compute_seconds,
        wait_seconds=whole.wait_seconds,
        meter=whole.meter,
    )
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
