"""All ways to staff the regions of a job, and the choice among them with a deadline and a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from scheduler._elastic import MUCH_THE_SAME, EvaluatedOption, Option, taken
from scheduler._model import Alternative, Declined, Demand, Estimate, Plan, Reason

__all__ = ["Ways"]


class Ways:
    """The evaluated options, independent of deadline and budget, so that both can be varied cheaply."""

    def __init__(self, alike: Mapping[Option, Plan], by_itself: Callable[[Option], Plan | Declined]) -> None:
        self._alike = alike
        """Plans that all exchange like the first one."""
        self._evaluated = [_evaluated(way, other.estimate) for way, other in alike.items()]
        self._by_itself = by_itself
        self._own: dict[Option, Plan | Declined] = {}
        """Each option with the exchange that is best for it alone; filled on demand."""

    def best(self, demand: Demand) -> Plan | Declined:
        """Return the cheapest or fastest among those that keep deadline and budget."""
        best = taken(
            self._evaluated,
            minimise=demand.minimise,
            deadline_seconds=demand.deadline_seconds,
            budget_usd=demand.budget_usd,
        )
        chosen = self._alike[best.option]
        if best is not self._evaluated[0]:
            if best.option not in self._own:
                self._own[best.option] = self._by_itself(best.option)
            own = self._own[best.option]
            # What it would exchange by itself may be cheaper, and too slow for what can be promised.
            if isinstance(own, Plan) and (_within(own, demand) or not _within(chosen, demand)):
                chosen = own
        others = _other_staff(best, self._evaluated, demand)
        chosen = replace(chosen, alternatives=(*others, *chosen.alternatives))
        too_much = _beyond_limits(chosen, self._evaluated, demand)
        return Declined(too_much) if too_much else chosen


def _evaluated(way: Option, took: Estimate) -> EvaluatedOption:
    return EvaluatedOption(way, took.seconds.expected, took.usd.expected, took.seconds.high, took.usd.high)


def _within(chosen: Plan, demand: Demand) -> bool:
    in_time = demand.deadline_seconds is None or chosen.estimate.seconds.high <= demand.deadline_seconds
    return in_time and (demand.budget_usd is None or chosen.estimate.usd.high <= demand.budget_usd)


def _other_staff(best: EvaluatedOption, evaluated: list[EvaluatedOption], demand: Demand) -> tuple[Alternative, ...]:
    """Return why the fastest and the slowest option, and the one that uses everything, lost."""
    ends = [evaluated[0], *(w for w in evaluated if w.option.name in ("greedy", "one worker in each region"))]
    return tuple(
        Alternative(
            f"{_STAFFED.get(way.option.name, way.option.name)} ({sum(way.option.workers)} workers): "
            f"{way.seconds:.0f} s and ${_usd(way.usd)}",
            _why_not(way, best, demand),
        )
        for way in dict.fromkeys(ends)
        if way is not best
    )


def _why_not(way: EvaluatedOption, best: EvaluatedOption, demand: Demand) -> str:
    if demand.deadline_seconds is not None and way.most_seconds > demand.deadline_seconds:
        return f"may take {way.most_seconds:.0f} s, the deadline leaves {demand.deadline_seconds:.0f} s"
    if demand.budget_usd is not None and way.most_usd > demand.budget_usd:
        return f"may cost ${_usd(way.most_usd)}, the budget is ${_usd(demand.budget_usd)}"
    slower, dearer = way.seconds / best.seconds - 1, way.usd / best.usd - 1 if best.usd else 0.0
    words = [f"{part:.1%} {what}" for part, what in ((dearer, "dearer"), (slower, "slower")) if part > 0.0005]
    return " and ".join(words) or f"saves less than {MUCH_THE_SAME:.0%}"


def _beyond_limits(chosen: Plan, evaluated: list[EvaluatedOption], demand: Demand) -> tuple[Reason, ...]:
    """Return what the plan cannot promise, with what could be promised, for each limit."""
    reasons = []
    took = chosen.estimate
    if demand.deadline_seconds is not None and took.seconds.high > demand.deadline_seconds:
        least = min(took.seconds.high, *(way.most_seconds for way in evaluated))
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"needs up to {took.seconds.high:.0f} s, the deadline {_leaves(demand.deadline_seconds)}",
                f"a deadline of {math.ceil(least)} s from now could be promised" + _cheaper_hint(demand),
                earliest_seconds=least,
            )
        )
    if demand.budget_usd is not None and took.usd.high > demand.budget_usd:
        in_time = [w for w in evaluated if demand.deadline_seconds is None or w.most_seconds <= demand.deadline_seconds]
        least = min(took.usd.high, *(way.most_usd for way in in_time or evaluated))
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"may cost up to ${_usd(took.usd.high)}, the budget is ${_usd(demand.budget_usd)}",
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


_STAFFED = {
    "matched": "load-power matching, as fast as the slowest region can",
    "greedy": "every worker that is free",
}
_UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
