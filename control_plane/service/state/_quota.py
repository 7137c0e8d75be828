"""Quotas of users, and the order of jobs in the queue."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from control_plane.store import UserRow
from scheduler import Declined, Reason
from scheduler.deadline import LIVE, DeviceCapacity, Gang, Reservation, Rules, offer

__all__ = ["over_quota", "rules_for", "turn_of"]

_LATER_DATES = 12
"""Number of later deadlines that are tried for a user whose quota is used up."""
_LAST_DATE_WINDOWS = 2.0
"""Distance of the last one from the user's latest deadline, in multiples of the requested time span."""


def rules_for(users: Mapping[str, UserRow], user: str, *, by_price: bool = False) -> Rules:
    """Return the rules of promises to a user. The operator, and users without a quota, have no limit.

    ``by_price``: whether what takes far more than others is refused where little is free.
    """
    limit = users[user].promised_workers if user in users else None
    return replace(LIVE, quotas={} if limit is None else {user: limit}, by_price=by_price)


def turn_of(gang: Gang) -> tuple[float, float, float]:
    """Return the sort key of the queue: promises by deadline; others by least served user, then by submission."""
    return gang.deadline_s, gang.served_s * gang.best_effort, gang.since_s


def over_quota(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    new: Gang,
    rules: Rules,
    held: Mapping[str, Reservation],
) -> Declined:
    """Return the refusal of a promise that exceeds a user's quota, with a deadline that could be promised."""
    limit = rules.quotas[new.user]
    text = f"with this job, the promises to {new.user} would exceed the quota of {limit} workers"
    least = sum(new.workers(0).values())
    if least > limit:
        remedy = f"the job needs at least {least} workers: ask the operator for a larger quota, or omit the deadline"
        return Declined((Reason("QUOTA_EXCEEDED", text, remedy),))
    window = new.deadline_s - now
    ends = [gang.deadline_s - now for gang in gangs if gang.user == new.user and not gang.best_effort]
    last = max([0.0, *ends]) + _LAST_DATE_WINDOWS * window
    growth = (last / window) ** (1 / _LATER_DATES)
    later = [now + window * growth**step for step in range(1, _LATER_DATES + 1)]
    offered = offer(now, capacities, gangs, replace(new, deadline_s=later[0], later=tuple(later[1:])), rules, held)
    remedy = "wait until one of your jobs has ended, or omit the deadline"
    if offered.deadline_s is not None:
        remedy = f"a deadline of {math.ceil(offered.deadline_s - now)} s from now could be promised"
    return Declined((Reason("QUOTA_EXCEEDED", text, remedy),))
