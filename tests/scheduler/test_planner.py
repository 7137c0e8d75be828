"""What the planner decides for money, for time and for learning, and what its forecasts count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.tuning_draws import cheapest

from scheduler import (
    Capacity,
    Dataset,
    Declined,
    Link,
    Plan,
    Prices,
    Region,
    RunningRegion,
    Snapshot,
    Split,
    plan,
    worker_change,
)
from scheduler.tuning import MergePoint, NormPair, PlatformCosts, StepPoint, TuningLimits, space_of, task_of
from tests.scheduler.test_plan import demand, planned, region
from tests.scheduler.test_tuned import profile, there

DEAR_EGRESS = Prices("list", "2026-01", 1.67e-5, 2e-7, 0.05, 0.09)
MODEL_BYTES = 44_700_000


def federation(workers: int = 4) -> Snapshot:
    """Three regions with 44.7 MB to exchange, at 0.09 USD/GB."""
    links = {a: tuple(Link(a, b, 100.0, 500.0) for b in "abc" if b != a) for a in "abc"}
    regions = tuple(
        replace(region(name, 42_000, workers, DEAR_EGRESS, links=links[name]), capacity=Capacity(workers, 2048))
        for name in "abc"
    )
    speeds = dict.fromkeys("abc", 100.0)
    return Snapshot(regions, speeds=speeds, model_bytes=MODEL_BYTES, start_seconds=2.0)


WANTED = demand(epochs=12.0, workers=4)


def egress(chosen: Plan) -> float:
    return sum(item.usd for item in chosen.estimate.items if "egress" in item.item)


def test_money_decides_codec_and_interval() -> None:
    snapshot = federation()
    float32 = planned(snapshot, replace(WANTED, codec="fp32", interval=20))
    assert egress(float32) / float32.estimate.usd.expected > 0.85
    chosen = planned(snapshot, WANTED)
    assert chosen.estimate.usd.expected < 0.3 * float32.estimate.usd.expected
    assert chosen.estimate.seconds.expected < 1.01 * float32.estimate.seconds.expected
    assert chosen.learning.points <= 0.3
    careful = planned(snapshot, replace(WANTED, tolerance=0.0))
    assert careful.learning.points == 0.0
    assert chosen.estimate.usd.expected < careful.estimate.usd.expected < float32.estimate.usd.expected


def test_a_budget_that_a_cheaper_exchange_keeps_is_admitted() -> None:
    snapshot = federation()
    float32 = planned(snapshot, replace(WANTED, codec="fp32", interval=20)).estimate.usd
    for share in (0.6, 0.4):
        chosen = planned(snapshot, replace(WANTED, budget_usd=share * float32.high))
        assert chosen.estimate.usd.high <= share * float32.high


def test_what_time_admits_money_admits_at_least_cost() -> None:
    snapshot = replace(federation(), speeds=dict.fromkeys("abc", 400.0))
    # So much that it allows money the batch of every worker there is: `minimise: time` does not count what it gives up.
    wanted = demand(epochs=12.0, tolerance=1.0)
    soonest = planned(snapshot, replace(wanted, minimise="time"))
    for slack in (1.0, 1.2, 2.0):
        deadline = soonest.estimate.seconds.high * slack
        fast = planned(snapshot, replace(wanted, minimise="time", deadline_seconds=deadline))
        cheap = planned(snapshot, replace(wanted, minimise="cost", deadline_seconds=deadline))
        assert cheap.estimate.seconds.high <= deadline
        assert cheap.estimate.usd.expected <= fast.estimate.usd.expected * 1.005


@pytest.mark.parametrize(("speed", "workers"), [(500.0, 1), (450.0, 2)])
def test_time_that_is_less_than_predictions_are_off_by_is_not_paid_for(speed: float, workers: int) -> None:
    """With one worker, a pass takes west as long as east with all of its four, or a tenth longer."""
    links = {name: (Link(name, other, 50.0, 100.0),) for name, other in (("east", "west"), ("west", "east"))}
    cheap = replace(DEAR_EGRESS, egress_usd_per_gb=0.0)
    prices = {"east": cheap, "west": replace(cheap, function_usd_per_gb_second=5e-5)}
    held = {name: (Dataset("digits", {"train": Split(size)}),) for name, size in (("east", 20_000), ("west", 10_000))}
    regions = tuple(Region(name, "c", Capacity(4, 1024), prices[name], held[name], links[name]) for name in held)
    snapshot = Snapshot(regions, speeds={"east": 250.0, "west": speed}, model_bytes=340_000, start_seconds=1.0)
    wanted = demand(epochs=5.0, batch=16, interval=4, minimise="time")
    found = planned(snapshot, wanted)
    assert [part.workers for part in found.partitions] == [4, workers]
    one, two = (planned(snapshot, replace(wanted, workers={"east": 4, "west": count})).estimate for count in (1, 2))
    assert two.usd.expected > 1.25 * one.usd.expected
    assert two.seconds.expected < one.seconds.expected
    assert (one.seconds.expected < 1.01 * two.seconds.expected) == (workers == 1)
    told = [other for other in found.alternatives if other.decision.startswith("workers") and "4, 2" in other.text]
    assert all("dearer" in other.why_not for other in told)
    assert bool(told) == (workers == 1)


@pytest.mark.parametrize(("merge_seconds", "workers"), [(0.02, 2), (0.05, 1)])
def test_half_the_time_is_worth_two_per_cent_of_the_money(merge_seconds: float, workers: int) -> None:
    """Two workers that divide a batch take half the time of one, and are paid for their merges: 1.25 or 3.1 % more."""
    alone = region("a", 42_000, 2, replace(DEAR_EGRESS, server_usd_per_hour=0.0, function_usd_per_request=0.0))
    merge = MergePoint("server-reduce", 2, 1, 4000.0, merge_seconds)
    snapshot = Snapshot(
        (alone,), speeds={"a": 10.0}, model_bytes=4000, start_seconds=0.0, fixed_shares={"a": 0.0},
        merges={"a": (merge,)},
    )  # fmt: skip
    found = planned(snapshot, demand(divides_batch=True, minimise="cost"))
    assert [part.workers for part in found.partitions] == [workers]
    one, two = (planned(snapshot, demand(workers=count, batch=32 // count)).estimate for count in (1, 2))
    assert two.seconds.expected < 0.52 * one.seconds.expected
    assert two.usd.expected / one.usd.expected - 1 == pytest.approx(merge_seconds / 1.6, abs=2e-3)


def uneven(**more: object) -> Snapshot:
    """Two regions whose parameter servers are paid while the slower one works; functions of the other cost thrice."""
    links = {name: (Link(name, other, 50.0, 100.0),) for name, other in (("east", "west"), ("west", "east"))}
    dear = {"east": 2e-5, "west": 5e-5}
    prices = {name: replace(DEAR_EGRESS, function_usd_per_gb_second=usd) for name, usd in dear.items()}
    held = {name: (Dataset("digits", {"train": Split(size)}),) for name, size in (("east", 960), ("west", 480))}
    regions = tuple(Region(name, "c", Capacity(4, 1024), prices[name], held[name], links[name]) for name in held)
    known = Snapshot(
        regions, speeds={"east": 125.0, "west": 250.0}, model_bytes=4000, start_seconds=1.0,
        fixed_shares=dict.fromkeys(held, 0.0), merges={"east": (MergePoint("server-reduce", 4, 1, 4000.0, 0.006),)},
    )  # fmt: skip
    return replace(known, **more)  # type: ignore[arg-type]


SHARED = demand(epochs=8.0, batch=16, divides_batch=True)


def running_regions(found: Plan, snapshot: Snapshot) -> list[RunningRegion]:
    """As they are while the plan's job runs as predicted."""
    return [
        RunningRegion(
            part.region, part.workers, 4, int(part.step_samples), part.steps_per_round, part.samples_per_second,
            prices.worker_usd_per_second(part.memory_mb, 0), prices.server_usd_per_hour / 3600,
            part.merge_seconds or 0.004,
        )
        for part in found.partitions
        for prices in [snapshot.by_name[part.region].prices]
        if prices is not None
    ]  # fmt: skip


