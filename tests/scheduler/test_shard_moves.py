"""Shards that are processed elsewhere: never against a rule, never for nothing, and the copy is in the bill."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler import Capacity, Dataset, Declined, Demand, Link, Plan, Planner, Prices, Region, Snapshot, Split, plan

MB = 1_000_000
PRICES = Prices("list", "2026-01", 1.67e-5, 2e-7, 0.05, 0.09)


def region(
    name: str,
    samples: int = 10_000,
    workers: int = 4,
    residency: str | tuple[str, ...] = "anywhere",
    size: int | None = 10 * MB,
    speed: float | None = 500.0,
    usd: float = 1.67e-5,
    cloud: str = "cloud",
    **more: object,
) -> Region:
    held = (Dataset("digits", {"train": Split(samples, size), "test": Split(10, 0)}, residency),) if samples else ()
    prices = replace(PRICES, function_usd_per_gb_second=usd)
    made = Region(name, cloud, Capacity(workers, 2048, speed), prices, held, takes_shards=True)
    return replace(made, **more)  # type: ignore[arg-type]


def demand(**more: object) -> Demand:
    wanted = Demand("job", "digits", batch=32, epochs=3.0, steps=None, seed=1, residency="anywhere")
    return replace(wanted, **more)  # type: ignore[arg-type]


def planned(regions: list[Region], wanted: Demand | None = None) -> Plan:
    answer = plan(Snapshot(tuple(regions), model_bytes=MB), wanted or demand())
    assert isinstance(answer, Plan), answer
    return answer


def moves(chosen: Plan) -> dict[str, str]:
    return {copy.source: copy.destination for copy in chosen.copies}


names = [f"r{number}" for number in range(5)]
rules = st.one_of(st.sampled_from(["region", "cloud", "anywhere"]), st.lists(st.sampled_from(names)).map(tuple))
drawn = st.fixed_dictionaries(
    {
        "samples": st.sampled_from([0, 100, 5_000, 200_000]),
        "workers": st.integers(0, 6),
        "residency": rules,
        "size": st.one_of(st.none(), st.integers(0, 5_000 * MB)),
        "speed": st.one_of(st.none(), st.floats(10, 1e4)),
        "usd": st.floats(1e-6, 1e-4),
        "cloud": st.sampled_from(["one", "two"]),
        "takes_shards": st.booleans(),
    }
)


@pytest.mark.slow
@settings(deadline=None, max_examples=budget(150))
@given(
    st.lists(drawn, min_size=1, max_size=5),
    rules,
    st.sampled_from(["cost", "time"]),
    st.lists(st.sampled_from(names), max_size=1).map(tuple),
    st.one_of(st.none(), st.floats(10, 1e4)),
)
def test_no_rule_is_broken_each_shard_is_used_once_and_nothing_moves_without_gain(
    shape: list[dict[str, object]], rule: str | tuple[str, ...], minimise: str, avoid: tuple[str, ...], deadline: float
) -> None:
    regions = {name: region(name, **one) for name, one in zip(names, shape, strict=False)}  # type: ignore[arg-type]
    wanted = demand(residency=rule, minimise=minimise, avoid=avoid, deadline_seconds=deadline)
    snapshot = Snapshot(tuple(regions.values()), model_bytes=MB)
    chosen, at_home = plan(snapshot, wanted), plan(snapshot, replace(wanted, residency="region"))
    if isinstance(chosen, Declined):
        assert isinstance(at_home, Declined)
        return
    holders = {name for name, one in regions.items() if one.datasets and name not in avoid}
    used: list[str] = []
    for part in chosen.partitions:
        used += part.shards or (part.region,)
        assert part.region not in avoid
        assert 1 <= part.workers <= regions[part.region].capacity.workers
        assert part.samples == sum(
            regions[name].datasets[0].splits["train"].samples for name in part.shards or (part.region,)
        )
    assert sorted(used) == sorted(holders), "each shard is trained on exactly once"
    where = {name: part.region for part in chosen.partitions for name in part.shards or (part.region,)}
    copies = {copy.source: copy for copy in chosen.copies}
    assert {name for name, at in where.items() if name != at} == set(copies)
    for name, copy in copies.items():
        home, there = regions[name], regions[copy.destination]
        assert where[name] == copy.destination
        for owner in (home.datasets[0].residency, rule):
            assert owner == "anywhere" or (owner == "cloud" and home.cloud == there.cloud) or there.name in owner
            assert owner != "region"
        assert there.takes_shards
        sent = sum(split.bytes or 0 for split in home.datasets[0].splits.values())
        assert copy.bytes == sent
        on_line = chosen.estimate.link_bytes[f"{name}>{copy.destination}"]
        assert sent <= on_line <= sent * 1.06 + 1
        (paid,) = [cost for cost in chosen.estimate.items if cost.region == name]
        assert paid.item == f"egress to {copy.destination}"
        assert paid.usd == pytest.approx(on_line / 1e9 * PRICES.egress(copy.destination))
        assert f"is processed in {copy.destination}" in chosen.residency[name]
    assert sum(cost.usd for cost in chosen.estimate.items) == pytest.approx(chosen.estimate.usd.expected)
    if copies and isinstance(at_home, Plan):
        what = "seconds" if minimise == "time" else "usd"
        mine, other = (getattr(one.estimate, what).expected for one in (chosen, at_home))
        assert mine <= 0.9 * other + 1e-12
    elif not copies:
        assert isinstance(at_home, Plan)
        assert (chosen.partitions, chosen.estimate) == (at_home.partitions, at_home.estimate)


def test_a_region_that_only_holds_data_is_worked_for_elsewhere() -> None:
    chosen = planned([region("a", workers=0), region("b", samples=0)])
    assert moves(chosen) == {"a": "b"}
    (part,) = chosen.partitions
    assert (part.region, part.samples, part.shards) == ("b", 10_000, ("a",))
    assert chosen.alternatives[0].text == "all data stay where they are: not possible"
    took = replace(chosen.estimate, items=())
    assert took.seconds.expected > chosen.copies[0].seconds


def test_two_shards_of_one_region_are_one_partition() -> None:
    chosen = planned([region("a", workers=0), region("b", samples=500)])
    (part,) = chosen.partitions
    assert (part.samples, part.shards) == (10_500, ("a", "b"))
    assert chosen.residency["b"].startswith("stays in b (rule: anywhere; ")


def test_the_job_decides_too_and_is_told_that_it_could() -> None:
    regions = [region("a", workers=0), region("b", samples=0)]
    for rule in ("region", ("c",), ()):
        answer = plan(Snapshot(tuple(regions)), demand(residency=rule))
        assert isinstance(answer, Declined)
    answer = plan(Snapshot(tuple(regions)), demand(residency="region"))
    assert isinstance(answer, Declined)
    assert "data.residency: anywhere" in answer.reasons[0].remedy
    assert "that of a in b" in answer.reasons[0].remedy


def test_data_move_to_where_work_is_much_cheaper_and_not_where_it_is_a_little() -> None:
    dear = region("a", usd=1e-4, size=MB)
    assert moves(planned([dear, region("b", samples=0, usd=1e-5)])) == {"a": "b"}
    stays = planned([dear, region("b", samples=0, usd=9.8e-5)])
    assert moves(stays) == {}
    assert "elsewhere it would not save 10%" in stays.residency["a"]
    assert any("the shard of a in b" in other.text for other in stays.alternatives)


def test_a_shard_that_would_gain_hardly_anything_by_itself_stays() -> None:
    """Though all together gain much."""

    def made(name: str, samples: int, usd: float, workers: int = 1) -> Region:
        # Nothing but the functions costs anything, and nobody waits for anybody once a is in b.
        prices = replace(PRICES, function_usd_per_gb_second=usd, server_usd_per_hour=0.0, egress_usd_per_gb=0.0)
        return replace(region(name, samples, workers, size=MB), prices=prices)

    rarely = demand(interval=2_500)
    dear, cheap = made("a", 1_000_000, 1e-4), made("b", 1_000_000, 1e-5)
    assert moves(planned([dear, cheap, made("c", 2_000_000, 1.01e-5)], rarely)) == {"a": "b"}
    assert moves(planned([dear, cheap, made("c", 2_000_000, 1.2e-5)], rarely)) == {"a": "b", "c": "b"}


def test_egress_that_costs_more_than_is_saved_keeps_data_at_home() -> None:
    dear, cheap = region("a", usd=1e-4, size=100_000 * MB), region("b", samples=0, usd=1e-5)
    assert moves(planned([dear, cheap])) == {}


def test_a_deadline_that_cannot_be_kept_at_home_is_kept_elsewhere() -> None:
    slow, fast = region("a", speed=100.0, workers=1), region("b", samples=0, speed=1_000.0, workers=8, usd=5e-4)
    alone = plan(Snapshot((slow, fast)), demand(residency="region", deadline_seconds=200.0))
    assert isinstance(alone, Declined)
    assert moves(planned([slow, fast], demand(deadline_seconds=200.0))) == {"a": "b"}
    assert moves(planned([slow, fast])) == {}, "without the deadline the dearer region is not worth it"


def test_a_fast_region_is_used_where_time_counts() -> None:
    slow, fast = region("a", speed=100.0, workers=1), region("b", samples=0, speed=1_000.0, workers=8, usd=1e-4)
    assert moves(planned([slow, fast], demand(minimise="time"))) == {"a": "b"}
    far = replace(slow, links=(Link("a", "b", 100.0, 0.1),))
    assert moves(planned([far, fast], demand(minimise="time"))) == {}, "the copy alone takes longer"
    cut = replace(slow, links=(Link("a", "b", 100.0, 0.0),))
    assert moves(planned([cut, fast], demand(minimise="time"))) == {}


def test_a_guess_makes_no_region_look_faster() -> None:
    """Home is known to be slow for this task, of the other nothing is known: then it is taken to be as slow."""
    home, other = region("a", speed=None), region("b", samples=0, speed=None)
    snapshot = Snapshot((home, other), speeds={"a": 10.0}, model_bytes=MB)
    answer = plan(snapshot, demand(minimise="time"))
    assert isinstance(answer, Plan)
    assert moves(answer) == {}
    stated = (replace(home, capacity=Capacity(4, 2048, 100.0)), replace(other, capacity=Capacity(4, 2048, 1000.0)))
    answer = plan(replace(snapshot, regions=stated), demand(minimise="time"))
    assert isinstance(answer, Plan)
    assert moves(answer) == {"a": "b"}, "ten times as fast as operators state both"
    assert answer.partitions[0].samples_per_second == pytest.approx(100.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"takes_shards": False},
        {"workers": 0},
        {"prices": None},
        {"channel": "redis"},
    ],
)
def test_a_region_that_cannot_take_a_shard_is_not_asked(changed: dict[str, object]) -> None:
    other = region("b", samples=0, **changed)  # type: ignore[arg-type]
    answer = plan(Snapshot((region("a", workers=0), other)), demand(channel="file"))
    assert isinstance(answer, Declined)


def test_a_shard_whose_size_nobody_knows_stays() -> None:
    answer = plan(Snapshot((region("a", usd=1e-3, size=None), region("b", samples=0))), demand())
    assert isinstance(answer, Plan)
    assert moves(answer) == {}
    assert "its size is not known" in answer.residency["a"]


def test_a_region_that_is_named_may_have_no_data() -> None:
    regions = [region("a", workers=0), region("b", samples=0), region("c", samples=0)]
    assert moves(planned(regions, demand(use=("a", "c")))) == {"a": "c"}
    answer = plan(Snapshot(tuple(regions)), demand(use=("a", "c"), residency="region"))
    assert isinstance(answer, Declined)
    assert answer.reasons[0].code == "DATASET_UNKNOWN"


@pytest.mark.slow
def test_many_regions_are_planned_soon() -> None:
    """Bounded by the number of plans that are asked for, not by the regions."""
    regions = [region(f"r{n:02}", workers=n % 3, usd=1e-6 * (n + 1), size=n * MB) for n in range(40)]
    chosen = planned(regions)
    assert set(moves(chosen)) >= {f"r{n:02}" for n in range(0, 40, 3)} - set(moves(chosen).values())


@settings(deadline=None, max_examples=budget(60))
@given(
    st.lists(drawn, min_size=1, max_size=4),
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.floats(10, 1e4)),
            st.one_of(st.none(), st.floats(1e-5, 1)),
            st.sampled_from([1.0, 3.0]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_what_was_asked_before_changes_no_plan(
    shape: list[dict[str, object]], asked: list[tuple[float | None, float | None, float]]
) -> None:
    snapshot = Snapshot(tuple(region(name, **one) for name, one in zip(names, shape, strict=False)))  # type: ignore[arg-type]
    planner = Planner(snapshot)
    for seconds, usd, epochs in asked:
        wanted = demand(deadline_seconds=seconds, budget_usd=usd, epochs=epochs)
        assert planner.plan(wanted) == plan(snapshot, wanted)
    evaluated = planner.placements
    planner.plan(wanted)
    assert planner.placements == evaluated
