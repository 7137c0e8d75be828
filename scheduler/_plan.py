"""The plan of one job by data location: a partition runs where its shard is, or where residency lets the shard move."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler._configurations import (
    RegionConfigurations,
    configurations,
    merging_of,
)
from scheduler._estimate import basis_of, constants_of, copied_of, estimate, spread_of
from scheduler._exchange import ExchangeOptions, adapted, exchange_options, share_of
from scheduler._explain import alternatives, alternatives_of_parts, beyond_limits, chosen_slice
from scheduler._model import (
    Alternative,
    Declined,
    Demand,
    Learning,
    Plan,
    PlanEstimate,
    PlannedPartition,
    Range,
    Snapshot,
)
from scheduler._pipelined import unstaged
from scheduler._published_rules import METHODS
from scheduler._shard_moves import IMPOSSIBLE, PlacedShards, best_moves
from scheduler.checks import candidates, refusals, unfit, warnings_of
from scheduler.search import EvaluatedPlans, PlanCriteria, PlanEvaluation, PlanIndex, PlanSearch, Spread
from scheduler.topology import Topology
from scheduler.tuning._learning import PRIOR_NOISE_SAMPLES, noise_samples
from sync.policy import DEFAULT


def plan(snapshot: Snapshot, demand: Demand) -> Plan | Declined:
    """Choose regions, workers and steps for a demand.

    Every live, allowed region that holds a training shard takes part, or another region processes its shard: where the
    shard's owner and the demand permit that, and staying is impossible or clearly worse (`_moves`).
    """
    return Planner(snapshot).plan(demand)


class Planner:
    """Plans over one snapshot; what depends on neither objective, deadline nor budget is computed once for a demand.

    So others can be tried at little cost. The results are the same as those of `plan`.
    """

    def __init__(self, snapshot: Snapshot, like: Planner | None = None) -> None:
        """``like``: a planner over a snapshot that differs in the speeds of workers only, which share what does not
        depend on these."""
        self._snapshot = snapshot
        self._demand: Demand | None = None
        self._evaluated: dict[tuple[tuple[str, str], ...], _Problem | Declined] = {}
        """Results by moved shards and their destinations."""
        self._ways: _SharedWays = _SharedWays() if like is None else like._ways
        self.placements = 0
        """Number of shard layouts that were evaluated; they take most of the time."""

    def plan(self, demand: Demand) -> Plan | Declined:
        """Return a plan, as the function `plan`."""
        if demand.method is not None:
            return self._by_method(demand, demand.method)
        unbounded = replace(demand, minimise="cost", deadline_seconds=None, budget_usd=None, explained=True)
        if unbounded != self._demand:
            self._demand, self._evaluated = unbounded, {}
        return best_moves(self._snapshot, demand, self._placed, self._roughly)

    def configured(self, demand: Demand) -> tuple[list[ConfiguredJob], ConfiguredJob | None] | Declined:
        """Return what the demand takes with each configuration of the only region, whatever its limits, those with the
        fewest workers first; and the one that `plan` chooses (None: none keeps the limits)."""
        asked = replace(demand, method=None, residency="region", explained=False)
        self.plan(asked)
        problem = self._problem(PlacedShards(self._snapshot), asked)
        return problem if isinstance(problem, Declined) else problem.configured(asked)

    def _by_method(self, demand: Demand, method: str) -> Plan | Declined:
        """Return the plan of a published rule, with what the search would have chosen beside it."""

        def answer(placed: PlacedShards, asked: Demand) -> Plan | Declined:
            problem = _problem(placed, asked)
            return problem if isinstance(problem, Declined) else problem.best(asked)

        ruled = replace(demand, residency="region", collective=demand.collective or METHODS[method].collective)
        found = best_moves(self._snapshot, ruled, answer, lambda placed, asked: IMPOSSIBLE)
        if isinstance(found, Declined):
            return found
        auto = self.plan(replace(demand, method=None))
        if isinstance(auto, Declined):
            told = Alternative("no plan", "; ".join(reason.text for reason in auto.reasons), f"method {method}")
        else:
            each = ", ".join(f"{part.workers} in {part.region}" for part in auto.partitions)
            usual = auto.estimate
            points = [one.learning.points if one.learning else 0.0 for one in (auto, found)]
            text = (
                f"auto: {usual.seconds.expected:.0f} s and ${usual.usd.expected:.4f}; may give up {points[0]:.2g} "
                f"points, this plan {points[1]:.2g}"
            )
            told = Alternative(text, f"the job asks for {method}; workers: {each}", f"method {method}")
        return replace(found, alternatives=(told, *found.alternatives))

    def _placed(self, placed: PlacedShards, demand: Demand) -> Plan | Declined:
        problem = self._problem(placed, demand)
        return problem if isinstance(problem, Declined) else problem.best(demand)

    def _roughly(self, placed: PlacedShards, demand: Demand) -> tuple[float, ...]:
        problem = self._problem(placed, demand)
        return IMPOSSIBLE if isinstance(problem, Declined) else problem.search.roughly(limits_of(demand))

    def _problem(self, placed: PlacedShards, demand: Demand) -> _Problem | Declined:
        key = tuple((copy.source, copy.destination) for copy in placed.copies)
        if key not in self._evaluated:
            self._evaluated[key] = _problem(placed, demand, self._ways.of(demand))
            self.placements += 1
        return self._evaluated[key]


@dataclass(frozen=True)
class ConfiguredJob:
    """A job in one region with one of its configurations."""

    part: PlannedPartition
    merging: tuple[str, int] | None
    """Collective, and K where it takes one (else 0); None: nothing merges."""
    steps: int
    seconds: float
    usd: float


@dataclass(frozen=True)
class _Problem:
    """A demand over shards that lie where they are processed, independent of deadline and budget."""

    placed: PlacedShards
    fronts: tuple[RegionConfigurations, ...]
    """Configurations by region, in the order of their names."""
    ways: ExchangeOptions
    search: PlanSearch
    _made: list[tuple[Demand, Plan]] = field(default_factory=list)
    """The last plan, before its slice is chosen, and its demand: the best batch's is first made, then explained."""

    def best(self, demand: Demand) -> Plan | Declined:
        """Return the best plan within deadline and budget."""
        limits, unexplained = limits_of(demand), replace(demand, explained=False)
        found = self.search.best(limits)
        if found is None:
            return Declined(beyond_limits(self.search, demand))
        if not self._made or self._made[0][0] != unexplained:
            self._made[:] = [(unexplained, self._plan(*found, demand, limits))]
        return self._explained(self._made[0][1], *found, demand, limits)

    def configured(self, demand: Demand) -> tuple[list[ConfiguredJob], ConfiguredJob | None]:
        """Return the jobs with each configuration of the first region, and the chosen one."""
        front, limits = self.fronts[0], limits_of(demand)
        evaluated = self.search.evaluation.evaluate(np.arange(len(front))[:, None])
        score = np.where(evaluated.tolerated, self.search.score(evaluated, limits), np.inf).reshape(len(front), -1)
        best = np.unravel_index(score.argmin(axis=1), evaluated.seconds.shape[1:])
        each = [
            ConfiguredJob(
                front[n].part, front[n].merging, int(evaluated.rounds[n, at] * evaluated.interval[n, at]),
                float(evaluated.seconds[n, at, way]), float(evaluated.usd[n, at, way]),
            )
            for n, (at, way) in enumerate(zip(*(axis.tolist() for axis in best), strict=True))
        ]  # fmt: skip
        found = self.search.best(limits)
        return each, None if found is None else each[int(found[0].choice[found[1].assignment][0])]

    def _plan(self, evaluated: EvaluatedPlans, place: PlanIndex, demand: Demand, limits: PlanCriteria) -> Plan:
        snapshot, way = self.placed.snapshot, self.ways.each[evaluated.ways[place.way]]
        own = list(zip(self.fronts, evaluated.choice[place.assignment].tolist(), strict=True))
        chosen = [front[n] for front, n in own]
        merging = merging_of(chosen)
        if merging is None and demand.collective is None:
            # Each region chooses by itself.
            chosen = [front.fastest_merging(n) for front, n in own]
        steps = self.search.evaluation.steps(evaluated, place)
        partitions = tuple(
            replace(one.part, steps_per_round=int(count), shards=self.placed.shards.get(one.part.region, ()))
            for one, count in zip(chosen, steps, strict=True)
        )
        named = {part.region for part in partitions}
        plan = Plan(
            partitions=partitions,
            copies=self.placed.copies,
            rounds=int(evaluated.rounds[place.assignment, place.interval]),
            interval=int(evaluated.interval[place.assignment, place.interval]),
            collective=demand.collective or (merging[0] if merging else "auto"),
            channel=demand.channel or "auto",
            merging=demand.merging if not merging or not merging[1] else {"k": float(merging[1]), **demand.merging},
            merging_codec=demand.merging_codec,
            wan_policy=demand.wan_policy or DEFAULT,
            wan_settings=_wan_settings(way.background, len(partitions), demand),
            codec=way.codec,
            topology=way.topology.name,
            neighbours=way.topology.links,
            exchange_seconds=way.seconds,
            slice_seconds=demand.longest_slice(self.placed.snapshot.by_name[name] for name in named),
            seed=demand.seed,
            sent_share=share_of(snapshot, demand),
            evaluate_every=demand.evaluate_every,
            evaluation_batch=demand.evaluation_batch,
            estimate=_NOTHING,
            residency={},
            isolation={region.name: region.isolation for region in snapshot.regions if region.name in named},
            learning=self._learning(evaluated, place, limits),
        )
        return self._predicted(replace(plan, warnings=warnings_of(plan, demand, snapshot)), way.topology)

    def _predicted(self, plan: Plan, topology: Topology) -> Plan:
        """Return a plan with its estimate."""
        return replace(plan, estimate=estimate(plan, self.placed.snapshot, self.ways.links, topology))

    def _explained(
        self, plan: Plan, evaluated: EvaluatedPlans, place: PlanIndex, demand: Demand, limits: PlanCriteria
    ) -> Plan:
        """Return a plan with its slice and alternatives."""
        topology, chosen = self.ways.each[evaluated.ways[place.way]].topology, plan
        slices: tuple[Alternative, ...] = ()

        def predicted(other: Plan) -> Plan:
            return self._predicted(other, topology)

        if demand.slice_seconds is None:
            chosen, slices = chosen_slice(plan, demand, predicted)
        if not demand.explained:
            return chosen
        told = alternatives(self.search, self.fronts, self.ways, evaluated, place, demand, limits)
        of_parts = alternatives_of_parts(plan, self.placed.snapshot, demand, predicted)
        return replace(chosen, alternatives=(*told, *of_parts, *slices))

    def _learning(self, evaluated: EvaluatedPlans, place: PlanIndex, limits: PlanCriteria) -> Learning:
        measured = self.search.evaluation.measured_noise
        return Learning(
            samples_factor=float(evaluated.factor[place.assignment]),
            points=self.search.given_up(evaluated, place, replace(limits, progress=True)),
            noise_samples=measured or PRIOR_NOISE_SAMPLES,
            basis="measured" if measured else "prior",
            score=self.search.score_of(evaluated, place, limits),
            tolerated=self.search.tolerates(evaluated, place, limits),
        )


