"""The plan of one job by data location: a partition runs where its shard is, or where residency lets the shard move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler._configurations import (
    TORCH_MB,
    RegionConfigurations,
    configurations,
    merging_of,
    needed_mb,
)
from scheduler._cost_model import step_seconds
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
    Reason,
    Region,
    Snapshot,
)
from scheduler._pipelined import unstaged
from scheduler._published_rules import METHODS
from scheduler._shard_moves import IMPOSSIBLE, PlacedShards, best_moves, train_clients, train_samples
from scheduler.search import MOST_OFF, EvaluatedPlans, PlanCriteria, PlanEvaluation, PlanIndex, PlanSearch, Spread
from scheduler.topology import Topology
from scheduler.tuning._learning import PRIOR_NOISE_SAMPLES, noise_samples
from sync.channel import channel_kinds
from sync.codec import MaskedIntegers, codec_named
from sync.policy import DEFAULT
from sync.robust import robust_in, robust_rule_named


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
        return self._predicted(replace(plan, warnings=_warnings_of(plan, demand, snapshot)), way.topology)

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
    regions, reasons = _candidates(snapshot, demand)
    if not reasons:
        reasons = [reason for region in regions if (reason := unstaged(region, snapshot, demand)) is not None]
    if not reasons:
        reasons = [
            *_misnamed(demand.workers, regions, snapshot),
            *_unreachable_quorum(demand, regions),
            *_too_many_wrong(demand, regions),
            *_readable(demand, regions),
            *_without_clients(demand, regions),
            *(_unprofiled(demand, regions, snapshot) if method is not None and method.by_region else ()),
        ]
    if reasons:
        return Declined(tuple(reasons))
    fronts = tuple(configurations(region, snapshot, demand) for region in regions)
    parts = [front[0].part for front in fronts]
    reasons = [reason for r, own in zip(regions, fronts, strict=True) for reason in _unfit(r, own, snapshot, demand)]
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


def _misnamed(workers: int | Mapping[str, int] | None, candidates: list[Region], snapshot: Snapshot) -> list[Reason]:
    """Return why stated workers do not match: regions without a number, and names that no region has."""
    if not isinstance(workers, Mapping):
        return []
    names = [region.name for region in candidates]
    known = {*snapshot.absent, *(region.name for region in snapshot.regions)}
    unnamed = [
        Reason(
            "INADMISSIBLE",
            f"train.workers has no number for region {name}, which holds a shard",
            f"add {name} to train.workers, or keep it out with regions.avoid",
        )
        for name in names
        if name not in workers
    ]
    return unnamed + [
        Reason(
            "REGION_NOT_FOUND",
            f"region {name} of train.workers is not part of the federation",
            f"correct it or take it out; the regions are {', '.join(sorted(known))}",
        )
        for name in sorted(workers)
        if name not in known
    ]


def _unreachable_quorum(demand: Demand, candidates: list[Region]) -> list[Reason]:
    quorum = int(demand.wan_settings.get("quorum", 0))
    if quorum <= len(candidates):
        return []
    text = f"advanced.wan.quorum is {quorum}, and {len(candidates)} region{'s' * (len(candidates) > 1)} take part"
    return [Reason("INADMISSIBLE", text, f"set advanced.wan.quorum to {len(candidates)} at most, or leave it out")]


def _too_many_wrong(demand: Demand, candidates: list[Region]) -> list[Reason]:
    """Return why a robust rule cannot withstand the wrong updates that it has to."""
    name, wrong = robust_in(demand.wan_settings)
    if not name:
        return []
    wrong = max(1, int(wrong))
    fewest = robust_rule_named(name).fewest(wrong)
    if fewest <= len(candidates):
        return []
    those = f"{wrong} region{'s' * (wrong > 1)} that may be wrong"
    text = f"advanced.wan.robust: {name} with {those} needs {fewest} regions, and {len(candidates)} take part"
    return [Reason("INADMISSIBLE", text, "use another rule, a lower advanced.wan.byzantine, or more regions")]


def _without_clients(demand: Demand, candidates: list[Region]) -> list[Reason]:
    """Return which regions do not know their clients, for a job with clients."""
    if demand.clients is None:
        return []
    return [
        Reason(
            "INADMISSIBLE",
            f"region {region.name} does not tell how many clients its shard of {demand.dataset} has",
            f"state `clients` in the dataset's format or its split in the region's file, or leave {region.name} out",
        )
        for region in candidates
        if not train_clients(region, demand.dataset)
    ]


def _unprofiled(demand: Demand, candidates: list[Region], snapshot: Snapshot) -> list[Reason]:
    """Return the regions without a profile by which a published rule could choose."""
    return [
        Reason(
            "INADMISSIBLE",
            f"method {demand.method} chooses by a profile of the task, and region {region.name} has none",
            "profile the task first: geofed profile JOB.yaml",
        )
        for region in candidates
        if region.name not in snapshot.profiles
    ]


def _readable(demand: Demand, candidates: list[Region]) -> list[Reason]:
    """Return why secure aggregation cannot hide the updates of these regions."""
    fewest, count = int(demand.wan_settings.get("secure", 0)), len(candidates)
    if not fewest:
        return []
    if count < fewest:
        text = f"privacy.minRegions is {fewest}, and {count} region{'s' * (count > 1)} take part"
        return [Reason("INADMISSIBLE", text, "use more regions: the sum of fewer would tell too much")]
    masked = codec_named(demand.codec) if demand.codec else None
    if isinstance(masked, MaskedIntegers) and count > masked.most_regions:
        text = f"advanced.wan.codec holds sums of at most {masked.most_regions} regions with secure aggregation"
        return [
            Reason(
                "INADMISSIBLE", f"{text}, and {count} take part", "set advanced.wan.codec to bf16 or fp32, or to auto"
            )
        ]
    return []


def _warnings_of(chosen: Plan, demand: Demand, snapshot: Snapshot) -> tuple[str, ...]:
    """Return warnings where functions cannot hold PyTorch or the model, requests have no known price, or rounds of
    whole steps change what was asked for."""
    told = []
    asking = set(channel_kinds(lambda kind: not kind.announces))
    channels = {part.region: snapshot.by_name[part.region].channel for part in chosen.partitions}
    allowed_mb = {part.region: snapshot.by_name[part.region].capacity.memory_mb for part in chosen.partitions}
    for part in chosen.partitions:
        if part.memory_mb < TORCH_MB:
            told.append(
                f"functions of {part.memory_mb} MB in {part.region} are smaller than PyTorch, which takes about "
                f"{TORCH_MB} MB: only workers that share it, as those of the agent's own gateway do, can run; ask for "
                "more (function.memoryMb)"
            )
        if chosen.isolation.get(part.region) == "none":
            told.append(
                f"{part.region} runs job code without a sandbox: it can read and change what the agent can there"
            )
        told += _too_small(part, demand, snapshot, allowed_mb[part.region])
        if part.workers > 1 and channels[part.region] in asking and part.region not in snapshot.profiles:
            told.append(
                f"the requests of channel {channels[part.region]} in {part.region} are not part of the cost, since no "
                "profile tells their number: run `geofed profile`"
            )
        if part.clients and (seconds := step_seconds(part)) > _LONG_ROUND_SECONDS:
            told.append(
                f"a round of clients takes {part.region} about {seconds:.0f} s, and an invocation that does not answer "
                "two minutes after its slice is ended: use more workers, fewer clients or a longer function.slice"
            )
    return (*told, *_shorter(chosen, demand), *_uneven(chosen, demand))


def _too_small(part: PlannedPartition, demand: Demand, snapshot: Snapshot, most_mb: int) -> list[str]:
    """Return that a worker has less memory than a whole model needs; empty if it has enough, or holds one stage.

    ``most_mb``: what the region allows a function.
    """
    held_mb = (snapshot.held_bytes or _COPIES * (snapshot.model_bytes or 0)) / 2**20
    if part.pipeline is not None or not held_mb:
        return []
    # A profile has measured what its configurations need. Functions smaller than PyTorch can only share it.
    measured = part.merge_seconds is not None and part.region in snapshot.profiles
    torch_mb = 0 if measured or part.memory_mb < TORCH_MB else TORCH_MB
    allowed = part.memory_mb < most_mb
    remedy = "ask for more (function.memoryMb)" if allowed else "leave the region out (regions.avoid)"
    if not part.clients:
        remedy += ", or measure the task with `geofed profile`, so that it can be cut into stages"
    if part.memory_mb < held_mb + torch_mb:
        what = "tensors, gradients and sums of clients" if part.clients else "tensors and gradients"
        beside = f" beside PyTorch, which takes about {torch_mb} MB" if torch_mb else ""
        text = f"cannot hold the model: its {what} take {held_mb:.0f} MB{beside}"
    elif not (measured or demand.memory_mb) and part.memory_mb < needed_mb(snapshot, demand) - TORCH_MB + torch_mb:
        needed = needed_mb(snapshot, demand)
        text = f"may be too small, and the region allows no more: to train the model takes up to about {needed:.0f} MB"
    else:
        return []
    return [f"functions of {part.memory_mb} MB in {part.region} {text}; {remedy}"]


def _shorter(chosen: Plan, demand: Demand) -> list[str]:
    """Return that rounds are shorter than the job file's, since whole ones would make other passes over the data."""
    if demand.interval is None or chosen.rounds == 1 or chosen.interval >= demand.interval:
        return []
    return [
        f"a round has {chosen.interval} steps where advanced.wan.interval is {demand.interval}: the job makes "
        f"{chosen.rounds * chosen.interval}, and whole rounds of {demand.interval} would change that by more than "
        f"{MOST_OFF:.0%}"
    ]


