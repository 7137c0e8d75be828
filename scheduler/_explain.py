"""Why a plan is as it is: for each decision the two best alternatives, and why limits cannot be kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from scheduler._configurations import Configured
from scheduler._exchange import Ways
from scheduler._model import Alternative, Demand, Reason
from scheduler._search import Evaluated, Limits, Place, Search

__all__ = ["alternatives", "beyond_limits"]

_MOST_ALTERNATIVES = 2
"""Alternatives that are told of one decision."""
_VISIBLE = 0.0005
"""Relative difference below which two figures are told as equal: both are printed with three digits."""
_UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def alternatives(
    search: Search,
    fronts: Sequence[Sequence[Configured]],
    ways: Ways,
    evaluated: Evaluated,
    place: Place,
    demand: Demand,
    limits: Limits,
) -> tuple[Alternative, ...]:
    """Return for each decision that was open the two best others, with time and money, and what decided."""
    exchanges, staffs = search.around(evaluated, place), search.neighbours(evaluated, place)
    chosen = evaluated, place

    def named(names: Callable[[Configured], object]) -> Callable[[Evaluated, Place], str]:
        return lambda found, at: _listed(
            [names(front[n]) for front, n in zip(fronts, found.choice[at.staff], strict=True)]
        )

    def of_way(name: str) -> Callable[[Evaluated, Place], str]:
        return lambda found, at: str(getattr(ways.each[found.ways[at.way]], name))

    told: list[Alternative] = []
    decisions: list[tuple[str, object, Evaluated, Callable[[Evaluated, Place], str]]] = [
        ("workers", demand.workers, staffs, named(lambda one: one.part.workers)),
        ("memory", demand.memory_mb, staffs, named(lambda one: one.part.memory_mb)),
        ("merge", demand.collective, staffs, named(lambda one: _merge(one))),
        ("interval", demand.interval, exchanges, lambda found, at: f"{found.interval[at.staff, at.interval]:.0f}"),
        ("codec", demand.codec, exchanges, of_way("codec")),
        ("exchange", demand.exchange, exchanges, of_way("exchange")),
        ("topology", demand.topology, exchanges, lambda found, at: ways.each[found.ways[at.way]].topology.name),
    ]
    for decision, fixed, among, name in decisions:
        if fixed is None:
            told += _others(search, decision, among, name, chosen, demand, limits)
    if demand.topology is None:
        taken = f"topology {ways.each[evaluated.ways[place.way]].topology.name}"
        told += [Alternative(kind, why, taken) for kind, why in ways.impossible.items()]
    return tuple(told)


def _merge(one: Configured) -> str:
    if one.merging is None:
        return "-"
    return one.merging[0] + (f" with K = {one.merging[1]}" if one.merging[1] else "")


def _listed(names: Sequence[object]) -> str:
    return f"{names[0]} in each region" if len(set(names)) == 1 and len(names) > 1 else ", ".join(map(str, names))


def _others(
    search: Search,
    decision: str,
    among: Evaluated,
    name: Callable[[Evaluated, Place], str],
    chosen: tuple[Evaluated, Place],
    demand: Demand,
    limits: Limits,
) -> Iterator[Alternative]:
    """Return the best plan that decides otherwise, and the best that would save more but is not allowed; in place of
    either another one."""
    score, allowed = search.score(among, limits), search.allowed(among, limits)
    best, own = chosen
    saves, present = (search.score(some, replace(limits, possible=True)) for some in (among, best))
    tempting = ~allowed & (saves < present[own.staff, own.interval, own.way])
    seen = {name(*chosen)}
    order = [Place(*(int(n) for n in np.unravel_index(flat, score.shape))) for flat in score.argsort(None, "stable")]
    for wanted in (allowed, tempting, allowed, ~allowed):
        for at in order:
            value = name(among, at) if wanted[at.staff, at.interval, at.way] else ""
            if not value or value in seen or len(seen) > _MOST_ALTERNATIVES:
                continue
            seen.add(value)
            seconds, usd = (float(figures[at.staff, at.interval, at.way]) for figures in (among.seconds, among.usd))
            why = _why_not(search, among, at, chosen, demand, limits)
            yield Alternative(f"{value}: {seconds:.0f} s and ${_usd(usd)}", why, f"{decision} {name(*chosen)}")
            break


def _why_not(
    search: Search, among: Evaluated, at: Place, chosen: tuple[Evaluated, Place], demand: Demand, limits: Limits
) -> str:
    """Return the mechanism that decided against a plan."""
    best, own = chosen
    where = at.staff, at.interval, at.way
    high = search.highest(among)
    if high[0][where] > limits.deadline_seconds:
        return f"may take {high[0][where]:.0f} s, the deadline leaves {limits.deadline_seconds:.0f} s"
    if high[1][where] > limits.budget_usd:
        return f"may cost ${_usd(float(high[1][where]))}, the budget is ${_usd(limits.budget_usd)}"
    points = search.given_up(among, at, limits)
    if not search.allowed(among, limits)[where] and points > demand.tolerance:
        return f"may give up {points:.2g} points, objective.tolerance is {demand.tolerance:g}"
    if not among.tolerated[where]:
        return "rounds of whole steps would change the passes over some shard"
    mine = own.staff, own.interval, own.way
    pairs = (
        (among.usd[where], best.usd[mine], "dearer"),
        (among.seconds[where], best.seconds[mine], "slower"),
        (among.factor[at.staff], best.factor[own.staff], "more samples for the same progress"),
    )
    words = [f"{a / b - 1:.1%} {what}" for a, b, what in pairs if b and a / b - 1 > _VISIBLE]
    given = points - search.given_up(best, own, limits)
    words += [f"may give up {given:.2g} points more"] if given > 0.005 else []
    return " and ".join(words) or "saves nothing that counts"


def beyond_limits(search: Search, demand: Demand) -> tuple[Reason, ...]:
    """Return which limits no plan keeps, with what could be promised."""
    soonest = search.least(Limits("time", possible=True))[0]
    deadline, budget = demand.deadline_seconds, demand.budget_usd
    late = deadline is not None and soonest > deadline
    reasons = []
    if deadline is not None and late:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"needs up to {soonest:.0f} s, the deadline {_leaves(deadline)}",
                f"a deadline of {math.ceil(soonest)} s from now could be promised" + _cheaper_hint(demand),
                earliest_seconds=soonest,
            )
        )
    left = math.inf if late or deadline is None else deadline
    least = search.least(Limits("cost", left, possible=True))[1]
    if budget is not None and least > budget:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"may cost up to ${_usd(least)}, the budget is ${_usd(budget)}",
                f"a budget of ${_usd(least, up=True)} would do",
            )
        )
    return tuple(reasons)


def _leaves(seconds: float) -> str:
    if seconds > 0:
        return f"leaves {seconds:.0f} s"
    size, unit = next(((size, unit) for size, unit in _UNITS if -seconds >= 2 * size), (1.0, "seconds"))
    return f"has passed, {-seconds / size:.0f} {unit} ago"


def _usd(amount: float, *, up: bool = False) -> str:
    """Return an amount with four digits, or, below a tenth of a cent, with the first two that are not zero; rounded up
    on request."""
    digits = 4 if amount >= 1e-3 or amount <= 0 else 1 - math.floor(math.log10(amount))
    return f"{math.ceil(amount * 10**digits) / 10**digits if up else amount:.{digits}f}"


def _cheaper_hint(demand: Demand) -> str:
    return ", or with train.workers auto an earlier one" if demand.workers else ""