def limits_of(demand: Demand) -> PlanCriteria:
    """Return what a demand's plan is chosen by."""
    deadline = math.inf if demand.deadline_seconds is None else demand.deadline_seconds
    budget = math.inf if demand.budget_usd is None else demand.budget_usd
    # Who wants a number of samples soon gets them soon; money is saved, and a batch chosen, only where the same
    # progress takes less.
    progress = demand.to_goal or demand.minimise == "cost" or demand.chooses_batch
    return PlanCriteria(demand.minimise, deadline, budget, progress=progress)


_KnownOptions = dict[tuple[tuple[str, ...], bool], ExchangeOptions | Declined]
"""Ways to exchange, by regions and whether some run pipelines: shards do not matter."""


class _SharedWays:
    """Ways to exchange of the latest demand; neither its batch nor its limits matter."""

    def __init__(self) -> None:
        self._demand: Demand | None = None
        self._known: _KnownOptions = {}

    def of(self, demand: Demand) -> _KnownOptions:
        """Return the ways that are known, to which others may be added."""
        wanted = replace(
            demand, batch=1, least_batch=None, minimise="cost", deadline_seconds=None, budget_usd=None, explained=True
        )  # fmt: skip
        if wanted != self._demand:
            self._demand, self._known = wanted, {}
        return self._known


