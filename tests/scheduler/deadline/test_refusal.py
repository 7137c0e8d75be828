"""What a refusal says, to the number, and what decides where a region is full: reckoned by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scheduler.deadline import (
    DeadlineJob,
    DeadlineRefusal,
    DeviceCapacity,
    Overhead,
    Rules,
    SpeedCurve,
    _admit_one_region,
    admit,
)
from tests.scheduler.deadline.test_admit import FREE_CHANGES, LINE, R, job, names

BUSY = job("busy", 190, 100, region=R, share=2)
"""It has two devices until 95 s."""


def told(rules: Rules, new: DeadlineJob, *old: DeadlineJob, devices: int = 4) -> DeadlineRefusal:
    answer = admit(0.0, {R: DeviceCapacity(devices)}, old, [new], rules)
    assert not answer.promised
    (refusal,) = answer.refused
    return refusal


@pytest.mark.parametrize(
    ("rules", "earliest_s", "short", "possible"),
    [
        # Two devices until 95 s, and then four.
        (FREE_CHANGES, 145.0, 2, 210.0),
        # Of the fastest level two pauses of a second are kept free.
        (replace(FREE_CHANGES, overhead=Overhead(1.0, 0.0)), 149.0, 2, 194.0),
        # 88 s are left of the window.
        (replace(FREE_CHANGES, margin=0.1, reserve_s=2.0, grace_s=0.0), (145.0 + 2.0) / 0.9, 6, 176.0),
        # The other one, too, continues after 3 s only.
        (replace(FREE_CHANGES, change_pause_s=3.0), 158.5, 6, 156.0),
    ],
)
def test_a_refusal_names_the_date_the_devices_and_the_work_that_would_do(
    rules: Rules, earliest_s: float, short: int, possible: float
) -> None:
    refusal = told(rules, job("new", 390, 100), BUSY)
    assert "too few devices" in refusal.reason
    assert "quota" not in refusal.reason
    assert refusal.earliest_s == pytest.approx(earliest_s)
    assert refusal.devices_short == short
    assert refusal.work_possible == pytest.approx(possible)


def test_who_could_not_be_in_time_alone_is_told_so() -> None:
    refusal = told(FREE_CHANGES, job("new", 900, 100), devices=8)
    assert "even alone" in refusal.reason
    assert (refusal.earliest_s, refusal.devices_short, refusal.work_possible) == (112.5, math.inf, 800.0)


def test_of_several_regions_the_one_that_comes_nearest_is_told() -> None:
    new = DeadlineJob("new", {"a": LINE, "b": LINE, "nowhere": LINE}, 900, 100)
    (refusal,) = admit(0.0, {"a": DeviceCapacity(4), "b": DeviceCapacity(8)}, (), [new], FREE_CHANGES).refused
    assert (refusal.region, refusal.earliest_s) == ("b", 112.5)


def test_with_very_many_promises_the_devices_short_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device seconds of one more would do; but nobody can use them so, what with the pauses between."""
    pairs = DeadlineJob("pairs", {R: SpeedCurve((2,), (1.0,))}, 20, 40)
    burst = [pairs, job("first", 140, 90), job("last", 190, 100)]
    rules = replace(FREE_CHANGES, overhead=Overhead(2.0, 0.0))
    for few, short in ((2, 2), (1, 1)):
        monkeypatch.setattr(_admit_one_region, "_FEW", few)
        answer = admit(0.0, {R: DeviceCapacity(3)}, (), burst, rules)
        assert names(answer.promised) == {"pairs", "first"}
        assert [refusal.devices_short for refusal in answer.refused] == [short]


def test_nobody_comes_while_a_job_that_can_take_no_pause_ends() -> None:
    rules = Rules(Overhead(2.0, 0.0, everyone=True), margin=0.0, kept_margin=0.0, grace_s=100.0)
    frail, new = job("frail", 70.0, 71.0, region=R, share=1), job("new", 60.0, 60.0)
    assert not admit(0.0, {R: DeviceCapacity(4)}, [frail], [new], rules).promised
    later = admit(0.0, {R: DeviceCapacity(4)}, [frail], [replace(new, deadline_s=110.0)], rules)
    assert names(later.promised) == {"new"}, "once it is done"
    assert names(admit(0.0, {R: DeviceCapacity(4)}, [replace(frail, deadline_s=90.0)], [new], rules).promised) == {
        "new"
    }


def test_with_very_many_promises_a_job_pushes_a_dozen_others_back_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_admit_one_region, "_FEW", 0)
    one = SpeedCurve((1,), (1.0,))

    def promised(count: int, work: float = 90.0) -> set[str]:
        """Of so many jobs that have all there is, and a quick one that needs all of it first."""
        slow = [DeadlineJob(f"slow{n}", {R: one}, work, 200.0 + n, R, 1) for n in range(count)]
        quick = DeadlineJob("quick", {R: SpeedCurve((count,), (float(count),))}, count * 90.0, 100.0)
        answer = admit(0.0, {R: DeviceCapacity(count)}, slow, [quick], FREE_CHANGES)
        assert not [held for held in answer.books[R].holdings.values() if held.late]
        return names(answer.promised)

    assert promised(1) == promised(12) == {"quick"}
    assert promised(13) == set()
    assert promised(2, work=150.0) == set(), "others do not fit behind it"


def test_in_a_burst_a_place_is_taken_for_more_value_and_from_none_more_valuable() -> None:
    def promised(*burst: DeadlineJob) -> set[str]:
        return names(admit(0.0, {R: DeviceCapacity(4)}, (), burst, FREE_CHANGES).promised)

    assert promised(job("large", 390, 99, value=5.0), job("worth it", 380, 100, value=10.0)) == {"worth it"}
    assert promised(job("large", 390, 99, value=5.0), job("as dear", 380, 100, value=4.8)) == {"large"}
    assert promised(job("valuable", 390, 99, value=2.0), job("small", 95, 100)) == {"valuable"}, "though it takes more"
