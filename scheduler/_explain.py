"""Why a plan is as it is: for each decision the two best alternatives, and why limits cannot be kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler._configurations import RegionConfigurations, configurations, in_stages, merge_of
from scheduler._exchange import ExchangeOption, ExchangeOptions
from scheduler._model import Alternative, Demand, Plan, PlanEstimate, PlannedPartition, Reason, Snapshot
from scheduler._pipelined import WORTH, staged
from scheduler.search import EvaluatedPlans, Ints, PlanCriteria, PlanIndex, PlanSearch, differences

__all__ = ["alternatives", "alternatives_of_parts", "beyond_limits", "chosen_slice"]

_MOST_ALTERNATIVES = 2
"""Alternatives that are told of one decision."""
_SLICES = (30.0, 60.0, 120.0, 300.0)
"""Slices in seconds that a plan may choose, and the longest that is possible. With short ones a worker that hangs, or
waits for a region that is lost, is noticed and stopped sooner; shorter ones than these would cost more starts."""
_SLICE_WORTH = 0.005
"""Share of the objective that a longer slice must save."""
_MOST_REGIONS = 20
"""Regions up to which other K are evaluated: each is looked up in each region's profile."""
_UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


@dataclass(frozen=True)
class _Decided:
    """What plans decide in one respect."""

    codes: Callable[[EvaluatedPlans], Ints]
    """Numbers of the values, with the three axes of plans and one more."""
    name: Callable[[EvaluatedPlans, PlanIndex], str]

    def code(self, evaluated: EvaluatedPlans, place: PlanIndex) -> Ints:
        """Return one plan's."""
        codes = self.codes(evaluated)
        rows = np.broadcast_to(codes, (*evaluated.seconds.shape, codes.shape[-1]))
        return np.asarray(rows[place.assignment, place.interval, place.way])


_INTERVAL = _Decided(
    lambda found: found.interval[:, :, None, None].astype(np.int64),
    lambda found, at: f"{found.interval[at.assignment, at.interval]:.0f}",
)


def alternatives(
    search: PlanSearch,
    fronts: Sequence[RegionConfigurations],
    ways: ExchangeOptions,
    evaluated: EvaluatedPlans,
    place: PlanIndex,
    demand: Demand,
    limits: PlanCriteria,
) -> tuple[Alternative, ...]:
    """Return for each decision that was open the two best others, with time and money, and what decided."""
    chosen, exchanges = (evaluated, place), search.around(evaluated, place)
    assignments = search.neighbours(evaluated, place)

    def of_regions(
        codes: Callable[[RegionConfigurations], Ints], name: Callable[[int], object] = lambda code: code
    ) -> _Decided:
        table = np.zeros((len(fronts), max(len(front) for front in fronts)), np.int64)
        for region, front in enumerate(fronts):
            table[region, : len(front)] = codes(front)
        places = np.arange(len(fronts))
        return _Decided(
            lambda found: table[places, found.choice][:, None, None, :],
            lambda found, at: _listed([name(code) for code in table[places, found.choice[at.assignment]].tolist()]),
        )

    told: list[Alternative] = []
    decisions: list[tuple[str, object, EvaluatedPlans, _Decided]] = [
        (_workers_in(fronts), demand.workers, assignments, of_regions(lambda front: front.workers // front.stages)),
        ("samples of a worker", _given_batch(fronts), assignments, of_regions(lambda front: front.batches)),
        ("stages", demand.stages, assignments, of_regions(lambda front: front.stages)),
        ("memory", demand.memory_mb, assignments, of_regions(lambda front: front.memory_mb)),
        ("merge", demand.collective, assignments, of_regions(lambda front: front.merges, _merge)),
        ("interval", demand.interval, exchanges, _INTERVAL),
        ("codec", demand.codec, exchanges, _of_option(ways, lambda option: option.codec)),
        ("exchange", demand.exchange, exchanges, _of_option(ways, lambda option: option.exchange)),
        ("topology", demand.topology, exchanges, _of_option(ways, lambda option: option.topology.name)),
    ]
    for decision, fixed, among, decided in decisions:
        if fixed is None:
            told += _others(search, decision, among, decided, chosen, demand, limits)
    if demand.topology is None:
        taken = f"topology {ways.each[evaluated.ways[place.way]].topology.name}"
        told += [Alternative(kind, why, taken) for kind, why in ways.impossible.items()]
    return tuple(told)


def _of_option(ways: ExchangeOptions, name: Callable[[ExchangeOption], str]) -> _Decided:
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(name(option), len(numbers)) for option in ways.each])
    return _Decided(
        lambda found: codes[list(found.ways)][None, None, :, None],
        lambda found, at: name(ways.each[found.ways[at.way]]),
    )