def _problem(placed: PlacedShards, demand: Demand, known: _KnownOptions | None = None) -> _Problem | Declined:
    """Return the problem of a demand, or why there is none. ``known``: the ways of other layouts, to which its own are
    added."""
    snapshot, method = placed.snapshot, METHODS[demand.method] if demand.method is not None else None
    regions, reasons = candidates(snapshot, demand)
    if not reasons:
        reasons = [reason for region in regions if (reason := unstaged(region, snapshot, demand)) is not None]
    if not reasons:
        reasons = refusals(demand, regions, snapshot)
    if reasons:
        return Declined(tuple(reasons))
    fronts = tuple(configurations(region, snapshot, demand) for region in regions)
    parts = [front[0].part for front in fronts]
    reasons = [reason for r, own in zip(regions, fronts, strict=True) for reason in unfit(r, own, snapshot, demand)]
    if reasons:
        return Declined(tuple(reasons))
    known = {} if known is None else known
    among = tuple(region.name for region in regions), any(part.pipeline is not None for part in parts)
    if among not in known:
        known[among] = exchange_options(regions, parts, snapshot, demand)
    ways = known[among]
    if isinstance(ways, Declined):
        return ways
    served_late = [not placed.shards.get(part.region) for part in parts]
    evaluation = PlanEvaluation(
        [front.figures for front in fronts],
        [part.samples for part in parts],
        ways,
        constants_of(parts, served_late, placed.copies, demand.longest_slice(regions), snapshot),
        demand,
        noise_samples(snapshot.profiles.values()),
    )
    spread = Spread(spread_of(basis_of(regions, snapshot))[1], *copied_of(placed.copies, snapshot.by_name))
    only = None if method is None else method.assignment(evaluation)
    return _Problem(placed, fronts, ways, PlanSearch(evaluation, spread, only))


def _wan_settings(background: bool, regions: int, demand: Demand) -> dict[str, float]:
    """Return the settings of policy and exchange, and what may be adapted while the job runs."""
    codec, interval = adapted(demand)
    chosen = {
        "background": background,
        "choose_codec": background and codec,
        "choose_interval": background and interval,
        "choose_topology": demand.topology is None and regions > 2,
    }
    return demand.wan_settings | {name: 1.0 for name, wanted in chosen.items() if wanted}


_NOTHING = PlanEstimate(Range(0, 0, 0), Range(0, 0, 0), Range(0, 0, 0), (), {}, "prior")
