"""Plans of tasks that were profiled: memory, merging and workers follow from what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler import Capacity, Declined, Planner, Region, Snapshot, plan
from scheduler.tuning import ChannelProfile, MergePoint, NormPair, StepPoint, TaskProfile
from tests.scheduler.test_plan import demand, planned, region


def profile(
    name: str, *, peak_mb: float = 300.0, put_seconds: float = 0.001, put_usd: float = 0.0, channel: str = "redis"
) -> TaskProfile:
    return TaskProfile(
        region=name,
        samples=1000,
        batch=32,
        parameters=1_000_000,
        model_bytes=4_000_000,
        steps=tuple(StepPoint(b, 1024, 0.01 + 0.001 * b, peak_mb + b) for b in (8, 16, 32, 64)),
        update_seconds=0.001,
        norms=(NormPair(8, 10.0, 64, 2.0),),
        evaluation_peak_mb=0.0,
        channel=ChannelProfile(put_seconds, put_seconds, 1e8, 1e8, put_usd=put_usd, name=channel),
        start_seconds=1.0,
        again_seconds=0.1,
        gb_seconds=1.0,
        usd=1e-5,
        layers=({"name": "0"},),
    )


def there(name: str, channel: str = "redis", **more: object) -> Region:
    return region(name, channel=channel, **more)


def snapshot(*profiles: TaskProfile, channel: str = "redis") -> Snapshot:
    regions = tuple(there(name, channel) for name in "ab")
    return Snapshot(regions, model_bytes=4_000_000, profiles={one.region: one for one in profiles})


def test_memory_is_what_the_task_needs_and_no_more() -> None:
    small = planned(snapshot(profile("a"), profile("b", peak_mb=700.0)), demand(workers=1))
    assert [part.memory_mb for part in small.partitions] == [512, 1024]
    without = planned(snapshot(), demand(workers=1))
    assert [part.memory_mb for part in without.partitions] == [1024, 1024]
    assert small.estimate.usd.expected < without.estimate.usd.expected


def test_what_the_job_file_names_stays() -> None:
    asked = demand(memory_mb=2048, workers=3, collective="k-reduce", merging={"k": 2.0})
    plan = planned(snapshot(profile("a"), profile("b")), asked)
    assert {part.memory_mb for part in plan.partitions} == {2048}
    assert (plan.collective, plan.merging) == ("k-reduce", {"k": 2.0})


def test_all_regions_merge_as_their_profiles_say_where_these_agree() -> None:
    plan = planned(snapshot(profile("a"), profile("b")), demand(workers=4))
    assert plan.collective != "auto"
    assert plan.merging.get("k", 1.0) <= 4
    # A dear store and a free one are not best served alike: each region then chooses by what it measures.
    apart = planned(snapshot(profile("a"), profile("b", put_usd=1e-3)), demand(workers=4))
    assert apart.collective == "auto"
    assert not apart.merging


def test_one_profile_alone_does_not_speak_for_the_other_region() -> None:
    plan = planned(snapshot(profile("a")), demand(workers=4))
    assert plan.collective == "auto"
    assert [part.memory_mb for part in plan.partitions] == [512, 1024]


def test_a_profile_over_another_channel_does_not_count() -> None:
    plan = planned(snapshot(profile("a"), profile("b"), channel="s3"), demand(workers=4))
    assert plan.collective == "auto"
    assert {part.merge_seconds for part in plan.partitions} == {None}


def test_merges_that_take_long_keep_workers_from_being_hired() -> None:
    """With a store of half a second a request, four workers are slower than one."""
    lone = Snapshot((there("a"),), model_bytes=4_000_000)
    quick = replace(lone, profiles={"a": profile("a")})
    slow = replace(lone, profiles={"a": profile("a", put_seconds=0.5)})
    fast = demand(minimise="time")
    assert planned(quick, fast).partitions[0].workers > 1
    assert planned(slow, fast).partitions[0].workers == 1
    with_four = planned(slow, demand(workers=4)).partitions[0]
    assert with_four.merge_seconds is not None
    assert with_four.merge_seconds > 1.0


def test_where_nothing_has_memory_enough_it_is_declined_unless_the_job_file_insists() -> None:
    tight = replace(there("a"), capacity=Capacity(4, 256))
    known = Snapshot((tight,), profiles={"a": profile("a")})
    answer = plan(known, demand())
    assert isinstance(answer, Declined)
    assert "parallelism: data" in answer.reasons[0].remedy
    assert planned(known, demand(parallelism="data")).partitions[0].memory_mb == 256


@pytest.mark.parametrize("collective", ["isp", "server-reduce"])
def test_what_has_no_model_here_or_needs_none_is_planned(collective: str) -> None:
    plan = planned(snapshot(profile("a"), profile("b")), demand(workers=2, collective=collective))
    assert plan.collective == collective


def test_in_shared_memory_the_server_merges() -> None:
    held = snapshot(profile("a", channel="file"), profile("b", channel="file"), channel="file")
    assert planned(held, demand(workers=2)).collective == "server-reduce"


def test_the_profiles_k_tells_how_unequal_parts_are() -> None:
    wanted = demand(workers=4, collective="k-reduce", merging={"staleness": 1.0, "ratio": 2.0})
    plan = planned(snapshot(profile("a"), profile("b")), wanted)
    k = plan.merging["k"]
    expected = 2.0 * 4 / (k + (4 - k) * 2.0) if k < 4 else 1.0
    assert [part.largest_share for part in plan.partitions] == [pytest.approx(expected)] * 2
    few = planned(snapshot(profile("a"), profile("b")), replace(wanted, merging={**wanted.merging, "k": 1.0}))
    assert [part.largest_share for part in few.partitions] == [pytest.approx(8 / 7)] * 2


def test_merges_of_earlier_runs_mend_what_is_predicted() -> None:
    before = snapshot(profile("a"), profile("b"))
    told = planned(before, demand(workers=4)).partitions[0].merge_seconds
    assert told is not None
    slower = tuple(
        MergePoint(collective, 4, chunks, 4e6, 3 * told, compute_seconds=0.04)
        for collective, chunks in (("pipelined-scatter-reduce", 4), ("all-reduce", 1), ("server-reduce", 4))
    )
    after = planned(replace(before, merges={"a": slower}), demand(workers=4))
    learned, same = (part.merge_seconds for part in after.partitions)
    assert same == told
    assert learned is not None
    assert learned > 1.2 * told


def test_a_plan_tells_what_other_numbers_of_chunks_would_take() -> None:
    there_is = snapshot(profile("a"), profile("b"))
    regions = tuple(replace(one, capacity=Capacity(12, 3072)) for one in there_is.regions)
    asked = demand(workers=6, collective="k-reduce")
    found = planned(replace(there_is, regions=regions), asked)
    k = int(found.merging["k"])
    told = [one for one in found.alternatives if one.decision == f"K {k}"]
    assert len(told) == 2
    for one in told:
        other = int(one.text.split(":")[0])
        fixed = planned(
            replace(there_is, regions=regions),
            replace(asked, merging={"k": float(other)}, memory_mb=found.partitions[0].memory_mb),
        )
        assert other != k
        assert f" {fixed.estimate.seconds.expected:.0f} s" in one.text
        assert "slower" in one.why_not
    fixed = planned(replace(there_is, regions=regions), replace(asked, merging={"k": 2.0}))
    assert not [one for one in fixed.alternatives if one.decision.startswith("K ")]


@pytest.mark.parametrize(("again", "slice_seconds"), [(0.1, 30.0), (3.0, 300.0)])
def test_the_slice_is_longer_only_where_starts_make_that_worth_it(again: float, slice_seconds: float) -> None:
    profiles = (replace(profile(name), again_seconds=again) for name in "ab")
    there_is, asked = snapshot(*profiles), demand(workers=2, epochs=300.0, slice_seconds=None)
    found = planned(there_is, asked)
    assert found.slice_seconds == slice_seconds
    least = planned(there_is, replace(asked, slice_seconds=600.0)).estimate.usd.expected
    assert least <= found.estimate.usd.expected <= 1.005 * least
    told = [one for one in found.alternatives if one.decision == f"slice {slice_seconds:g} s"]
    assert [one.text.split(":")[0] for one in told] == (["60 s", "600 s"] if again < 1.0 else ["600 s", "30 s"])
    for one in told:
        fixed = planned(there_is, replace(asked, slice_seconds=float(one.text.split(" ")[0])))
        assert f": {fixed.estimate.seconds.expected:.0f} s and $" in one.text
        assert not [other for other in fixed.alternatives if other.decision.startswith("slice")]


def test_a_slice_that_keeps_a_deadline_is_chosen_and_none_is_longer_than_a_platform_lets_it() -> None:
    there_is, asked = snapshot(profile("a"), profile("b")), demand(workers=2, epochs=300.0, slice_seconds=None)
    usual = planned(there_is, asked)
    longest = planned(there_is, replace(asked, slice_seconds=600.0))
    between = (longest.estimate.seconds.high + usual.estimate.seconds.high) / 2
    assert planned(there_is, replace(asked, deadline_seconds=between)).slice_seconds > 30.0
    capacity = replace(there_is.regions[0].capacity, slice_seconds=20.0)
    limited = replace(there_is, regions=(replace(there_is.regions[0], capacity=capacity), there_is.regions[1]))
    assert planned(limited, asked).slice_seconds == 20.0


@pytest.mark.parametrize("minimise", ["time", "cost"])
@pytest.mark.parametrize("deadline", [None, 60.0, 1e-3])
def test_configurations_of_a_region_take_what_its_plan_takes(minimise: str, deadline: float | None) -> None:
    known = Snapshot((there("a"),), model_bytes=4_000_000, profiles={"a": profile("a")}, start_seconds=1.0)
    asked = demand(minimise=minimise, deadline_seconds=deadline)
    answer = plan(known, asked)
    found = Planner(known).configured(asked)
    assert not isinstance(found, Declined)
    each, chosen = found
    assert [one.part.workers for one in each] == sorted(one.part.workers for one in each)
    if isinstance(answer, Declined):
        assert chosen is None
        return
    assert chosen is not None
    (part,) = answer.partitions
    assert replace(chosen.part, steps_per_round=part.steps_per_round) == replace(part, shards=())
    assert chosen.steps == answer.rounds * answer.interval
    # A plan's slices are shorter where that costs less than half a per cent.
    assert answer.estimate.seconds.expected == pytest.approx(chosen.seconds, rel=0.006)
    assert answer.estimate.usd.expected == pytest.approx(chosen.usd, rel=0.006)