def _workers_in(fronts: Sequence[RegionConfigurations]) -> str:
    return "replicas" if any(front[0].part.pipeline is not None for front in fronts) else "workers"


def _given_batch(fronts: Sequence[RegionConfigurations]) -> int | None:
    """Return the samples of every worker in a step; None: workers may divide a batch."""
    batches = {batch for front in fronts for batch in front.batches.tolist()}
    return batches.pop() if len(batches) == 1 else None


def _merge(number: int) -> str:
    merging = merge_of(number)
    if merging is None:
        return "-"
    return merging[0] + (f" with K = {merging[1]}" if merging[1] else "")


def _listed(names: Sequence[object]) -> str:
    return f"{names[0]} in each region" if len(set(names)) == 1 and len(names) > 1 else ", ".join(map(str, names))


def _others(
    search: PlanSearch,
    decision: str,
    among: EvaluatedPlans,
    decided: _Decided,
    chosen: tuple[EvaluatedPlans, PlanIndex],
    demand: Demand,
    limits: PlanCriteria,
) -> Iterator[Alternative]:
    """Return the best plan that decides otherwise, and the best that would save more but is not allowed; in place of
    either another one."""
    score, allowed = search.score(among, limits), search.allowed(among, limits)
    best, own = chosen
    saves, present = (search.score(some, replace(limits, possible=True)) for some in (among, best))
    tempting = ~allowed & (saves < present[own.assignment, own.interval, own.way])
    codes, open_ = decided.codes(among), np.ones(score.shape, bool)
    last, told = decided.code(best, own), 0
    for wanted in (allowed, tempting, allowed, ~allowed):
        open_ &= (codes != last).any(axis=-1)
        if told == _MOST_ALTERNATIVES or not (wanted & open_).any():
            continue
        flat = np.where(wanted & open_, score, np.inf).argmin()
        at = PlanIndex(*(int(n) for n in np.unravel_index(flat, score.shape)))
        seconds, usd = (float(figures[at.assignment, at.interval, at.way]) for figures in (among.seconds, among.usd))
        why = _why_not(search, among, at, chosen, demand, limits)
        text = f"{decided.name(among, at)}: {seconds:.0f} s and ${_usd(usd)}"
        yield Alternative(text, why, f"{decision} {decided.name(best, own)}")
        last, told = decided.code(among, at), told + 1


def _why_not(
    search: PlanSearch,
    among: EvaluatedPlans,
    at: PlanIndex,
    chosen: tuple[EvaluatedPlans, PlanIndex],
    demand: Demand,
    limits: PlanCriteria,
) -> str:
    """Return the mechanism that decided against a plan."""
    best, own = chosen
    where = at.assignment, at.interval, at.way
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
    mine = own.assignment, own.interval, own.way
    if search.changed(among)[where] and not search.changed(best)[mine]:
        return "its exchange takes so much of a round's compute that codec or interval would not stay in the job"
    pairs = (
        (float(among.usd[where]), float(best.usd[mine]), "dearer"),
        (float(among.seconds[where]), float(best.seconds[mine]), "slower"),
        (float(among.factor[at.assignment]), float(best.factor[own.assignment]), "more samples for the same progress"),
    )
    return differences(*pairs, points=points - search.given_up(best, own, limits)) or "saves nothing that counts"


_Parts = tuple[PlannedPartition, ...]
"""The partitions of a plan."""


