"""Spare devices go where they save most, and nobody is disturbed for nothing."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.deadline import DeadlineJob, DeviceCapacity, Overhead, Rules, SpeedCurve
from scheduler.lab.one_region import admit, spread

R = "r"
LINE = SpeedCurve((1, 2, 4, 8), (1.0, 2.0, 4.0, 8.0))
FLAT = SpeedCurve((1, 2, 4, 8), (1.0, 1.3, 1.5, 1.6))
OWN, ALL = Rules(Overhead()), Rules(Overhead(everyone=True))


def shares(jobs: list[DeadlineJob], waiting: list[DeadlineJob], devices: int, rules: Rules = OWN) -> dict[str, int]:
    ledger = admit(0.0, {R: DeviceCapacity(devices)}, jobs, (), rules).ledgers[R]
    return dict(spread(ledger, R, jobs, waiting, rules).shares)


def test_spare_devices_go_to_the_job_that_scales() -> None:
    jobs = [DeadlineJob("line", {R: LINE}, 5000, 10_000, R), DeadlineJob("flat", {R: FLAT}, 5000, 9_000, R)]
    assert shares(jobs, [], 9) == {"line": 8, "flat": 1}


def test_a_job_scales_only_where_that_saves_more_than_it_takes() -> None:
    nearly_done = DeadlineJob("j", {R: LINE}, 12.0, 1000.0, R, share=1)
    assert shares([nearly_done], [], 8) == {"j": 1}
    assert shares([replace(nearly_done, work=900.0)], [], 8) == {"j": 8}


def test_what_is_left_goes_to_those_who_wait_and_the_least_served_user_first() -> None:
    waiting = [
        DeadlineJob("had much", {R: SpeedCurve((4,), (1.0,))}, 500, float("inf"), served_s=9000.0),
        DeadlineJob("had little", {R: SpeedCurve((4,), (1.0,))}, 500, float("inf"), served_s=10.0),
    ]
    assert shares([DeadlineJob("sure", {R: SpeedCurve((2,), (2.0,))}, 150, 100, R)], waiting, 7) == {
        "sure": 2,
        "had much": 0,
        "had little": 4,
    }


def test_where_a_change_pauses_all_small_gains_change_nothing() -> None:
    running = [DeadlineJob(f"r{i}", {R: SpeedCurve((8,), (8.0,))}, 8000, 2000, R, share=8) for i in range(6)]
    small = DeadlineJob("small", {R: SpeedCurve((1,), (1.0,))}, 30, float("inf"))
    assert shares(running, [small], 49, ALL)["small"] == 0
    assert shares(running, [small], 49, OWN)["small"] == 1


def test_nobody_is_paused_while_a_job_ends_that_could_not_bear_it() -> None:
    tight = DeadlineJob("tight", {R: SpeedCurve((1,), (1.0,))}, 20.0, 21.0, R, share=1)
    loose = DeadlineJob("loose", {R: LINE}, 5000.0, 5000.0, R, share=1)
    ledger = admit(0.0, {R: DeviceCapacity(9)}, [tight, loose], (), ALL).ledgers[R]
    answer = spread(ledger, R, [tight, loose], (), ALL)
    assert dict(answer.shares) == {"tight": 1, "loose": 1}
    assert answer.wake_s == 20.0
    free = admit(0.0, {R: DeviceCapacity(9)}, [replace(tight, deadline_s=60.0), loose], (), ALL).ledgers[R]
    assert spread(free, R, [tight, loose], (), OWN).shares["loose"] == 8


@settings(max_examples=budget(80), deadline=None)
@given(
    st.lists(st.tuples(st.floats(10, 3000), st.floats(30, 3000), st.sampled_from((0, 1, 2, 4))), max_size=10),
    st.lists(st.floats(10, 3000), max_size=4),
    st.integers(1, 40),
    st.booleans(),
)
def test_shares_fit_and_cover_what_is_reserved(
    asked: list[tuple[float, float, int]], best_effort: list[float], devices: int, everyone: bool
) -> None:
    rules = ALL if everyone else OWN
    jobs = [DeadlineJob(f"j{i}", {R: LINE}, work, window) for i, (work, window, _) in enumerate(asked)]
    promised = []
    left = devices
    for job, (_, _, share) in zip(jobs, asked, strict=True):
        for taken in admit(0.0, {R: DeviceCapacity(devices)}, promised, [job], rules).promised:
            share = share if share <= left else 0
            left -= share
            promised.append(replace(taken, share=share))
    waiting = [DeadlineJob(f"w{i}", {R: LINE}, work, float("inf")) for i, work in enumerate(best_effort)]
    ledger = admit(0.0, {R: DeviceCapacity(devices)}, promised, (), rules).ledgers[R]
    answer = spread(ledger, R, promised, waiting, rules)
    assert sum(answer.shares.values()) <= devices
    assert all(share in (0, *LINE.levels) for share in answer.shares.values())
    kept = all(answer.shares[job.name] == job.share for job in (*promised, *waiting))
    assert kept or all(answer.shares[job.name] >= ledger.reservations[job.name].share() for job in promised)