def test_workers_divide_a_batch_where_a_larger_one_learns_less() -> None:
    snapshot = uneven()
    found, whole = planned(snapshot, SHARED), planned(snapshot, replace(SHARED, divides_batch=False))
    assert [(part.workers, part.batch, part.divided) for part in found.partitions] == [(4, 4, 4), (1, 16, 1)]
    assert [(part.workers, part.batch, part.divided) for part in whole.partitions] == [(1, 16, 1), (1, 16, 1)]
    assert [part.step_samples for part in found.partitions] == [part.step_samples for part in whole.partitions]
    assert found.learning.samples_factor == whole.learning.samples_factor == 1.0
    assert found.estimate.usd.expected < 0.8 * whole.estimate.usd.expected
    assert found.estimate.seconds.expected < 0.5 * whole.estimate.seconds.expected
    told = [other for other in found.alternatives if other.decision == "samples of a worker 4, 16"]
    assert told
    assert all(other.why_not for other in told)


def test_a_job_starts_with_the_workers_that_it_would_be_scaled_to() -> None:
    snapshot = uneven()
    changes = [
        worker_change(
            running_regions(chosen, snapshot), rounds_left=chosen.rounds, exchange_seconds=chosen.exchange_seconds,
            background=chosen.background, minimise="cost",
        )
        for chosen in (planned(snapshot, replace(SHARED, divides_batch=divides)) for divides in (True, False))
    ]  # fmt: skip
    assert changes[0] is None
    assert changes[1] is not None
    assert changes[1].workers == {"east": 4}


