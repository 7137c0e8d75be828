"""Who gets a promise."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.deadline import DeadlineJob, DeviceCapacity, Overhead, Rules, SpeedCurve
from scheduler.lab.one_region import admit

R = "r"
LINE = SpeedCurve((1, 2, 4, 8), (1.0, 2.0, 4.0, 8.0))
FREE_CHANGES = Rules(Overhead(0.0, 0.0), margin=0.0, kept_margin=0.0)


def job(name: str, work: float, deadline_s: float, **more: object) -> DeadlineJob:
    return DeadlineJob(name, {R: LINE}, work, deadline_s, **more)  # type: ignore[arg-type]  # what a test says


def names(jobs: tuple[DeadlineJob, ...]) -> set[str]:
    return {entry.name for entry in jobs}


def test_one_impossible_job_of_a_burst_declines_nobody_else() -> None:
    burst = [job("fits", 50, 100), job("never", 10_000, 100), job("too", 50, 100)]
    answer = admit(0.0, {R: DeviceCapacity(4)}, (), burst, FREE_CHANGES)
    assert names(answer.promised) == {"fits", "too"}


def test_of_a_burst_as_many_as_can_be_have_a_promise() -> None:
    large = job("large", 390, 99)
    small = [job(f"small{i}", 95, 100) for i in range(4)]
    answer = admit(0.0, {R: DeviceCapacity(4)}, (), [large, *small], FREE_CHANGES)
    assert names(answer.promised) == names(tuple(small))


def test_a_valuable_job_is_not_dropped_for_small_ones() -> None:
    large = job("large", 390, 99, value=100.0)
    answer = admit(0.0, {R: DeviceCapacity(4)}, (), [large, *(job(f"s{i}", 95, 100) for i in range(4))], FREE_CHANGES)
    assert names(answer.promised) == {"large"}


def test_a_promise_once_given_is_not_taken_back() -> None:
    old = job("old", 390, 99, region=R, share=4)
    answer = admit(
        0.0, {R: DeviceCapacity(4)}, [old], [job(f"s{i}", 95, 100, value=9.0) for i in range(4)], FREE_CHANGES
    )
    assert not answer.promised
    assert not answer.ledgers[R].reservations["old"].late


def test_a_job_with_an_earlier_deadline_pushes_others_back() -> None:
    slow = job("slow", 380, 200, region=R, share=4)
    answer = admit(0.0, {R: DeviceCapacity(4)}, [slow], [job("quick", 380, 100)], FREE_CHANGES)
    assert names(answer.promised) == {"quick"}
    assert not answer.ledgers[R].reservations["slow"].late


def test_a_soft_deadline_is_promised_at_the_first_step_that_is_possible() -> None:
    busy = job("busy", 390, 100, region=R, share=4)
    soft = job("soft", 390, 100, value=10.0, later=((150.0, 5.0), (250.0, 2.0)))
    answer = admit(0.0, {R: DeviceCapacity(4)}, [busy], [soft], FREE_CHANGES)
    assert [(entry.deadline_s, entry.value) for entry in answer.promised] == [(250.0, 2.0)]


def test_a_job_goes_where_it_takes_the_least_and_only_where_it_may() -> None:
    slow = SpeedCurve((1, 2, 4, 8), (0.5, 1.0, 2.0, 4.0))
    capacities = {"near": DeviceCapacity(8), "far": DeviceCapacity(8), "forbidden": DeviceCapacity(64)}
    entry = DeadlineJob("j", {"near": slow, "far": LINE}, 390, 100)
    assert admit(0.0, capacities, (), [entry], FREE_CHANGES).promised[0].region == "far"
    full = DeadlineJob("full", {"far": LINE}, 790, 100, "far", 8)
    assert admit(0.0, capacities, [full], [entry], FREE_CHANGES).promised[0].region == "near"
    both = [full, DeadlineJob("also", {"near": slow}, 390, 100, "near", 8)]
    assert not admit(0.0, capacities, both, [entry], FREE_CHANGES).promised


def test_where_it_is_full_only_jobs_of_the_usual_size_come_in() -> None:
    rules = replace(FREE_CHANGES, usual_device_s=100.0)
    busy = job("busy", 700, 100, region=R, share=7)
    assert not admit(0.0, {R: DeviceCapacity(10)}, [busy], [job("large", 290, 100)], rules).promised
    assert admit(0.0, {R: DeviceCapacity(10)}, [busy], [job("usual", 90, 100)], rules).promised
    assert admit(0.0, {R: DeviceCapacity(10)}, (), [job("large", 290, 100)], rules).promised


def test_nothing_is_promised_in_a_region_without_capacity() -> None:
    assert not admit(0.0, {"elsewhere": DeviceCapacity(4)}, (), [job("j", 10, 100)], FREE_CHANGES).promised


@settings(max_examples=budget(40), deadline=None)
@given(st.lists(st.tuples(st.floats(20, 900), st.floats(50, 600)), min_size=2, max_size=14), st.integers(1, 10))
def test_answers_do_not_depend_on_whether_books_are_kept(asked: list[tuple[float, float]], devices: int) -> None:
    """Promises given one by one on kept ledgers hold when everything is filled again."""
    rules, ledgers, promised = FREE_CHANGES, None, []
    for number, (work, window) in enumerate(asked):
        answer = admit(0.0, {R: DeviceCapacity(devices)}, promised, [job(f"j{number}", work, window)], rules, ledgers)
        ledgers = answer.ledgers
        promised += answer.promised
    assert ledgers is not None
    assert ledgers[R].free.min() >= 0
    for entry in promised:
        held = ledgers[R].reservations[entry.name]
        assert not held.late
        assert held.end_s <= entry.deadline_s + 1e-6