def alternatives_of_parts(
    plan: Plan, snapshot: Snapshot, demand: Demand, predicted: Callable[[Plan], Plan]
) -> Iterator[Alternative]:
    """Return the same for decisions inside partitions: the stages of pipelines, and K. What other plans beat in every
    respect is no configuration of a region, but is told, too.

    ``predicted``: returns a plan with its estimate.
    """
    variants = tuple(_staged_otherwise(plan, snapshot, demand))
    for decision, named in _OF_STAGES.items() if variants else ():
        if decision != "activations" or demand.activations is None:
            yield from _told(decision, named, variants, plan, demand, predicted)
    k = plan.merging.get("k")
    if k is not None and "k" not in demand.merging and len(plan.partitions) <= _MOST_REGIONS:
        others = {_with_k(plan, other, snapshot, demand): other for other in _other_ks(plan, int(k))}
        yield from _told("K", lambda parts: f"{others.get(parts, int(k))}", others, plan, demand, predicted)


def _by_stages(name: Callable[[PlannedPartition], object]) -> Callable[[_Parts], str]:
    return lambda parts: _listed([name(part) for part in parts if part.pipeline is not None])


_OF_STAGES: dict[str, Callable[[_Parts], str]] = {
    "activations": _by_stages(lambda part: part.pipeline.activation_codec if part.pipeline else ""),
    "recomputed stages": _by_stages(
        lambda part: sum(stage.rematerialise for stage in part.pipeline.stages) if part.pipeline else 0
    ),
    "micro-batch": _by_stages(lambda part: part.pipeline.micro_batch if part.pipeline else 0),
    "order": _by_stages(lambda part: part.pipeline.order if part.pipeline else ""),
}
"""Decisions on pipelines, and what partitions decide."""


def _staged_otherwise(plan: Plan, snapshot: Snapshot, demand: Demand) -> Iterator[_Parts]:
    """Return the plan's partitions with another pipeline in one region, or in all that can have the same."""
    found: dict[tuple[str, ...], dict[str, PlannedPartition]] = {}
    for part in plan.partitions:
        region = snapshot.by_name[part.region]
        best = staged(region, snapshot, demand) if part.pipeline is not None else None
        tried = (best, *best.others) if best is not None else ()
        own = next(
            (cut for cut in tried if cut.memory_mb == part.memory_mb and cut.shape(part.replicas) == part.pipeline),
            None,
        )
        for variant in own.variants(part.replicas) if own is not None else ():
            try:
                other = in_stages(region, part.samples, variant, part.replicas, demand)
            except ValueError:
                continue
            other = replace(other, steps_per_round=part.steps_per_round, shards=part.shards)
            found.setdefault(tuple(name((other,)) for name in _OF_STAGES.values()), {})[part.region] = other
    for changed in found.values():
        yield tuple(changed.get(part.region, part) for part in plan.partitions)


