"""Where the time of rounds goes, from events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane._view import time_text
from control_plane.core import Partition, Report, RoundTime
from control_plane.core._report_events import records_of
from control_plane.dashboard._timeline import grouped, means_of, reason_of, timeline_of

START = 1_800_000_000.0


def event(cursor: int, region: str, round_: int, at: float, *seconds: float) -> dict[str, Any]:
    names = ("compute_seconds", "merge_seconds", "exchange_seconds", "wait_seconds", "evaluate_seconds")
    told = dict(zip(names, seconds, strict=False)) if seconds else {}
    at_text = time_text(START + at)
    return {
        "cursor": cursor,
        "kind": "partition.round",
        "region": region,
        "at": at_text,
        "data": {"round": round_} | told,
    }


def test_events_of_rounds_tell_what_the_rounds_since_the_last_one_took() -> None:
    before = Report(1, "training", round=2, time=RoundTime(4.0, 1.0, 0.5, 0.0))
    now = Report(1, "training", round=4, time=RoundTime(10.0, 1.5, 0.75, 2.0))
    (record,) = records_of(Partition("a", 1, state="training", report=before), now)
    told = {name: value for name, value in record.data.items() if name.endswith("_seconds")}
    assert told == {
        "compute_seconds": 6.0,
        "merge_seconds": 0.5,
        "exchange_seconds": 0.25,
        "wait_seconds": 2.0,
        "evaluate_seconds": 0.0,
    }
    older = Report(1, "training", round=4)
    (record,) = records_of(Partition("a", 1, state="training", report=before), older)
    assert "compute_seconds" not in record.data, "an agent of an older version"
    lost = Report(1, "training", round=4, time=RoundTime(1.0, 1.5, 0.75, 2.0))
    (record,) = records_of(Partition("a", 1, state="training", report=before), lost)
    assert "compute_seconds" not in record.data, "an agent that has lost its disk"
    first = Report(1, "training", round=51, time=RoundTime(5000.0, 100.0, 10.0, 3000.0))
    (record,) = records_of(Partition("a", 1, state="training", report=Report(1, "training", round=50)), first)
    assert "compute_seconds" not in record.data, "the first report after an upgrade has the seconds of the whole job"
    (record,) = records_of(Partition("a", 1, state="training"), first)
    assert record.data["compute_seconds"] == 5000.0
    ended = Report(1, "training", round=3, time=RoundTime(4.0, 1.0, 2.5, 1.0))
    (record,) = records_of(Partition("a", 1, state="training", report=before), ended)
    assert "compute_seconds" not in record.data, "its parameter server was ended in the exchange"


def test_what_no_part_counts_is_the_rest_of_the_round() -> None:
    found = timeline_of([event(1, "a", 1, 5.0, 2.0, 1.0, 0.5, 0.5), event(2, "a", 3, 15.0, 4.0, 1.0, 1.0, 2.0, 0.5)])
    first, second = found["a"]
    assert (first.first, first.last, first.begin, first.seconds) == (1, 1, START + 1.0, 4.0)
    assert (second.first, second.last, second.begin, second.rounds) == (2, 3, START + 5.0, 2)
    assert second.parts == pytest.approx((4.0, 1.0, 1.0, 2.0, 0.5, 1.5))
    assert means_of(found, 1)["a"] == pytest.approx((2.0, 0.5, 0.5, 1.0, 0.25, 0.75))


def test_the_reason_names_the_region_that_the_others_wait_for() -> None:
    found = [event(n * 2 + 1, "a", n + 1, 10.0 * n, 1.0, 0.5, 0.5, 8.0) for n in range(3)]
    found += [event(n * 2 + 2, "b", n + 1, 10.0 * n, 9.0, 0.5, 0.5, 0.0) for n in range(3)]
    text = reason_of(means_of(timeline_of(found), 20), {"a": 2, "b": 2})
    assert text == (
        "A round takes 10.0 s. b is the slowest region: mostly computing (9.0 s). Waiting for others: a 8.0 s."
    )
    slow_links = [event(n, one, n, 10.0 * n, 1.0, 0.5, 8.0, 0.2) for n in range(1, 4) for one in ("a", "b")]
    assert "mostly exchanging updates (8.0 s)" in reason_of(means_of(timeline_of(slow_links), 20), {"a": 1, "b": 1})
    assert reason_of({}, {"a": 1}) == ""
    both = {"a": (2.0, 0.0, 1.0, 5.0, 0.0, 0.0), "b": (1.0, 0.0, 1.0, 6.0, 0.0, 0.0)}
    assert "a is the slowest region: mostly computing (2.0 s)." in reason_of(both, {"a": 1, "b": 1})


def test_the_reason_names_regions_of_which_nothing_is_known() -> None:
    found = [event(n, "a", n, 10.0 * n, 1.0, 0.5, 0.5, 8.0) for n in range(1, 4)]
    found += [event(n + 3, "b", n, 10.0 * n, 9.0, 0.5, 0.5, 0.0) for n in range(1, 4)]
    found += [event(n + 6, "old", n, 60.0 * n) for n in range(1, 4)]
    text = reason_of(means_of(timeline_of(found), 20), {"a": 2, "b": 2, "old": 2, "new": 2})
    assert "b is the slowest region of those with figures: mostly computing" in text
    assert text.endswith("No figures yet: new, old.")
    alone = reason_of({"a": (1.0, 0.0, 0.0, 8.0, 0.0, 0.0)}, {"a": 2, "old": 2})
    assert alone == "A round takes 9.0 s. a: mostly waiting for others (8.0 s). No figures yet: old."


def test_one_worker_merges_nothing() -> None:
    means = {"a": (1.0, 5.0, 0.0, 0.0, 0.0, 0.0)}
    assert reason_of(means, {"a": 1}).endswith("a: mostly its optimiser's steps (5.0 s).")
    assert reason_of(means, {"a": 2}).endswith("a: mostly merging its workers' steps (5.0 s).")


def test_the_time_of_stages_is_explained_by_no_part() -> None:
    assert "mostly other: start-up, storage (6.0 s)" in reason_of({"a": (4.0, 0.0, 0.1, 0.0, 0.0, 6.0)}, {"a": 4})


def test_a_pause_is_no_round() -> None:
    at, found = 0.0, []
    for number in range(1, 22):
        at += 60.0 + (8 * 3600.0 if number == 15 else 0.0)
        found.append(event(number, "a", number, at, 50.0, 2.0, 6.0, 1.0, 0.0))
    (parts,) = means_of(timeline_of(found), 20).values()
    assert parts == pytest.approx((50.0, 2.0, 6.0, 1.0, 0.0, 1.0))
    only = timeline_of(found[13:15])
    assert sum(means_of(only, 20)["a"]) < 61.0, "the other one is known"


def test_the_mean_is_of_so_many_rounds_however_they_were_reported() -> None:
    found = [event(n, "a", 5 * n, 10.0 * n, 8.0 if n <= 26 else 1.0) for n in range(1, 31)]
    assert means_of(timeline_of(found), 20)["a"][0] == pytest.approx(1.0 / 5)


def test_the_first_round_counts_if_there_is_no_other() -> None:
    first, second = event(1, "a", 1, 100.0, 90.0), event(2, "a", 2, 110.0, 8.0)
    assert means_of(timeline_of([first]), 20)["a"][0] == pytest.approx(90.0)
    assert means_of(timeline_of([first, second]), 20)["a"][0] == pytest.approx(8.0)


def test_rounds_that_tell_nothing_are_left_out() -> None:
    assert timeline_of([event(1, "a", 1, 5.0), event(2, "a", 2, 9.0)]) == {}
    (only,) = timeline_of([event(1, "a", 1, 5.0), event(2, "a", 2, 9.0, 1.0, 0.0, 0.0, 0.0)])["a"]
    assert (only.first, only.begin, only.parts[-1]) == (2, START + 5.0, pytest.approx(3.0))


seconds = st.floats(0.0, 100.0)


@given(
    st.lists(st.tuples(st.floats(0.001, 100.0), seconds, seconds, seconds, seconds), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_parts_fill_the_time_and_groups_lose_none(taken: list[tuple[float, ...]], most: int) -> None:
    at, events = 0.0, []
    for number, (wall, *parts) in enumerate(taken):
        at += wall
        events.append(event(number, "a", number + 1, at, *parts))
    spans = timeline_of(events).get("a", [])
    for span in spans:
        assert span.seconds > 0
        assert min(span.parts) >= 0
        assert sum(span.parts) == pytest.approx(span.seconds, abs=1e-5)
    if spans:
        groups = grouped(spans, most)
        assert len(groups) <= most
        assert sum(group.seconds for group in groups) == pytest.approx(sum(span.seconds for span in spans), abs=0.1)
        assert (groups[0].first, groups[-1].last) == (spans[0].first, spans[-1].last)