def _uneven(chosen: Plan, demand: Demand) -> list[str]:
    """Return the shards over which a plan makes more or fewer passes than asked, beyond one step and `MOST_OFF`."""
    if demand.balance != "data" or demand.clients is not None:
        return []
    samples, shares = sum(part.samples for part in chosen.partitions), chosen.shares
    told = []
    longest = max(part.samples / (part.batch * part.replicas) for part in chosen.partitions)
    asked = demand.epochs if demand.epochs is not None else (demand.steps or 1) / longest
    for part in chosen.partitions:
        step = part.batch * part.replicas
        made = chosen.rounds * part.steps_per_round * step / part.samples
        if abs(made - asked) * part.samples > step * (1 + 1e-6) and abs(made / asked - 1) > MOST_OFF:
            told.append(
                f"{part.region} makes {made:.3g} passes over its data, where {asked:.3g} are asked for: a round has "
                f"{part.steps_per_round} whole steps of {step} samples there; its updates weigh "
                f"{shares[part.region]:.1%}, its data {part.samples / samples:.1%}"
            )
    return told


def _candidates(snapshot: Snapshot, demand: Demand) -> tuple[list[Region], list[Reason]]:
    """The regions that hold a shard and are wanted; the reasons why the demand cannot be planned with them."""
    known = snapshot.by_name
    names = sorted(known.keys() & demand.use if demand.use else known)
    wanted = [known[name] for name in names if name not in demand.avoid]
    holders = [region for region in wanted if train_samples(region, demand.dataset) > 0]
    reasons = [*_unknown_use(snapshot, demand), *_unknown_avoid(snapshot, demand)]
    if demand.use and (without := _without_shard(wanted, holders, demand)):
        reasons += without
    elif not holders and not reasons:
        reasons.append(_no_holder(snapshot, demand))
    reasons += [
        Reason("PRICE_UNKNOWN", f"region {region.name} states no prices", "add `prices` to its configuration")
        for region in holders
        if region.prices is None
    ]
    return holders, [*reasons, *_other_schemas(holders, demand.dataset)]


