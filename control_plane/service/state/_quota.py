"""Users among each other: what may be promised to one, and whose turn it is in line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from control_plane.store import UserRow
from scheduler import Declined, Reason
from scheduler.deadline import LIVE, DeviceCapacity, Gang, Held, Rules, offer

__all__ = ["over_quota", "quota_of", "turn_of"]

_TRIED, _FURTHEST = 12, 2.0
"""So many later dates are tried for a user whose quota is used up, the last one so many windows after all its
deadlines."""


def quota_of(users: Mapping[str, UserRow], user: str) -> Rules:
    """The rules by which a user is promised something. The operator, and users without a quota, have no limit."""
    limit = users[user].promised_workers if user in users else None
    return LIVE if limit is None else replace(LIVE, quotas={user: limit})


def turn_of(gang: Gang) -> tuple[float, float, float]:
    """Place in line: promises by deadline; the others the least served user's first, then as they came."""
    return gang.deadline_s, gang.served_s * gang.best_effort, gang.since_s


def over_quota(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    new: Gang,
    rules: Rules,
    held: Mapping[str, Held],
) -> Declined:
    """Why a promise to a user is too much beside those it has, and the date that could be promised instead."""
    limit = rules.quotas[new.user]
    text = f"with it the promises to {new.user} would hold more than {limit} workers at once, which is the quota"
    least = sum(new.workers(0).values())
    if least > limit:
        remedy = f"it takes {least} workers at least: ask the operator for a larger quota, or leave the deadline out"
        return Declined((Reason("QUOTA_EXCEEDED", text, remedy),))
    window = new.deadline_s - now
    ends = [gang.deadline_s - now for gang in gangs if gang.user == new.user and not gang.best_effort]
    last = max([0.0, *ends]) + _FURTHEST * window
    growth = (last / window) ** (1 / _TRIED)
    later = [now + window * growth**step for step in range(1, _TRIED + 1)]
    told = offer(now, capacities, gangs, replace(new, deadline_s=later[0], later=tuple(later[1:])), rules, held)
    remedy = "wait until one of your jobs has ended, or leave the deadline out"
    if told.deadline_s is not None:
        remedy = f"a deadline of {math.ceil(told.deadline_s - now)} s from now could be promised"
    return Declined((Reason("QUOTA_EXCEEDED", text, remedy),))
