"""ElasticFlow in its own clock: small cases worked out by hand, and what the published simulator prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from bench.deadlines_published import _Published, simulate_published

from scheduler.deadline import curve_from_table
from scheduler.lab.policies import ElasticFlow
from scheduler.lab.policies._elasticflow import _Plan
from scheduler.simulate import JobOutcome, RunningJob, TraceJob, read_table, read_trace

from .traces import generated

pytestmark = pytest.mark.slow

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"


def asks(
    name: str, submit_s: float, work: float, deadline_s: float, table: Mapping[int, float] | None = None
) -> TraceJob:
    table = table or {1: 1.0}
    curve = curve_from_table(table)
    assert curve is not None
    return TraceJob(name, submit_s, work, ((deadline_s, 1.0),), 1, work, curve, table)


def outcomes(devices: int, *jobs: TraceJob, slot_s: float = 60.0) -> dict[str, JobOutcome]:
    return {job.name: job for job in simulate_published(jobs, ElasticFlow(slot_s), 1, devices).outcomes}


def test_a_job_ends_where_its_plan_does_and_its_pause_makes_it_no_later() -> None:
    only = outcomes(1, asks("j", 0.0, 100.0, 100.0))["j"]
    assert only.met
    assert only.ended_s == 100.0
    assert only.device_s == 124.0, "two slots, and a pause of 4 s"


def test_a_decision_in_between_makes_the_pause_count() -> None:
    found = outcomes(1, asks("j", 0.0, 100.0, 100.0), asks("late", 110.0, 30.0, 900.0))
    assert found["late"].declined, "as the plan of the other is late"
    assert found["j"].ended_s == 114.0, "what the pause of 4 s has left undone is replanned at 110 s"
    assert not found["j"].met
    assert found["j"].device_s == 172.0, (
        "to the edge of a slot from then on, and a pause of 2 s in a place that was seen"
    )


def test_devices_are_free_only_after_the_plan() -> None:
    first = asks("first", 0.0, 61.0, 61.0)
    assert outcomes(1, first, asks("next", 123.0, 40.0, 170.0))["next"].declined, "held to 124 s"
    found = outcomes(1, first, asks("next", 125.0, 40.0, 170.0))["next"]
    assert (found.started_s, found.ended_s) == (125.0, 165.0)


def test_what_happens_within_a_slot_waits_for_its_end_but_where_nothing_else_is_to_happen() -> None:
    found = outcomes(2, asks("first", 0.0, 100.0, 900.0), asks("next", 10.0, 100.0, 900.0))
    assert found["next"].started_s == 60.0
    found = outcomes(2, asks("impossible", 0.0, 100.0, 50.0), asks("next", 10.0, 100.0, 900.0))
    assert found["impossible"].declined
    assert found["next"].started_s == 10.0


def test_a_restart_is_charged_where_a_place_was_not_seen_and_forgets_all() -> None:
    clock = _Published([], ElasticFlow(2.0), 4)
    wide, narrow = (RunningJob(spec, spec.curve, spec.work) for spec in (asks("w", 0, 1, 9), asks("n", 0, 1, 9)))

    def pauses(*active: tuple[RunningJob, int]) -> list[float]:
        clock.timeline.append((0.0, 0, 0))
        clock.active = [job for job, _ in active]
        for job, job.share in active:
            clock.ends_s[job.name] = 0.0
        clock._pause()
        return [clock.ends_s[job.name] for job, _ in active]

    assert pauses((wide, 2)) == [6.0]
    assert pauses((wide, 2), (narrow, 1)) == [2.0, 4.0]
    assert pauses((wide, 2), (narrow, 2)) == [2.0, 6.0 + 27.0], "the restart"
    assert pauses((narrow, 2), (wide, 2)) == [6.0, 6.0], "forgotten, also what was first seen then"
    assert pauses((wide, 2), (narrow, 1)) == [2.0, 4.0 + 27.0], "a place is where it begins and how many it has"


@pytest.mark.parametrize(("early", "late"), [("z", "a"), ("a", "z")])
def test_of_equal_gains_the_earlier_deadline_gets_the_spare_device(early: str, late: str) -> None:
    specs = [asks(late, 0.0, 300.0, 7260.0), asks(early, 0.0, 300.0, 7200.0), asks("first", 0.0, 300.0, 3600.0)]
    new = [RunningJob(spec, spec.curve, spec.work) for spec in specs]
    decision = ElasticFlow().decide(0.0, 2, new, new)
    assert decision.shares == {"first": 1, early: 1, late: 0}, "neither needs one yet"


def test_a_step_counts_in_full_where_another_follows() -> None:
    assert _Plan([0.0], [2], 60.0, 50.0).device_s() == 120.0
    assert _Plan([0.0, 600.0], [2, 0], 60.0, 50.0).device_s() == 1200.0
    assert _Plan([0.0, 600.0], [2, 0], 60.0, 50.0).spans() == [(0.0, 60.0, 2)], "though it holds them no longer"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("singly", [False, True])
def test_every_job_ends_or_is_declined(seed: int, singly: bool) -> None:
    jobs = generated(seed=seed)
    done = simulate_published(jobs, ElasticFlow(singly=singly), 2, 8)
    assert {outcome.name for outcome in done.outcomes} == {job.name for job in jobs}
    assert all(outcome.declined != math.isfinite(outcome.ended_s) for outcome in done.outcomes)
    assert all(in_use <= 16 for _, in_use, _ in done.timeline)
    assert done.met > 20
    assert done == simulate_published(jobs, ElasticFlow(singly=singly), 2, 8), "the same again"


def test_best_effort_is_refused() -> None:
    with pytest.raises(ValueError, match="best effort"):
        outcomes(1, replace(asks("j", 0.0, 1.0, 9.0), deadlines=()))
    with pytest.raises(ValueError, match="keep"):
        simulate_published([], ElasticFlow(keep=True), 1, 1)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not on this machine")
@pytest.mark.parametrize(
    ("trace", "kind", "nodes", "per_node", "slot_s", "printed"),
    [
        ("elasticVpollux_e", "T4", 16, 4, 60.0, 142),
        ("195job", "A100", 16, 8, 240.0, 146),
        ("195job", "A100", 8, 8, 240.0, 137),
        ("195job", "A100", 4, 8, 240.0, 118),
        ("philly_103959", "A100", 32, 8, 60.0, 797),
    ],
)
def test_as_many_deadlines_are_met_as_the_published_simulator_prints(
    trace: str, kind: str, nodes: int, per_node: int, slot_s: float, printed: int
) -> None:
    tables: dict[tuple[str, int], dict[int, float]] = {}
    for path in (SHARED / f"throughputs_{kind}").glob("*.csv"):
        tables |= read_table(path.read_text().splitlines(), path.stem, path.name)
    if kind == "T4":  # it has a model run on no more, whatever was measured
        tables["bert", 384] = {devices: rate for devices, rate in tables["bert", 384].items() if devices <= 16}
    jobs = read_trace((SHARED / "elasticflow" / f"{trace}.csv").read_text().splitlines(), tables, trace)
    assert simulate_published(jobs, ElasticFlow(slot_s), nodes, per_node).met == printed