def _other_schemas(holders: list[Region], dataset: str) -> list[Reason]:
    """Regions whose samples differ from the first one's, with which no task can work."""
    held = [(region.name, one.schema) for region in holders for one in region.datasets if one.name == dataset]
    return [
        Reason(
            "INADMISSIBLE",
            f"the samples of {dataset} in {name} differ from those in {held[0][0]}: other columns, types or classes",
            f"`geofed agent doctor` there shows them; correct `format` in a region's file, or leave {name} out",
        )
        for name, schema in held
        if schema != held[0][1]
    ]


def _unknown_use(snapshot: Snapshot, demand: Demand) -> list[Reason]:
    """Regions of `regions.use` that are not connected or unknown; what is avoided too need not be there."""
    known = {region.name for region in snapshot.regions}
    reasons = []
    for name in demand.use:
        if name in demand.avoid:
            continue
        if name in snapshot.absent:
            hint = f"start its agent, or take {name} out of regions.use"
            reasons.append(Reason("INADMISSIBLE", f"region {name} is not connected", hint))
        elif name not in known:
            hint = f"invite it with `geofed region invite {name}`"
            reasons.append(Reason("REGION_NOT_FOUND", f"region {name} is not part of the federation", hint))
    return reasons


def _unknown_avoid(snapshot: Snapshot, demand: Demand) -> list[Reason]:
    """Unknown regions of `regions.avoid`: a misspelt one would have data used where their owner does not want it."""
    known = {*snapshot.absent, *(region.name for region in snapshot.regions)}
    here = ", ".join(sorted(known)) or "none yet"
    return [
        Reason(
            "REGION_NOT_FOUND",
            f"region {name} of regions.avoid is not part of the federation",
            f"correct it or take it out; the regions are {here}",
        )
        for name in demand.avoid
        if name not in known
    ]


