"""What is compared with the prediction is what was predicted: without the wait for workers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from control_plane.cli._report import result_text
from control_plane.core import (
    Charge,
    JobMachine,
    JobState,
    MeterTotals,
    Partition,
    Planned,
    Report,
    Reported,
    RoundTime,
    Speed,
    StartAllowed,
    StartDelayed,
)
from control_plane.service.jobs._result import result_of, runs_of
from control_plane.service.measuring._task_history import TaskHistory
from control_plane.service.planning._planning import plan_json, snapshot_of
from control_plane.spec import load, to_demand
from control_plane.store import JobRow, RunRow
from scheduler import BETWEEN_REGIONS, Plan, StartBilled, link_table, plan, stood_still_seconds
from tests.control_plane.test_possible_deadline import live


def ended(begun_at: float, started_at: float, phase: str = "succeeded") -> JobState:
    report = Report(1, "published", round=5, step=50, samples=500, speed=Speed(samples_per_second=100.0))
    parts = (Partition("r0", state="published", report=report),)
    return JobState(
        "j", 600.0, 100.0, phase=phase, partitions=parts, begun_at=begun_at, started_at=started_at, finished_at=195.0,
        flat_bytes=40, blob_bytes=90,
    )  # type: ignore[arg-type]  # fmt: skip


def test_the_wait_for_workers_is_told_apart(job_file: Path) -> None:
    spec = load(job_file).spec
    chosen = plan(
        snapshot_of([live("r0", 500, 2, 100.0)], (), TaskHistory()),
        to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC)),
    )
    assert isinstance(chosen, Plan)
    row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), plan_json(chosen), "", "succeeded", 100.0)
    result = result_of(row, ended(155.0, 158.0), chosen)
    assert (result["seconds"], result["queued_seconds"], result["training_seconds"]) == (95.0, 55.0, 37.0)
    assert result["measured"]["seconds"] == 40.0
    told = result_text({"result": result})
    assert "1 min 35 s, of which waiting for workers 55.0 s, training 37.0 s" in told
    assert told.splitlines()[-3].split()[-2:] == ["40.0", "s"]
    (known,) = runs_of(row, ended(155.0, 158.0), spec, chosen)
    assert (known.start_seconds, known.model_bytes) == (3.0, 40), "later plans do not start the later for it"
    stepped = replace(ended(155.0, 158.0), stepped_at=172.0, stepped_region="r0", stepped_steps=40)
    (known,) = runs_of(row, stepped, spec, chosen)
    assert known.start_seconds == 172.0 - 40 * spec.train.batch / 100.0 - 155.0, "a slow model too"
    (part,) = stepped.partitions
    assert part.report is not None
    merged = replace(part.report, speed=replace(part.report.speed, merge_seconds=0.03))
    (known,) = runs_of(row, replace(stepped, partitions=(replace(part, report=merged),)), spec, chosen)
    assert known.start_seconds == pytest.approx(172.0 - 40 * (spec.train.batch / 100.0 + 0.03) - 155.0), "with merges"
    never = result_of(row, ended(0.0, 0.0, "cancelled"), chosen)
    assert (never["queued_seconds"], never["measured"]["seconds"]) == (95.0, 0.0)
    before = result_of(row, ended(0.0, 101.0), chosen)
    assert before["queued_seconds"] == 0.0, "a job that began when this was not kept yet"


def test_a_speed_is_known_with_the_part_of_the_batch_that_it_was_measured_with(job_file: Path) -> None:
    spec = load(job_file, ["train.workers=auto"]).spec
    wanted = to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC))
    chosen = plan(snapshot_of([live("r0", 500, 2, 100.0)], (), TaskHistory()), wanted)
    assert isinstance(chosen, Plan)
    row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), plan_json(chosen), "", "succeeded", 100.0)
    stepped = replace(ended(155.0, 158.0), stepped_at=172.0, stepped_region="r0", stepped_steps=40)
    for divided in (1, 2):
        part = replace(chosen.partitions[0], workers=2, divided=divided, batch=wanted.batch // divided)
        (known,) = runs_of(row, stepped, spec, replace(chosen, partitions=(part,)))
        assert known.batch == wanted.batch // divided
        assert known.start_seconds == 172.0 - 40 * wanted.batch / divided / 100.0 - 155.0


def test_what_a_start_is_billed_is_known_to_the_next_plan(job_file: Path) -> None:
    spec, region = load(job_file).spec, live("r0", 500, 2, 100.0)
    wanted = to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC))
    chosen = plan(snapshot_of([region], (), TaskHistory()), wanted)
    assert isinstance(chosen, Plan)
    (part,) = chosen.partitions
    row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), plan_json(chosen), "", "succeeded", 100.0)
    # 37 seconds of training; the workers' functions ran 2 seconds longer, the parameter server 4.
    money = (
        Charge("function-seconds", 30.0 * part.workers * part.memory_mb / 1024, "GB-s", 0.1, "list"),
        Charge("preemptible-function-seconds", 9.0 * part.workers * part.memory_mb / 1024, "GB-s", 0.1, "list"),
        Charge("parameter-server", 41.0 / 3600, "h", 0.1, "list"),
    )
    state = ended(155.0, 158.0)
    (own,) = state.partitions
    assert own.report is not None
    report = replace(own.report, workers=part.workers, totals=MeterTotals(money=money))
    state = replace(state, partitions=(replace(own, report=report),))
    (run,) = runs_of(row, state, spec, chosen)
    assert (run.start_function_seconds, run.start_server_seconds) == (pytest.approx(2.0), pytest.approx(4.0))
    told = snapshot_of([region], (), TaskHistory([run]), spec.train.batch).started
    assert told == {"r0": StartBilled(run.start_function_seconds, run.start_server_seconds)}
    away = (*money[:2], Charge("parameter-server", 30.0 / 3600, "h", 0.1, "list"))
    for changed in (
        replace(report, workers=part.workers + 1), replace(report, totals=MeterTotals()),
        replace(report, totals=MeterTotals(money=away)),
    ):  # fmt: skip
        other = replace(state, partitions=(replace(own, report=changed),))
        (run,) = runs_of(row, other, spec, chosen)
        assert run.start_function_seconds is None, "other workers, no meters, or a region that was away for a while"
        assert not snapshot_of([region], (), TaskHistory([run]), spec.train.batch).started


@pytest.mark.parametrize(("unbilled", "known"), [(5.0, True), (864.0, False)])
def test_only_the_end_of_a_long_training_is_taken_off(job_file: Path, unbilled: float, known: bool) -> None:
    spec, region = load(job_file).spec, live("r0", 500, 2, 100.0)
    wanted = to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC))
    chosen = plan(snapshot_of([region], (), TaskHistory()), wanted)
    assert isinstance(chosen, Plan)
    (part,) = chosen.partitions
    row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), plan_json(chosen), "", "succeeded", 100.0)
    billed = 10_000.0 - unbilled
    money = (
        Charge("function-seconds", billed * part.workers * part.memory_mb / 1024, "GB-s", 0.1, "list"),
        Charge("parameter-server", billed / 3600, "h", 0.1, "list"),
    )
    state = replace(ended(155.0, 158.0), finished_at=10_158.0)
    (own,) = state.partitions
    assert own.report is not None
    report = replace(own.report, workers=part.workers, totals=MeterTotals(money=money))
    (run,) = runs_of(row, replace(state, partitions=(replace(own, report=report),)), spec, chosen)
    told = run.start_function_seconds, run.start_server_seconds
    assert told == ((pytest.approx(-unbilled), pytest.approx(-unbilled)) if known else (None, None))


def test_a_run_with_unequal_parts_does_not_tell_the_speed(job_file: Path) -> None:
    region, at = live("r0", 500, 2, 100.0), datetime.fromtimestamp(100.0, UTC)
    unequal = ["advanced.collective=k-reduce", "advanced.merge.staleness=1", "advanced.merge.ratio=2", "advanced.k=1"]
    spec = load(job_file, unequal).spec
    chosen = plan(snapshot_of([region], (), TaskHistory()), to_demand(spec, "j", at))
    assert isinstance(chosen, Plan)
    row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), plan_json(chosen), "", "succeeded", 100.0)
    runs = runs_of(row, ended(155.0, 158.0), spec, chosen)
    told = snapshot_of([region], (), TaskHistory(runs), spec.train.batch)
    assert (dict(told.speeds), told.model_bytes, told.start_seconds) == ({}, 40, 3.0), "size and start it does tell"
    equal = runs_of(replace(row, id="i"), ended(155.0, 158.0), spec, replace(chosen, merging={"staleness": 1.0}))
    told = snapshot_of([region], (), TaskHistory((*runs, *equal)), spec.train.batch)
    assert told.speeds == {"r0": 100.0}, "the newest run with equal parts counts"
    assert not told.profiled


def test_the_part_that_a_filter_lets_pass_is_known_to_the_next_plan(job_file: Path) -> None:
    spec, regions = load(job_file).spec, [live("r0", 500, 2, 100.0), live("r1", 500, 2, 100.0)]
    wanted = to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC))
    wanted = replace(wanted, wan_policy="asp", interval=None, wan_settings={"significance": 0.01})
    known = replace(snapshot_of(regions, (), TaskHistory()), model_bytes=400_000)
    chosen = plan(known, wanted)
    assert isinstance(chosen, Plan)
    row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), plan_json(chosen), "", "succeeded", 100.0)
    # Half of the rounds, and of each update a fifth.
    sent = {"r1": int(0.1 * chosen.estimate.link_bytes["r0>r1"])}
    (own,) = ended(155.0, 158.0).partitions
    assert own.report is not None
    reports = [
        replace(
            own.report,
            round=chosen.rounds // 2,
            totals=MeterTotals(sent_bytes=sent if name == "r0" else {"r0": sent["r1"]}),
        )
        for name in ("r0", "r1")
    ]
    parts = tuple(replace(own, region=name, report=one) for name, one in zip(("r0", "r1"), reports, strict=True))
    runs = runs_of(row, replace(ended(155.0, 158.0), partitions=parts), spec, chosen)
    share = runs[0].sent_share
    assert share == pytest.approx(0.2, rel=0.02)
    after = replace(known, sent_share=snapshot_of(regions, (), TaskHistory(runs), spec.train.batch).sent_share)
    again = plan(after, wanted)
    assert isinstance(again, Plan)
    assert again.sent_share == share
    ratio = again.estimate.wan_bytes.expected / again.rounds / (chosen.estimate.wan_bytes.expected / chosen.rounds)
    assert ratio == pytest.approx(0.2, rel=0.02)
    (told, _) = runs_of(row, replace(ended(155.0, 158.0), partitions=parts), spec, again)
    assert told.sent_share == pytest.approx(share, rel=0.01), "by a plan that knows it, too"
    other = plan(after, replace(wanted, wan_policy="ma", wan_settings={}, codec="fp32"))
    assert isinstance(other, Plan)
    assert other.sent_share == 1.0, "other policies have no filter"
    table = link_table([region.planned for region in regions if region.planned is not None])
    rounds = chosen.rounds // 2
    timed = tuple(
        replace(part, report=replace(one, time=RoundTime(compute=9.0, exchange=rounds * 0.3)))
        for part, one in zip(parts, reports, strict=True)
    )
    state = replace(ended(155.0, 158.0), partitions=timed, flat_bytes=400_000)
    assert stood_still_seconds(chosen, table, 400_000) > stood_still_seconds(again, table, 400_000)
    expected = 0.3 - stood_still_seconds(replace(chosen, sent_share=share), table, 400_000)
    assert runs_of(row, state, spec, chosen, table)[0].background_end_seconds == pytest.approx(expected)


def test_the_ends_of_rounds_are_known_to_the_next_plan(job_file: Path) -> None:
    spec, regions = load(job_file).spec, [live("r0", 500, 2, 100.0), live("r1", 500, 2, 100.0)]
    wanted = replace(to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC)), workers=1, exchange="synchronous")
    known = snapshot_of(regions, (), TaskHistory())
    chosen = plan(known, wanted)
    assert isinstance(chosen, Plan)
    row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), plan_json(chosen), "", "succeeded", 100.0)
    (own,) = ended(155.0, 158.0).partitions
    assert own.report is not None
    each = stood_still_seconds(chosen, link_table([live(name, 500, 2, 100.0).planned for name in ("r0", "r1")]), 40)
    times = {
        "r0": RoundTime(compute=9.0, merge=0.5, exchange=5 * (each + 0.2), wait=1.0, evaluate=1.0),
        "r1": RoundTime(compute=2.0, merge=0.5, exchange=5 * (each + 3.0), wait=8.0, evaluate=1.0),
    }
    parts = tuple(
        replace(own, region=name, report=replace(own.report, time=time, workers=1)) for name, time in times.items()
    )
    state = replace(ended(155.0, 158.0), partitions=parts)
    table = link_table([region.planned for region in regions if region.planned is not None])
    told = snapshot_of(regions, (), TaskHistory(runs_of(row, state, spec, chosen, table)), spec.train.batch)
    assert told.round_end_seconds == pytest.approx(0.2), "of the region that the others wait for"
    assert told.round_work_seconds == pytest.approx(0.2 + 0.1), "it evaluates, and its worker does more than compute"
    history = replace(known, round_end_seconds=told.round_end_seconds, round_work_seconds=told.round_work_seconds)
    after = plan(history, replace(wanted, interval=chosen.interval, codec=chosen.codec))
    assert isinstance(after, Plan)
    phases = {phase.name: phase.seconds for phase in after.estimate.phases}
    before = {phase.name: phase.seconds for phase in chosen.estimate.phases}
    assert phases[BETWEEN_REGIONS] == pytest.approx(before[BETWEEN_REGIONS] + after.rounds * 0.2)
    assert phases["besides steps"] == pytest.approx(after.rounds * 0.3)
    hidden = replace(chosen, wan_settings={"background": 1.0})
    run = runs_of(row, state, spec, hidden, table)[0]
    assert run.round_end_seconds is None, "nobody waits for a round's end"
    assert run.background_end_seconds == pytest.approx(each + 0.2 - stood_still_seconds(hidden, table, 40))
    assert run.round_work_seconds == pytest.approx(0.3)
    assert runs_of(row, state, spec, chosen)[0].round_end_seconds is None, "its links are not known"
    one_way = dict(list(table.items())[:1])
    assert runs_of(row, state, spec, chosen, one_way)[0].round_end_seconds is None, "a path of its plan is gone"


def test_waiting_for_each_other_is_not_cheaper_as_only_the_background_is_known(job_file: Path) -> None:
    spec, regions = load(job_file).spec, [live("r0", 500, 2, 100.0), live("r1", 500, 2, 100.0)]
    wanted = replace(to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC)), workers=1, interval=5, codec="fp32")
    known = snapshot_of(regions, (), TaskHistory())
    for exchange in ("synchronous", "background"):
        before, after, told = (
            plan(one, replace(wanted, exchange=exchange))
            for one in (
                known,
                replace(known, background_end_seconds=0.2),
                replace(known, background_end_seconds=0.2, round_end_seconds=0.1),
            )
        )
        assert isinstance(before, Plan)
        assert isinstance(after, Plan)
        assert isinstance(told, Plan)
        more = [one.estimate.seconds.expected - before.estimate.seconds.expected for one in (after, told)]
        own = 0.1 if exchange == "synchronous" else 0.2
        assert more == pytest.approx([before.rounds * 0.2, before.rounds * own], rel=0.01)


def test_a_round_that_stands_still_for_less_than_predicted_is_known_to_the_next_plan(job_file: Path) -> None:
    spec, regions = load(job_file).spec, [live("r0", 500, 2, 100.0), live("r1", 500, 2, 100.0)]
    wanted = replace(to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC)), workers=1, exchange="synchronous")
    known = snapshot_of(regions, (), TaskHistory())
    for beyond, left in ((-0.05, 1.0), (-1e3, 0.0)):
        first = plan(known, wanted)
        assert isinstance(first, Plan)
        fixed = replace(wanted, interval=first.interval, codec=first.codec)
        before, after = plan(known, fixed), plan(replace(known, round_end_seconds=beyond), fixed)
        assert isinstance(before, Plan)
        assert isinstance(after, Plan)
        between = [
            next((phase.seconds for phase in one.estimate.phases if phase.name == BETWEEN_REGIONS), 0.0)
            for one in (before, after)
        ]
        assert between[1] == pytest.approx(left * max(0.0, between[0] + before.rounds * beyond))
        assert after.estimate.seconds.expected == pytest.approx(
            before.estimate.seconds.expected - between[0] + between[1]
        )


def test_what_no_phase_accounts_for_and_handing_the_model_in_are_known_to_the_next_plan(job_file: Path) -> None:
    spec = load(job_file).spec
    known = snapshot_of([live("r0", 500, 2, 100.0)], (), TaskHistory())
    wanted = replace(to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC)), workers=2)
    chosen = plan(known, wanted)
    assert isinstance(chosen, Plan)
    row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), plan_json(chosen), "", "succeeded", 100.0)
    state = replace(ended(155.0, 158.0), stepped_at=162.0, stepped_region="r0", stepped_steps=0, trained_at=192.0)
    (own,) = state.partitions
    assert own.report is not None
    report = replace(own.report, time=RoundTime(compute=15.0, merge=1.0, exchange=2.0, wait=0.5, evaluate=0.5))
    workers = chosen.partitions[0].workers

    def told(workers: int) -> tuple[float | None, float | None]:
        parts = (replace(own, report=replace(report, workers=workers)),)
        (run,) = runs_of(row, replace(state, partitions=parts), spec, chosen)
        return run.round_work_seconds, run.rest_seconds

    assert told(workers) == (pytest.approx((0.5 + 192.0 - 162.0 - 19.0) / 5), pytest.approx(3.0))
    assert told(workers + 1) == (pytest.approx(0.5 / 5), None), "a part of the training had other workers"
    for disturbed in ({"scale_order": 2}, {"epoch": 2}, {"preempted": True}):
        own = replace(own, **disturbed)
        assert told(workers) == (pytest.approx(0.5 / 5), None), "it was paused, or began again"
        own = replace(state.partitions[0])
    state = replace(state, trained_at=5000.0, finished_at=9000.0)
    assert told(workers) == (pytest.approx(0.5 / 5), None), "a region was away for longer than it trained"
    after = plan(replace(known, rest_seconds=3.0), replace(wanted, interval=chosen.interval))
    assert isinstance(after, Plan)
    phases = {phase.name: phase.seconds for phase in after.estimate.phases}
    assert phases["handing the model in"] == pytest.approx(3.0)


@pytest.mark.parametrize("waited", [0.0, 30.0])
def test_a_job_begins_when_it_gets_its_workers(waited: float) -> None:
    machine = JobMachine(replace(ended(0.0, 0.0), phase="queued", finished_at=0.0, partitions=(Partition("r0"),)))
    machine.handle(StartDelayed(100.0, "for workers in r0"))
    machine.handle(Planned(100.0 + waited))
    machine.handle(StartAllowed(100.0 + waited))
    assert machine.state.begun_at == 100.0 + waited


def test_the_first_steps_are_those_of_the_last_region_to_make_one() -> None:
    parts = tuple(Partition(name, state="training", workers=1) for name in ("r0", "r1"))
    machine = JobMachine(replace(ended(0.0, 0.0), phase="starting", finished_at=0.0, partitions=parts))
    for at, region, step in [(101.0, "r0", 3), (102.0, "r1", 0), (103.0, "r0", 9), (104.0, "r1", 2), (105.0, "r1", 8)]:
        machine.handle(Reported(at, region, Report(1, "training", step=step)))
    state = machine.state
    assert (state.started_at, state.stepped_at, state.stepped_region, state.stepped_steps) == (101.0, 104.0, "r1", 2)


def test_one_run_on_busy_machines_does_not_decide_for_all_plans() -> None:
    runs = [
        RunRow(f"j{number}", region, "t", 9.0 - number, 100.0, 40, 1.0, round_end_seconds=seconds)
        for number, seconds in enumerate([9.0, 0.2, None, 0.3, -0.1, 0.25, 50.0])
        for region in ("r0", "r1")
    ]
    assert snapshot_of([], (), TaskHistory(runs)).round_end_seconds == 0.25
    assert snapshot_of([], (), TaskHistory(runs[:2])).round_end_seconds == 9.0
    assert snapshot_of([], (), TaskHistory(())).round_end_seconds is None
