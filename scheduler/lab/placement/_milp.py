"""Placement of few jobs as one mixed-integer program, solved by HiGHS; the exact reference for the search.

Indices: job j at pace p (omitted below), shard s, region r, site k = (region, device), hub h:

    min   sum usd_k n_jk + sum server_r z_jk + sum copy_jsr x_jsr + sum rounds_jrh y_jrh + sum penalty_j u_j
    s.t.  sum_r x_jsr = a_jp,  sum_p a_jp + u_j = 1   a job is refused, or has one pace and each shard once
          x_jsr <= sum_{k in r} z_jk <= 1             a shard is in a partition, with one type of device
          sum_{k in r} z_jk <= sum_s x_jsr            a partition has a shard
          sum_s power_js x_jsr <= sum_{k in r} power_k n_jk      its devices suffice for the pace
          n_jk <= C_k z_jk,   sum_j n_jk <= C_k       capacity
          sum_h y_jrh = sum_{k in r} z_jk             each partition reports to one hub
          y_jrh <= y_jhh,   sum_h y_jhh = a_jp        a job has one hub, which is a partition of it

x, z, a and u are binary, n is an integer. There are only columns x_jsr that residency, memory and links allow. The
program shares the model's arrays with the search, but no part of its decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.lab.placement._choice import PlacementChoice, bill_of, copy_usd, rounds_usd
from scheduler.lab.placement._sites import SLACK, Floats, Need, Sites

GAP = 1e-4
"""Relative gap between the best solution and the bound at which the solver stops. 0.01 % of the cost is less than the
accuracy of prices."""


@dataclass(frozen=True, eq=False)
class SolverResult:
    """The result of the solver."""

    choices: tuple[PlacementChoice | None, ...]
    """Choice of each job; None: refused."""
    usd: float
    """Cost, including the penalties of refused jobs."""
    bound_usd: float
    """Lower bound of the cost."""
    proven: bool
    """Whether the solver ended with a relative gap of at most `GAP`."""


@dataclass
class _Model:
    """Columns and rows of the program, added one by one."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, list[int], list[float]]] = field(default_factory=list)

    def column(self, cost: float, upper: float, whole: bool) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, low: float, high: float, terms: Mapping[int, float]) -> None:
        self.rows.append((low, high, list(terms), list(terms.values())))


@dataclass
class _Columns:
    """Indices of the columns of one job at one pace."""

    need: Need
    taken: int
    """a: whether the job has this pace."""
    shard: dict[tuple[int, int], int] = field(default_factory=dict)
    """x, by shard and region."""
    used: dict[int, int] = field(default_factory=dict)
    """z, by site."""
    units: dict[int, int] = field(default_factory=dict)
    """n, by site."""
    reports: dict[tuple[int, int], int] = field(default_factory=dict)
    """y, by region and hub."""


def solve_exactly(
    sites: Sites,
    needs: Sequence[Sequence[Need]],
    free: Floats,
    penalties: Sequence[float],
    *,
    seconds: float = math.inf,
) -> SolverResult:
    """Place all jobs, each at one of its paces, at the least cost.

    After `seconds` of wall time the result is the best placement so far and a bound. A job with an infinite penalty
    must be placed; raises ``ValueError`` if no such placement was found.
    """
    model = _Model()
    columns = []
    for paces, penalty in zip(needs, penalties, strict=True):
        refused = model.column(0.0, 0.0, True) if math.isinf(penalty) else model.column(penalty, 1.0, True)
        columns.append([_job(model, sites, need, free) for need in paces])
        model.row(1.0, 1.0, {refused: 1.0} | {job.taken: 1.0 for job in columns[-1]})
    for site in range(len(free)):
        terms = {job.units[site]: 1.0 for paced in columns for job in paced if site in job.units}
        if terms:
            model.row(-math.inf, float(free[site]), terms)
    value, usd, bound, proven = _solve(model, seconds)
    if not value:
        if not math.isfinite(sum(penalties)):
            raise ValueError("no placement of all jobs that must be placed was found")
        return SolverResult((None,) * len(needs), float(sum(penalties)), max(0.0, bound), False)
    choices = tuple(_read(sites, paced, value) for paced in columns)
    return SolverResult(choices, usd, bound, proven)


def _job(model: _Model, sites: Sites, need: Need, free: Floats) -> _Columns:
    """Add the columns and rows of one job at one pace."""
    job = _Columns(need, model.column(0.0, 1.0, True))
    allowed = _allowed(need)
    for shard, regions in enumerate(allowed):
        for region in regions:
            job.shard[shard, region] = model.column(float(copy_usd(sites, need, shard, region)), 1.0, True)
        model.row(0.0, 0.0, {job.taken: -1.0} | {job.shard[shard, region]: 1.0 for region in regions})
    open_regions = sorted({region for regions in allowed for region in regions})
    for region in open_regions:
        _region(model, sites, need, free, job, region, [s for s, regions in enumerate(allowed) if region in regions])
    if len(allowed) > 1 and need.round_gb > 0:
        _hub(model, sites, need, job, open_regions)
    return job