def _without_shard(wanted: list[Region], holders: list[Region], demand: Demand) -> list[Reason]:
    """Wanted regions that hold no shard and cannot take one."""
    without = sorted(
        region.name
        for region in wanted
        if region not in holders and (demand.residency == "region" or not region.takes_shards)
    )
    return [
        Reason(
            "DATASET_UNKNOWN",
            f"region {name} holds no shard of dataset {demand.dataset}",
            f"take {name} out of regions.use, or add the shard to its configuration",
        )
        for name in without
    ]


def _no_holder(snapshot: Snapshot, demand: Demand) -> Reason:
    """Why no wanted region holds the dataset: `regions.avoid` leaves all holders out, or there are none."""
    known = {region.name: region for region in snapshot.regions}
    if kept_out := _kept_out(known, demand):
        return Reason(
            "INADMISSIBLE",
            f"regions.avoid leaves out every live region that holds dataset {demand.dataset}",
            f"take one of them out of it: {', '.join(kept_out)}",
        )
    away = f"; not connected: {', '.join(snapshot.absent)}" if snapshot.absent else ""
    elsewhere = ", ".join(sorted({d.name for region in snapshot.regions for d in region.datasets})) or "none"
    return Reason(
        "DATASET_UNKNOWN",
        f"no live region holds dataset {demand.dataset}",
        f"datasets that are there: {elsewhere}{away}",
    )


def _kept_out(known: Mapping[str, Region], demand: Demand) -> list[str]:
    return [name for name in sorted(demand.avoid) if name in known and train_samples(known[name], demand.dataset)]


def _more_workers_than_there_are(needed: int, most: int) -> str:
    if not most:
        return _ONLY_HOLDS_DATA
    if needed > most:
        return f"lower train.workers to {most} at most"
    return "wait for a job to end, or lower train.workers"


