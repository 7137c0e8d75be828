"""What decides where a region is full: reckoned by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.deadline import DeadlineJob, DeviceCapacity, Overhead, Rules, SpeedCurve
from scheduler.lab.one_region import _admit_one_region, admit
from tests.scheduler.lab.one_region.test_admit import FREE_CHANGES, R, job, names


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
    monkeypatch.setattr(_admit_one_region, "_MAX_REFILLED_PROMISES", 0)
    one = SpeedCurve((1,), (1.0,))

    def promised(count: int, work: float = 90.0) -> set[str]:
        """Of so many jobs that have all there is, and a quick one that needs all of it first."""
        slow = [DeadlineJob(f"slow{n}", {R: one}, work, 200.0 + n, R, 1) for n in range(count)]
        quick = DeadlineJob("quick", {R: SpeedCurve((count,), (float(count),))}, count * 90.0, 100.0)
        answer = admit(0.0, {R: DeviceCapacity(count)}, slow, [quick], FREE_CHANGES)
        assert not [held for held in answer.ledgers[R].reservations.values() if held.late]
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
