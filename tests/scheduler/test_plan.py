"""What every plan holds, whatever the federation looks like."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler import (
    Capacity,
    Dataset,
    Declined,
    Demand,
    Link,
    Plan,
    Prices,
    Region,
    Snapshot,
    Split,
    StartBilled,
    plan,
    step_seconds,
)
from scheduler._link import update_bytes
from scheduler.tuning import MergePoint
from sync.ps.controller import Controller
from sync.wan import ExchangeSettings, LinkSample

PRICES = Prices("list", "2026-01", 1.67e-5, 2e-7, 0.05, 0.09, {"b": 0.02})


def region(name: str, samples: int = 1000, workers: int = 4, prices: Prices | None = PRICES, **more: object) -> Region:
    held = Dataset("digits", {"train": Split(samples)} if samples else {"test": Split(10)})
    return Region(name, "cloud", Capacity(workers, 2048), prices, (held,), **more)  # type: ignore[arg-type]


def demand(**more: object) -> Demand:
    return replace(Demand("job", "digits", batch=32, epochs=3.0, steps=None, seed=1), **more)  # type: ignore[arg-type]


def planned(snapshot: Snapshot, wanted: Demand) -> Plan:
    answer = plan(snapshot, wanted)
    assert isinstance(answer, Plan), answer
    return answer


def declined(snapshot: Snapshot, wanted: Demand) -> dict[str, str]:
    answer = plan(snapshot, wanted)
    assert isinstance(answer, Declined)
    return {reason.code: reason.text + " | " + reason.remedy for reason in answer.reasons}


federations = st.lists(
    st.tuples(st.integers(1, 50_000), st.integers(1, 16), st.floats(10, 1e5)), min_size=1, max_size=8
)


@settings(deadline=None)  # the first plan of a process takes longer
@given(federations, st.integers(1, 256), st.floats(0.1, 20), st.one_of(st.none(), st.integers(1, 100)))
def test_a_plan_uses_each_shard_where_it_is_and_no_more_than_is_free(
    shape: list[tuple[int, int, float]], batch: int, epochs: float, interval: int | None
) -> None:
    regions = tuple(
        replace(region(f"r{i}", samples, workers), capacity=Capacity(workers, 2048, speed))
        for i, (samples, workers, speed) in enumerate(shape)
    )
    chosen = planned(Snapshot(regions), demand(batch=batch, epochs=epochs, interval=interval))
    assert [part.region for part in chosen.partitions] == sorted(r.name for r in regions)
    longest = 0.0
    for part in chosen.partitions:
        own = next(r for r in regions if r.name == part.region)
        assert 1 <= part.workers <= own.capacity.workers
        assert part.samples == own.datasets[0].splits["train"].samples
        per_epoch = part.samples / (part.batch * part.workers)
        longest = max(longest, per_epoch)
        # All regions make the demanded epochs, to within the rounding of one step in each round.
        made = chosen.rounds * part.steps_per_round
        assert abs(made - epochs * per_epoch) <= chosen.rounds + 0.02 * epochs * longest + 1
    total = max(1, round(epochs * longest))
    assert chosen.rounds * chosen.interval >= 0.98 * total
    assert interval is None or chosen.interval <= interval


@settings(deadline=None)  # the first plan of a process takes longer
@given(federations)
def test_estimates_are_ranges_around_what_is_expected(shape: list[tuple[int, int, float]]) -> None:
    regions = tuple(region(f"r{i}", samples, workers) for i, (samples, workers, _) in enumerate(shape))
    estimate = planned(Snapshot(regions), demand()).estimate
    for range_ in (estimate.seconds, estimate.wan_bytes, estimate.usd):
        assert 0 <= range_.low <= range_.expected <= range_.high
    assert math.isclose(estimate.usd.expected, sum(item.usd for item in estimate.items))
    assert estimate.wan_bytes.expected == sum(estimate.link_bytes.values())
    assert len(estimate.link_bytes) == len(regions) * (len(regions) - 1)


def test_workers_are_in_proportion_to_the_data_within_what_is_free() -> None:
    # More of them in the second region would help where the first one waits for updates.
    wanted = demand(minimise="time", interval=20, epochs=30.0, exchange="background")
    chosen = planned(Snapshot((region("a", 3000, 6), region("b", 1000, 6))), wanted)
    assert [part.workers for part in chosen.partitions] == [6, 2]


@settings(deadline=None)  # the first plan of a process takes longer
@given(federations, st.integers(1, 256), st.floats(1, 20), st.integers(50, 500))
def test_by_speed_all_rounds_take_equally_long_and_the_epochs_are_made_together(
    shape: list[tuple[int, int, float]], batch: int, epochs: float, interval: int
) -> None:
    regions = tuple(
        replace(region(f"r{i}", samples, workers), capacity=Capacity(workers, 2048, speed))
        for i, (samples, workers, speed) in enumerate(shape)
    )
    wanted = demand(batch=batch, epochs=epochs, interval=interval, balance="speed")
    chosen = planned(Snapshot(regions), wanted)
    seconds = [(part.steps_per_round * step_seconds(part), step_seconds(part)) for part in chosen.partitions]
    longest = max(round_ for round_, _ in seconds)
    # To within the rounding of one step; who is too slow for one makes one all the same.
    assert all(round_ >= longest - 1.5 * max(step for _, step in seconds) - 1e-9 for round_, _ in seconds)
    made = sum(p.steps_per_round * p.batch * p.workers for p in chosen.partitions) * chosen.rounds
    all_steps = sum(p.batch * p.workers for p in chosen.partitions) * chosen.rounds
    asked = epochs * sum(part.samples for part in chosen.partitions)
    assert abs(made - asked) <= 2 * all_steps + 0.02 * asked


def test_a_region_that_is_half_as_fast_makes_half_the_steps() -> None:
    fast, slow = (replace(region(n, 4000, 1), capacity=Capacity(1, 2048, v)) for n, v in (("a", 200.0), ("b", 100.0)))
    waiting = planned(Snapshot((fast, slow)), demand(exchange="synchronous", interval=20))
    balanced = planned(Snapshot((fast, slow)), demand(exchange="synchronous", interval=20, balance="speed"))
    assert [part.steps_per_round for part in waiting.partitions] == [20, 20]
    first, second = (part.steps_per_round for part in balanced.partitions)
    assert (first, second) == (20, 10)
    # Three epochs of 8,000 samples at 300 a second, instead of three of 4,000 at 100.
    assert balanced.rounds * (first + second) * 32 == pytest.approx(24_000, rel=0.03)
    seconds = [chosen.rounds * 20 * rate for chosen, rate in ((balanced, 32 / 200), (waiting, 32 / 100))]
    assert seconds == [pytest.approx(80, rel=0.03), pytest.approx(120, rel=0.03)]


def test_busy_workers_are_not_given_twice() -> None:
    snapshot = Snapshot((region("a", 3000, 4),), busy_workers={"a": 3})
    assert planned(snapshot, demand()).partitions[0].workers == 1
    assert "wait for a job to end" in declined(snapshot, demand(workers=2))["INADMISSIBLE"]


def test_limits_of_a_function_platform_are_known_before_a_job_runs() -> None:
    capacity = Capacity(4, 3072, slice_seconds=585.0, least_memory_mb=128, memory_step_mb=128)
    snapshot = Snapshot((replace(region("a"), capacity=capacity), region("b")))
    refused = declined(snapshot, demand(slice_seconds=700.0))
    assert refused == {
        "LIMIT_EXCEEDED": "the platform of region a ends functions, so that a slice has at most 585 s, 700 s are asked "
        "for | lower function.slice to 585s, or keep the region out with regions.avoid"
    }
    assert planned(snapshot, demand(slice_seconds=585.0)).slice_seconds == 585.0
    for asked, gets in ((1, 128), (128, 128), (1000, 1024), (2900, 2944), (3072, 3072)):
        stated = planned(snapshot, demand(memory_mb=asked, workers=1, avoid=("b",)))
        same = planned(snapshot, demand(memory_mb=gets, workers=1, avoid=("b",)))
        assert [part.memory_mb for part in stated.partitions] == [gets]
        assert stated.estimate.items == same.estimate.items, "what is billed is what the platform gives"
    refused = declined(snapshot, demand(memory_mb=3073, avoid=("b",)))
    assert "gives a function at most 3072 MB, 3200 MB" in refused["INADMISSIBLE"]


def test_workers_may_be_stated_by_region() -> None:
    snapshot = Snapshot((region("a"), region("b")), absent=("c",))
    chosen = planned(snapshot, demand(workers={"a": 3, "b": 1, "c": 9}))
    assert [part.workers for part in chosen.partitions] == [3, 1]
    assert "no number for region b" in declined(snapshot, demand(workers={"a": 3}))["INADMISSIBLE"]
    assert "4 workers free, 5 are needed" in declined(snapshot, demand(workers={"a": 5, "b": 1}))["INADMISSIBLE"]


def test_a_region_without_the_shard_takes_no_part_unless_it_was_asked_for() -> None:
    snapshot = Snapshot((region("a"), region("b", samples=0)))
    assert [part.region for part in planned(snapshot, demand()).partitions] == ["a"]
    assert "region b" in declined(snapshot, demand(use=("a", "b")))["DATASET_UNKNOWN"]


def test_an_avoided_region_takes_no_part() -> None:
    chosen = planned(Snapshot((region("a"), region("b")), absent=("c",)), demand(avoid=("b", "c")))
    assert [part.region for part in chosen.partitions] == ["a"]


def test_a_region_that_is_named_and_avoided_need_not_be_there() -> None:
    snapshot = Snapshot((region("a"), region("b"), region("c")), absent=("x",))
    chosen = planned(snapshot, demand(use=("a", "b", "x"), avoid=("x",)))
    assert [part.region for part in chosen.partitions] == ["a", "b"]
    # Where all that are named are avoided, others take no part for them.
    assert "no live region holds" in declined(snapshot, demand(use=("x",), avoid=("x",)))["DATASET_UNKNOWN"]
    assert "out of it: a" in declined(snapshot, demand(use=("a",), avoid=("a",)))["INADMISSIBLE"]


def test_a_secure_plan_has_a_masked_codec_whose_first_update_is_larger() -> None:
    secure = demand(wan_settings={"secure": 3.0}, exchange="synchronous")
    unknown = planned(Snapshot(tuple(map(region, "abc"))), secure)
    assert unknown.codec == "fp32-masked"
    known = Snapshot(tuple(map(region, "abc")), model_bytes=40_000_000)
    chosen = planned(known, secure)
    assert (chosen.codec, chosen.background) == ("int8-masked", False)
    (sent,) = set(chosen.estimate.link_bytes.values())
    assert sent / chosen.rounds == pytest.approx(40e6 * (0.252 + 0.75 / chosen.rounds), rel=0.01)


@pytest.mark.parametrize(
    ("snapshot", "wanted", "code", "text"),
    [
        (Snapshot((region("a"),)), demand(dataset="faces"), "DATASET_UNKNOWN", "digits"),
        (Snapshot(()), demand(), "DATASET_UNKNOWN", "none"),
        (Snapshot((region("a"),)), demand(use=("a", "x")), "REGION_NOT_FOUND", "region x"),
        (Snapshot((region("a"),), absent=("x",)), demand(use=("a", "x")), "INADMISSIBLE", "start its agent"),
        (Snapshot((region("a"), region("b"))), demand(avoid=("bb",)), "REGION_NOT_FOUND", "the regions are a, b"),
        (Snapshot((region("a"),)), demand(workers={"a": 2, "x": 2}), "REGION_NOT_FOUND", "x of train.workers"),
        (Snapshot((region("a"),)), demand(wan_settings={"quorum": 2.0}), "INADMISSIBLE", "quorum is 2, and 1 region"),
        (
            Snapshot((region("a"), region("b"))),
            demand(wan_settings={"robust/median": 0.0}),
            "INADMISSIBLE",
            "advanced.wan.robust: median with 1 region that may be wrong needs 3 regions, and 2 take part",
        ),
        (
            Snapshot(tuple(map(region, "abcdef"))),
            demand(wan_settings={"robust/krum": 2.0}),
            "INADMISSIBLE",
            "krum with 2 regions that may be wrong needs 7 regions, and 6 take part",
        ),
        (
            Snapshot(tuple(map(region, "ab"))),
            demand(wan_settings={"secure": 3.0}),
            "INADMISSIBLE",
            "privacy.minRegions is 3, and 2 regions take part",
        ),
        (
            Snapshot(tuple(region(f"r{number}") for number in range(33))),
            demand(wan_settings={"secure": 3.0}, codec="int8-masked", exchange="synchronous"),
            "INADMISSIBLE",
            "advanced.wan.codec holds sums of at most 32 regions with secure aggregation, and 33 take part",
        ),
        (Snapshot((region("a", prices=None),)), demand(), "PRICE_UNKNOWN", "region a"),
        (Snapshot((region("a"), region("b"))), demand(avoid=("a", "b")), "INADMISSIBLE", "out of it: a, b"),
        (Snapshot((region("a"),), absent=("b",)), demand(dataset="faces"), "DATASET_UNKNOWN", "not connected: b"),
        (Snapshot((region("a"),)), demand(workers=9), "INADMISSIBLE", "lower train.workers to 4 at most"),
        (Snapshot((region("a"),)), demand(memory_mb=9999), "INADMISSIBLE", "2048 MB"),
        (Snapshot((region("a"),)), demand(memory_mb=9999), "INADMISSIBLE", "lower function.memoryMb"),
        (Snapshot((region("a"),)), demand(deadline_seconds=0.5), "INADMISSIBLE", "could be promised"),
        (Snapshot((region("a"),)), demand(deadline_seconds=-2e8), "INADMISSIBLE", "has passed, 2315 days ago"),
        (Snapshot((region("a"),)), demand(deadline_seconds=-3.0), "INADMISSIBLE", "has passed, 3 seconds ago"),
        (Snapshot((region("a"),)), demand(budget_usd=0.0), "INADMISSIBLE", "would do"),
        (Snapshot((region("a"),)), demand(budget_usd=1e-5), "INADMISSIBLE", "the budget is $0.000010"),
    ],
)
def test_what_cannot_be_done_is_declined_with_a_reason_and_a_remedy(
    snapshot: Snapshot, wanted: Demand, code: str, text: str
) -> None:
    assert text in declined(snapshot, wanted)[code]


def test_functions_that_cannot_hold_the_model_are_told_of() -> None:
    regions = (region("a", 500),)
    memory_mb, wanted = 1024, demand(memory_mb=1024)
    fits = (memory_mb - 320) << 19
    assert planned(Snapshot(regions, model_bytes=fits), wanted).warnings == ()
    (told,) = planned(Snapshot(regions, model_bytes=fits + (1 << 20)), wanted).warnings
    assert told.startswith(f"functions of {memory_mb} MB in a cannot hold the model")
    assert "706 MB beside PyTorch" in told
    assert "function.memoryMb" in told
    frozen = Snapshot(regions, model_bytes=10, held_bytes=2 * fits)
    assert planned(frozen, wanted).warnings == (), "what is not trained counts, but has no gradient"
    (told,) = planned(replace(frozen, held_bytes=2 * fits + (1 << 20)), wanted).warnings
    assert told.startswith(f"functions of {memory_mb} MB in a cannot hold the model")


def test_regions_that_allow_too_little_memory_are_told_of() -> None:
    (alone,) = regions = (region("a", 500),)
    most = alone.capacity.memory_mb
    fits = Snapshot(regions, model_bytes=(most - 320) << 17, held_bytes=(most - 320) << 18)
    assert planned(fits, demand()).warnings == (), "8 and 24 bytes a parameter"
    larger = replace(fits, model_bytes=fits.model_bytes + (1 << 20))
    (told,) = planned(larger, demand()).warnings
    assert told.startswith(f"functions of {most} MB in a may be too small, and the region allows no more")
    assert f"about {most + 6} MB; leave the region out (regions.avoid)" in told
    assert planned(larger, demand(memory_mb=most)).warnings == (), "it may do, and who states it may know"
    (told,) = planned(replace(fits, held_bytes=most << 20), demand()).warnings
    assert told.startswith(f"functions of {most} MB in a cannot hold the model")
    (told,) = planned(Snapshot(regions, model_bytes=most << 20), demand()).warnings
    assert told.startswith("functions of 1024 MB in a cannot hold the model")
    assert "ask for more (function.memoryMb)" in told
    small = replace(alone, capacity=replace(alone.capacity, memory_mb=128))
    (told,) = planned(Snapshot((small,), model_bytes=10, held_bytes=20), demand()).warnings
    assert "smaller than PyTorch" in told


def test_a_model_that_an_agent_has_counted_gets_the_memory_that_it_needs() -> None:
    def chosen(held_mb: int, trained_mb: int = 0, **wanted: int) -> int:
        known = Snapshot((region("a", 500),), model_bytes=trained_mb << 20, held_bytes=held_mb << 20)
        return planned(known, demand(**wanted)).partitions[0].memory_mb

    most = region("a", 500).capacity.memory_mb
    assert [chosen(held) for held in (0, 704, 705)] == [1024, 1024, 1536], "frozen weights count once"
    assert [chosen(2 * size, size) for size in (88, 89)] == [1024, 1536], "8 and 24 bytes of each trained parameter"
    assert chosen(600, 17) == 1024
    assert chosen(600, 18) == 1536, "a few trained parameters beside frozen ones"
    assert [chosen(2 * size, 1, local=True) for size in (88, 89)] == [1024, 1536], "all of it may be trained"
    assert chosen(1 << 20) == most
    assert chosen(1000, memory_mb=512) == 512


def test_functions_smaller_than_torch_are_told() -> None:
    (told,) = planned(Snapshot((region("a", 500),)), demand(memory_mb=64)).warnings
    assert told.startswith("functions of 64 MB in a are smaller than PyTorch, which takes about 320 MB")
    assert planned(Snapshot((region("a", 500),)), demand(memory_mb=512)).warnings == ()


def test_isolation_of_job_code_is_told_and_its_absence_is_a_warning() -> None:
    regions = (region("a", isolation="bubblewrap"), region("b", isolation="none"), region("c"))
    chosen = planned(Snapshot(regions), demand())
    assert chosen.isolation == {"a": "bubblewrap", "b": "none", "c": ""}
    (warning,) = [text for text in chosen.warnings if "sandbox" in text]
    assert warning.startswith("b runs job code without a sandbox")


def test_a_shard_that_rounds_of_whole_steps_do_not_fit_is_told() -> None:
    small, large = region("a", 300, 1), region("b", 10_000, 1)
    assert planned(Snapshot((small, replace(large, datasets=small.datasets))), demand(epochs=10.0)).warnings == ()
    chosen = planned(Snapshot((small, large)), demand(epochs=10.0, interval=20))
    assert chosen.rounds * chosen.partitions[0].steps_per_round * 32 / 300 > 16
    (told,) = chosen.warnings
    assert told.startswith("a makes 16.")
    assert "where 10 are asked for: a round has 1 whole steps of 32 samples there; its updates weigh 4.8%" in told
    free = planned(Snapshot((small, large)), demand(epochs=10.0, tolerance=2.0))
    made = free.rounds * free.partitions[0].steps_per_round * 32 / 300
    assert made == pytest.approx(10, abs=0.5), "an interval that fits is taken where that costs too little to matter"
    assert free.warnings == ()


def test_who_sets_what_only_late_updates_know_means_the_background() -> None:
    regions = (replace(region("a"), capacity=Capacity(1, 2048, 1.0)), region("b"))
    assert not planned(Snapshot(regions), demand(interval=20)).background
    assert planned(Snapshot(regions), demand(wan_settings={"quorum": 2.0})).background
    assert planned(Snapshot(regions), demand(wan_settings={"damping": 1.0})).background


@pytest.mark.slow
@settings(deadline=None, max_examples=budget(16))
@given(federations, st.floats(0.5, 0.999))
def test_what_is_said_to_be_possible_is_promised(shape: list[tuple[int, int, float]], part: float) -> None:
    regions = tuple(
        replace(region(f"r{i}", samples, workers), capacity=Capacity(workers, 2048, speed))
        for i, (samples, workers, speed) in enumerate(shape)
    )
    snapshot = Snapshot(regions)
    fastest, cheapest = planned(snapshot, demand(minimise="time")), planned(snapshot, demand())
    for limit, needed in (
        ("deadline_seconds", fastest.estimate.seconds.high * 0.9),
        ("budget_usd", cheapest.estimate.usd.high * 0.9),
    ):
        answer = plan(snapshot, demand(**{limit: needed * part}))
        if isinstance(answer, Declined):
            (reason,) = answer.reasons
            told = float(re.search(r"[\d.]+", reason.remedy)[0])  # type: ignore[index]
            assert told >= needed * part
            planned(snapshot, demand(**{limit: told}))


@pytest.mark.slow
@settings(deadline=None, max_examples=budget(16))
@given(federations, st.floats(1.0, 3.0), st.floats(0.01, 0.999))
def test_a_budget_that_is_said_to_do_keeps_the_deadline_too(
    shape: list[tuple[int, int, float]], slack: float, part: float
) -> None:
    regions = tuple(
        replace(region(f"r{i}", samples, workers), capacity=Capacity(workers, 2048, speed))
        for i, (samples, workers, speed) in enumerate(shape)
    )
    snapshot = Snapshot(regions)
    soon = planned(snapshot, demand(minimise="time")).estimate.seconds.high * slack
    answer = plan(snapshot, demand(deadline_seconds=soon))
    if isinstance(answer, Plan):
        no = plan(snapshot, demand(deadline_seconds=soon, budget_usd=answer.estimate.usd.high * part))
        if isinstance(no, Declined):
            (reason,) = no.reasons
            told = re.fullmatch(r"a budget of \$([\d.]+) would do", reason.remedy)
            assert told is not None, reason
            planned(snapshot, demand(deadline_seconds=soon, budget_usd=float(told[1])))


def test_a_deadline_takes_more_workers_and_a_budget_fewer() -> None:
    # Merging a step's gradients takes as long as making them, so that many workers are dear.
    slow = replace(region("a", 40_000, 16, replace(PRICES, server_usd_per_hour=0.001)))
    snapshot = Snapshot((slow, replace(slow, name="b")), speeds={"a": 8000.0, "b": 8000.0}, model_bytes=1000)
    cheap, fast = planned(snapshot, demand()), planned(snapshot, demand(minimise="time"))
    workers = [sum(part.workers for part in chosen.partitions) for chosen in (cheap, fast)]
    assert workers[0] < workers[1]
    assert cheap.estimate.usd.expected < fast.estimate.usd.expected
    between = (cheap.estimate.seconds.high + fast.estimate.seconds.high) / 2
    hurried = planned(snapshot, demand(deadline_seconds=between))
    assert workers[0] < sum(part.workers for part in hurried.partitions) <= workers[1]
    assert hurried.estimate.seconds.high <= between
    thrifty = planned(snapshot, demand(minimise="time", budget_usd=cheap.estimate.usd.high * 1.1))
    assert thrifty.estimate.usd.high <= cheap.estimate.usd.high * 1.1
    assert any("budget" in other.why_not for other in thrifty.alternatives)


def test_waiting_workers_are_not_hired() -> None:
    snapshot = Snapshot((region("a", 8000, 4), region("b", 1000, 8)))
    chosen = planned(snapshot, demand(minimise="time", interval=16, exchange="background"))
    assert [part.workers for part in chosen.partitions] == [4, 1]
    more = [other for other in chosen.alternatives if other.text.startswith("4, 2: ")]
    assert ["dearer" in other.why_not and "slower" not in other.why_not for other in more] == [True]


def test_every_shard_of_the_dataset_has_a_verdict() -> None:
    snapshot = Snapshot((region("a"), region("b"), region("c", samples=0)))
    assert planned(snapshot, demand(avoid=("b",))).residency == {
        "a": "stays in a (rule: region)",
        "b": "not used: the job file leaves the region out",
        "c": "not used: it has no training split",
    }


def test_of_many_shards_that_are_not_used_only_some_have_a_verdict() -> None:
    snapshot = Snapshot((region("z"), *(region(f"r{number:03}") for number in range(300))))
    verdicts = planned(snapshot, demand(use=("z",))).residency
    assert list(verdicts) == [*(f"r{number:03}" for number in range(20)), "z"]
    assert verdicts["z"] == "stays in z (rule: region)"
    assert verdicts["r018"] == "not used: the job file leaves the region out"
    assert verdicts["r019"] == "not used: the job file leaves the region out; 280 more shards are not used"


def test_a_measured_speed_goes_before_a_stated_one_and_narrows_the_range() -> None:
    stated = replace(region("a"), capacity=Capacity(4, 2048, 500.0))
    guess = planned(Snapshot((region("a"),)), demand()).estimate
    told = planned(Snapshot((stated,)), demand()).estimate
    known = planned(Snapshot((stated,), speeds={"a": 2000.0}, model_bytes=4000, start_seconds=1.0), demand())
    assert (guess.basis, told.basis, known.estimate.basis) == ("prior", "stated", "measured")
    assert known.partitions[0].samples_per_second == 2000.0
    widths = [e.seconds.high / e.seconds.low for e in (guess, told, known.estimate)]
    assert widths == sorted(widths, reverse=True)


def test_a_probe_goes_before_what_is_stated_and_tells_of_regions_like_it() -> None:
    plain = Snapshot((region("a"), region("b")), probed={"b": 300.0}, model_bytes=4000, counted=True)
    told = planned(plain, demand())
    assert [part.samples_per_second for part in told.partitions] == [300.0, 300.0]
    assert (told.estimate.basis, told.estimate.model_basis) == ("likened", "counted")
    # Two operators' figures compare; one alone says nothing of this task.
    stated = {
        name: replace(region(name), capacity=Capacity(4, 2048, speed)) for name, speed in (("a", 500.0), ("b", 1000.0))
    }
    both = planned(replace(plain, regions=tuple(stated.values())), demand())
    assert [part.samples_per_second for part in both.partitions] == [150.0, 300.0]
    one = planned(replace(plain, regions=(stated["a"], region("b"))), demand())
    assert [part.samples_per_second for part in one.partitions] == [500.0, 300.0]
    assert planned(replace(plain, regions=(region("b"),)), demand()).estimate.basis == "probed"
    ran = planned(replace(plain, speeds={"a": 80.0, "b": 90.0}), demand())
    assert [part.samples_per_second for part in ran.partitions] == [80.0, 90.0]


def test_a_size_that_is_known_leaves_no_doubt_of_the_bytes() -> None:
    guess = planned(Snapshot((region("a"), region("b"))), demand()).estimate
    wanted = demand(codec="fp32")
    known = planned(Snapshot((region("a"), region("b")), model_bytes=4000, counted=True), wanted).estimate
    assert guess.model_basis == "prior"
    assert guess.wan_bytes.high > 1000 * guess.wan_bytes.low
    assert known.wan_bytes.high < 1.7 * known.wan_bytes.low, "with and without the first model on its way"
    # How quick it is was guessed in both.
    assert known.seconds.high == pytest.approx(known.seconds.expected * 5)


def test_a_first_model_is_expected_to_be_made_by_each_region() -> None:
    plain = Snapshot((region("a"), region("b"), region("c")), model_bytes=4_000_000)
    told = planned(plain, demand()).estimate.wan_bytes
    # Regions whose tasks make another one are sent it.
    assert told.high > told.expected + 2 * update_bytes(4_000_000, "fp32")
    assert told.low == pytest.approx(0.9 * told.expected)


@given(
    st.lists(st.tuples(st.none() | st.floats(1, 1e4), st.none() | st.floats(1, 1e4)), min_size=1, max_size=4),
    st.sets(st.integers(0, 3)),
)
def test_the_surer_a_speed_the_narrower_its_range(
    regions: list[tuple[float | None, float | None]], ran: set[int]
) -> None:
    """Stated and probed by region; whatever one more region is found to run at widens nothing."""
    held = tuple(
        replace(region(f"r{number}"), capacity=Capacity(2, 2048, stated)) for number, (stated, _) in enumerate(regions)
    )
    probed = {f"r{number}": speed for number, (_, speed) in enumerate(regions) if speed is not None}
    speeds = {f"r{number}": 77.0 for number in ran if number < len(regions)}
    before = Snapshot(held, probed=probed, model_bytes=4000)
    after = replace(before, speeds=speeds)
    wide, narrow = planned(before, demand()).estimate.seconds, planned(after, demand()).estimate.seconds
    assert narrow.high / narrow.expected <= wide.high / wide.expected + 1e-9


def test_a_slow_link_is_in_the_time_and_a_dear_one_in_the_money() -> None:
    near = Snapshot((region("a"), region("b")), model_bytes=50_000_000)
    slow = tuple(Link(x, y, 300.0, 10.0) for x, y in (("a", "b"), ("b", "a")))
    far = replace(near, regions=(region("a", links=slow[:1]), region("b", links=slow[1:])))
    one, other = planned(near, demand()).estimate, planned(far, demand()).estimate
    assert other.seconds.expected > one.seconds.expected + 5
    egress = {(item.region, item.item): item.usd / item.quantity for item in one.items if "egress" in item.item}
    assert egress == {("a", "egress to b"): pytest.approx(0.02), ("b", "egress to a"): pytest.approx(0.09)}


def test_nobody_waits_for_large_models_because_the_links_are_fast() -> None:
    """What servers take to end a round does not go with the links."""
    links = {a: tuple(Link(a, b, 0.1, 10_000.0) for b in "abc" if b != a) for a in "abc"}
    regions = tuple(region(name, links=links[name]) for name in "abc")
    rounds = demand(epochs=100.0, interval=20, workers=4, minimise="time", codec="fp32")
    large = planned(Snapshot(regions, model_bytes=40_000_000), rounds)
    assert large.background
    waiting = planned(Snapshot(regions, model_bytes=40_000_000), replace(rounds, exchange="synchronous"))
    assert waiting.exchange_seconds > 0.7
    assert waiting.estimate.seconds.expected > waiting.rounds * waiting.exchange_seconds
    small = planned(Snapshot(regions, model_bytes=40_000), rounds)
    assert small.exchange_seconds < 0.01
    assert large.estimate.seconds.expected < waiting.estimate.seconds.expected
    assert small.estimate.seconds.expected < large.estimate.seconds.expected


@pytest.mark.parametrize(
    ("model_bytes", "mbps", "among"),
    [(1_000, 1000.0, {"fp32"}), (50_000_000, 50.0, {"int8", "ternary"}), (2_000_000_000, 1e6, {"fp32", "int8"})],
)
def test_updates_are_coded_only_where_that_saves_time(model_bytes: int, mbps: float, among: set[str]) -> None:
    links = {a: tuple(Link(a, b, 1.0, mbps) for b in "ab" if b != a) for a in "ab"}
    regions = tuple(region(name, links=links[name]) for name in "ab")
    snapshot = Snapshot(regions, model_bytes=model_bytes)
    chosen = planned(snapshot, demand(minimise="time"))
    assert chosen.codec in among
    other = planned(snapshot, demand(minimise="time", codec="fp32" if chosen.codec == "int8" else "int8"))
    assert chosen.estimate.seconds.expected <= other.estimate.seconds.expected * 1.1
    assert planned(snapshot, demand(codec="topk")).codec == "topk"


@pytest.mark.parametrize("epochs", [3.0, 300.0])
@pytest.mark.parametrize("model_bytes", [None, 180])
def test_nothing_is_lost_where_that_saves_nothing_or_by_a_guess(model_bytes: int | None, epochs: float) -> None:
    # Rounds of milliseconds: no codec hides the round trip.
    quick = Capacity(1, 2048, 1e7)
    regions = tuple(replace(region(name, 500), capacity=quick) for name in "abc")
    wanted = demand(epochs=epochs, minimise="time")
    assert planned(Snapshot(regions, model_bytes=model_bytes), wanted).codec == "fp32"
    if epochs > 100:
        slow = Snapshot(regions, model_bytes=500_000_000)
        assert planned(slow, wanted).codec == "ternary", "where it saves much it is taken"


def test_the_codec_is_in_the_bytes() -> None:
    snapshot = Snapshot((region("a"), region("b")), model_bytes=40_000_000)
    sizes = [
        planned(snapshot, demand(codec=codec, epochs=200.0)).estimate.wan_bytes.expected
        for codec in ("fp32", "bf16", "int8", "topk")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] / sizes[3] > 30


def test_bytes_are_predicted_as_they_are_metered() -> None:
    # Metered over three regions on one machine: 452 numbers in float32, 157 rounds.
    regions = tuple(replace(region(name, 500), capacity=Capacity(1, 2048, 1e6)) for name in "abc")
    wanted = demand(codec="fp32", interval=1, epochs=None, steps=157)
    known = planned(Snapshot(regions, model_bytes=4 * 452), wanted).estimate
    assert all(sent == pytest.approx(305_000, rel=0.06) for sent in known.link_bytes.values())
    assert known.wan_bytes.low <= 1_830_276 <= known.wan_bytes.high
    guessed = planned(Snapshot(regions), wanted).estimate
    assert guessed.wan_bytes.low <= 1_830_276 <= guessed.wan_bytes.high, "nobody knows the model's size yet"


def test_parameter_servers_are_not_paid_for_before_the_functions_start() -> None:
    bills = {}
    for start in (1.0, 11.0):
        found = planned(Snapshot((region("a"), region("b")), model_bytes=4000, start_seconds=start), demand(workers=1))
        hours = [cost.quantity for cost in found.estimate.items if cost.item == "parameter-server"]
        bills[start] = found.estimate.seconds.expected, hours, found.estimate.usd.expected
    assert bills[11.0][0] == pytest.approx(bills[1.0][0] + 10)
    assert bills[11.0][1:] == (pytest.approx(bills[1.0][1]), pytest.approx(bills[1.0][2]))


def test_what_runs_were_billed_for_their_start_is_in_the_bill() -> None:
    known = Snapshot((region("a"), region("b")), model_bytes=4000, start_seconds=3.0)
    told = {"a": StartBilled(1.5, 2.5), "b": StartBilled(0.5, -0.25)}
    before, after = (planned(one, demand(workers=2)) for one in (known, replace(known, started=told)))
    assert after.estimate.seconds == before.estimate.seconds, "the start itself is no longer"
    by_time = ("function-seconds", "parameter-server")
    quantities = [{(c.region, c.item): c.quantity for c in one.estimate.items} for one in (before, after)]
    for part in after.partitions:
        more = {item: quantities[1][part.region, item] - quantities[0][part.region, item] for item in by_time}
        gb = part.workers * part.memory_mb / 1024
        assert more["function-seconds"] == pytest.approx(gb * told[part.region].function)
        assert more["parameter-server"] == pytest.approx(told[part.region].server / 3600)
    assert sum(cost.usd for cost in after.estimate.items) == pytest.approx(after.estimate.usd.expected)
    # A probe's start is that of a function; nothing else tells.
    probed = planned(replace(known, start_probed=True, start_of_run=False), demand(workers=2)).estimate
    unprobed = planned(replace(known, start_of_run=False), demand(workers=2)).estimate
    assert probed.seconds == unprobed.seconds
    of = [sum(c.quantity for c in one.items if c.item == "parameter-server") for one in (unprobed, probed)]
    assert of[1] - of[0] == pytest.approx(2 * 3.0 / 3600)


def test_workers_that_merge_nothing_take_longer_by_their_larger_part() -> None:
    stated = Capacity(4, 2048, samples_per_second=50.0)
    regions = tuple(replace(region(name, 60_000), capacity=stated) for name in "ab")
    known = Snapshot(regions, model_bytes=4000, start_seconds=3.0)

    def found(ratio: float | None, **settings: float) -> Plan:
        merging = {"staleness": 1.0, **settings} | ({} if ratio is None else {"ratio": ratio})
        return planned(known, demand(workers=4, collective="k-reduce", merging=merging))

    equal, unequal = found(None, k=1.0), found(2.5, k=1.0)
    # Parts of 1, 2.5, 2.5 and 2.5 in place of four times 2.125.
    factor = 2.5 * 4 / (1 + 3 * 2.5)
    for one, other in zip(equal.partitions, unequal.partitions, strict=True):
        merge = step_seconds(one) - 32 / 50.0
        assert step_seconds(other) == pytest.approx(factor * 32 / 50.0 + merge)
    steps = [next(p.seconds for p in one.estimate.phases if p.name == "steps") for one in (equal, unequal)]
    assert steps[1] / unequal.rounds > 1.15 * steps[0] / equal.rounds
    assert unequal.estimate.usd.expected > 1.15 * equal.estimate.usd.expected, "functions are paid for it"
    most = equal.estimate.seconds.high
    late = declined(known, demand(
        workers=4, collective="k-reduce", merging={"staleness": 1.0, "k": 1.0, "ratio": 2.5}, deadline_seconds=most,
    ))  # fmt: skip
    assert "deadline" in str(late)
    for same in (found(2.5, k=4.0), found(2.5)):
        assert [step_seconds(part) for part in same.partitions] == [step_seconds(part) for part in equal.partitions]


def test_no_item_of_a_bill_is_negative() -> None:
    """Whatever earlier runs were billed less than they trained; search and estimate agree, or budgets are wrong."""
    known = Snapshot((region("a"), region("b")), model_bytes=4000, start_seconds=3.0)
    for told in (StartBilled(-864.0, -864.0), StartBilled(-864.0, 2.0), StartBilled(2.0, -864.0)):
        # The other region is billed more: what one lacks must not be taken off the other's items.
        found = planned(replace(known, started={"a": told, "b": StartBilled(50.0, 50.0)}), demand(workers=2)).estimate
        assert all(cost.quantity >= 0.0 and cost.usd >= 0.0 for cost in found.items)
        assert 0.0 <= found.usd.low <= found.usd.expected <= found.usd.high
        by_item = {(cost.region, cost.item): cost.quantity for cost in found.items}
        assert (by_item["a", "function-seconds"] == 0.0) == (told.function < 0)
        assert (by_item["a", "parameter-server"] == 0.0) == (told.server < 0)


def test_the_search_bills_what_the_estimate_does() -> None:
    told = {"a": StartBilled(-864.0, -864.0), "b": StartBilled(50.0, 50.0)}
    known = Snapshot((region("a"), region("b")), model_bytes=4000, start_seconds=3.0, started=told)
    cheapest = demand(workers=2, minimise="cost", exchange="background")
    most = planned(known, cheapest).estimate.usd.high
    assert planned(known, replace(cheapest, budget_usd=most * 1.001)).estimate.usd.high <= most * 1.001
    assert f"a budget of ${most:.4f} would do" in str(declined(known, replace(cheapest, budget_usd=most * 0.999)))


def test_merges_of_runs_count_without_a_profile() -> None:
    point = MergePoint("server-reduce", 3, 1, 4000.0, 0.05)
    known = Snapshot((region("a"), region("b")), model_bytes=4000, speeds={"a": 500.0, "b": 500.0})
    ran = replace(known, merges={"a": (point, replace(point, seconds=0.07), replace(point, workers=9, seconds=9.0))})

    def merges(snapshot: Snapshot, workers: int, **more: object) -> dict[str, float | None]:
        found = planned(snapshot, demand(workers=workers, **more))
        return {part.region: part.merge_seconds for part in found.partitions}

    assert merges(known, 3) == {"a": None, "b": None}
    assert merges(ran, 1) == {"a": pytest.approx(0.06), "b": None}, "as with others, if workers are added"
    assert merges(ran, 3) == {"a": pytest.approx(0.06), "b": None}
    assert merges(ran, 4) == {"a": pytest.approx(0.09), "b": None}, "each merges with three others in place of two"
    assert merges(ran, 3, collective="all-reduce") == {"a": None, "b": None}
    assert merges(ran, 3, collective="server-reduce") == {"a": pytest.approx(0.06), "b": None}
    assert merges(ran, 3, merging_codec="int8") == {"a": None, "b": None}


@pytest.mark.parametrize("mbps", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("model_bytes", [50_000, 400_000])
@pytest.mark.parametrize("minimise", ["time", "cost"])
def test_codec_and_interval_of_a_plan_stay_while_links_are_as_known(
    mbps: float, model_bytes: int, minimise: str
) -> None:
    one, other = (region(name, 4000, links=(Link(name, to, 100.0, mbps),)) for name, to in (("a", "b"), ("b", "a")))
    known = Snapshot((one, other), model_bytes=model_bytes, speeds={"a": 1000.0, "b": 1000.0})
    chosen = planned(known, demand(minimise=minimise, epochs=5.0))
    for part in chosen.partitions:
        steps, settings = part.steps_per_round, ExchangeSettings.of(chosen.wan_settings)[0]
        controller = Controller(settings, chosen.codec, steps, chosen.rounds * steps)
        for number in range(20):
            controller.round_over(number, step_seconds(part), model_bytes, {"other": LinkSample(mbps, 100.0)}, 0.0)
        assert (controller.codec, controller.interval_steps) == (chosen.codec, steps), list(controller.decisions)


def test_bytes_of_a_filter_have_a_wide_range() -> None:
    first = planned(
        Snapshot((region("a"), region("b")), model_bytes=4000),
        demand(wan_policy="asp", wan_settings={"significance": 0.01}),
    ).estimate.wan_bytes
    known = Snapshot((region("a"), region("b")), model_bytes=4000, sent_share=0.5)
    second = planned(known, demand(wan_policy="asp", wan_settings={"significance": 0.01})).estimate.wan_bytes
    assert first.low < 0.02 * first.expected < 2 * first.expected < first.high
    assert second.low == pytest.approx(0.5 * second.expected)
    assert second.high >= 2 * second.expected