@pytest.mark.parametrize(
    "more",
    [
        {"normalises_by_batches": True},
        {"merges": {}, "model_bytes": 40_000_000},
        # Most of a step does not depend on its samples.
        {"fixed_shares": {"east": 0.9, "west": 0.9}},
    ],
)
def test_a_batch_is_not_divided_where_that_is_no_gain_or_not_known_to_be_one(more: dict[str, object]) -> None:
    found = planned(uneven(**more), SHARED)
    assert {part.divided for part in found.partitions} == {1}


def test_a_larger_batch_is_not_free() -> None:
    """By the gradient noise scale more workers make fewer steps, but no cheaper progress."""

    def noisy(scale: float) -> Snapshot:
        # |G|^2 = 1 and tr = scale: batches of 8 and of 64.
        norms = (NormPair(8, 1 + scale / 8, 64, 1 + scale / 64),)
        found = {name: replace(profile(name), samples=42_000, norms=norms) for name in "abc"}
        regions = tuple(replace(one, channel="redis") for one in federation(16).regions)
        return replace(federation(16), regions=regions, profiles=found)

    wanted = demand(epochs=12.0, codec="fp32")
    small, large = (planned(noisy(scale), wanted) for scale in (20.0, 50_000.0))
    assert sum(p.workers for p in small.partitions) < sum(p.workers for p in large.partitions)
    assert (small.learning.basis, large.learning.basis) == ("measured", "measured")
    assert large.learning.samples_factor < 1.1
    four = planned(noisy(20.0), replace(wanted, workers=4))
    assert four.learning.samples_factor == 1.0, "workers that the job file fixes are compared with no others"
    prior = planned(federation(), demand(epochs=12.0))
    assert (prior.learning.basis, prior.learning.noise_samples) == ("prior", 1000.0)


def alone(**more: object) -> Region:
    return replace(there("a"), prices=replace(DEAR_EGRESS, server_usd_per_hour=0.0), **more)  # type: ignore[arg-type]


