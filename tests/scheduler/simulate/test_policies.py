"""Every policy runs a trace to its end; ours keeps its promises and meets more deadlines than the others."""

from __future__ import annotations

import math
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from bench.deadlines_spot import SpotSettings, simulate_spot

from scheduler.deadline import Overhead
from scheduler.lab.policies import POLICIES, ceiling, policy_named
from scheduler.simulate import Incidents, Pauses, SimulationRun, chart, outcome_rows, read_table, read_trace, simulate
from scheduler.simulate._outcome import JobOutcome

from .traces import generated

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"


def run(name: str, count: int = 60, seed: int = 1) -> SimulationRun:
    policy, pauses = policy_named(name, 16)
    return simulate(generated(count, seed), policy, 2, 8, pauses)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_job_ends_or_is_declined_and_no_device_is_used_twice(name: str) -> None:
    done = run(name)
    assert len(done.outcomes) == 60
    assert all(outcome.declined != math.isfinite(outcome.ended_s) for outcome in done.outcomes)
    assert all(in_use <= 16 for _, in_use, _ in done.timeline)
    jobs = {job.name: job for job in generated()}
    for outcome in done.outcomes:
        if not outcome.declined:
            fastest = max(jobs[outcome.name].table.values())
            assert outcome.ended_s - outcome.submit_s >= jobs[outcome.name].work / fastest - 1e-6
            assert outcome.promised_s in (outcome.deadline_s, math.inf)
    assert done == run(name), "the same again"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_ours_keeps_every_promise_where_a_change_pauses_whom_it_changes(seed: int) -> None:
    policy, pauses = policy_named("geofed", 16, everyone=False)
    done = simulate(generated(seed=seed), policy, 2, 8, pauses)
    assert done.promised > 40
    assert done.broken == 0


@pytest.mark.slow
def test_ours_meets_more_than_others_and_breaks_no_promise_where_a_change_pauses_all() -> None:
    met = dict.fromkeys(("geofed", "elasticflow", "edf", "tiresias", "pollux-like"), 0)
    broken = 0
    for seed in range(6):
        for name in met:
            done = run(name, seed=seed)
            met[name] += done.met
            if name == "geofed":
                broken += done.broken
                assert done.met <= ceiling(generated(seed=seed), 16).met + 1e-6
    assert all(met["geofed"] > count for name, count in met.items() if name != "geofed")
    assert broken == 0


def test_a_failure_or_a_wrong_curve_breaks_few_promises() -> None:
    policy, pauses = policy_named("geofed", 16, curve_error=0.1)
    done = simulate(generated(120), policy, 2, 8, pauses, Incidents(1e-3, seed=4), curve_error=0.1)
    assert done.promised > 40
    assert done.broken <= 1


def test_no_schedule_meets_more_than_the_ceiling_says() -> None:
    jobs = [job for job in generated(30) if job.submit_s < 2500]
    most = ceiling(jobs, 2)
    assert 0 < most.met < most.alone, "scarce"
    assert ceiling(jobs, 1 << 10).met == pytest.approx(ceiling(jobs, 1 << 10).alone)
    assert ceiling([], 4).met == 0


def test_a_ceiling_over_longer_intervals_is_looser_and_still_tells_more_than_the_jobs_alone() -> None:
    jobs = generated(60)
    exact = ceiling(jobs, 2)
    coarse = ceiling(jobs, 2, most_columns=exact.columns - 1)
    assert coarse.columns <= exact.columns // 3
    assert exact.met - 1e-6 <= coarse.met < coarse.alone


@pytest.mark.parametrize("often", [0.2, 2.0])
def test_preemptible_capacity_is_left_in_time(often: float) -> None:
    done = simulate_spot(generated(200), SpotSettings(often, price_ratio=0.3))
    assert done.jobs > 100
    assert done.met == done.jobs
    assert done.preemptions > 0
    assert done.cost < done.cost_on_demand


def test_rows_and_picture_hold_every_run() -> None:
    runs = [run("geofed"), run("edf")]
    rows = outcome_rows(runs[0])
    assert len(rows) == 61
    assert {len(row) for row in rows} == {len(rows[0])}
    met = rows[0].index("met")
    assert sum(int(row[met]) for row in rows[1:]) == runs[0].met
    root = xml.fromstring(chart(runs))
    lines = [node for node in root if node.tag.endswith("polyline")]
    assert len(lines) == 4
    assert xml.fromstring(chart([])) is not None


def test_met_and_broken_are_about_the_first_deadline_and_the_promised_one() -> None:
    soft = JobOutcome("j", 0.0, 10.0, 20.0, False, 0.0, 15.0, 15.0, 5.0, False, "")
    assert (soft.met, soft.broken) == (False, False)
    late = JobOutcome("j", 0.0, 10.0, 20.0, False, 0.0, 21.0, 15.0, 5.0, False, "")
    assert (late.met, late.broken) == (False, True)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not on this machine")
@pytest.mark.parametrize(("name", "printed"), [("edf", 17), ("tiresias", 90)])
def test_our_ports_meet_what_the_published_simulator_meets(name: str, printed: int) -> None:
    tables: dict[tuple[str, int], dict[int, float]] = {}
    for path in (SHARED / "throughputs_A100").glob("*.csv"):
        tables |= read_table(path.read_text().splitlines(), path.stem, path.name)
    jobs = read_trace((SHARED / "elasticflow" / "195job.csv").read_text().splitlines(), tables, "195job")
    pauses = {"edf": Pauses(Overhead(0.0, 0.0)), "tiresias": Pauses(Overhead())}[name]
    met = simulate(jobs, policy_named(name, 128, 240.0)[0], 16, 8, pauses).met
    assert abs(met - printed) <= 0.03 * len(jobs)
