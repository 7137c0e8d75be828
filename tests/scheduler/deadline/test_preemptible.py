"""Preemptible workers beside those that stay: used while there is slack, never what a promise rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.deadline import (
    LIVE,
    AssignmentPace,
    DeviceCapacity,
    Gang,
    KindAllotment,
    Overhead,
    Reservation,
    Rules,
    SpeedCurve,
    allot_kinds,
    latest_exit,
    offer,
)
from tests.scheduler.deadline.test_admission import CAPACITIES, gang, gangs, room

EXACT = Rules(Overhead(base_s=0.0, doubling_s=0.0), margin=0.0, kept_margin=0.0)
RULES = replace(LIVE, overhead=Overhead(base_s=1.0, doubling_s=0.0), reserve_s=0.0, kept_reserve_s=0.0)


def used(answer: KindAllotment, jobs: Sequence[Gang]) -> tuple[dict[str, int], dict[str, int]]:
    """Workers that stay, and preemptible ones, by region."""
    totals: tuple[dict[str, int], dict[str, int]] = ({"east": 0, "west": 0}, {"east": 0, "west": 0})
    for job in jobs:
        for total, pace in zip(totals, (answer.paces[job.name], answer.preemptible.get(job.name, -1)), strict=True):
            for region, count in job.workers(pace).items():
                total[region] += count
    return totals


def going(job: Gang, answer: KindAllotment) -> Gang:
    """The job as the answer leaves it."""
    pace = answer.pace(job.name)
    return replace(job, held=pace, preemptible=job.name in answer.preemptible and pace >= 0)


def test_a_job_with_slack_takes_preemptible_workers_and_leaves_them_at_the_last_moment() -> None:
    paces = (AssignmentPace({"east": 1, "west": 1}, 1.0), AssignmentPace({"east": 2, "west": 2}, 1.5))
    job, now = Gang("job", paces, 100.0, 200.0), 0.0
    held: Mapping[str, Reservation] = {}
    alone = latest_exit(100.0, 200.0, SpeedCurve((2, 4), (1.0, 1.5)), 0.0, EXACT.overhead, EXACT.kept_margin)
    while True:
        answer = allot_kinds(now, room(east=2, west=2), room(east=1, west=1), [job], EXACT, held)
        held, job = answer.held, going(job, answer)
        assert not answer.late
        if not job.preemptible:
            break
        # Nothing is done there: it is the worst that preemptible workers can do.
        now += 1.0
    assert alone.leave_s - 6.0 <= now <= alone.leave_s
    assert job.held == 0


def test_progress_there_puts_the_last_moment_off() -> None:
    job, held, now = gang("job", 100.0, 200.0, most=2), {}, 0.0
    while job.work > 0 and now < 200.0:
        answer = allot_kinds(now, room(east=2, west=2), room(east=2, west=2), [job], EXACT, held)
        held, job = answer.held, going(job, answer)
        assert job.preemptible, "with enough of them it never needs others"
        job, now = replace(job, work=job.work - job.paces[job.held].rate), now + 1.0
    assert now <= 100.0


def test_who_has_no_slack_does_not_come() -> None:
    tight = gang("tight", 100.0, 52.0, most=2)
    answer = allot_kinds(0.0, room(east=2, west=2), room(east=8, west=8), [tight], RULES)
    assert (answer.paces["tight"], dict(answer.preemptible)) == (1, {})


def test_what_others_were_promised_counts() -> None:
    # Alone it could come back at 100 s at the latest, to one worker in each region; but until 110 s others have them.
    first = gang("first", 220.0, 200.0, least=2, most=2, fixed=True, held=0)
    answer = allot_kinds(0.0, room(east=2, west=2), room(east=2, west=2), [first, gang("job", 100.0, 200.0)], EXACT)
    assert "job" in answer.preemptible
    begins_s, ends_s = answer.held["job"].times[-2], answer.held["job"].end_s
    assert begins_s >= 110.0 - 1e-9
    assert ends_s <= 200.0
    assert answer.held["job"].pace_indices[-1] == 1, "so it needs two in each then"
    assert not answer.late


def test_best_effort_takes_them_first_and_the_least_served_user_before_others() -> None:
    jobs = [gang("much", served_s=900.0, user="ann", most=1), gang("little", served_s=1.0, user="bob", most=1)]
    answer = allot_kinds(0.0, room(east=1, west=1), room(east=1, west=1), jobs, RULES)
    assert dict(answer.preemptible) == {"little": 0}
    assert answer.paces == {"much": 0, "little": -1}


def test_what_is_fixed_stays_where_it_is() -> None:
    fixed = gang("fixed", 500.0, most=1, held=0, fixed=True)
    answer = allot_kinds(0.0, room(east=1, west=1), room(east=4, west=4), [fixed], RULES)
    assert (answer.paces["fixed"], dict(answer.preemptible)) == (0, {})


def test_a_region_without_preemptible_workers_keeps_a_job_on_those_that_stay() -> None:
    answer = allot_kinds(0.0, room(east=2, west=2), room(east=4), [gang("job")], RULES)
    assert not answer.preemptible


@settings(deadline=None, max_examples=budget(100))
@given(gangs(), CAPACITIES, CAPACITIES, st.data())
def test_neither_kind_is_given_twice(
    jobs: list[Gang], lasting: dict[str, DeviceCapacity], cheap: dict[str, DeviceCapacity], data: st.DataObject
) -> None:
    first = allot_kinds(0.0, lasting, cheap, jobs, RULES)
    after = [going(job, first) for job in jobs]
    fewer = {region: DeviceCapacity(data.draw(st.integers(0, held.devices))) for region, held in cheap.items()}
    second = allot_kinds(5.0, lasting, fewer, after, RULES, first.held)
    for answer, there in ((first, cheap), (second, fewer)):
        stays, goes = used(answer, jobs)
        assert all(stays[region] <= lasting[region].devices for region in stays)
        assert all(goes[region] <= there[region].devices for region in goes)
        assert not [name for name, pace in answer.preemptible.items() if answer.paces[name] >= 0 or pace < 0]
        assert not [job for job in jobs if job.fixed and job.name in answer.preemptible]


@settings(deadline=None, max_examples=budget(60))
@given(gangs(), CAPACITIES, CAPACITIES, st.data())
def test_promises_are_kept_whatever_becomes_of_preemptible_workers(
    jobs: list[Gang], lasting: dict[str, DeviceCapacity], cheap: dict[str, DeviceCapacity], data: st.DataObject
) -> None:
    """Played with every pause, and preemptible workers that come and go at any instant."""
    there: dict[str, Gang] = {}
    held: Mapping[str, Reservation] = {}
    for job in jobs:
        if job.best_effort:
            continue
        told = offer(0.0, lasting, list(there.values()), job, RULES, held)
        if told.deadline_s is not None:
            there[job.name], held = replace(job, deadline_s=told.deadline_s), told.held
    promised = set(there)
    there |= {job.name: job for job in jobs if job.best_effort}
    turns = sorted(data.draw(st.lists(st.floats(0.5, 300.0), max_size=6)))
    # Of what they should, preemptible workers may do as little as nothing.
    worth = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    now, ready, ends = 0.0, dict.fromkeys(there, -math.inf), {}
    while promised & set(there) and now < 3000.0:
        present = [replace(job, ready_s=ready[name]) for name, job in there.items()]
        answer = allot_kinds(now, lasting, cheap, present, RULES, held)
        held = answer.held
        for job in present:
            after = going(job, answer)
            if (after.held, after.preemptible) != (job.held, job.preemptible) and after.held >= 0:
                ready[job.name] = now + RULES.overhead.base_s
            there[job.name] = after
        # The next instant at which anything can happen: a second at most, as the control plane looks.
        rates = {
            name: job.paces[job.held].rate * (worth if job.preemptible else 1.0) if job.held >= 0 else 0.0
            for name, job in there.items()
        }
        done_s = [max(now, ready[name]) + job.work / rates[name] for name, job in there.items() if rates[name]]
        turning = [at for holding in held.values() for at in (*holding.times, *(at for at, _ in holding.schedule))]
        until = min([now + 1.0, *(at for at in (*done_s, *turning, *turns) if at > now + 1e-9)])
        for name, job in list(there.items()):
            left = job.work - max(0.0, until - max(now, ready[name])) * rates[name]
            there[name] = replace(job, work=left)
            if left <= 1e-6:
                ends[name] = until
                del there[name]
        now = until
        if turns and now >= turns[0]:
            turns.pop(0)
            cheap = {region: DeviceCapacity(data.draw(st.integers(0, 12))) for region in cheap}
    for job in jobs:
        if job.name in promised:
            assert ends.get(job.name, math.inf) <= job.deadline_s + 1e-3, f"{job.name} is late"