def test_the_requests_of_a_channel_are_counted_as_tuning_and_meter_count_them() -> None:
    of_s3 = profile("a", channel="s3", put_usd=5e-6, put_seconds=0.02)
    of_s3 = replace(of_s3, channel=replace(of_s3.channel, get_usd=4e-7))
    snapshot = Snapshot(
        (alone(channel="s3", capacity=Capacity(8, 2048)),),
        model_bytes=4_000_000,
        profiles={"a": of_s3},
        start_seconds=1.0,
    )
    chosen = planned(snapshot, demand(workers=8, epochs=64.0, batch=25))
    (requests,) = [item for item in chosen.estimate.items if item.item == "channel-requests"]
    assert requests.usd > 0.1 * chosen.estimate.usd.expected
    part = chosen.partitions[0]
    assert requests.usd == pytest.approx(part.merge_usd * chosen.rounds * part.steps_per_round)
    platform = PlatformCosts(DEAR_EGRESS.function_usd_per_gb_second, DEAR_EGRESS.function_usd_per_request)
    task = task_of(of_s3, platform, epochs=64.0, steps=None)
    told = cheapest(task, space_of(of_s3, workers=(8,), most_memory_mb=2048, batch=25), TuningLimits())
    assert told is not None
    assert chosen.estimate.usd.expected == pytest.approx(told.usd, rel=0.02)
    assert chosen.warnings == ()
    untold = planned(replace(snapshot, profiles={}), demand(workers=8, epochs=64.0, batch=25))
    assert "requests of channel s3 in a are not part of the cost" in untold.warnings[0]


def test_memory_that_buys_speed_is_predicted_and_bought_where_it_pays() -> None:
    steps = tuple(
        StepPoint(b, m, (0.01 + 0.001 * b) * max(1.0, 1769 / m), 200.0) for b in (8, 16, 32, 64) for m in (512, 1769)
    )
    found = {"a": replace(profile("a"), steps=steps)}
    snapshot = Snapshot((alone(capacity=Capacity(1, 3008)),), model_bytes=4_000_000, profiles=found, start_seconds=1.0)
    wanted = demand(epochs=30.0)
    small, full = (planned(snapshot, replace(wanted, memory_mb=mb)) for mb in (512, 1769))
    step = next(phase for phase in small.estimate.phases if phase.name == "steps")
    assert step.seconds / step.times == pytest.approx(0.042 * 1769 / 512, rel=0.05)
    assert full.estimate.seconds.expected < 0.4 * small.estimate.seconds.expected
    chosen = planned(snapshot, wanted)
    assert chosen.estimate.usd.expected <= min(small.estimate.usd.expected, full.estimate.usd.expected) * 1.005
    soon = planned(snapshot, replace(wanted, minimise="time"))
    assert soon.partitions[0].memory_mb == 1769


def test_restarts_of_invocations_are_counted() -> None:
    def told(seconds: float) -> Plan:
        found = {"a": replace(profile("a"), again_seconds=seconds)}
        return planned(Snapshot((alone(),), profiles=found, start_seconds=1.0), demand(workers=1, epochs=64.0))

    quick, slow = told(0.0).estimate, told(5.0).estimate
    ends = math.ceil((quick.seconds.expected - 1.0) / 30.0) - 1
    assert ends >= 2
    assert slow.seconds.expected == pytest.approx(quick.seconds.expected + 5.0 * ends)
    assert slow.usd.expected > quick.usd.expected


def test_an_interval_that_the_job_file_fixes_stays() -> None:
    for steps in (157, 161, 379, 20, 7):
        chosen = planned(Snapshot((region("a"), region("b"))), demand(interval=20, epochs=None, steps=steps))
        assert chosen.interval == min(20, steps)
        assert abs(chosen.rounds * chosen.interval - steps) <= 10


def test_an_interval_that_changes_the_steps_by_much_is_shortened_and_the_plan_says_so() -> None:
    snapshot = Snapshot((region("a"), region("b")))
    for steps, rounds, interval in ((29, 2, 15), (50, 3, 17), (150, 8, 19)):
        chosen = planned(snapshot, demand(interval=20, epochs=None, steps=steps))
        assert (chosen.rounds, chosen.interval) == (rounds, interval)
        assert chosen.warnings[0].startswith(f"a round has {interval} steps where advanced.wan.interval is 20")
    assert planned(snapshot, demand(interval=20, epochs=None, steps=7)).warnings == ()


def test_a_short_job_merges_often_enough() -> None:
    """Twenty times, or nearly so if only then the shards get their passes; once in 20 steps where it is long."""
    pair = Snapshot((region("a", 915, 3), region("b", 523, 3)))
    for objective in ("cost", "time"):
        short = planned(pair, demand(epochs=3.0, workers=3, minimise=objective))
        assert short.rounds >= 14
        assert short.interval <= 2
        rather_short = planned(pair, demand(epochs=20.0, workers=3, minimise=objective))
        assert rather_short.rounds >= 18
    long = planned(pair, demand(epochs=2000.0, workers=3, minimise="time"))
    assert long.interval >= 20


