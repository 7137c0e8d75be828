"""What every placement holds, whatever the federation and the jobs look like, and that cheap means cheap."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from bench.placement_baselines import cheapest_single_region, greedy, load_power_matching
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler import Path
from scheduler.lab.placement import (
    Device,
    Index,
    Placement,
    PlacementFederation,
    PlacementJob,
    PlacementOutcome,
    PlacementRefusal,
    PlacementRegion,
    PlacementShard,
    UnknownPriceError,
    _narrow,
    audit,
    federation,
    place,
    place_fastest,
)
from scheduler.lab.placement._cheapest import cheapest, priced
from scheduler.lab.placement._sites import MOST_FREE, need_of, sites_of

from .strategies import GB, federations, jobs_over, worlds

QUICK = settings(max_examples=budget(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(max_examples=budget(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
World = tuple[PlacementFederation, tuple[PlacementJob, ...]]


def region(name: str, usd: float = 1.0, units: int = 10, cloud: str = "x", speed: float = 100.0) -> PlacementRegion:
    return PlacementRegion(name, cloud, (Device("cpu", units, speed, usd, 8 * GB),), 0.0)


def mesh(*regions: PlacementRegion, usd: float = 0.1, mbps: float = 1e4) -> PlacementFederation:
    links = {(a.name, b.name): Path(50, mbps, usd) for a in regions for b in regions if a is not b}
    return federation(regions, links)


def job(*shards: PlacementShard, hours: float = 1.0, **more: float) -> PlacementJob:
    given_ = {"deadline_seconds": hours * 3600, "model_bytes": 0, "rounds": 0} | more
    return PlacementJob("job", shards, **given_)  # type: ignore[arg-type]


def shard(
    name: str, region: str, hours: float, gb: float = 0.0, residency: str | frozenset[str] = "region"
) -> PlacementShard:
    """As much work as one unit of speed 100 does in so many hours."""
    return PlacementShard(name, region, int(hours * 360_000), int(gb * GB), residency)


# --- whatever is drawn


@QUICK
@given(worlds())
def test_nothing_is_ever_violated(world: World) -> None:
    """Residency above all; also capacity, memory, deadline, links, the bill, and each shard exactly once."""
    where, jobs = world
    outcome = place(where, jobs)
    assert audit(where, jobs, outcome) == ()
    rules = {(job.name, shard.name): shard for job in jobs for shard in job.shards}
    clouds = {region.name: region.cloud for region in where.regions}
    for placement in outcome.placements:
        for part in placement.partitions:
            for held in (rules[placement.job, name] for name in part.shards):
                if held.residency == "region":
                    assert part.region == held.region
                elif held.residency == "cloud":
                    assert clouds[part.region] == clouds[held.region]
                elif held.residency != "anywhere":
                    assert part.region in held.residency | {held.region}


@QUICK
@given(worlds())
def test_baselines_violate_nothing_either(world: World) -> None:
    where, jobs = world
    outcomes = [rule(where, jobs) for rule in (load_power_matching, greedy, cheapest_single_region)]
    outcomes += [load_power_matching(where, jobs, pace=pace) for pace in ("cheapest", "fastest")]
    for outcome in outcomes:
        assert audit(where, jobs, outcome) == ()


@FEW
@given(worlds(regions=4, jobs=4, shards=3))
def test_search_lies_between_the_exact_cost_and_the_baselines(world: World) -> None:
    where, jobs = world
    ours, exact = place(where, jobs), place(where, jobs, method="exact")
    assert audit(where, jobs, exact) == ()
    cost, least = ours.usd + ours.penalty_usd, exact.usd + exact.penalty_usd
    assert exact.proven
    assert ours.bound_usd is not None
    assert ours.bound_usd <= least * (1 + 1e-3) + 1e-6, "a bound is not above what is possible"
    assert least <= cost * (1 + 1e-3) + 1e-6
    for rule in (load_power_matching, cheapest_single_region):
        theirs = rule(where, jobs)
        admitted = {placement.job for placement in theirs.placements}
        same = place(where, [job for job in jobs if job.name in admitted], method="exact")
        assert same.usd + same.penalty_usd <= theirs.usd * (1 + 1e-3) + 1e-6


@FEW
@given(worlds(regions=4, jobs=1, shards=4))
def test_one_job_is_placed_exactly(world: World) -> None:
    where, jobs = world
    ours, exact = place(where, jobs), place(where, jobs, method="exact")
    assert len(ours.placements) == len(exact.placements)
    assert ours.usd == pytest.approx(exact.usd, rel=1e-3, abs=1e-6)


@QUICK
@given(worlds(regions=3, jobs=1, shards=3), st.data())
def test_the_cheapest_is_what_trying_everything_finds(world: World, data: st.DataObject) -> None:
    where, (job,) = world
    sites = sites_of(where)
    need = need_of(sites, job)
    if need is None:
        return
    scarcity = np.array(data.draw(st.lists(st.floats(0, 5), min_size=len(sites.units), max_size=len(sites.units))))
    found, bound = priced(sites, [need], sites.units, scarcity)
    best = _by_trying(where, job, need.seconds, dict(zip(sites.index, scarcity, strict=True)))
    assert (found is None) == math.isinf(best)
    if found is not None:
        assert found.priced_usd == pytest.approx(best, rel=1e-9, abs=1e-9)
        known = cheapest(sites, [need], sites.units)
        again, least = priced(sites, [need], sites.units, scarcity, known=known)
        assert again is not None
        assert (again.priced_usd, least) == pytest.approx((found.priced_usd, bound), rel=1e-9, abs=1e-9)
        assert bound <= best * (1 + 1e-9) + 1e-9


def _by_trying(
    where: PlacementFederation, job: PlacementJob, seconds: float, scarcity: dict[tuple[str, str], float]
) -> float:
    """Every site for every shard, every hub."""
    everything = [(region.name, device) for region in where.regions for device in region.devices]
    servers = {region.name: region.server_usd_per_hour for region in where.regions}
    hours, best = (seconds + job.start_seconds) / 3600, math.inf
    for ways in product(everything, repeat=len(job.shards)):
        sites = set(ways)
        if len({name for name, _ in sites}) < len(sites):
            continue
        usd = 0.0
        for name, device in sites:
            mine = [shard for shard, way in zip(job.shards, ways, strict=True) if way == (name, device)]
            work = sum(shard.samples for shard in mine) * job.passes / seconds
            units = math.ceil(work / device.samples_per_second * (1 - 1e-9))
            fits = units <= device.units and device.memory_bytes >= job.memory_bytes
            usd += units * (device.usd_per_unit_hour * hours + scarcity[name, device.name]) if fits else math.inf
            usd += servers[name] * hours
            usd += sum(_moved(where, shard, name, job, seconds) for shard in mine)
        for hub in {name for name, _ in sites}:
            rounds = sum(
                _sent(where, a, b, job.rounds * job.model_bytes, seconds)
                for name, _ in sites
                for a, b in ((name, hub), (hub, name))
            )
            best = min(best, usd + rounds)
    return best


def _moved(where: PlacementFederation, shard: PlacementShard, to: str, job: PlacementJob, seconds: float) -> float:
    clouds = {region.name: region.cloud for region in where.regions}
    allowed = shard.residency if isinstance(shard.residency, frozenset) else frozenset()
    may = (
        to == shard.region
        or shard.residency == "anywhere"
        or to in allowed
        or (shard.residency == "cloud" and clouds[to] == clouds[shard.region])
    )
    return _sent(where, shard.region, to, shard.bytes, seconds / max(1.0, job.passes), True) if may else math.inf


def _sent(where: PlacementFederation, a: str, b: str, size: int, seconds: float, needs_path: bool = False) -> float:
    if a == b or (size == 0 and not needs_path):
        return 0.0
    way = where.index[a], where.index[b]
    rate = float(where.mbps[way])
    if rate == 0 or size * 8 / 1e6 > rate * seconds:
        return math.inf
    return size / 1e9 * float(where.egress_usd_per_gb[way])


@FEW
@given(worlds(jobs=1))
def test_a_proposed_deadline_is_one_that_can_be_kept(world: World) -> None:
    where, (job,) = world
    outcome = place(where, [job])
    for refusal in outcome.refusals:
        for reason in refusal.reasons:
            proposed = re.match(r"a deadline of (\d+) s", reason.remedy)
            if proposed:
                assert place(where, [replace(job, deadline_seconds=float(proposed[1]))]).placements


@FEW
@given(worlds(jobs=1), st.floats(0.2, 3.0))
def test_the_fastest_within_a_budget_keeps_it(world: World, share: float) -> None:
    where, (job,) = world
    cheap = place(where, [job]).placements
    budget = share * cheap[0].usd if cheap else 1.0
    answer = place_fastest(where, job, budget)
    if isinstance(answer, Placement):
        assert audit(where, [job], PlacementOutcome((answer,), ())) == ()
        assert answer.usd <= budget
        if cheap:
            assert answer.seconds <= cheap[0].seconds * 1.02
    else:
        assert not cheap or share < 1 + 1e-9
        assert answer.reasons


@FEW
@given(worlds(jobs=5))
def test_jobs_that_come_one_by_one_fit_beside_each_other(world: World) -> None:
    where, jobs = world
    index = Index(where)
    offers = []
    for job in jobs:
        offer = index.offer(job)
        if offer is not None:
            index.hold(offer)
            offers.append(offer)
        else:
            assert index.refusal(job).reasons
    placed = {offer.job for offer in offers}
    assert len(index) == len(placed)
    assert audit(where, [job for job in jobs if job.name in placed], PlacementOutcome(tuple(offers), ())) == ()
    for offer in offers:
        index.release(offer.job)
    fresh = Index(where)
    assert [index.offer(job) for job in jobs] == [fresh.offer(job) for job in jobs]


@FEW
@given(federations(5), st.data())
def test_leaving_regions_out_loses_nothing(where: PlacementFederation, data: st.DataObject) -> None:
    """A wide federation is narrowed before it is searched; many copies of a small one make a wide one."""
    copies = 5
    regions = tuple(
        replace(region, name=f"{region.name}{copy}", server_usd_per_hour=region.server_usd_per_hour + copy / 100)
        for region in where.regions
        for copy in range(copies)
    )
    each = np.ones((copies, copies))
    rates, egress = np.kron(where.mbps, each), np.kron(np.nan_to_num(where.egress_usd_per_gb), each)
    wide = PlacementFederation(regions, rates, egress)
    (job,) = data.draw(jobs_over([region.name for region in regions], 1))
    sites = sites_of(wide)
    need = need_of(sites, job)
    if need is None:
        return
    whole, least = priced(sites, [need], sites.units)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_narrow, "WIDE", 8)
        narrow, bound = priced(sites, [need], sites.units)
    if whole is not None and narrow is not None:
        assert narrow.priced_usd == pytest.approx(whole.priced_usd, rel=1e-9)
        assert bound == pytest.approx(least, rel=1e-9, abs=1e-9)
    else:
        assert whole is narrow is None


# --- by hand


def test_compute_moves_where_it_is_cheaper_by_more_than_the_egress() -> None:
    where = mesh(region("dear", 2.0), region("cheap", 1.0))
    for gb, expected in ((5, "cheap"), (50, "dear")):
        (placement,) = place(where, [job(shard("s", "dear", 4, gb, "anywhere"))]).placements
        assert [part.region for part in placement.partitions] == [expected]
    assert place(where, [job(shard("s", "dear", 4, 5))]).placements[0].partitions[0].region == "dear"


def test_the_price_of_scarce_capacity_sends_the_right_job_away() -> None:
    """Both want the cheap region, which has room for one; the one with less to carry goes elsewhere."""
    where = mesh(region("a", 1.0, 4), region("b", 1.5), region("c", 9.0))
    heavy, light = (
        replace(job(shard("s", "c", 4, gb, "anywhere")), name=name) for gb, name in ((10, "heavy"), (1, "light"))
    )
    links = {("c", "a"): 0.1, ("c", "b"): 0.5}
    table = {
        (x.name, y.name): Path(50, 1e4, links.get((x.name, y.name), 0.1))
        for x in where.regions
        for y in where.regions
        if x is not y
    }
    for order in ((heavy, light), (light, heavy)):
        outcome = place(federation(where.regions, table), order)
        assert {p.job: p.partitions[0].region for p in outcome.placements} == {"heavy": "a", "light": "b"}
    assert outcome.bound_usd is not None
    assert outcome.bound_usd <= outcome.usd + 1e-9


def test_rounds_are_paid_up_and_down_to_the_best_hub() -> None:
    where = mesh(region("a"), region("b"), region("c"))
    egress = where.egress_usd_per_gb.copy()
    egress[:, 1] = egress[1, :] = 0.01  # everything to and from b is cheap
    where = replace(where, egress_usd_per_gb=egress)
    spread = job(*(shard(name, name, 1) for name in "abc"), model_bytes=GB, rounds=10)
    (placement,) = place(where, [spread]).placements
    assert placement.hub == "b"
    assert placement.bill.rounds == pytest.approx(10 * 4 * 0.01)
    assert placement.bill.compute == pytest.approx(3.0)


def test_a_partition_has_one_type_of_device_with_enough_memory() -> None:
    devices = (Device("small", 9, 100.0, 0.1, 4 * GB), Device("large", 9, 100.0, 1.0, 16 * GB))
    where = mesh(PlacementRegion("a", "x", devices, 0.0))
    for memory, expected in ((GB, "small"), (8 * GB, "large")):
        (placement,) = place(where, [job(shard("s", "a", 3), memory_bytes=memory)]).placements
        assert [part.device for part in placement.partitions] == [expected]
        assert placement.bill.compute == pytest.approx(0.3 if expected == "small" else 3.0)
    refused = place(where, [job(shard("s", "a", 3), memory_bytes=32 * GB)]).refusals[0]
    assert "32 GB" in refused.reasons[0].text
    assert "16 GB" in refused.reasons[0].remedy


def test_what_others_hold_is_not_given_again() -> None:
    where = mesh(region("a", units=5))
    wanted = job(shard("s", "a", 3))
    assert place(where, [wanted], held={("a", "cpu"): 2}).placements
    refusal = place(where, [wanted], held={("a", "cpu"): 3}).refusals[0]
    assert refusal.reasons[0].text == "a has 2 units of cpu free, 3 are needed"
    assert re.fullmatch(r"a deadline of 5\d\d\d s from now could be promised", refusal.reasons[0].remedy)


def test_reasons_tell_what_is_in_the_way() -> None:
    where = mesh(region("a", units=2))
    for wanted, text in (
        (job(shard("s", "nowhere", 1)), "region nowhere is not part"),
        (job(shard("s", "a", 1), start_seconds=9e3), "it starts after 9000 s"),
        (job(shard("s", "a", 3)), "no machines that its data may use finish it within 3600 s"),
    ):
        assert place(where, [wanted]).refusals[0].reasons[0].text.startswith(text)


def test_a_slow_link_carries_neither_shards_nor_rounds() -> None:
    where = mesh(region("dear", 5.0), region("cheap", 1.0), mbps=1.0)  # 0.45 GB in an hour
    moving = job(shard("s", "dear", 1, 1, "anywhere"))
    assert place(where, [moving]).placements[0].partitions[0].region == "dear"
    split = job(shard("s", "dear", 1), shard("t", "cheap", 1), model_bytes=10**7, rounds=100)
    assert place(where, [split]).refusals


def test_an_unknown_price_is_an_error() -> None:
    with pytest.raises(UnknownPriceError, match="an hour of cpu"):
        Device("cpu", 1, 1.0, math.nan, GB)
    with pytest.raises(UnknownPriceError, match="parameter server in a"):
        PlacementRegion("a", "x", region("a").devices, math.nan)
    with pytest.raises(UnknownPriceError, match="a GB from a to b"):
        federation((region("a"), region("b")), {("a", "b"): Path(1, 100, math.nan)})


def test_more_groups_than_the_tables_have_rows_still_go_somewhere() -> None:
    names = "abcdefgh"
    where = mesh(*(region(name, 1 + place / 10) for place, name in enumerate(names)), usd=0.001)
    wide = job(*(shard(name, name, 0.2, 1, "anywhere") for name in names))
    assert len(names) > MOST_FREE
    outcome = place(where, [wide])
    assert audit(where, [wide], outcome) == ()
    assert [part.region for part in outcome.placements[0].partitions] == ["a"]


def test_the_audit_finds_what_is_wrong() -> None:
    where = mesh(region("a"), region("b"))
    wanted = job(shard("s", "a", 2))
    (right,) = place(where, [wanted]).placements
    assert audit(where, [wanted], PlacementOutcome((right,), ())) == ()
    (part,) = right.partitions
    for wrong, text in (
        (replace(right, hub="b", partitions=(replace(part, region="b"),)), "shard s may not be in b"),
        (replace(right, partitions=(replace(part, units=1),)), "too slow"),
        (replace(right, partitions=(replace(part, units=11),)), "11 units"),
        (replace(right, partitions=(replace(part, shards=()),)), "trained on 0 times"),
        (replace(right, seconds=4000.0), "deadline"),
        (replace(right, bill=replace(right.bill, compute=0.0)), "billed"),
    ):
        assert any(text in fault for fault in audit(where, [wanted], PlacementOutcome((wrong,), ())))
    assert audit(where, [wanted], PlacementOutcome((), ())) == ("job has 0 answers",)


# --- the published rule


def test_matching_gives_all_regions_the_load_power_of_the_slowest() -> None:
    """Twice the data in b, ten machines each: b sets the pace, a gives half of its machines back."""
    where = mesh(region("a"), region("b"))
    wanted = job(shard("s", "a", 5), shard("t", "b", 10), hours=8)
    (matched,) = load_power_matching(where, [wanted], pace="fastest").placements
    assert {part.region: part.units for part in matched.partitions} == {"a": 5, "b": 10}
    assert matched.seconds == pytest.approx(3600)
    (everything,) = greedy(where, [wanted]).placements
    assert {part.region: part.units for part in everything.partitions} == {"a": 10, "b": 10}
    assert matched.usd == pytest.approx(0.75 * everything.usd)
    (paced,) = load_power_matching(where, [wanted]).placements
    assert sum(part.units for part in paced.partitions) == 3
    assert paced.seconds <= 8 * 3600


def test_a_single_region_is_refused_what_residency_ties_to_two() -> None:
    where = mesh(region("a"), region("b", 0.5))
    tied = job(shard("s", "a", 1), shard("t", "b", 1))
    assert cheapest_single_region(where, [tied]).refusals
    loose = job(shard("s", "a", 1, 0, "anywhere"), shard("t", "b", 1))
    assert [part.region for part in cheapest_single_region(where, [loose]).placements[0].partitions] == ["b"]


# --- surfaces


def test_arguments_that_make_no_sense_are_told() -> None:
    where = mesh(region("a"))
    wanted = job(shard("s", "a", 1))
    with pytest.raises(ValueError, match="same name"):
        place(where, [wanted, wanted])
    with pytest.raises(ValueError, match="method"):
        place(where, [wanted], method="guess")
    with pytest.raises(ValueError, match="pace"):
        load_power_matching(where, [wanted], pace="slow")
    with pytest.raises(ValueError, match="residency"):
        PlacementShard("s", "a", 1, 1, "planet")
    index = Index(where)
    offer = index.offer(wanted)
    assert offer is not None
    index.hold(offer)
    with pytest.raises(ValueError, match="placed already"):
        index.hold(offer)


def test_a_refusal_under_a_budget_names_the_budget() -> None:
    where = mesh(region("a"))
    wanted = job(shard("s", "a", 10), hours=5)
    answer = place_fastest(where, wanted, 5.0)
    assert isinstance(answer, PlacementRefusal)
    told = re.fullmatch(r"a budget of \$([\d.]+) would do", answer.reasons[0].remedy)
    assert told
    quick = place_fastest(where, wanted, float(told[1]) + 1e-3)
    assert isinstance(quick, Placement)
    assert quick.seconds == pytest.approx(3600, rel=0.02), "ten units cost what one does, for a tenth of the time"