def _other_ks(plan: Plan, k: int) -> list[int]:
    """Return other numbers of workers that merge a chunk each: the nearest, and all."""
    most = max(part.workers for part in plan.partitions)
    return sorted({other for other in (k // 2, k - 1, k + 1, 2 * k, most) if 0 < other <= most} - {k})


def _with_k(plan: Plan, k: int, snapshot: Snapshot, demand: Demand) -> _Parts:
    """Return the plan's partitions with another K, where their functions have the memory."""
    parts = []
    for part in plan.partitions:
        own = part
        if part.workers > 1 and part.pipeline is None:
            fixed = replace(
                demand, workers={part.region: part.workers}, memory_mb=part.memory_mb, collective=plan.collective,
                merging={**demand.merging, "k": float(k)}, batch=part.batch, divides_batch=False,
            )  # fmt: skip
            one = configurations(snapshot.by_name[part.region], snapshot, fixed)[0]
            if one.merging is not None:
                own = replace(one.part, divided=part.divided, steps_per_round=part.steps_per_round, shards=part.shards)
        parts.append(own)
    return tuple(parts)


def _told(
    decision: str,
    named: Callable[[_Parts], str],
    variants: Iterable[_Parts],
    plan: Plan,
    demand: Demand,
    predicted: Callable[[Plan], Plan],
) -> Iterator[Alternative]:
    """Return the two best of partitions that decide otherwise."""
    own, told = named(plan.partitions), set[str]()
    others = [parts for parts in variants if named(parts) != own and parts != plan.partitions]
    each = [(predicted(replace(plan, partitions=parts)).estimate, parts) for parts in others]
    for took, parts in sorted(each, key=lambda one: _measure(one[0], demand)):
        if len(told) == _MOST_ALTERNATIVES or named(parts) in told:
            continue
        told.add(named(parts))
        rounding = f"saves less than {1 - WORTH:.0%}, which rounding must be worth"
        yield _told_of(
            named(parts), took, plan, demand, f"{decision} {own}", rounding if decision == "activations" else ""
        )


def chosen_slice(plan: Plan, demand: Demand, predicted: Callable[[Plan], Plan]) -> tuple[Plan, tuple[Alternative, ...]]:
    """Return a plan with the longest slice changed to the shortest that costs hardly more, with two others.

    Longer slices never cost more time or money by the cost model.
    """
    longest, limits = plan.slice_seconds, (demand.deadline_seconds, demand.budget_usd)
    most = _measure(plan.estimate, demand) * (1 + _SLICE_WORTH)
    tried, chosen = [plan], plan
    for seconds in (one for one in _SLICES if one < longest):
        other = predicted(replace(plan, slice_seconds=seconds))
        tried.append(other)
        highest = other.estimate.seconds.high, other.estimate.usd.high
        kept = all(high <= (math.inf if limit is None else limit) for high, limit in zip(highest, limits, strict=True))
        if chosen is plan and kept and _measure(other.estimate, demand) <= most:
            chosen = other
        elif chosen is not plan:
            break
    others = [one for one in (tried[-1], *tried) if one is not chosen]
    named = f"slice {chosen.slice_seconds:g} s"
    why = f"saves less than {_SLICE_WORTH:.1%}; a worker that hangs is noticed later"
    told = {
        f"{one.slice_seconds:g} s": _told_of(f"{one.slice_seconds:g} s", one.estimate, chosen, demand, named, why)
        for one in others
    }
    return chosen, (*told.values(),)[:_MOST_ALTERNATIVES]


def _told_of(name: str, took: PlanEstimate, own: Plan, demand: Demand, decision: str, why: str = "") -> Alternative:
    """Return an alternative to a plan. ``why``: what decided where it is no worse."""
    text = f"{name}: {took.seconds.expected:.0f} s and ${_usd(took.usd.expected)}"
    return Alternative(text, _why_not_so(took, own.estimate, demand) or why or "saves nothing that counts", decision)


def _measure(took: PlanEstimate, demand: Demand) -> float:
    return (took.seconds if demand.minimise == "time" else took.usd).expected


def _why_not_so(took: PlanEstimate, own: PlanEstimate, demand: Demand) -> str:
    """Return the mechanism that decided against other partitions; empty: they are no worse."""
    if took.seconds.high > (demand.deadline_seconds or math.inf):
        return f"may take {took.seconds.high:.0f} s, the deadline leaves {demand.deadline_seconds:.0f} s"
    if took.usd.high > (demand.budget_usd or math.inf):
        return f"may cost ${_usd(took.usd.high)}, the budget is ${_usd(demand.budget_usd or 0.0)}"
    return differences(
        (took.usd.expected, own.usd.expected, "dearer"), (took.seconds.expected, own.seconds.expected, "slower"),
        points=0.0,
    )  # fmt: skip


def beyond_limits(search: PlanSearch, demand: Demand) -> tuple[Reason, ...]:
    """Return which limits no plan keeps, with what could be promised."""
    soonest = search.least(PlanCriteria("time", possible=True))[0]
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
    least = search.least(PlanCriteria("cost", left, possible=True))[1]
    if budget is not None and least > budget:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"may cost up to ${_usd(least)}, the budget is ${_usd(budget)}",
                f"a budget of ${_usd(least, up=True)} would do",
                least_usd=least,
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