def _allowed(need: Need) -> list[list[int]]:
    """Return the permitted regions of each shard."""
    allowed: list[list[int]] = [[] for _ in need.job.shards]
    for region, shards in need.pinned.items():
        for shard in shards:
            allowed[shard] = [region]
    for group, mask in zip(need.free, need.allowed, strict=True):
        for shard in group:
            allowed[shard] = [int(region) for region in np.flatnonzero(mask)]
    return allowed


def _region(
    model: _Model, sites: Sites, need: Need, free: Floats, job: _Columns, region: int, shards: list[int]
) -> None:
    """Add the columns and rows of a job's partition in a region, for the shards that may be there."""
    own = [int(site) for site in np.flatnonzero((sites.region == region) & need.fits & (free > 0))]
    for site in own:
        job.used[site] = model.column(float(sites.server_usd_per_hour[region]) * need.hours, 1.0, True)
        job.units[site] = model.column(float(sites.usd_per_hour[site]) * need.hours, float(free[site]), True)
        model.row(-math.inf, 0.0, {job.units[site]: 1.0, job.used[site]: -float(free[site])})
    here = {job.used[site]: 1.0 for site in own}
    if own:
        model.row(-math.inf, 1.0, here)
    for shard in shards:
        model.row(-math.inf, 0.0, {job.shard[shard, region]: 1.0} | dict.fromkeys(here, -1.0))
    model.row(-math.inf, 0.0, here | {job.shard[shard, region]: -1.0 for shard in shards})
    given = {job.units[site]: -float(sites.power[site]) for site in own}
    wanted = {job.shard[shard, region]: float(need.powers[shard]) * (1 - SLACK) for shard in shards}
    model.row(-math.inf, 0.0, wanted | given)


def _hub(model: _Model, sites: Sites, need: Need, job: _Columns, regions: list[int]) -> None:
    """Add the columns and rows of the hub that a job's partitions report to."""
    places = np.array(regions)
    usd = rounds_usd(sites, need, places, places)
    for a, region in enumerate(regions):
        for b, hub in enumerate(regions):
            if math.isfinite(usd[a, b]):
                job.reports[region, hub] = model.column(float(usd[a, b]), 1.0, region == hub)
    for region in regions:
        used = {column: -1.0 for site, column in job.used.items() if int(sites.region[site]) == region}
        model.row(0.0, 0.0, used | {job.reports[region, hub]: 1.0 for hub in regions if (region, hub) in job.reports})
    for (region, hub), column in job.reports.items():
        if region != hub:
            model.row(-math.inf, 0.0, {column: 1.0, job.reports[hub, hub]: -1.0})
    model.row(0.0, 0.0, {job.taken: -1.0} | {job.reports[region, region]: 1.0 for region in regions})


def _solve(model: _Model, seconds: float) -> tuple[list[float], float, float, bool]:
    """Return the values of the columns (empty: no solution), the cost, its lower bound, and whether it is proven."""
    import highspy  # loads a solver of several MB, which no other module needs

    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(model.cost), len(model.rows)
    program.col_cost_, program.col_lower_ = np.array(model.cost), np.zeros(len(model.cost))
    program.col_upper_ = np.array(model.upper)
    program.row_lower_ = np.array([row[0] for row in model.rows])
    program.row_upper_ = np.array([row[1] for row in model.rows])
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.cumsum([0] + [len(row[2]) for row in model.rows])
    program.a_matrix_.index_ = np.concatenate([np.array(row[2]) for row in model.rows])
    program.a_matrix_.value_ = np.concatenate([np.array(row[3]) for row in model.rows])
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    program.integrality_ = [kinds[whole] for whole in model.whole]
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", GAP)
    if math.isfinite(seconds):
        solver.setOptionValue("time_limit", seconds)
    solver.passModel(program)
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return [], math.inf, info.mip_dual_bound, False
    proven = bool(status == highspy.HighsModelStatus.kOptimal)
    return list(solver.getSolution().col_value), info.objective_function_value, info.mip_dual_bound, proven


def _read(sites: Sites, paced: list[_Columns], value: list[float]) -> PlacementChoice | None:
    """Return a job's choice in a solution; None: refused. ``paced``: the job's columns, by pace."""
    job = next((job for job in paced if value[job.taken] > 0.5), None)
    if job is None:
        return None
    need = job.need
    where = {shard: region for (shard, region), column in job.shard.items() if value[column] > 0.5}
    parts = []
    for site, column in sorted(job.units.items()):
        shards = tuple(sorted(s for s, region in where.items() if region == sites.region[site]))
        if value[job.used[site]] > 0.5 and shards:
            parts.append((site, round(value[column]), shards))
    regions = [int(sites.region[site]) for site, _, _ in parts]
    hub = min(regions, key=lambda region: bill_of(sites, need, region, parts).rounds)
    usd = bill_of(sites, need, hub, parts).usd
    return PlacementChoice(need, usd, usd, hub, tuple(parts))