def test_a_larger_batch_saves_money_only_where_the_steps_that_are_left_suffice() -> None:
    """By the prior: 3,000 points x steps, within the tolerance; a goal, a limit or `minimise: time` allow more."""
    snapshot = replace(federation(), speeds=dict.fromkeys("abc", 400.0))

    def workers(**more: object) -> int:
        return sum(part.workers for part in planned(snapshot, demand(**more)).partitions)

    short = planned(snapshot, demand(epochs=2.0))
    assert (short.learning.samples_factor, short.learning.points) == (1.0, pytest.approx(0.0, abs=0.3))
    assert workers(epochs=2.0) == 3 < workers(epochs=60.0, tolerance=5.0)
    assert workers(epochs=2.0, minimise="time") == 12
    alone = planned(snapshot, demand(epochs=2.0)).estimate.seconds.high
    soon = planned(snapshot, demand(epochs=2.0, deadline_seconds=0.6 * alone))
    assert sum(part.workers for part in soon.partitions) > 3
    assert soon.learning.points > 0.3, "what keeping the deadline may cost is told"


def test_all_regions_make_the_epochs_that_are_asked_for() -> None:
    """Rounds have whole steps, so the interval is chosen by what they leave."""
    for shards in ((500, 590, 707), (10_000, 9_000, 4_100), (800, 333, 412)):
        regions = tuple(region(name, samples, 1) for name, samples in zip("abc", shards, strict=True))
        chosen = planned(Snapshot(regions), demand(epochs=30.0, batch=16))
        made = [chosen.rounds * part.steps_per_round * 16 / part.samples for part in chosen.partitions]
        assert made == pytest.approx([30.0] * 3, rel=0.05)


@pytest.mark.parametrize("batch", [16, 32, 256])
@pytest.mark.parametrize("small", [100, 300, 700])
@pytest.mark.parametrize("interval", [None, 20])
def test_a_small_shard_makes_its_passes_and_weighs_as_its_data_or_the_plan_warns(
    small: int, batch: int, interval: int | None
) -> None:
    pair = Snapshot((region("large", 10_000, 1), region("small", small, 1)))
    chosen = planned(pair, demand(epochs=10.0, batch=batch, workers=1, interval=interval))
    told = [warning for warning in chosen.warnings if " passes over its data, where 10 are asked for" in warning]
    for part in chosen.partitions:
        passes = chosen.rounds * part.steps_per_round * batch / part.samples
        mine = [warning for warning in told if warning.startswith(f"{part.region} makes {passes:.3g} passes")]
        assert mine or abs(passes - 10.0) <= max(0.2, batch / part.samples * 1.001), passes
        share = part.samples / (10_000 + small)
        if not told:
            assert chosen.shares[part.region] == pytest.approx(share, rel=0.05)
        for warning in mine:
            assert warning.endswith(f"weigh {chosen.shares[part.region]:.1%}, its data {share:.1%}")


def test_each_open_decision_names_its_best_alternatives_with_time_and_money() -> None:
    chosen = planned(federation(), demand(epochs=12.0))
    decided = {other.decision.partition(" ")[0] for other in chosen.alternatives}
    assert {"workers", "interval", "codec", "exchange", "topology"} <= decided
    codecs = [other for other in chosen.alternatives if other.decision == f"codec {chosen.codec}"]
    assert len(codecs) == 2
    assert all(" s and $" in other.text and other.why_not for other in codecs)
    fixed = planned(federation(), demand(epochs=12.0, codec="int8", interval=20))
    assert not any(other.decision.startswith(("codec", "interval")) for other in fixed.alternatives)
    bounded = planned(federation(), demand(epochs=12.0, tolerance=0.0))
    assert any("objective.tolerance is 0" in other.why_not for other in bounded.alternatives)


def test_what_no_plan_keeps_is_declined_with_what_one_would_keep() -> None:
    answer = plan(federation(), replace(WANTED, budget_usd=0.01, deadline_seconds=1.0))
    assert isinstance(answer, Declined)
    assert len(answer.reasons) == 2
