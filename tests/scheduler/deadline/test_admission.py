"""Jobs of several regions at one pace: promises hold over time, and what is free is shared out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.deadline import (
    LIVE,
    AssignmentPace,
    DeviceCapacity,
    Gang,
    Overhead,
    Reservation,
    Rules,
    allot,
    offer,
    promised_at_once,
)
from scheduler.deadline._ledger import WorkerLedger

REGIONS = ("east", "west")
EXACT = Rules(Overhead(base_s=0.0, doubling_s=0.0), margin=0.0, kept_margin=0.0)


def gang(
    name: str,
    work: float = 100.0,
    deadline_s: float = math.inf,
    *,
    most: int = 4,
    least: int = 1,
    regions: Sequence[str] = REGIONS,
    **more: object,
) -> Gang:
    """Its speed is the number of workers in each region."""
    paces = tuple(AssignmentPace(dict.fromkeys(regions, count), float(count)) for count in range(least, most + 1))
    return replace(Gang(name, paces, work, deadline_s, wish=len(paces) - 1), **more)  # type: ignore[arg-type]


def room(**devices: int) -> dict[str, DeviceCapacity]:
    return {region: DeviceCapacity(count) for region, count in devices.items()}


@st.composite
def gangs(draw: st.DrawFn) -> list[Gang]:
    made = []
    for number in range(draw(st.integers(1, 6))):
        regions = draw(st.sampled_from([("east",), ("west",), REGIONS]))
        count = draw(st.integers(1, 4))
        fixed = draw(st.booleans()) and draw(st.booleans())
        rates = sorted(draw(st.lists(st.floats(0.5, 8), min_size=count, max_size=count, unique=True)))
        workers = dict.fromkeys(regions, 0)
        paces = []
        for rate in rates[: 1 if fixed else None]:
            workers = {region: held + draw(st.integers(1, 3)) for region, held in workers.items()}
            paces.append(AssignmentPace(workers, rate))
        deadline_s = draw(st.one_of(st.just(math.inf), st.floats(1, 400)))
        made.append(
            Gang(
                f"j{number}",
                tuple(paces),
                draw(st.floats(1, 500)),
                deadline_s,
                wish=draw(st.integers(0, len(paces) - 1)),
                fixed=fixed,
                since_s=float(-number),
            )
        )
    return made


CAPACITIES = st.builds(room, east=st.integers(1, 12), west=st.integers(1, 12))


def used(paces: Mapping[str, int], jobs: Sequence[Gang]) -> dict[str, int]:
    total = dict.fromkeys(REGIONS, 0)
    for job in jobs:
        for region, count in job.workers(paces[job.name]).items():
            total[region] += count
    return total


def progress(job: Gang, held: Reservation) -> float:
    spans = zip(held.times, held.times[1:], held.pace_indices, strict=False)
    return sum((end - begin) * job.paces[pace].rate for begin, end, pace in spans if pace >= 0)


@settings(max_examples=budget(200), deadline=None)
@given(gangs(), CAPACITIES)
def test_nobody_has_what_is_not_there_and_what_is_held_does_the_work_in_time(
    jobs: list[Gang], capacities: dict[str, DeviceCapacity]
) -> None:
    answer = allot(0.0, capacities, jobs, LIVE)
    for region, count in used(answer.paces, jobs).items():
        assert count <= capacities[region].devices
    instants = sorted({at for held in answer.held.values() for at in held.times if math.isfinite(at)})
    for at in instants:
        total = dict.fromkeys(REGIONS, 0)
        for job in jobs:
            held = answer.held.get(job.name)
            if held is None or at >= held.end_s or at < held.times[0]:
                continue
            index = max(i for i, begin in enumerate(held.times[:-1]) if begin <= at)
            for region, count in job.workers(held.pace_indices[index]).items():
                total[region] += count
        assert all(total[region] <= capacities[region].devices for region in REGIONS)
    for job in jobs:
        held = answer.held.get(job.name)
        if held is None or held.late:
            continue
        if held.end_s > job.deadline_s + 1e-6:
            # What is held counts more pauses than there will be; where it is not late even so, the schedule is not.
            assert course_work(job, held) >= job.work - 1e-6
            continue
        assert progress(job, held) >= job.work * (1 - 1e-9) - 1e-6


def course_work(job: Gang, held: Reservation) -> float:
    """Rounds done on the schedule by the deadline, each change with its pause."""
    done, last = 0.0, job.held
    ends = [*(at for at, _ in held.schedule[1:]), job.deadline_s]
    for (begin, pace), end in zip(held.schedule, ends, strict=True):
        pause = LIVE.overhead.base_s if pace not in (last, -1) else 0.0
        rate = job.paces[pace].rate if pace >= 0 else 0.0
        done, last = done + max(0.0, min(end, job.deadline_s) - begin - pause) * rate, pace
    return done


def with_nothing_to_spare() -> list[Gang]:
    """Of four jobs two are late, and have all there is, and one ends on its deadline to the second; then a fifth."""
    east = [{"east": count} for count in range(6)]
    both = [{"east": count + 1, "west": count} for count in range(4)]
    return [
        Gang(
            "j0", (AssignmentPace(east[1], 1.0), AssignmentPace(east[2], 2.0), AssignmentPace(east[5], 3.0)), 1.0, 1.0
        ),
        Gang(
            "j1",
            (AssignmentPace(east[1], 0.5), AssignmentPace(east[2], 1.0), AssignmentPace(east[3], 2.0)),
            1.0,
            since_s=-1.0,
        ),
        Gang("j2", (AssignmentPace(east[1], 0.5),), 1.0, 1.0, since_s=-2.0),
        Gang(
            "j3",
            (AssignmentPace(both[1], 1.0), AssignmentPace(both[2], 2.0), AssignmentPace(both[3], 3.0)),
            1.0,
            4.0,
            since_s=-3.0,
        ),
        Gang("j4", (AssignmentPace(east[1], 0.5), AssignmentPace(east[2], 1.0)), 141.0, since_s=-4.0),
    ]


@pytest.mark.slow
@settings(max_examples=budget(150), deadline=None)
@given(gangs(), CAPACITIES)
@example(with_nothing_to_spare(), room(east=9, west=11))
def test_an_offer_can_be_kept_with_all_that_were_promised(
    jobs: list[Gang], capacities: dict[str, DeviceCapacity]
) -> None:
    *others, new = jobs
    new = replace(new, deadline_s=min(new.deadline_s, 300.0))
    before = allot(0.0, capacities, others, LIVE).late
    told = offer(0.0, capacities, others, new, LIVE)
    if told.deadline_s is not None:
        assert told.deadline_s == new.deadline_s
        after = allot(0.0, capacities, [*others, replace(new, deadline_s=told.deadline_s)], LIVE)
        assert after.late <= before
    elif math.isfinite(told.earliest_s):
        dates = (told.earliest_s * wider * (1 + 1e-6) + 1e-3 for wider in (1.0, 1.5, 2.25))
        later = (offer(0.0, capacities, others, replace(new, deadline_s=date), LIVE) for date in dates)
        assert any(answer.deadline_s is not None for answer in later), "no date near the one named can be promised"


@settings(max_examples=budget(100), deadline=None)
@given(gangs(), CAPACITIES)
def test_promises_are_kept_as_time_passes(jobs: list[Gang], capacities: dict[str, DeviceCapacity]) -> None:
    """Each job is asked for when its turn comes; then everybody continues, with a pause for each change."""
    there: dict[str, Gang] = {}
    pause_until: dict[str, float] = {}
    promised: set[str] = set()
    now, step = 0.0, 1.0
    coming = list(jobs)
    while (coming or promised & set(there)) and now < 2000:
        if coming:
            new = coming.pop()
            if not new.best_effort:
                new = replace(new, deadline_s=now + new.deadline_s)
                if offer(now, capacities, list(there.values()), new, LIVE).deadline_s is None:
                    continue
                promised.add(new.name)
            there[new.name] = new
        for name, pace in allot(now, capacities, list(there.values()), LIVE).paces.items():
            job = there[name]
            if pace != job.held and pace >= 0:
                pause_until[name] = now + LIVE.overhead.base_s
            there[name] = replace(job, held=pace)
        now += step
        for name, job in list(there.items()):
            ran = 0.0 if job.held < 0 else min(step, max(0.0, now - pause_until.get(name, 0.0)))
            left = job.work - ran * (job.paces[job.held].rate if job.held >= 0 else 0.0)
            if left <= 0:
                assert now - step <= job.deadline_s, f"{name} was promised {job.deadline_s}, and is late"
                del there[name]
            else:
                there[name] = replace(job, work=left)


def test_a_promise_waits_for_workers_that_others_have_until_then() -> None:
    jobs = [gang("old", 40.0, most=4, least=4, fixed=True, held=0)]
    told = offer(0.0, room(east=4, west=4), jobs, gang("new", 100.0, 40.0), EXACT)
    assert told.deadline_s == 40.0
    answer = allot(0.0, room(east=4, west=4), [*jobs, gang("new", 100.0, 40.0)], EXACT)
    assert answer.paces == {"old": 0, "new": -1}
    assert offer(0.0, room(east=4, west=4), jobs, gang("new", 100.0, 30.0), EXACT).earliest_s == pytest.approx(35.0)


def test_a_promise_holds_the_least_worker_time_even_where_paces_are_not_concave() -> None:
    """Four workers do by themselves more for each than three, two or one: with three until then it would take 168."""
    paces = tuple(AssignmentPace({"east": n}, rate) for n, rate in ((1, 1.0), (2, 1.1), (3, 1.3), (4, 6.0)))
    job = Gang("j", paces, work=175.0, deadline_s=50.0)
    held = allot(0.0, room(east=4), [job], EXACT).held["j"]
    spent = sum(
        (end - begin) * sum(job.workers(pace).values())
        for begin, end, pace in zip(held.times, held.times[1:], held.pace_indices, strict=False)
    )
    assert spent == pytest.approx(4 * 175.0 / 6.0)
    assert held.end_s <= 50.0


def test_both_regions_must_be_free_at_the_same_time() -> None:
    """East is free at first and west later: each alone would do, together they do not."""
    early = gang("east then", 30.0, most=4, least=4, regions=("west",), fixed=True, held=0)
    capacities = {"east": DeviceCapacity(4, ((10.0, 0),)), "west": DeviceCapacity(4)}
    assert offer(0.0, capacities, [early], gang("new", 20.0, 60.0), EXACT).deadline_s is None
    assert offer(0.0, capacities, [], gang("new", 20.0, 60.0), EXACT).deadline_s == 60.0


def test_best_effort_gives_way_to_promises_and_shares_what_is_left() -> None:
    first, second = gang("first", held=3, since_s=0.0), gang("second", since_s=1.0)
    both = allot(2.0, room(east=4, west=4), [first, second])
    assert both.paces == {"first": 2, "second": 0} or both.paces == {"first": 1, "second": 1}
    urgent = gang("urgent", 100.0, 30.5, least=4)
    assert allot(2.0, room(east=4, west=4), [first, urgent]).paces == {"first": -1, "urgent": 0}


def test_a_large_job_is_not_passed_for_ever() -> None:
    running = gang("running", least=2, most=2, fixed=True, held=0)
    large = gang("large", least=4, since_s=1.0)
    small = gang("small", since_s=2.0)
    assert allot(3.0, room(east=4, west=4), [running, large, small]).paces == {"running": 0, "large": -1, "small": -1}


def test_what_is_fixed_begins_only_where_no_promise_needs_its_workers() -> None:
    later = gang("later", 100.0, 40.0, least=4)
    capacities = {
        region: DeviceCapacity(0, ((10.0, 4),)) if region == "west" else DeviceCapacity(4) for region in REGIONS
    }
    fixed = gang("fixed", 100.0, most=1, regions=("east",), fixed=True)
    assert allot(0.0, capacities, [later, fixed], EXACT).paces == {"later": -1, "fixed": -1}
    assert allot(0.0, capacities, [later, replace(fixed, work=5.0)], EXACT).paces == {"later": -1, "fixed": 0}


def test_a_small_gain_is_not_worth_a_change() -> None:
    nearly = gang("nearly", 12.0, held=2)
    assert allot(0.0, room(east=8, west=8), [nearly]).paces == {"nearly": 2}
    assert allot(0.0, room(east=8, west=8), [replace(nearly, work=1000.0)]).paces == {"nearly": 3}


def test_a_soft_deadline_is_tried_at_each_of_its_steps() -> None:
    wanted = gang("soft", 100.0, 10.0, later=(20.0, 30.0))
    assert offer(0.0, room(east=4, west=4), [], wanted, EXACT).deadline_s == 30.0
    assert offer(0.0, room(east=12, west=4), [], replace(wanted, later=(20.0,)), EXACT).deadline_s is None


def test_a_quota_bounds_what_a_user_is_promised_at_once() -> None:
    rules = replace(EXACT, quotas={"ann": 4})
    held = gang("held", 100.0, 50.0, user="ann")
    told = offer(0.0, room(east=8, west=8), [held], gang("more", 100.0, 50.0, user="ann"), rules)
    assert told.deadline_s is None
    assert told.over_quota
    assert offer(0.0, room(east=8, west=8), [held], gang("more", 100.0, 50.0, user="bob"), rules).deadline_s == 50.0


def test_by_price_a_large_job_takes_no_place_of_small_ones_where_little_is_free() -> None:
    rules, capacities = replace(EXACT, by_price=True), room(east=10, west=10)
    small = [gang(f"small-{n}", 100.0, 100.0, most=1) for n in range(8)]
    others = [*small, gang("done", 1.0, 10.0), gang("soon", 1.0, 10.0)]
    large = gang("large", 190.0, 100.0, most=2)
    assert offer(0.0, capacities, others, large, EXACT).deadline_s == 100.0
    told = offer(0.0, capacities, others, large, rules)
    assert told.deadline_s is None
    assert told.too_large is not None
    size, most = told.too_large
    assert size == pytest.approx(2 * 190.0, rel=0.01)
    assert 200.0 <= most < size, "in both regions; the usual size is the least limit"
    assert offer(0.0, capacities, others, gang("equal", 80.0, 100.0, most=1), rules).deadline_s == 100.0
    assert offer(0.0, capacities, others[:9], large, rules).deadline_s == 100.0, "nine tell of no usual size"
    assert offer(0.0, room(east=40, west=40), others, large, rules).deadline_s == 100.0, "most is free"
    longer = replace(large, later=(1000.0,))
    assert offer(0.0, capacities, others, longer, rules).deadline_s == 1000.0, "until then most is free"
    assert offer(0.0, capacities, others, replace(large, value=4.0), rules).deadline_s == 100.0, "it is worth four"


@settings(deadline=None, max_examples=budget(60))
@given(st.lists(gangs().map(lambda made: made[0]), min_size=11, max_size=14), CAPACITIES)
def test_by_price_nothing_is_promised_that_does_not_fit(
    drawn: list[Gang], capacities: dict[str, DeviceCapacity]
) -> None:
    new, *others = (replace(one, name=f"j{number}") for number, one in enumerate(drawn))
    new = replace(new, deadline_s=min(new.deadline_s, 400.0))
    fits = offer(0.0, capacities, others, new, LIVE)
    told = offer(0.0, capacities, others, new, replace(LIVE, by_price=True))
    assert told == fits or (told.deadline_s is None and told.too_large is not None)


def test_best_effort_work_takes_nothing_of_a_quota() -> None:
    rules = replace(EXACT, quotas={"ann": 2})
    runs = gang("runs", 100.0, most=1, held=0, fixed=True, user="ann")
    assert offer(0.0, room(east=8, west=8), [runs], gang("new", 50.0, 50.0, user="ann"), rules).deadline_s == 50.0


@settings(deadline=None, max_examples=budget(80))
@given(st.lists(gangs().map(lambda made: made[0]), min_size=2, max_size=6), CAPACITIES, st.integers(0, 8))
def test_no_offer_has_a_user_hold_more_than_its_quota(
    asked: list[Gang], capacities: dict[str, DeviceCapacity], limit: int
) -> None:
    rules, taken = replace(EXACT, quotas={"ann": limit}), []
    held: Mapping[str, Reservation] = {}
    for number, job in enumerate(asked):
        new = replace(job, name=f"j{number}", user="ann" if number % 2 else "bob")
        if new.best_effort:
            continue
        told = offer(0.0, capacities, taken, new, rules, before=held)
        if told.deadline_s is None:
            continue
        taken.append(new)
        held = told.held
        if new.user == "bob":
            continue
        for at in {at for holding in held.values() for at in holding.times[:-1]}:
            mine = [(gang, held[gang.name]) for gang in taken if gang.user == "ann"]
            workers = sum(
                sum(gang.workers(pace).values())
                for gang, holding in mine
                for begin, end, pace in zip(holding.times, holding.times[1:], holding.pace_indices, strict=False)
                if begin <= at < end
            )
            assert workers <= promised_at_once(taken, held, "ann") <= limit


def test_a_promise_in_danger_gets_all_there_is_and_is_told() -> None:
    late = gang("late", 1000.0, 50.0)
    answer = allot(0.0, room(east=4, west=4), [late, gang("other", held=3)])
    assert answer.late == {"late"}
    assert answer.paces == {"late": 3, "other": -1}


def test_paces_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(ValueError, match="do not ascend"):
        Gang("odd", (AssignmentPace({"east": 2}, 1.0), AssignmentPace({"east": 1}, 2.0)), 1.0)
    with pytest.raises(ValueError, match="no pace"):
        Gang("none", (), 1.0)


def test_one_that_cannot_run_at_all_keeps_nobody_from_beginning() -> None:
    gone = gang("gone", since_s=0.0)
    small = gang("small", regions=("west",), since_s=1.0)
    assert allot(2.0, room(west=4), [gone, small]).paces["small"] >= 0
    huge = gang("huge", least=8, most=8, fixed=True, since_s=0.0)
    assert allot(2.0, room(east=4, west=4), [huge, small]).paces["small"] >= 0


def test_a_late_promise_goes_on_where_its_paces_have_become_fewer() -> None:
    """A region that is out of reach leaves one pace; the schedule that was answered before is of the fourth of four."""
    able = gang("a", 100.0, 30.0, held=3)
    before = allot(0.0, room(east=4, west=4), [able], LIVE).held
    assert before["a"].schedule == ((0.0, 3),)
    behind = replace(able, paces=able.paces[3:], held=0, wish=0, fixed=True, work=200.0)
    answer = allot(1.0, room(east=4, west=4), [behind], LIVE, before)
    assert answer.paces == {"a": 0}
    assert answer.late == {"a"}
    assert answer.held["a"].schedule == ((1.0, 0),)
    back = allot(2.0, room(east=4, west=4), [replace(able, work=200.0)], LIVE, answer.held)
    assert back.paces == {"a": 3}


def test_what_was_held_is_read_in_workers_not_in_indices() -> None:
    """As many paces as before, that mean other workers: of a schedule of 2 and then 4 in each region."""
    job = gang("a", 100.0, 40.0, held=1)
    held = Reservation((0.0, 5.0, 40.0), (1, 3), schedule=((0.0, 1), (5.0, 3), (9.0, -1)), ladder=job.paces)
    assert held.on(replace(job, work=1.0)) is held
    others = tuple(AssignmentPace(dict.fromkeys(REGIONS, count), float(count)) for count in (2, 3, 5, 8))
    now = held.on(replace(job, paces=others))
    assert now == Reservation((0.0, 5.0, 40.0), (0, 1), schedule=((0.0, 0), (5.0, 1), (9.0, -1)), ladder=others)
    assert held.on(replace(job, paces=others[1:])) is None, "2 are too few for the slowest"
    assert replace(held, ladder=()).on(job) is None


def test_nothing_held_for_ever_does_no_work() -> None:
    ledger, waiting = WorkerLedger(0.0, room(east=1)), gang("a", deadline_s=200.0, regions=["east"])
    assert ledger.again(waiting, Reservation((0.0, math.inf), (-1,), ladder=waiting.paces), EXACT) is None


def test_what_is_fixed_and_runs_stays_whatever_its_schedule_was() -> None:
    """The schedule of a job whose workers could change let it fall for another; now nobody can tell it to."""
    job = gang("a", 300.0, 60.0, held=3, least=2, most=5)
    held = Reservation((0.0, 60.0), (3,), late=True, schedule=((0.0, 3), (0.5, 0)), ladder=job.paces)
    stuck = replace(job, paces=job.paces[3:], held=0, wish=0, fixed=True)
    other = gang("b", 100.0, 50.0, held=-1)
    answer = allot(1.0, room(east=5, west=5), [stuck, other], LIVE, {"a": held})
    assert answer.paces == {"a": 0, "b": -1}


@settings(max_examples=budget(150), deadline=None)
@given(gangs(), gangs(), CAPACITIES, st.data())
def test_paces_may_become_others_from_one_answer_to_the_next(
    jobs: list[Gang], later: list[Gang], capacities: dict[str, DeviceCapacity], data: st.DataObject
) -> None:
    before = allot(0.0, capacities, jobs, LIVE).held
    for job in later:
        now = before[job.name].on(job) if job.name in before else None
        if now is not None:
            for (_, pace), (_, was) in zip(now.schedule, before[job.name].schedule, strict=True):
                had = before[job.name].ladder[was].workers if was >= 0 else {}
                assert all(count <= had.get(region, 0) for region, count in job.workers(pace).items())
    later = [replace(job, held=data.draw(st.integers(-1, len(job.paces) - 1))) for job in later]
    answer = allot(5.0, capacities, later, LIVE, before)
    for job in later:
        assert -1 <= answer.paces[job.name] < len(job.paces)
        assert not (job.fixed and 0 <= job.held != answer.paces[job.name]), "what is fixed cannot be told to change"
