"""Which date can be promised where the one that was asked for cannot: found by asking for others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from scheduler import Declined, Demand, Plan, Reason
from scheduler.deadline import Offer

__all__ = ["too_late", "with_dates"]

_WIDER, _TRIED = 1.5, 14
"""Each further date that is tried is so many times as far away, until one can be promised."""
_FINE = 0.02
"""To this part of it the earliest date is found."""
_STEPS_LATER = 4
"""Of that part, that are tried after it: of two dates the later one may be the harder to promise, since workers are
shared out by the order of dates, and by how much time each leaves."""


class Refusal(Protocol):
    """What is answered to another demand; None: it would be taken."""

    def __call__(self, other: Demand, *, later: bool = False) -> Declined | None:
        """``later``: a moment later."""


def too_late(told: Offer, demand: Demand, chosen: Plan, at: float, *, alone: bool) -> Declined:
    """Why a date cannot be promised for which a plan is fast enough; ``alone``: not even if there were no other job."""
    assert demand.deadline_seconds is not None
    most, asked = chosen.estimate.seconds.high, demand.deadline_seconds
    text = f"cannot be done in {asked:.0f} s, the promises to other jobs kept"
    if alone:
        text = (
            f"cannot be promised in {asked:.0f} s: the job may take {most:.0f} s, and a promise keeps time besides, "
            "for the start and changes of workers and for what nobody can foresee"
        )
    return Declined((Reason("INADMISSIBLE", text, _named(None), told.earliest_s - at),))


def with_dates(declined: Declined, demand: Demand, refusal: Refusal, enough: Callable[[], bool]) -> Declined:
    """The same refusal, where a date is named, with the earliest that is not refused in turn, nor a moment later.

    A budget is kept to, if any date is there with it. ``enough``: it has taken so long that a date which was found is
    named as it is, though an earlier one may do.
    """
    asked = demand.deadline_seconds
    first = next((r.earliest_seconds for r in declined.reasons if r.earliest_seconds is not None), None)
    if asked is None or first is None:
        return declined
    found, more = _earliest(demand, asked, first, refusal, enough), ""
    if found is None and demand.budget_usd is not None:
        found, more = (
            _earliest(replace(demand, budget_usd=None), asked, first, refusal, enough),
            ", with a larger budget",
        )
    remedy = _named(found) + more * (found is not None)
    if found is not None and demand.workers:
        remedy += ", or with train.workers auto perhaps an earlier one"
    reasons = (r if r.earliest_seconds is None else replace(r, remedy=remedy) for r in declined.reasons)
    return Declined(tuple(reasons))


def _earliest(
    demand: Demand,
    asked: float,
    first: float,
    refusal: Refusal,
    enough: Callable[[], bool],
    *,
    lasting: bool = False,
) -> int | None:
    """In whole seconds, later than `asked`; None where none was found. ``first``: where to begin. ``lasting``: dates
    that would be refused a moment later are passed over from the beginning, which takes twice as long."""

    def told(seconds: int, *, later: bool = lasting) -> Declined | None:
        other = replace(demand, deadline_seconds=float(seconds))
        return refusal(other) or (refusal(other, later=True) if later else None)

    refused = max(0, math.floor(asked))
    tried = max(refused + 1, math.ceil(first) if math.isfinite(first) else 0)
    for _ in range(_TRIED):
        no = told(tried)
        if no is None:
            break
        better = next((r.earliest_seconds for r in no.reasons if r.earliest_seconds is not None), None)
        if better is None:
            return None
        refused, tried = tried, max(math.ceil(tried * _WIDER), math.ceil(better) if math.isfinite(better) else 0)
    else:
        return None
    while tried - refused > max(1, math.floor(_FINE * tried)) and not enough():
        middle = (tried + refused) // 2
        if told(middle) is None:
            tried = middle
        else:
            refused = middle
    # A little later, as a moment passes until it is asked for, and others may turn out slower meanwhile.
    step = max(1, math.ceil(_FINE * tried))
    dates = (*(tried + number * step for number in range(1, 1 + _STEPS_LATER)), tried)
    found = next((date for date in dates if told(date, later=True) is None), None)
    if found is None and not lasting:
        found = _earliest(demand, asked, first, refusal, enough, lasting=True)
    return tried if found is None else found


def _named(seconds: int | None) -> str:
    if seconds is None:
        return "no date can be named as things stand: leave the deadline out, or wait for regions to be back"
    return f"a deadline of {seconds} s from now could be promised"