def _unfit(region: Region, configured: RegionConfigurations, snapshot: Snapshot, demand: Demand) -> list[Reason]:
    reasons, part = [], configured[0].part
    name, capacity = region.name, region.capacity
    devices, wanted = capacity.function_devices, demand.gpus or 1
    if devices is not None and devices < wanted:
        text = f"functions in {name} have {devices} devices, {wanted} are asked for"
        return [Reason("INADMISSIBLE", text, "lower function.gpus, or keep the region out with regions.avoid")]
    if text := _gpu_memory(region, snapshot, demand):
        reasons.append(Reason("GPU_MEMORY", text, _SMALLER_STEPS))
    insists = demand.memory_mb is not None or demand.parallelism == "data"
    if not configured.holds_step and (demand.chooses_batch or not insists):
        most = demand.memory_mb or capacity.memory_mb
        text = f"a step of {demand.batch} samples does not fit into a function of {most} MB in {name}, as profiled"
        reasons.append(Reason("INADMISSIBLE", text, _MORE_MEMORY if demand.chooses_batch else _OTHER_STEPS))
    free = max(0, snapshot.free_workers(region, demand.gpus))
    if part.workers > free:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"region {name} has {free} of {capacity.workers} workers free, {part.workers} are needed",
                _more_workers_than_there_are(part.workers, capacity.workers),
            )
        )
    if part.memory_mb > capacity.memory_mb:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"region {name} gives a function at most {capacity.memory_mb} MB, {part.memory_mb} MB are asked for",
                "lower function.memoryMb",
            )
        )
    asked = demand.slice_seconds
    if capacity.slice_seconds is not None and asked is not None and asked > capacity.slice_seconds:
        text = f"the platform of region {name} ends functions, so that a slice has at most {capacity.slice_seconds:g} s"
        reasons.append(
            Reason(
                "LIMIT_EXCEEDED",
                f"{text}, {asked:g} s are asked for",
                f"lower function.slice to {capacity.slice_seconds:g}s, or keep the region out with regions.avoid",
            )
        )
    if demand.channel not in (None, region.channel):
        text = f"region {name} has the channel {region.channel}, {demand.channel} is asked for"
        reasons.append(
            Reason("INADMISSIBLE", text, "leave `advanced.channel` out, or keep the region out with regions.avoid")
        )
    return reasons


def _gpu_memory(region: Region, snapshot: Snapshot, demand: Demand) -> str:
    """Return why a step does not fit into a GPU of a region, as a probe there or elsewhere tells; else empty."""
    batch, told = snapshot.gpu_lacks.get(region.name, (0, ""))
    if told and demand.batch >= batch:
        return f"a step of {batch} samples does not fit into a GPU of region {region.name}: {told}"
    ranks = max(1, region.worker_devices(demand.gpus)) if demand.sharded else 1
    devices, needed = region.capacity.devices, snapshot.gpu_mb(demand.batch, ranks)
    if devices is None or devices.memory_mb is None or needed <= devices.memory_mb:
        return ""
    step = f"a step of {demand.batch} samples takes {needed:.0f} MB of a GPU's memory, as a probe tells"
    return f"{step}, and one in region {region.name} has {devices.memory_mb} MB"


_MORE_MEMORY = "raise function.memoryMb, or the region's capacity.memoryMb"
_OTHER_STEPS = (
    "use a smaller train.batch, raise the region's capacity.memoryMb, or keep the region out with regions.avoid; with "
    "`function.memoryMb` or `parallelism: data` it is tried all the same"
)
_SMALLER_STEPS = (
    "let a step need less (train.accumulate, train.precision: bf16, a smaller train.batch), or keep the region out "
    "with regions.avoid"
)
_LONG_ROUND_SECONDS = 60.0
"""Seconds of a step from which a plan warns of an invocation's limit: predictions may be off by a factor of two."""
_COPIES = 2
"""Copies of the model in a worker's memory, at least: parameters and gradients."""
_ONLY_HOLDS_DATA = "it only holds data: keep it out with regions.avoid"
_NOTHING = PlanEstimate(Range(0, 0, 0), Range(0, 0, 0), Range(0, 0, 0), (), {}, "prior")
