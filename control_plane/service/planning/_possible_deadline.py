"""Search for a deadline that can be promised if the requested one cannot."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from scheduler import Declined, Demand, Plan, Reason
from scheduler.deadline import Offer

__all__ = ["too_late", "with_dates"]

_GROWTH = 1.5
"""Factor between two dates that are tried, until one can be promised."""
_MAX_DATES = 14
"""Number of dates that are tried so."""
_PRECISION = 0.02
"""Relative precision to which the earliest date is found."""
_LATER_STEPS = 4
"""Number of steps of that size that are tried after the found date. A later date may be harder to promise than an
earlier one, since workers are allocated by the order of dates and by the time that each leaves."""


class Refusal(Protocol):
    """Checks if another demand would be refused; None: it would be admitted."""

    def __call__(self, other: Demand, *, later: bool = False) -> Declined | None:
        """``later``: check as of a moment later."""


def too_late(offered: Offer, demand: Demand, chosen: Plan, at: float, *, alone: bool) -> Declined:
    """Return why a deadline cannot be promised although a plan is fast enough; ``alone``: even without other jobs."""
    assert demand.deadline_seconds is not None
    high, asked = chosen.estimate.seconds.high, demand.deadline_seconds
    text = f"cannot be done in {asked:.0f} s without breaking promises to other jobs"
    if offered.too_large is not None:
        size, most = (seconds / 3600 for seconds in offered.too_large)
        text = (
            f"takes {size:.3g} worker hours to be done in {asked:.0f} s; while so little is free until then, no job is "
            f"promised more than {most:.3g}, since smaller ones would lose their place"
        )
    elif alone:
        text = (
            f"cannot be promised in {asked:.0f} s: the job may take {high:.0f} s, and a promise reserves additional "
            "time for the start, for changes of workers and for failures"
        )
    return Declined((Reason("INADMISSIBLE", text, _named(None), offered.earliest_s - at),))


def with_dates(declined: Declined, demand: Demand, refusal: Refusal, enough: Callable[[], bool]) -> Declined:
    """Return the refusal with the earliest deadline that would be admitted now and a moment later.

    The budget is kept if any deadline can be promised with it; else the deadline is the one with a larger budget.

    Args:
        enough: returns True once the search has taken so long that the date found so far is used.
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
    """Return the earliest deadline after `asked` that can be promised, in whole seconds; None if none was found.

    Args:
        first: where to begin the search.
        lasting: skip dates that would be refused a moment later from the beginning, which takes twice as long.
    """

    def refused_at(seconds: int, *, later: bool = lasting) -> Declined | None:
        other = replace(demand, deadline_seconds=float(seconds))
        return refusal(other) or (refusal(other, later=True) if later else None)

    refused = max(0, math.floor(asked))
    tried = max(refused + 1, math.ceil(first) if math.isfinite(first) else 0)
    for _ in range(_MAX_DATES):
        answer = refused_at(tried)
        if answer is None:
            break
        better = next((r.earliest_seconds for r in answer.reasons if r.earliest_seconds is not None), None)
        if better is None:
            return None
        refused, tried = tried, max(math.ceil(tried * _GROWTH), math.ceil(better) if math.isfinite(better) else 0)
    else:
        return None
    while tried - refused > max(1, math.floor(_PRECISION * tried)) and not enough():
        middle = (tried + refused) // 2
        if refused_at(middle) is None:
            tried = middle
        else:
            refused = middle
    # Prefer a slightly later date, since time passes until it is requested, and other jobs may become slower.
    step = max(1, math.ceil(_PRECISION * tried))
    dates = (*(tried + number * step for number in range(1, 1 + _LATER_STEPS)), tried)
    found = next((date for date in dates if refused_at(date, later=True) is None), None)
    if found is None and not lasting:
        found = _earliest(demand, asked, first, refusal, enough, lasting=True)
    return tried if found is None else found


def _named(seconds: int | None) -> str:
    if seconds is None:
        return "no deadline can be promised now: omit the deadline, or wait until regions have reconnected"
    return f"a deadline of {seconds} s from now could be promised"
